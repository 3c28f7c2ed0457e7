from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from consensus_checker.divergence_lines import Told, argument, judge_lines, lines_screen
from tests.consensus_checker.test_check import SCHEMA, faults
from tests.support.divergence_lines import divergence_line
from tracer.errors import LogError

MATCH = "match_prefix called params=params=MatchPrefixParams(req=Req(rid=r7, input_ids=[11, 22, 33]))"
HITS = "match_prefix returns result=result.full_kv_hit_length=96"
BACKUP = "write_backup_storage called params=<no check>"
DONE = "write_backup_storage returns result=<no check>"
POLL = "check_prefetch_progress called params={'request': Handle(rid='r7', attempt_id=0)}"
POLLED = "check_prefetch_progress returns result=True"
EVENTS = (MATCH, HITS, BACKUP, DONE, POLL, POLLED)


def judged(tmp_path: Path, lists: Mapping[str, Sequence[str]], *, before: str = "", after: str = "") -> Told:
    """The verdict on one log with a list for each tag."""
    text = "".join(divergence_line(events, f" {tag}") for tag, events in lists.items())
    return judged_text(tmp_path, before + text + after)


def judged_text(tmp_path: Path, *texts: str) -> Told:
    paths = []
    for number, text in enumerate(texts):
        paths.append(tmp_path / f"server{number or ''}.log")
        paths[-1].write_text(text)
    return judge_lines(paths)


def changed(index: int, event: str) -> list[str]:
    return [*EVENTS[:index], event, *EVENTS[index + 1 :]]


def without(index: int, then: str) -> list[str]:
    """One call less, so that a later one came into the batch."""
    return [*EVENTS[:index], *EVENTS[index + 2 :], then, then]


def test_a_result_that_differs_names_the_odd_rank_the_call_and_the_field(tmp_path: Path) -> None:
    odd = changed(1, HITS.replace("96", "32"))
    told = judged(tmp_path, {"TP0": EVENTS, "TP1": EVENTS, "TP2": odd}, before="noise\n")
    finding = told.verdict.finding
    first = finding.first_divergence
    assert first is not None
    assert (finding.kind, finding.code, finding.culprit, finding.level) == ("divergence", 10, (2,), "medium")
    assert (first.index, first.call, first.phase, first.kind) == (1, "match_prefix", "return", "value")
    assert [diff.to_json() for diff in first.field_diff] == [
        {"field": "result.full_kv_hit_length", "majority": 96, "values": {"2": 32}}
    ]
    assert finding.basis == ("majority 2/3", "every list gives its hash")
    assert [(one.file, one.record, one.supports) for one in finding.evidence] == [
        ("server.log", 4, "culprit 2: TP2"),
        ("server.log", 2, "majority 0: TP0"),
    ]
    assert finding.summary == (
        "rank 2 left the majority (2 of 3) at call 1 (match prefix) of 6, scope dp0: "
        "result.full_kv_hit_length 32 instead of 96"
    )


@pytest.mark.parametrize(
    ("odd", "kind", "call"),
    [
        (without(2, "evict called params=<no check>"), "missing", "write_backup_storage"),
        ([*EVENTS[:2], "evict called params=<no check>", "evict returns result=<no check>", *EVENTS[2:4]],
         "extra", "evict"),
        ([*EVENTS[:2], POLL, MATCH, MATCH, MATCH], "order", "check_prefetch_progress"),
    ],
    ids=["missing", "extra", "order"],
)  # fmt: skip
def test_a_call_that_is_missing_extra_or_elsewhere_is_told_as_that(
    odd: list[str], kind: str, call: str, tmp_path: Path
) -> None:
    finding = judged(tmp_path, {"TP0": EVENTS, "TP1": odd, "TP2": EVENTS}).verdict.finding
    first = finding.first_divergence
    assert first is not None
    assert (finding.culprit, first.index, first.kind, first.call) == ((1,), 2, kind, call)


