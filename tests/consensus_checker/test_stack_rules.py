from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from consensus_checker.claim import Claim
from consensus_checker.rules import (
    stack_cache_reduction,
    stack_frozen,
    stack_gil_held,
    stack_in_storage,
    stack_missing_thread,
    stack_not_joined,
    stack_same_place,
    stack_split,
)
from consensus_checker.stack_tree import merged_tree
from tests.support.mutate import mutations
from tests.support.stacks import dossier_of
from tests.tracer.importers.test_stacks_faulthandler import DUMP as FAULTS
from tests.tracer.importers.test_stacks_pyspy import DUMP, SERVER
from tracer.importers import stacks_faulthandler, stacks_pyspy
from tracer.importers.dossier import At, Dossier, Dump, Who
from tracer.importers.sniff import File

RULES = (
    *(stack_cache_reduction, stack_gil_held, stack_in_storage, stack_not_joined, stack_split),
    *(stack_missing_thread, stack_frozen, stack_same_place),
)
LOOP = "event_loop_overlap scheduler.py:1100"
VOTE = f"all_reduce  writing_check hiradix_cache.py:700, check_hicache_events hiradix_cache.py:900, {LOOP}"
ASK = f"broadcast  broadcast_pyobj utils.py:90, recv_requests scheduler.py:1210, {LOOP}"
FORWARD = f"all_reduce  forward model.py:50, run_batch scheduler.py:1500, {LOOP}"
COPY = f"-  copy_pages hiradix_cache.py:640, load_back hiradix_cache.py:600, {LOOP}"


def look(*ranks: str) -> str:
    return "\n".join(f"{rank}  {text}" for rank, text in enumerate(ranks) if text)


def claims(dossier: Dossier) -> list[Claim]:
    return [claim for rule in RULES for claim in rule.find(dossier)]


def told(dossier: Dossier) -> list[tuple[str, int, str, tuple[int, ...], bool]]:
    return [
        (one.finding.rule, one.finding.code, one.finding.level, one.finding.culprit, one.needs_second_look)
        for one in claims(dossier)
    ]


def test_one_rank_that_votes_while_the_others_ask_for_requests_is_named() -> None:
    (claim,) = claims(dossier_of(*[look(VOTE, ASK, ASK, ASK)] * 2))
    finding = claim.finding
    assert (finding.rule, finding.code, finding.level) == ("stack_cache_reduction", 11, "medium")
    assert (finding.culprit, finding.victims) == ((0,), (1, 2, 3))
    assert finding.summary == (
        "rank 0 waits in all_reduce (writing_check, hiradix_cache.py:700), ranks 1-3 wait in broadcast "
        "(broadcast_pyobj, utils.py:90): some of them voted in the cache and the others did not"
    )
    assert [(entry.file, entry.supports.partition(":")[0]) for entry in finding.evidence] == [
        ("look2/rank0.txt", "culprit 0"),
        ("look2/rank1.txt", "victim 1"),
        ("look2/rank2.txt", "victim 2"),
        ("look2/rank3.txt", "victim 3"),
    ]
    assert finding.resembles == ("HC01", "HC03", "HC05")


def test_one_look_at_the_pair_needs_a_second_one() -> None:
    assert told(dossier_of(look(VOTE, ASK, ASK))) == [("stack_cache_reduction", 11, "low", (0,), True)]


def test_one_look_that_a_watchdog_took_is_enough_for_the_pair() -> None:
    dossier = dossier_of(look(VOTE, ASK, ASK), events=("scheduler_watchdog_timeout",))
    assert told(dossier) == [("stack_cache_reduction", 11, "medium", (0,), False)]


def test_one_rank_that_asks_while_the_others_vote_is_not_named() -> None:
    # It may wait there for one of them that votes once too often.
    (claim,) = claims(dossier_of(*[look(ASK, VOTE, VOTE)] * 2))
    finding = claim.finding
    assert (finding.rule, finding.level, finding.culprit) == ("stack_cache_reduction", "undetermined", ())
    assert finding.unknown == (0, 1, 2)


