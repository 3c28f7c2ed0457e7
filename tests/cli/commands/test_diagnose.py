"""`hicache diagnose`: screens as whole texts, exit codes, JSON, and input that is none."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from tests.cli.conftest import Hicache
from tests.consensus_checker.test_diagnose import DIVERGED, FINE, GIVEN_UP, RANKS, STALL
from tests.support.divergence_lines import divergence_line
from tests.support.evidence import STACK, dump, put
from tests.support.golden import assert_golden
from tests.support.hearts import beating, write_logs

STANDS = dict.fromkeys((0, 1), ("writing_check", "all_reduce", 700)) | {2: ("copy_pages", "sleep", 60)}
STACKS = {
    f"look{look}/rank_{rank}.txt": STACK.format(func=func, call=call, line=line)
    for look in (1, 2)
    for rank, (func, call, line) in STANDS.items()
}


# A pickle that would call a function of the system.
HOSTILE = b"\x80\x02cposix\nsystem\nq\x00X\x02\x00\x00\x00idq\x01\x85q\x02Rq\x03."


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("job")


def killed(place: Path) -> Path:
    return write_logs(place, beating(STALL, dict.fromkeys(RANKS, 40.0)))


def both(place: Path) -> Path:
    write_logs(place / "own", beating(DIVERGED, {}))
    return put(place, GIVEN_UP)


def dumps(place: Path) -> Path:
    return put(place, {**GIVEN_UP, "readme.md": "# About\n"})


def stacks(place: Path) -> Path:
    return put(place, STACKS)


def two_looks(place: Path) -> Path:
    looks = {
        f"look{look}/trace_rank_{rank}": dump(40 + look, open_calls=0) for look in (1, 2) for rank in RANKS
    }
    return put(place, looks)


CASES = {
    "killed": (killed, 11),
    "both": (both, 10),
    "dumps": (dumps, 11),
    "stacks": (stacks, 11),
    "two_looks": (two_looks, 0),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_screen_reads_as_agreed(name: str, place: Path, hicache: Hicache) -> None:
    make, code = CASES[name]
    said = hicache("diagnose", make(place))
    lines = said.out.splitlines()
    assert said.code == code
    assert len(lines) <= 24
    assert [line for line in lines if len(line) > 80 or line != line.rstrip() or "\x1b" in line] == []
    assert_golden(f"cli_diagnose_{name}.txt", said.out)


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_whole_argument_is_narrow_and_names_the_files(name: str, place: Path, hicache: Hicache) -> None:
    make, _ = CASES[name]
    said = hicache("diagnose", make(place), "--full")
    assert [line for line in said.out.splitlines() if len(line) > 80 and "hicache query" not in line] == []
    if name != "killed":
        assert "\n  files\n" in said.out


def test_json_is_one_document_with_the_same_verdict(place: Path, hicache: Hicache) -> None:
    said = hicache("diagnose", both(place), "--json")
    document = json.loads(said.out)
    assert (said.code, said.err) == (10, "")
    assert (document["schema"], document["verdict"]["code"]) == ("hicache.verdict.v1", 10)
    assert document["ranks"]["culprit"] == [2]
    assert document["coverage"]["sources"]["ranks"] == {"logs": [0, 1, 2], "dumps": [0, 1, 2]}
    assert document["advice"][0]["do"] == "restart ranks 0-2 together"
    assert said.out == hicache("diagnose", place, "--json").out


def test_quiet_is_one_line_and_exit_zero_is_zero(place: Path, hicache: Hicache) -> None:
    said = hicache("diagnose", dumps(place), "--quiet", "--exit-zero")
    assert (said.code, said.err) == (0, "")
    assert said.out == "STALL  rank 2 did not join all_reduce #41 of 1 (tp)\n"


def test_an_archive_is_as_good_as_what_is_in_it(place: Path, hicache: Hicache) -> None:
    both(place)
    with tarfile.open("job.tar.gz", "w:gz") as archive:
        archive.add(place, "host-a")
    plain, packed = (json.loads(hicache("diagnose", path, "--json").out) for path in (place, "job.tar.gz"))
    assert plain["verdict"] == packed["verdict"]
    assert [one["command"] for one in packed["next"]][:1] == [
        plain["next"][0]["command"].replace("job/own", "job.tar.gz")
    ]
    assert "/tmp" not in json.dumps(packed)


def test_files_may_be_given_one_by_one(place: Path, hicache: Hicache) -> None:
    dumps(place)
    assert hicache("diagnose", *sorted(place.iterdir())).code == 11


def test_strangers_alone_are_nothing_to_read(place: Path, hicache: Hicache) -> None:
    said = hicache("diagnose", put(place, {"readme.md": "# About\n"}))
    assert (said.code, said.out) == (3, "")
    assert said.err.splitlines()[0] == "error: no evidence in job: 1 file that nobody knows (readme.md)"


def test_where_all_is_refused_nothing_was_read_and_each_reason_is_told(place: Path, hicache: Hicache) -> None:
    said = hicache("diagnose", put(place, {"trace_rank_0": HOSTILE, "trace_rank_1": HOSTILE}))
    assert (said.code, said.out) == (3, "")
    assert said.err.splitlines()[:2] == [
        "error: nothing in job can be read",
        "  refused   trace_rank_0: opcode GLOBAL at byte 2, which would import "
        "posix.system; plain data needs none",
    ]


def test_logs_that_nobody_can_read_are_code_3_beside_whatever(place: Path, hicache: Hicache) -> None:
    files = {"rank0000.scheduler.000.jsonl": "junk\n", "readme.md": "# About\n"}
    said = hicache("diagnose", put(place, files))
    assert (said.code, said.out) == (3, "")
    assert said.err.splitlines()[0] == "error: no readable log in job"


def test_an_empty_folder_and_a_path_that_is_not_there_are_code_3(place: Path, hicache: Hicache) -> None:
    place.mkdir()
    assert [hicache("diagnose", path).code for path in (place, "nowhere")] == [3, 3]
    assert hicache("diagnose").code == 2


def test_a_kept_database_is_said_to_be_one(place: Path, hicache: Hicache) -> None:
    said = hicache("diagnose", put(place, {"last.duckdb": b"\0" * 8 + b"DUCK" + b"\0" * 500}))
    assert (said.code, said.out) == (3, "")
    assert said.err.startswith(
        "error: last.duckdb is a database of DuckDB: decisions can't be compared from it"
    )


def test_a_pickle_that_would_run_something_is_refused_by_name(place: Path, hicache: Hicache) -> None:
    said = hicache("diagnose", put(place, {**GIVEN_UP, "trace_rank_7": HOSTILE}), "--json")
    assert said.code == 11
    refused = [file for file in json.loads(said.out)["coverage"]["sources"]["files"] if file["refused"]]
    assert [file["name"] for file in refused] == ["trace_rank_7"]
    assert "posix.system" in refused[0]["refused"]


def test_a_healthy_run_of_ours_is_healthy(place: Path, hicache: Hicache) -> None:
    said = hicache("diagnose", write_logs(place, beating(FINE, {})))
    assert said.code == 0
    assert said.out.startswith("CONSISTENT  no rank diverged")
    assert "  do  " not in said.out


def test_the_demo_run_has_the_verdict_of_check(inside: Path, hicache: Hicache) -> None:
    for name in ("hung", "twin"):
        checked, diagnosed = (json.loads(hicache(word, name, "--json").out) for word in ("check", "diagnose"))
        assert (checked["verdict"], checked["ranks"]) == (diagnosed["verdict"], diagnosed["ranks"])


def test_of_two_runs_the_one_that_went_wrong_is_told_with_its_own_coverage(
    place: Path, hicache: Hicache
) -> None:
    write_logs(place / "a", beating(DIVERGED, {}))
    write_logs(
        place / "b",
        beating(
            "0 match:r1=64\n1 match:r1=64\n2 match:r1=64\n3 match:r1=0",
            {},
            runs=dict.fromkeys(range(4), "run-b"),
        ),
    )
    said = hicache("diagnose", place, "--json")
    document = json.loads(said.out)
    assert (said.code, document["ranks"]["culprit"], document["coverage"]["ranks_expected"]) == (10, [2], 3)
    assert [one["verdict"]["summary"].partition(":")[0] for one in document["findings"]] == ["run run-b"]


def test_lines_of_sglangs_own_checker_are_judged_with_what_else_the_log_says(
    place: Path, hicache: Hicache
) -> None:
    events = ["check called params={'rid': 'r7'}", "check returns result=96"]
    logs = {
        f"tp{rank}.log": divergence_line(
            [*events[:1], "check returns result=32"] if rank == 2 else events, f" TP{rank}"
        )
        for rank in RANKS
    }
    said = hicache("diagnose", put(place, logs), "--json")
    document = json.loads(said.out)
    assert (said.code, document["ranks"]["culprit"]) == (10, [2])
    assert document["coverage"]["sources"]["ranks"]["divergence lines"] == [0, 1, 2]


def test_of_many_ranks_the_rows_with_nothing_to_see_are_counted(place: Path, hicache: Hicache) -> None:
    dumps = {
        f"trace_rank_{rank}": dump(
            41 - (rank == 9), open_calls=int(rank != 9), members=range(64), is_given_up=True
        )
        for rank in range(64)
    }
    lines = hicache("diagnose", put(place, dumps)).out.splitlines()
    assert lines[0] == "STALLED   rank 9 did not join all_reduce #41 of 1 (tp)"
    at = lines.index("  ranks")
    assert lines[at + 1 : at + 3] == [
        "     0-31  WWWWWWWW W!WWWWWW WWWWWWWW WWWWWWWW   W waits, ! missing",
        "           1 row without any other sign is left out",
    ]