def test_of_two_ranks_nobody_is_accused_and_both_sides_are_shown(tmp_path: Path) -> None:
    told = judged(tmp_path, {"TP0": EVENTS, "TP1": changed(5, POLLED.replace("True", "False"))})
    finding = told.verdict.finding
    assert (finding.code, finding.culprit, finding.unknown, finding.level) == (10, (), (0, 1), "undetermined")
    assert finding.first_divergence is not None
    assert finding.first_divergence.by_rank == {0: {"result": True}, 1: {"result": False}}
    assert finding.summary.endswith("the lists alone do not say who is right")


def test_what_was_always_done_before_is_no_reason_to_accuse_one_of_two(tmp_path: Path) -> None:
    always = [BACKUP, DONE, POLL, POLLED] * 12
    never = [BACKUP, DONE, "evict called params=<no check>", "evict returns result=<no check>"]
    finding = judged(tmp_path, {"TP0": [*always, *always[:4]], "TP1": [*always, *never]}).verdict.finding
    assert (finding.culprit, finding.unknown) == ((), (0, 1))
    assert "precedent" not in " ".join(finding.basis)


def test_objects_and_sets_that_print_differently_are_a_false_alarm(tmp_path: Path) -> None:
    lists = {
        f"TP{rank}": [
            *EVENTS,
            f"f called params=key=<Key object at 0x7f{rank}0aabbcc> | s={{{rank}, {1 - rank}}}",
        ]
        for rank in (0, 1)
    }
    finding = judged(tmp_path, lists).verdict.finding
    assert (finding.kind, finding.code, finding.culprit) == ("undetermined", 20, ())
    assert finding.summary == (
        "rank 0 against rank 1: the lists differ only in addresses or the order of sets, first at call 6 "
        "(f) of 7: a false alarm, as far as they show"
    )


def test_an_address_that_differs_hides_no_difference_behind_it(tmp_path: Path) -> None:
    lists = {
        f"TP{rank}": [f"f called params=key=<Key object at 0x7f{rank}0aabbcc>", f"f returns result={rank}"]
        for rank in (0, 1)
    }
    first = judged(tmp_path, lists).verdict.finding.first_divergence
    assert first is not None
    assert first.index == 1


def test_equal_hashes_on_all_that_printed_are_told_and_who_is_missing(tmp_path: Path) -> None:
    told = judged(
        tmp_path, {"TP0": EVENTS, "TP1": EVENTS}, before="[2026-03-01 12:00:00 TP2] Decode batch, #token: 1\n"
    )
    finding = told.verdict.finding
    assert (finding.code, finding.silent) == (20, (2,))
    assert finding.summary == "ranks 0-1 printed the same hash: who differs from them is not in these files"
    assert (told.verdict.coverage.ranks_expected, told.verdict.coverage.missing) == (3, (2,))


def test_one_rank_alone_has_nobody_to_be_compared_with(tmp_path: Path) -> None:
    verdict = judged(tmp_path, {"TP1": EVENTS}).verdict
    assert (verdict.kind, verdict.code, verdict.coverage.missing) == ("nothing_compared", 4, (0,))


def test_a_list_that_is_cut_before_the_difference_proves_nothing(tmp_path: Path) -> None:
    odd = divergence_line(changed(5, POLLED.replace("True", "False")), " TP1")
    told = judged_text(tmp_path, divergence_line(EVENTS, " TP0") + odd[:-20] + "\n")
    assert (told.verdict.code, told.verdict.finding.unknown) == (20, (0, 1))
    assert told.verdict.coverage.truncated == (1,)
    assert told.verdict.finding.summary == (
        "the hashes differ, rank 0 against rank 1; the lists are equal as far as they can be read "
        "(5 of 6 calls): that of rank 1 is cut"
    )


