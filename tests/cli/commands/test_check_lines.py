from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Hicache
from tests.support.divergence_lines import divergence_line
from tests.support.golden import assert_golden

POLL = "check_prefetch_progress called params={'request': Handle(rid='r7', attempt_id=0)}"
POLLED = "check_prefetch_progress returns result=True"
BACKUP = "write_backup_storage called params=<no check>"
DONE = "write_backup_storage returns result=<no check>"
MATCH = "match_prefix called params=params=MatchPrefixParams(req=Req(rid=r8, input_ids=[4403, 18652, 27769]))"
HITS = "match_prefix returns result=result.full_kv_hit_length=96"
EVENTS = (POLL, POLLED, BACKUP, DONE, MATCH, HITS)
ODD = (*EVENTS[:5], HITS.replace("96", "32"))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one log a rank; the last one hits less."""
    monkeypatch.chdir(tmp_path)
    folder = Path("server")
    folder.mkdir()
    for rank in range(4):
        noise = f"[2026-03-01 11:59:58 TP{rank}] Decode batch, #running-req: 3, #token: 4096\n" * 30
        line = divergence_line(ODD if rank == 3 else EVENTS, f" TP{rank}")
        (folder / f"tp{rank}.log").write_text(noise + line)
    return folder


@pytest.mark.parametrize("words", [[], ["--full"], ["--quiet"]], ids=["screen", "full", "quiet"])
def test_the_screen_of_a_servers_logs_reads_as_agreed(
    words: list[str], server: Path, hicache: Hicache
) -> None:
    said = hicache("check", server, *words)
    assert (said.code, said.err) == (10, "")
    assert [line for line in said.out.splitlines() if len(line) > 80 and words != ["--quiet"]] == []
    assert_golden(f"cli_check_lines{'_' + words[0].strip('-') if words else ''}.txt", said.out)


def test_a_folder_its_files_and_one_file_of_all_are_the_same_verdict(server: Path, hicache: Hicache) -> None:
    files = sorted(server.iterdir())
    Path("all.log").write_text("".join(file.read_text() for file in files))
    Path("all.log.gz").write_bytes(gzip.compress(Path("all.log").read_bytes()))
    found = []
    for paths in ([server], files, ["all.log"], ["all.log.gz"]):
        document = json.loads(hicache("check", *paths, "--json").out)
        assert document["schema"] == "hicache.verdict.v1"
        found.append([document[part] for part in ("verdict", "ranks", "first_divergence", "trigger")])
    assert [one == found[0] for one in found] == [True] * 4


def test_evidence_is_a_file_and_a_line_in_it(server: Path, hicache: Hicache) -> None:
    evidence = json.loads(hicache("check", server, "--json").out)["evidence"]
    assert [(entry["file"], entry["record"], entry["supports"]) for entry in evidence] == [
        ("tp3.log", 31, "culprit 3: TP3"),
        ("tp0.log", 31, "majority 0: TP0"),
    ]


def test_files_of_one_name_are_told_apart_by_their_folders(server: Path, hicache: Hicache) -> None:
    for rank in range(4):
        Path(f"attempt/{rank}").mkdir(parents=True)
        (server / f"tp{rank}.log").rename(f"attempt/{rank}/stderr.log")
    evidence = json.loads(hicache("check", "attempt", "--json").out)["evidence"]
    assert evidence[0]["file"] == "attempt/3/stderr.log"


def test_no_token_of_a_prompt_is_in_any_output(server: Path, hicache: Hicache) -> None:
    for words in ([], ["--full"], ["--quiet"], ["--json"]):
        said = hicache("check", server, *words)
        assert [token for token in ("4403", "18652", "27769") if token in said.out + said.err] == []


def test_a_servers_logs_beside_a_run_are_a_verdict_of_their_own(
    runs: Path, server: Path, hicache: Hicache
) -> None:
    said = hicache("check", server / "tp0.log", runs / "twin", server / "tp3.log")
    assert said.code == 10
    headings = [line for line in said.out.splitlines() if line.endswith(":")]
    assert headings == ["server/tp0.log + server/tp3.log:", f"{runs / 'twin'}:"]
    document = json.loads(hicache("check", server, runs / "twin", "--json").out)
    assert [entry["verdict"]["kind"] for entry in document["verdicts"]] == ["divergence", "consistent"]


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"", "0 lines"), (bytes(range(256)) * 40, "41 lines"), (b"nothing here\n" * 1000, "1,000 lines")],
    ids=["empty", "binary", "other"],
)
def test_a_log_without_such_a_line_is_one_clear_error(
    content: bytes, told: str, tmp_path: Path, hicache: Hicache
) -> None:
    (tmp_path / "server.log").write_bytes(content)
    said = hicache("check", tmp_path / "server.log")
    assert (said.code, said.out) == (3, "")
    assert said.err.splitlines()[:2] == [
        "error: no line of SGLang's rank consensus checker, and no log of this tool's",
        f"  where     server.log ({told})",
    ]


@pytest.mark.parametrize(
    ("ranks", "code", "word"),
    [((0, 1, 2, 3), 10, "DIVERGED"), ((0, 1), 20, "UNDETERMINED"), ((3,), 4, "UNCHECKED")],
)
def test_the_exit_code_says_how_far_the_lines_go(
    ranks: tuple[int, ...], code: int, word: str, server: Path, hicache: Hicache
) -> None:
    said = hicache("check", *(server / f"tp{rank}.log" for rank in ranks))
    assert (said.code, said.out.split()[0]) == (code, word)


def test_a_folder_that_nobody_may_list_is_one_clear_error(
    server: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "server")

    monkeypatch.setattr("os.scandir", refused)
    monkeypatch.setattr("os.listdir", refused)
    said = hicache("check", server)
    assert (said.code, said.out) == (3, "")
    assert said.err.startswith("error: server can't be listed: Permission denied")
