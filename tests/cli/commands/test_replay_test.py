"""`hicache replay --test` as it is typed: a test file from a real server's logs, or why there is none."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from consensus_checker import sglang_kinds
from tests.cli.conftest import Hicache
from tests.support.logs import write_lane
from tests.support.server_log import CONFIG, Record, arrival, event_round, joined, match, prefill, run_of_two
from tracer.record import Kind

KINDS = [kind for kind in vars(sglang_kinds).values() if isinstance(kind, Kind)]
BEFORE = joined(event_round(1), arrival("r1", 0), match("r1"))
RIGHT, REFUSED = joined(BEFORE, prefill("r1")), joined(BEFORE, prefill("r1", pages=0))


def logs(folder: Path, *ranks: list[Record], **config: object) -> Path:
    sizes = {"pp": 1, "dp": 1, "cp": 1, "tp": len(ranks)}
    for rank, records in enumerate(ranks):
        own = {**CONFIG, **config}
        write_lane(folder, records, rank=rank, sizes=sizes, kinds=KINDS, config=own)
    return folder


@pytest.fixture
def refused(tmp_path: Path) -> Path:
    return logs(tmp_path / "logs", RIGHT, REFUSED, RIGHT)


def test_a_test_of_the_odd_rank_and_the_first_that_is_right(
    hicache: Hicache, refused: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("test_it.py")
    said = hicache("replay", refused, "--test", file)
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines() == [
        "TEST      of ranks 0 and 1, which part at alloc_host",
        "  cause   rank 1: the host pool refused 2 pages",
        "  holds   1 request, 4 steps",
        f"  run     pytest {file}",
        f"  smaller python {file} --shrink",
    ]
    names = [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert [name for name in names if name.startswith("test")] == ["test_the_ranks_decide_alike"]


def test_the_ranks_can_be_chosen(hicache: Hicache, refused: Path, tmp_path: Path) -> None:
    words = ("replay", refused, "--test", tmp_path / "t.py", "--rank", 2, "--rank", 1, "--json")
    document = json.loads(hicache(*words).out)
    assert document == {
        "schema": "hicache.replay.v1",
        "test": str(tmp_path / "t.py"),
        "ranks": [2, 1],
        "calls": ["alloc_host", "alloc_host"],
        "cause": "rank 1: the host pool refused 2 pages",
        "requests": 1,
        "steps": 4,
    }


def test_a_cause_that_no_log_tells_is_told_and_the_code_is_4(hicache: Hicache, tmp_path: Path) -> None:
    victim: Record = {"kind": "evict_node", "component": "full", "node": 3, "has_progressed": True}
    other = {**victim, "node": 4}
    place = logs(tmp_path / "logs", *(joined(BEFORE, one, prefill("r1")) for one in (victim, other, victim)))
    said = hicache("replay", place, "--test", tmp_path / "t.py", "--quiet")
    assert said.code == 4
    assert "no log says what went otherwise" in hicache(
        "replay", place, "--test", tmp_path / "t.py", "--overwrite"
    ).out.replace("\n          ", " ")
    assert (tmp_path / "t.py").exists()


@pytest.mark.parametrize(
    ("ranks", "config", "code", "error"),
    [
        ((RIGHT, RIGHT), {}, 2, "nothing to make a test of: "),
        ((RIGHT, REFUSED), {"server": None}, 2, "--test writes tests for a real SGLang"),
        ((RIGHT, REFUSED), {"page_size_tokens": 0}, 4, "no test can be made: no size of a page"),
        ((RIGHT, REFUSED), {"page_size_tokens": None}, 4, "no test can be made: no size of a page"),
        ((REFUSED[2:], RIGHT[2:]), {}, 4, "no test can be made: the log does not begin with"),
    ],
)
def test_why_there_is_none(
    hicache: Hicache,
    tmp_path: Path,
    ranks: tuple[list[Record], ...],
    config: dict[str, object],
    code: int,
    error: str,
) -> None:
    said = hicache("replay", logs(tmp_path / "logs", *ranks, **config), "--test", tmp_path / "t.py")
    assert (said.code, said.out) == (code, "")
    assert said.err.startswith(f"error: {error}")
    assert not (tmp_path / "t.py").exists()


def test_a_step_that_no_test_takes_is_named(hicache: Hicache, tmp_path: Path) -> None:
    retracted: Record = {"kind": "retract", "rid": "r9", "output_tokens": 3}
    place = logs(tmp_path / "logs", joined(retracted, RIGHT), joined(retracted, REFUSED))
    said = hicache("replay", place, "--test", tmp_path / "t.py")
    assert (said.code, said.err) == (
        4,
        "error: no test can be made: before they part, a request was retracted\n",
    )


@pytest.mark.parametrize(
    ("index", "field", "value"),
    [(2, "input_tokens", "many"), (2, "input_tokens", None), (5, "rid", {}), (0, "device_pages_free", "x")],
)
def test_a_record_that_no_server_writes_is_told(
    hicache: Hicache, tmp_path: Path, index: int, field: str, value: object
) -> None:
    spoilt = [
        [{**record, field: value} if at == index else record for at, record in enumerate(records)]
        for records in (RIGHT, REFUSED)
    ]
    said = hicache("replay", logs(tmp_path / "logs", *spoilt), "--test", tmp_path / "t.py")
    assert said.code in (0, 4)
    assert said.code == 0 or said.err.startswith("error: no test can be made: ")


def test_a_file_that_is_there_is_kept_unless_it_is_to_be_replaced(
    hicache: Hicache, refused: Path, tmp_path: Path
) -> None:
    file = tmp_path / "t.py"
    file.write_text("mine")
    said = hicache("replay", refused, "--test", file)
    assert (said.code, file.read_text()) == (2, "mine")
    assert hicache("replay", refused, "--test", file, "--overwrite").code == 0
    assert file.read_text() != "mine"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--queue", "write"), "--test looks at two ranks"),
        (("--reenact",), "--test looks at two ranks"),
        (("--rank", "1"), "--test compares two ranks"),
        (("--rank", "0", "--rank", "7"), "--rank: rank 7 left no log"),
    ],
)
def test_options_that_do_not_go_with_it(
    hicache: Hicache, refused: Path, tmp_path: Path, words: tuple[str, ...], error: str
) -> None:
    said = hicache("replay", refused, "--test", tmp_path / "t.py", *words)
    assert said.code == 2
    assert said.err.startswith(f"error: {error}")


@pytest.mark.parametrize("file", ["/dev/null", "."])
@pytest.mark.parametrize("words", [(), ("--overwrite",)])
def test_what_is_no_file_is_not_written_to(
    hicache: Hicache, refused: Path, file: str, words: tuple[str, ...]
) -> None:
    said = hicache("replay", refused, "--test", file, *words)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"error: --test {file} is no regular file\n")


def test_a_folder_that_is_not_there_is_told_before_anything_is_read(
    hicache: Hicache, refused: Path, tmp_path: Path
) -> None:
    said = hicache("replay", refused, "--test", tmp_path / "none" / "t.py")
    assert said.code == 2
    assert "no folder" in said.err


def test_logs_of_one_whole_run_make_no_test(hicache: Hicache, tmp_path: Path) -> None:
    place = logs(tmp_path / "logs", run_of_two(), run_of_two())
    assert hicache("replay", place, "--test", tmp_path / "t.py").code == 2