def test_of_two_ranks_in_the_pair_nobody_is_named() -> None:
    (claim,) = claims(dossier_of(*[look(VOTE, ASK)] * 2))
    assert (claim.finding.culprit, claim.finding.unknown) == ((), (0, 1))


def test_ranks_in_different_calls_accuse_nobody() -> None:
    (claim,) = claims(dossier_of(*[look(VOTE, VOTE, FORWARD)] * 2))
    finding = claim.finding
    assert (
        finding.rule,
        finding.code,
        finding.culprit,
        finding.unknown,
    ) == ("stack_split", 11, (), (0, 1, 2))
    assert "largest crowd 2/3" in finding.basis


def test_a_rank_that_stands_elsewhere_in_two_looks_while_all_others_wait_is_named() -> None:
    (claim,) = claims(dossier_of(*[look(FORWARD, FORWARD, COPY)] * 2))
    finding = claim.finding
    assert (finding.rule, finding.code, finding.level) == ("stack_not_joined", 11, "medium")
    assert (finding.culprit, finding.victims) == ((2,), (0, 1))
    assert finding.summary == (
        "rank 2 is not in the call that ranks 0-1 wait in: it stands in copy_pages, hiradix_cache.py:640"
    )
    # Whoever waits there may be wrong elsewhere.
    assert claim.cleared == {}


def test_with_a_watchdog_and_two_looks_it_is_sure() -> None:
    dossier = dossier_of(*[look(FORWARD, FORWARD, COPY)] * 2, events=("watchdog_timeout",))
    assert told(dossier) == [("stack_not_joined", 11, "high", (2,), False)]


def test_one_look_at_a_rank_that_is_missed_needs_a_second_one() -> None:
    dossier = dossier_of(look(FORWARD, FORWARD, COPY))
    assert told(dossier) == [("stack_not_joined", 11, "low", (2,), True)]


def test_a_rank_that_moved_between_two_looks_is_not_named() -> None:
    dossier = dossier_of(look(FORWARD, FORWARD, VOTE), look(FORWARD, FORWARD, COPY))
    assert told(dossier) == [("stack_not_joined", 4, "undetermined", (), False)]


def test_a_job_that_moved_and_stands_together_is_well() -> None:
    dossier = dossier_of(look(ASK, ASK, ASK), look(FORWARD, FORWARD, FORWARD))
    assert told(dossier) == [("stack_same_place", 0, "medium", (), False)]


def test_three_looks_that_all_differ_are_of_a_job_that_moves() -> None:
    dossier = dossier_of(look(ASK, ASK, ASK), look(VOTE, VOTE, VOTE), look(FORWARD, FORWARD, COPY))
    (claim,) = claims(dossier)
    assert (claim.finding.rule, claim.finding.code) == ("stack_same_place", 0)
    assert claim.finding.summary == "ranks 0-2 moved from each look to the next"


def test_two_looks_of_which_the_newer_is_of_a_stall_are_not_called_well() -> None:
    dossier = dossier_of(look(ASK, ASK, ASK), look(FORWARD, FORWARD, COPY))
    assert told(dossier) == [("stack_not_joined", 4, "undetermined", (), False)]


def test_a_rank_that_runs_on_one_line_may_only_be_slow() -> None:
    slow = f"-  compile model.py:9, {LOOP}  state=active"
    assert told(dossier_of(*[look(FORWARD, FORWARD, slow)] * 2)) == [
        ("stack_not_joined", 11, "low", (2,), False)
    ]


def test_of_two_ranks_the_one_that_is_held_by_something_else_is_named() -> None:
    held = f"lock  take_pages pool.py:30, {LOOP}"
    assert told(dossier_of(*[look(FORWARD, held)] * 2)) == [("stack_not_joined", 11, "medium", (1,), False)]


def test_of_two_ranks_one_that_has_nothing_to_do_is_not_named() -> None:
    idle = f"get  {LOOP}"
    (claim,) = claims(dossier_of(*[look(FORWARD, idle)] * 2))
    assert (claim.finding.culprit, claim.finding.unknown) == ((), (1,))


