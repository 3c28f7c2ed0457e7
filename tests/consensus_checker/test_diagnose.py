"""All evidence of a job in, one verdict out, with its coverage and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from consensus_checker.diagnose import Diagnosis
from consensus_checker.finding import Finding
from tests.consensus_checker.test_check import SCHEMA, faults
from tests.support.evidence import STACK, WATCHDOG, diagnosed, dump, put
from tests.support.hearts import beating, write_logs
from tests.support.mutate import mutations
from tracer.errors import LogError

RANKS = range(3)
ROUND = "events! events. match:r1=64 "
FINE = "\n".join(f"{rank} {ROUND * 3}" for rank in RANKS)
STALL = f"0 {ROUND * 3}events! #killed\n1 {ROUND * 3}events! #killed\n2 {ROUND * 3}done:9 #killed"
# Rank 2 has refused a backup, and stands at the next broadcast.
DIVERGED = (
    f"0 {ROUND * 3}backup:17=64{{host_pages_free=5}} events! #killed\n"
    f"1 {ROUND * 3}backup:17=64{{host_pages_free=5}} events! #killed\n"
    f"2 {ROUND * 3}backup:17=0{{host_pages_free=0}} #killed"
)
STUCK_DUMPS = {
    f"look{look}/trace_rank_{rank}": dump(41 - (rank == 2), open_calls=int(rank != 2))
    for look in (1, 2)
    for rank in RANKS
}
WATCHDOG_LINES = {
    rank: WATCHDOG.format(rank=rank, work=41, enqueued=41 - (rank == 2), completed=40).encode()
    for rank in RANKS
}
GIVEN_UP = {
    f"trace_rank_{rank}": dump(41 - (rank == 2), open_calls=int(rank != 2), is_given_up=True)
    for rank in RANKS
}


def brief(told: Diagnosis) -> tuple[object, ...]:
    finding = told.verdict.finding
    return finding.kind, finding.code, finding.culprit


def named_without_evidence(finding: Finding) -> list[int]:
    told = " ".join(entry.supports.partition(":")[0] for entry in finding.evidence).replace(",", " ").split()
    named = (*finding.culprit, *finding.victims, *finding.silent, *finding.unknown)
    return [rank for rank in named if str(rank) not in told]


def test_logs_that_nobody_closed_are_the_stall_that_their_hearts_tell(tmp_path: Path) -> None:
    told = diagnosed(write_logs(tmp_path, beating(STALL, dict.fromkeys(RANKS, 40.0))))
    assert brief(told) == ("stall", 11, (2,))
    assert told.verdict.coverage.truncated == (0, 1, 2)


def test_a_rank_of_which_nobody_has_anything_new_is_a_guess_however_many_miss_it(tmp_path: Path) -> None:
    stands = STACK.format(func="writing_check", call="all_reduce", line=700)
    looks = {f"look{look}/trace_rank_{rank}": dump(41, open_calls=1) for look in (2, 3) for rank in (0, 1)}
    looks |= {f"look{look}/stacks_rank_{rank}.txt": stands for look in (2, 3) for rank in (0, 1)}
    old = STACK.format(func="copy_pages", call="sleep", line=60)
    told = diagnosed(put(tmp_path, {"look1/trace_rank_2": dump(38), "look1/stacks_rank_2.txt": old, **looks}))
    finding = told.verdict.finding
    assert (brief(told), finding.level) == (("stall", 11, (2,)), "low")
    assert "its newest dump was not collected" in [one.summary for one in finding.alternatives]


def test_dumps_alone_name_the_rank_that_did_not_join(tmp_path: Path) -> None:
    told = diagnosed(put(tmp_path, GIVEN_UP))
    assert brief(told) == ("stall", 11, (2,))
    assert told.history is None


def test_a_divergence_in_the_logs_and_a_stall_in_the_dumps_are_one_sentence(tmp_path: Path) -> None:
    write_logs(tmp_path / "own", beating(DIVERGED, {}))
    told = diagnosed(put(tmp_path, GIVEN_UP))
    finding = told.verdict.finding
    assert brief(told) == ("divergence", 10, (2,))
    assert finding.consequence == ("stall", 11)
    assert "also fr_not_joined" in finding.basis
    assert "; ranks 0-1 wait for it (rank 2 did not join all_reduce #41" in finding.summary
    assert told.history is not None


def test_dumps_decide_where_logs_are_cut(tmp_path: Path) -> None:
    write_logs(tmp_path / "own", beating(STALL, {}))
    assert brief(diagnosed(put(tmp_path, GIVEN_UP))) == ("stall", 11, (2,))


def test_sound_logs_and_dumps_that_accuse_contradict_each_other(tmp_path: Path) -> None:
    write_logs(tmp_path / "own", beating(FINE, {}))
    told = diagnosed(put(tmp_path, GIVEN_UP))
    assert (told.verdict.code, told.verdict.finding.rule, told.verdict.finding.unknown) == (
        20,
        "contradiction",
        (2,),
    )


def test_coverage_says_which_rank_has_which_evidence_and_what_became_of_each_file(tmp_path: Path) -> None:
    files = {**GIVEN_UP, "readme.md": "# About\n", "cut.pickle": b"\x80\x02}q\x00("}
    del files["trace_rank_1"]
    told = diagnosed(put(tmp_path, files))
    coverage = told.verdict.coverage
    assert (coverage.ranks_expected, coverage.ranks_seen, coverage.missing) == (3, 2, (1,))
    assert coverage.sources is not None
    assert dict(coverage.sources.ranks) == {"dumps": (0, 2)}
    assert [(file.name, file.format, file.refused is None) for file in coverage.sources.files] == [
        ("cut.pickle", "flight_recorder", False),
        ("readme.md", None, True),
        ("trace_rank_0", "flight_recorder", True),
        ("trace_rank_2", "flight_recorder", True),
    ]
    assert told.verdict.finding.silent == (1,)


@pytest.mark.parametrize("what", ["own", "dumps", "both", "one missing"])
def test_every_rank_that_is_named_has_evidence_and_the_document_fits_its_schema(
    what: str, tmp_path: Path
) -> None:
    if what in ("own", "both"):
        write_logs(tmp_path / "own", beating(DIVERGED, {}))
    files = {} if what == "own" else dict(GIVEN_UP)
    if what == "one missing":
        del files["trace_rank_1"]
    verdict = diagnosed(put(tmp_path, files)).verdict
    assert [named_without_evidence(one) for one in (verdict.finding, *verdict.findings)] == [
        [] for _ in (verdict.finding, *verdict.findings)
    ]
    assert faults(verdict.to_json(), SCHEMA, "verdict") == []


def test_equal_evidence_gives_equal_bytes(tmp_path: Path) -> None:
    texts = []
    for name in ("one", "two"):
        write_logs(tmp_path / name / "own", beating(DIVERGED, {}))
        put(tmp_path / name, STUCK_DUMPS)
        texts.append(diagnosed(tmp_path / name).verdict.to_text().replace(f"/{name}/", "/"))
    assert texts[0] == texts[1]


def test_what_to_do_says_who_lives_and_dies_together(tmp_path: Path) -> None:
    made = beating(f"{STALL}\n3 {ROUND}\n4 {ROUND}\n5 {ROUND}", dict.fromkeys(RANKS, 40.0), dp=2)
    (restart, *_) = diagnosed(write_logs(tmp_path, made)).verdict.advice
    assert restart == (
        "restart ranks 0-2 together",
        "no rank can come back into its process groups alone; ranks 3-5 and the router may stay",
    )


def test_the_setting_that_avoids_its_class_is_named(tmp_path: Path) -> None:
    verdict = diagnosed(write_logs(tmp_path, beating(DIVERGED, dict.fromkeys(RANKS, 40.0)))).verdict
    assert verdict.finding.resembles == ("HC02",)
    assert [what for what, _ in verdict.advice] == [
        "restart ranks 0-2 together",
        "a larger --hicache-size (or --hicache-ratio), the same on every rank",
        "start without --enable-hierarchical-cache until it is mended",
    ]
    assert ("hicache explain HC02", "what this class of bugs is, and what is known of it") in verdict.next


def test_where_nothing_is_wrong_nothing_is_to_be_done(tmp_path: Path) -> None:
    verdict = diagnosed(write_logs(tmp_path, beating(FINE, {}))).verdict
    assert (verdict.code, verdict.advice) == (0, ())
    assert "advice" not in json.loads(verdict.to_text())


def test_a_run_that_cannot_be_read_beside_dumps_is_a_doubt(tmp_path: Path) -> None:
    put(tmp_path, {**GIVEN_UP, "own/rank0000.scheduler.000.jsonl": "nothing of ours\n"})
    told = diagnosed(tmp_path)
    assert brief(told) == ("stall", 11, (2,))
    assert [doubt.partition(": ")[2][:15] for doubt in told.verdict.coverage.doubts] == ["no readable log"]


@pytest.mark.parametrize("seed", range(12))
def test_damaged_evidence_gives_a_verdict_and_never_another_rank(seed: int, tmp_path: Path) -> None:
    files = {**STUCK_DUMPS, **{f"rank_{rank}.log": WATCHDOG_LINES[rank] for rank in RANKS}}
    damaged = {
        name: next(mutations(content, 1, seed * 100 + at))
        for at, (name, content) in enumerate(files.items())
        if (at + seed) % 3
    }
    told = diagnosed(put(tmp_path, {**files, **damaged}))
    assert set(told.verdict.finding.culprit) <= {2}
    assert faults(told.verdict.to_json(), SCHEMA, "verdict") == []


def test_nothing_but_a_run_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    put(tmp_path, {"rank0000.scheduler.000.jsonl": "nothing of ours\n"})
    with pytest.raises(LogError, match="no readable log"):
        diagnosed(tmp_path)


def test_of_several_jobs_in_one_folder_the_one_that_is_told_is_named(tmp_path: Path) -> None:
    write_logs(tmp_path / "a", beating(FINE, {}, runs=dict.fromkeys(RANKS, "run-a")))
    write_logs(tmp_path / "b", beating(DIVERGED, {}, runs=dict.fromkeys(RANKS, "run-b")))
    assert "2 runs are here, and this is run run-b" in diagnosed(tmp_path).verdict.coverage.doubts