def test_a_list_that_is_cut_behind_the_difference_is_still_a_witness(tmp_path: Path) -> None:
    odd = divergence_line(changed(1, HITS.replace("96", "32")), " TP2")
    text = divergence_line(EVENTS, " TP0") + divergence_line(EVENTS, " TP1") + odd[:-20]
    finding = judged_text(tmp_path, text).verdict.finding
    assert (finding.code, finding.culprit, finding.level) == (10, (2,), "low")
    assert finding.basis[-1] == "the hash of rank 2 does not prove the list"


def test_a_majority_of_hashes_names_the_odd_rank_where_its_list_is_cut(tmp_path: Path) -> None:
    odd = divergence_line(changed(5, POLLED.replace("True", "False")), " TP2")
    text = divergence_line(EVENTS, " TP0") + divergence_line(EVENTS, " TP1") + odd[:-20] + "\n"
    finding = judged_text(tmp_path, text).verdict.finding
    assert (finding.code, finding.culprit, finding.level) == (10, (2,), "low")
    assert (finding.first_divergence, finding.basis) == (None, ("majority 2/3", "hashes alone"))
    assert [entry.supports for entry in finding.evidence] == ["culprit 2: TP2", "majority 0: TP0"]


def test_a_line_that_ends_before_its_hash_is_accused_of_nothing(tmp_path: Path) -> None:
    start = divergence_line(EVENTS, " TP2").partition(" local hash")[0]
    text = divergence_line(EVENTS, " TP0") + divergence_line(EVENTS, " TP1") + start + "\n"
    verdict = judged_text(tmp_path, text).verdict
    assert (verdict.code, verdict.finding.culprit) == (20, ())
    assert "rank 2: it ends before its list, after 0 of 6 events" in verdict.coverage.doubts