def test_an_idle_server_is_well() -> None:
    idle = f"-  recv_requests scheduler.py:1205, {LOOP}  state=active"
    for looks in (1, 2):
        (claim,) = claims(dossier_of(*[look(idle, ASK, ASK, ASK)] * looks))
        assert (
            claim.finding.rule,
            claim.finding.code,
            claim.finding.kind,
        ) == ("stack_same_place", 0, "consistent")


def test_what_a_watchdog_found_still_is_not_called_idle() -> None:
    idle = f"-  recv_requests scheduler.py:1205, {LOOP}  state=active"
    dossier = dossier_of(*[look(idle, ASK, ASK, ASK)] * 2, events=("watchdog_timeout",))
    assert [claim.finding.code for claim in claims(dossier)] == [11]


def test_all_ranks_in_one_call_are_not_judged_by_their_frames() -> None:
    (claim,) = claims(dossier_of(*[look(FORWARD, FORWARD, FORWARD)] * 2))
    finding = claim.finding
    assert (
        finding.rule,
        finding.code,
        finding.level,
        finding.culprit,
    ) == ("stack_same_place", 20, "undetermined", ())
    assert finding.ruled_out == (
        ("a rank that went another way", "ranks 0-2 stand in one place of the program"),
    )


def test_branches_of_one_function_are_one_call() -> None:
    source = ASK.replace("utils.py:90", "utils.py:80")
    assert told(dossier_of(*[look(source, ASK, ASK)] * 2)) == [
        ("stack_same_place", 20, "undetermined", (), False)
    ]


def test_a_rank_that_holds_the_interpreter_is_named_for_it() -> None:
    hog = f"-  hash_pages hiradix_cache.py:620, {LOOP}  state=active+gil"
    (claim,) = claims(dossier_of(*[look(FORWARD, hog, FORWARD)] * 2))
    finding = claim.finding
    assert (finding.rule, finding.culprit, finding.victims) == ("stack_gil_held", (1,), (0, 2))
    assert finding.summary == (
        "rank 1 is not in the call that ranks 0, 2 wait in: it runs in hash_pages, hiradix_cache.py:620 "
        "and holds the interpreter (GIL)"
    )


def test_a_thread_that_holds_the_interpreter_for_its_main_thread_is_told() -> None:
    waits = f"1  gil  copy_pages hiradix_cache.py:640, {LOOP}"
    holds = "1:tokenizer  -  encode tokens.py:3  state=active+gil"
    text = f"0  {FORWARD}\n{waits}\n{holds}\n2  {FORWARD}"
    (claim,) = claims(dossier_of(text, text))
    assert (claim.finding.rule, claim.finding.culprit) == ("stack_gil_held", (1,))
    assert "culprit 1: holds the interpreter (GIL)" in [e.supports for e in claim.finding.evidence]


def test_a_rank_in_the_store_while_all_others_wait_is_named() -> None:
    stored = f"-  batch_get mooncake_store.py:88, load_back hiradix_cache.py:600, {LOOP}"
    (claim,) = claims(dossier_of(*[look(FORWARD, stored, FORWARD)] * 2))
    assert (claim.finding.rule, claim.finding.culprit) == ("stack_in_storage", (1,))
    assert claim.finding.summary.endswith(
        "it is in a call to the external store (batch_get, mooncake_store.py:88)"
    )


def lanes(*texts: str) -> str:
    """Main threads at the request broadcast, and threads of their prefetches."""
    return "\n".join([*(f"{rank}  {ASK}" for rank in range(3)), *texts])


SYNC = "prefetch_sync_thread_func cache_controller.py:410"
IO = "prefetch_io_aux_func cache_controller.py:380"
READING = f"0:io  -  batch_get mooncake_store.py:88, {IO}"


def test_a_prefetch_thread_in_the_store_that_the_others_wait_for_is_named() -> None:
    text = lanes(
        f"0:sync  get  {SYNC}",
        READING,
        *(f"{rank}:sync  all_reduce  {SYNC}" for rank in (1, 2)),
        *(f"{rank}:io  get  {IO}" for rank in (1, 2)),
    )
    (claim,) = stack_in_storage.find(dossier_of(text, text))
    finding = claim.finding
    assert (*(finding.rule, finding.code, finding.level, finding.culprit, finding.victims),) == (
        "stack_in_storage",
        11,
        "medium",
        (0,),
        (1, 2),
    )
    assert stack_in_storage.find(dossier_of(text)) == []


def test_prefetch_threads_that_only_wait_for_work_say_nothing() -> None:
    text = lanes(*(f"{rank}:sync  get  {SYNC}" for rank in range(3)), READING)
    assert stack_in_storage.find(dossier_of(text, text)) == []


def test_a_helper_thread_that_one_rank_alone_lacks_is_told() -> None:
    text = lanes(
        *(f"{rank}:sync  get  {SYNC}" for rank in (0, 2)), *(f"{rank}:io  get  {IO}" for rank in range(3))
    )
    (claim,) = stack_missing_thread.find(dossier_of(text, text))
    finding = claim.finding
    assert (*(finding.rule, finding.code, finding.level, finding.culprit),) == (
        "stack_missing_thread",
        15,
        "medium",
        (1,),
    )
    assert finding.summary == "rank 1 has no thread prefetch_sync_thread_func sync; ranks 0, 2 have one"
    (once,) = stack_missing_thread.find(dossier_of(text))
    assert (once.finding.level, once.needs_second_look) == ("low", True)


@pytest.mark.parametrize(
    "threads",
    [
        ("0:sync  get  {SYNC}", "1:sync  get  {SYNC}"),
        ("0:stdin  get  read_stdin launch.py:3", "2:stdin  get  read_stdin launch.py:3"),
        ("0:sync  get  {SYNC}",),
        ("0:w1  get  {SYNC}", "0:w2  get  {SYNC}", "2:w1  get  {SYNC}"),
    ],
    ids=["two of three and the third", "not the cache's", "one rank has it", "a pool"],
)
def test_threads_that_differ_by_right_are_not_missed(threads: tuple[str, ...]) -> None:
    text = lanes(*(thread.format(SYNC=SYNC) for thread in threads))
    found = stack_missing_thread.find(dossier_of(text, text))
    expected = [(2,)] if threads[-1].startswith("1:sync") else []
    assert expected == [claim.finding.culprit for claim in found]


def test_ranks_that_stand_in_the_store_while_nobody_waits_for_them_are_frozen() -> None:
    stored = f"-  batch_get mooncake_store.py:88, load_back hiradix_cache.py:600, {LOOP}"
    (claim,) = claims(dossier_of(*[look(stored, stored)] * 2))
    finding = claim.finding
    assert (
        finding.rule,
        finding.code,
        finding.culprit,
        finding.victims,
    ) == ("stack_frozen", 15, (), (0, 1))
    assert claims(dossier_of(look(stored, stored))) == []


def test_a_rank_of_which_there_is_no_look_since_the_others_stopped_is_silent_and_named() -> None:
    (claim,) = claims(dossier_of(look(ASK, ASK, COPY), look(VOTE, VOTE), look(VOTE, VOTE)))
    finding = claim.finding
    assert (*(finding.rule, finding.level, finding.culprit, finding.silent),) == (
        "stack_not_joined",
        "low",
        (2,),
        (2,),
    )
    assert (finding.evidence[0].file, finding.evidence[0].record) == ("look1/rank2.txt", 3)
    assert claim.missing == (2,)


def test_a_rank_without_any_stack_is_silent_and_not_named() -> None:
    (claim,) = claims(dossier_of(*[look(VOTE, "", VOTE)] * 2))
    assert (claim.finding.culprit, claim.finding.silent, claim.finding.level) == ((), (1,), "undetermined")