def pieces(*, is_edited: bool) -> str:
    """Three long lists, of which two went through one pipe in pieces that have no mark; rank 2 is odd."""
    events = [f"step called params=tokens={[index * 1000 + one for one in range(90)]}" for index in range(20)]
    lines = []
    for rank in range(3):
        own = [*events[:12], f"step returns result={rank == 2}", *events[12:]]
        lines.append(divergence_line(own, f" TP{rank}", digest=str(rank // 2) * 40 if is_edited else None))
    _, one, two = lines
    return lines[0] + one[:6000] + two[:5000] + one[6000:9000] + two[5000:] + one[9000:]


def test_long_lists_that_went_through_one_pipe_in_pieces_are_compared_whole(tmp_path: Path) -> None:
    verdict = judged_text(tmp_path, pieces(is_edited=False)).verdict
    first = verdict.finding.first_divergence
    assert first is not None
    assert (verdict.finding.culprit, first.index, first.phase) == ((2,), 12, "return")
    told = "rank 2: its list went through a pipe in pieces, put together as its hash says"
    assert told in verdict.coverage.doubts


def test_where_no_hash_proves_the_pieces_no_difference_in_them_is_believed(tmp_path: Path) -> None:
    finding = judged_text(tmp_path, pieces(is_edited=True)).verdict.finding
    assert (finding.code, finding.culprit, finding.first_divergence) == (10, (2,), None)
    assert finding.basis == ("majority 2/3", "hashes alone")


def test_a_rank_that_was_shut_down_in_the_middle_is_not_accused(tmp_path: Path) -> None:
    finding = judged(tmp_path, {"TP0": EVENTS, "TP1": EVENTS[:4], "TP2": EVENTS}).verdict.finding
    assert (finding.code, finding.culprit) == (20, ())
    assert finding.summary == (
        "ranks 0, 2 against rank 1: the lists are equal as far as they go, and that of rank 1 ends after "
        "4 of 6 calls: as one does that is shut down in the middle"
    )


def test_a_damaged_line_is_read_as_the_whole_one_with_its_hash(tmp_path: Path) -> None:
    cut = divergence_line(EVENTS, " TP1")
    odd = divergence_line(changed(5, POLLED.replace("True", "False")), " TP2")
    told = judged_text(tmp_path, divergence_line(EVENTS, " TP0"), cut[: cut.index("events = [") + 12], odd)
    assert (told.verdict.code, told.verdict.finding.culprit) == (10, (2,))
    assert told.verdict.coverage.truncated == ()
    assert told.verdict.coverage.doubts[0] == "rank 1: its list is cut; read as the list with its hash"


def test_a_list_that_does_not_give_its_hash_lowers_the_confidence(tmp_path: Path) -> None:
    odd = divergence_line(changed(1, HITS.replace("96", "32")), " TP2", digest="0" * 40)
    text = divergence_line(EVENTS, " TP0") + divergence_line(EVENTS, " TP1") + odd
    verdict = judged_text(tmp_path, text).verdict
    assert (verdict.finding.culprit, verdict.finding.level) == ((2,), "low")
    assert "rank 2: its list does not give its hash: damaged or edited" in verdict.coverage.doubts


def test_a_hash_of_another_length_and_a_wrong_number_are_told(tmp_path: Path) -> None:
    text = divergence_line(EVENTS, " TP0", digest="ab12") + divergence_line(
        changed(1, HITS.replace("96", "32")), " TP1", count=9
    )
    doubts = judged_text(tmp_path, text).verdict.coverage.doubts
    assert "rank 0: its hash has 4 characters, not 40" in doubts
    assert "rank 1: it says 9 events and lists 6" in doubts


def test_where_a_long_value_differs_is_told_and_the_value_is_not(tmp_path: Path) -> None:
    lists = {}
    for rank in range(3):
        tokens = [4403, 18652, 27769, 26289, 25028]
        tokens[3] += rank == 1
        lists[f"TP{rank}"] = changed(0, MATCH.replace("[11, 22, 33]", str(tokens)))
    told = judged(tmp_path, lists)
    assert told.verdict.finding.culprit == (1,)
    assert told.verdict.finding.summary.endswith("; params.req.input_ids differs from element 3 on")
    shown = "\n".join([told.verdict.to_text(), *lines_screen(told), *argument(told)])
    assert [number for number in ("4403", "18652", "26289", "26290") if number in shown] == []
    assert "params.req.input_ids differs from element 3 on" in " ".join(" ".join(lines_screen(told)).split())


def test_no_text_of_a_request_comes_out(tmp_path: Path) -> None:
    secret = ["generate called params={'prompt': 'Tell me a secret', 'n': 1}", "free text: Tell me a secret"]
    told = judged(
        tmp_path,
        {"TP0": secret, "TP1": [event.replace("secret", "SECRET") for event in secret], "TP2": secret},
    )
    shown = "\n".join([told.verdict.to_text(), *lines_screen(told), *argument(told)])
    assert told.verdict.code == 10
    assert [word for word in ("Tell", "secret", "SECRET") if word in shown] == []


def test_equal_logs_give_equal_bytes(tmp_path: Path) -> None:
    lists = {"TP0": EVENTS, "TP1": changed(0, MATCH.replace("22", "23"))}
    assert judged(tmp_path, lists).verdict.to_text() == judged(tmp_path, lists).verdict.to_text()


def test_replicas_are_never_compared_with_each_other(tmp_path: Path) -> None:
    other = [POLL, POLLED]
    odd = [POLL, POLLED.replace("True", "False")]
    lists = {"DP0 TP0": EVENTS, "DP0 TP1": EVENTS, "DP1 TP0": other, "DP1 TP1": odd}
    verdict = judged(tmp_path, lists).verdict
    assert (verdict.finding.first_divergence.scope, verdict.finding.unknown) == ("dp1", (2, 3))  # type: ignore[union-attr]
    assert verdict.coverage.ranks_expected == 2
    assert [finding.code for finding in verdict.findings] == [20]


def test_of_several_incidents_the_first_is_the_verdict_and_the_rest_are_findings(tmp_path: Path) -> None:
    def incident(odd: int, hour: int) -> str:
        return "".join(
            divergence_line(
                changed(1, HITS.replace("96", "32")) if rank == odd else EVENTS,
                f" TP{rank}",
                moment=f"2026-03-01 {hour}:00:00",
            )
            for rank in range(3)
        )

    verdict = judged_text(tmp_path, incident(2, 13) + incident(1, 12)).verdict
    assert (verdict.finding.culprit, [finding.culprit for finding in verdict.findings]) == ((1,), [(2,)])
    assert verdict.finding.evidence[0].record == 5


@pytest.mark.parametrize(
    "name", ["checkpoint", "header", "trailer", "idle", "lane_state", "meeting", "throttle"]
)
def test_a_function_may_be_called_as_a_record_of_ours_is(name: str, tmp_path: Path) -> None:
    events = [f"{name} called params=step=1 | kind=2 | seq=3", f"{name} returns result=result.x=1"]
    odd = [events[0], f"{name} returns result=result.x=2"]
    finding = judged(tmp_path, {"TP0": events, "TP1": events, "TP2": odd}).verdict.finding
    assert finding.first_divergence is not None
    assert (finding.culprit, finding.first_divergence.call, finding.first_divergence.index) == ((2,), name, 1)


def test_none_and_a_field_that_is_not_there_are_two_things(tmp_path: Path) -> None:
    one, two = "f called params={'request': None}", "f called params={'request': Handle(rid='r1')}"
    finding = judged(tmp_path, {"TP0": [one], "TP1": [two], "TP2": [one]}).verdict.finding
    assert finding.culprit == (1,)


def test_the_next_step_shows_what_was_logged_before_any_list(tmp_path: Path) -> None:
    told = judged(tmp_path, {"TP0": EVENTS, "TP1": changed(1, HITS + "1")}, before="noise\n" * 30)
    assert [command for command, _ in told.verdict.next] == [f"sed -n 11,30p {tmp_path / 'server.log'}"]
    alone = judged(tmp_path, {"TP0": EVENTS, "TP1": changed(1, HITS + "1")})
    assert alone.verdict.next == ()


def test_the_screen_fits_and_says_who_is_who(tmp_path: Path) -> None:
    lists: dict[str, Sequence[str]] = {f"PP{rank // 8} TP{rank % 8}": EVENTS for rank in range(16)}
    lists["PP1 TP3"] = changed(0, MATCH.replace("33", "34"))
    told = judged(tmp_path, lists)
    screen = lines_screen(told)
    assert len(screen) <= 24
    assert [line for line in screen if len(line) > 80] == []
    assert "  ranks   11 is PP1 TP3 (server.log:12)" in screen
    assert "step" not in "\n".join(screen)


def test_logs_without_such_a_line_are_an_error_that_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(LogError) as raised:
        judged_text(tmp_path, "one\ntwo\n", "[2026-03-01 12:00:00] Rank consensus checker is enabled. The\n")
    assert str(raised.value) == (
        "no line of SGLang's rank consensus checker, and no log of this tool's\n"
        "  where     server.log (2 lines), server1.log (1 line)\n"
        "  expected  Found rank divergence for N events(s)! local hash: HEX, events = [...]\n"
        "  try       nothing: the checker was on in that server, and had printed no divergence up to there"
    )


def test_the_document_has_the_published_shape(tmp_path: Path) -> None:
    odd = changed(0, MATCH.replace("33", "34"))
    texts = [
        judged(tmp_path, lists).verdict.to_json()
        for lists in (
            {"TP0": EVENTS, "TP1": EVENTS, "TP2": odd},
            {"TP0": EVENTS, "TP1": odd},
            {"TP0": EVENTS},
        )
    ]
    assert [faults(document, SCHEMA, "verdict") for document in texts] == [[], [], []]