def test_a_rank_that_other_evidence_knows_is_missed_too() -> None:
    dossier = dossier_of(*[look(VOTE, VOTE)] * 2)
    index = dossier.begin("comm_lib_trace_rank_2")
    dossier.dumps.append(Dump(Who(2), 0, "2.9", "gloo", True, 0, (), At(index, 0)))
    (claim,) = claims(dossier)
    assert (claim.finding.silent, claim.finding.culprit) == ((2,), ())


def test_a_rank_whose_last_look_is_older_but_after_the_stop_counts() -> None:
    (claim,) = claims(
        dossier_of(look(VOTE, VOTE, VOTE), look(FORWARD, FORWARD, COPY), look(FORWARD, FORWARD))
    )
    assert (*(claim.finding.rule, claim.finding.level, claim.finding.culprit, claim.finding.silent),) == (
        "stack_not_joined",
        "medium",
        (2,),
        (),
    )


def test_stages_of_a_pipeline_are_compared_apart() -> None:
    receive = f"recv  recv_hidden_states scheduler_pp.py:30, {LOOP}"
    places = {rank: {"pp": rank // 2, "tp": rank % 2} for rank in range(4)}
    dossier = dossier_of(*[look(FORWARD, FORWARD, receive, receive)] * 2, places=places)
    assert told(dossier) == [
        ("stack_same_place", 20, "undetermined", (), False),
        ("stack_same_place", 20, "undetermined", (), False),
    ]


def test_a_replica_that_waits_while_another_has_nothing_to_do_is_told_of_it() -> None:
    idle = f"get  {LOOP}"
    places = {rank: {"dp": rank // 2, "tp": rank} for rank in range(4)}
    dossier = dossier_of(*[look(FORWARD, FORWARD, idle, idle)] * 2, places=places)
    first, second = claims(dossier)
    assert first.finding.alternatives[-1].summary == "ranks 2-3 would have to join, and wait for work"
    assert (first.finding.alternatives[-1].resembles, second.finding.code) == (("HC07",), 0)


def test_a_pipeline_at_rest_accuses_nobody() -> None:
    receive = f"recv  recv_hidden_states scheduler_pp.py:30, {LOOP}"
    idle = f"get  {LOOP}"
    assert [claim.finding.code for claim in claims(dossier_of(*[look(idle, receive, receive)] * 2))] == [0]


def test_messages_in_a_world_of_unknown_structure_accuse_nobody() -> None:
    receive = f"recv  recv_hidden_states scheduler_pp.py:30, {LOOP}"
    assert told(dossier_of(*[look(FORWARD, FORWARD, receive, receive)] * 2)) == []


def test_a_rank_that_two_processes_claim_to_be_is_left_out() -> None:
    dossier = dossier_of(*[look(FORWARD, FORWARD, COPY)] * 2)
    other = dossier_of(*[look("", "", VOTE)] * 2)
    for stack in other.stacks:
        at = At(stack.at.file + len(dossier.files), stack.at.record)
        dossier.stacks.append(replace(stack, who=Who(2, 999), at=at))
    dossier.files += other.files
    assert told(dossier) == [("stack_same_place", 20, "undetermined", (), False)]


def test_no_rule_says_anything_without_stacks() -> None:
    assert claims(Dossier()) == []


def test_dumps_with_anything_in_them_are_judged_without_a_word_of_python(tmp_path: Path) -> None:
    texts = {"rank0": SERVER, "rank1": DUMP, "rank2": FAULTS}
    importers = (stacks_pyspy, stacks_faulthandler)
    mutants = {name: list(mutations(text.encode(), 60, seed=3)) for name, text in texts.items()}
    for number in range(60):
        into = Dossier()
        for name, own in mutants.items():
            path = tmp_path / name
            path.write_bytes(own[number])
            for importer in importers:
                importer.read(File(path, name), into.begin(name), into)
        into.stacks = [
            replace(stack, who=replace(stack.who, rank=stack.at.file // 2)) for stack in into.stacks
        ]
        for claim in claims(into):
            assert all(entry.supports for entry in claim.finding.evidence)
            assert set(claim.finding.culprit) <= {0, 1, 2}
        assert all(len(line) <= 80 for line in merged_tree(into))
