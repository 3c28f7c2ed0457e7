"""`hicache replay` as it is typed: in short, at a step, step by step, and what another agreement would do."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.app import main
from cli.screens.stepper import _read
from consensus_checker.check import check
from tests.cli.conftest import Hicache
from tracer.log import find_logs

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="session")
def skipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which rank 3 stays away from an event round, since its own copy is late."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    words = ["zoo", "run", "skip_collective_when_empty", "--seed", "5", "--out", str(folder), "--quiet"]
    assert main(words) == 0
    return folder


def test_without_a_queue_all_four_are_told_in_short(hicache: Hicache, skipped: Path) -> None:
    said = hicache("replay", skipped)
    assert said.code == 0
    assert "write     ranks 0-3      3      2     1        1       1" in said.out
    # Where something is still open at the end is what one looks at.
    assert said.out.endswith(f"  next    hicache replay {skipped} --queue write --until 34\n")
    document = json.loads(hicache("replay", skipped, "--json").out)
    assert document["schema"] == "hicache.replay.v1"
    assert [each["queue"] for each in document["queues"]] == ["write", "load", "prefetch", "backup"]
    assert document["queues"][0]["ranks"][3] == {
        **{"rank": 3, "begun": 3, "ended": 2, "open": 1, "at_once": 1, "oldest": 1}
    }


def test_the_trigger_of_a_divergence_shows_in_the_queue_at_its_step(hicache: Hicache, skipped: Path) -> None:
    checked = json.loads(hicache("check", skipped, "--json").out)
    commands = [entry["command"] for entry in checked["next"]]
    (command,) = [command for command in commands if command.startswith("hicache replay ")]
    said = hicache(*command.split()[1:])
    assert said.code == 0
    assert said.out.splitlines()[:6] == [
        "WRITE QUEUE  at the end of step 34, event round 35",
        "",
        "           ranks 0-2  rank 3     since  what",
        "done here  1          0",
        "applied    -          0",
        "#3         done       in flight  33     nodes 6,7, 10 pages",
    ]
    assert max(map(len, said.out.splitlines())) <= 80
    document = json.loads(hicache(*command.split()[1:], "--json").out)
    sides = [(rank["saw"]["writes_done"], rank["applied"]["writes_agreed"]) for rank in document["ranks"]]
    assert sides == [(1, None), (1, None), (1, None), (0, 0)]
    assert document["ranks"][3]["in_queue"][0]["state"] == "in flight"


def test_local_polling_would_have_brought_the_ranks_apart_and_pp_sync_would_not(
    hicache: Hicache, skipped: Path
) -> None:
    local = hicache("replay", skipped, "--queue", "write", "--policy", "local")
    assert local.code == 10
    assert local.out.startswith(
        "APART     under local ranks would have come apart at step 34 (writes_done)\n"
    )
    synced = hicache("replay", skipped, "--queue", "write", "--policy", "pp-sync", "--json")
    assert synced.code == 0
    assert json.loads(synced.out)["parting"] is None
    assert hicache("replay", skipped, "--queue", "write", "--policy", "local", "--exit-zero").code == 0


def test_steps_are_tables_one_below_the_other_in_a_pipe(hicache: Hicache, skipped: Path) -> None:
    said = hicache("replay", skipped, "--queue", "write", "--step")
    assert said.code == 0
    steps = [line for line in said.out.splitlines() if line.startswith("WRITE QUEUE")]
    document = json.loads(hicache("replay", skipped, "--queue", "write", "--step", "--json").out)
    assert len(steps) == len(document["steps"]) > 3
    assert {each["step"] for each in document["steps"]} >= {33, 34}


@pytest.mark.parametrize(
    ("words", "told", "code"),
    [
        (["--until", "3"], "error: which queue?", 2),
        (["--queue", "writes"], "error: --queue writes is not known", 2),
        (["--queue", "write", "--until", "99999"], "error: --until 99999: the logs end with step 34", 2),
        (["--queue", "write", "--policy", "best"], "error: --policy best is not known", 2),
        (["--queue", "write", "--policy", "local", "--step"], "error: --policy looks at the whole run", 2),
        (["--rank", "9"], "error: --rank: rank 9 left no log", 2),
        (["--run", "nope"], "error: no run nope in", 3),
    ],
)
def test_what_makes_no_sense_is_said(
    hicache: Hicache, skipped: Path, words: list[str], told: str, code: int
) -> None:
    said = hicache("replay", skipped, *words)
    assert (said.code, said.out) == (code, "")
    assert said.err.startswith(told)


def test_a_folder_without_logs_is_unreadable(hicache: Hicache, tmp_path: Path) -> None:
    assert hicache("replay", tmp_path).code == 3


def two_ranks(out: Path) -> Path:
    words = ["--tp", 2, "--seed", 3, "--bug", "local_host_room_decides_backup", "--page-size", 16]
    words += ["--fault", "alloc_fail:rank=1,pool=host,nth=5", "--device-pages", 200, "--host-pages", 300]
    words += ["--agentic", "conversations=6,rounds=6,max-context=4000"]
    assert main(["run", *map(str, words), "--out", str(out), "--quiet"]) == 0
    return out


def test_of_two_ranks_the_one_whose_decision_does_not_follow_is_named(
    hicache: Hicache, tmp_path: Path
) -> None:
    folder = two_ranks(tmp_path / "run")
    # Without the runtime nobody can say which of two is right.
    assert check(find_logs(folder)).finding.level == "undetermined"
    said = hicache("check", folder, "--json")
    document = json.loads(said.out)
    assert (said.code, document["ranks"]["culprit"]) == (10, [1])
    assert document["verdict"]["confidence"]["level"] == "high"
    assert document["verdict"]["confidence"]["basis"][0].startswith("reenact")


def test_the_screen_shows_what_the_log_has_and_what_the_rules_say(hicache: Hicache, tmp_path: Path) -> None:
    folder = two_ranks(tmp_path / "run")
    said = hicache("replay", folder, "--reenact")
    assert said.code == 10
    assert said.out.splitlines()[:4] == [
        "DIFFERS   rank 1 at step 32, record 436: write backup does not follow from what",
        "          it was given",
        "  log     write backup: node 6, tokens 0",
        "  rules   write backup: node 6, tokens 16",
    ]
    document = json.loads(hicache("replay", folder, "--reenact", "--json", "--rank", 1).out)
    (one,) = document["reenact"]
    assert one["difference"]["logged"]["tokens"] == 0
    assert one["difference"]["by_the_rules"]["tokens"] == 16
    assert hicache("replay", folder, "--reenact", "--queue", "write").code == 2


def test_a_healthy_run_is_said_to_be_the_same(hicache: Hicache, tmp_path: Path) -> None:
    words = ["--tp", "2", "--agentic", "conversations=3,rounds=4,max-context=900,output=8"]
    assert main(["run", *words, "--out", str(tmp_path / "run"), "--quiet"]) == 0
    said = hicache("replay", tmp_path / "run", "--reenact")
    assert said.code == 0
    assert said.out.startswith("SAME      every decision of ranks 0-1 follows from what it was given")


def test_a_missing_rank_is_named_and_the_rest_replayed(
    hicache: Hicache, skipped: Path, tmp_path: Path
) -> None:
    for file in skipped.glob("rank000[013].*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    said = hicache("replay", tmp_path, "--queue", "write", "--until", "34")
    assert said.code == 0
    assert "unsure  rank 2 left no log" in said.out
    assert "ranks 0-1  rank 3" in said.out


def test_keys_step_through_a_queue_in_a_terminal(skipped: Path) -> None:
    shown = _typed(skipped, "npg34\rzq")
    assert "WRITE QUEUE  at the end of step 34, event round 35" in shown
    assert "keys    n next move" in shown
    assert "no such key: 'z'" in shown


def _typed(folder: Path, keys: str) -> str:
    """What a terminal shows when these keys are pressed, one when the screen has settled."""
    main, side = pty.openpty()
    words = [sys.executable, "-m", "cli.app", "replay", str(folder), "--queue", "write", "--step"]
    process = subprocess.Popen(
        words, stdin=side, stdout=side, stderr=side, env={**os.environ, "TERM": "xterm"}
    )
    os.close(side)
    shown = b""
    pending = list(keys)
    limit = time.monotonic() + 30
    try:
        while process.poll() is None and time.monotonic() < limit:
            if select.select([main], [], [], 0.3)[0]:
                try:
                    shown += os.read(main, 65536)
                except OSError:
                    break
            elif pending and b"keys" in shown:
                os.write(main, pending.pop(0).encode())
        assert process.wait(5) == 0, shown.decode(errors="replace")
    finally:
        process.kill()
        os.close(main)
    return COLOURS.sub("", shown.decode(errors="replace"))


def test_a_ranks_tree_pools_and_queues_are_shown_at_a_step(hicache: Hicache, skipped: Path) -> None:
    said = hicache("replay", skipped, "--at", "33", "--rank", "2")
    assert said.code == 0
    assert said.out.startswith("STATE     rank 2 at the end of step 33: ")
    assert "  writes  #3 node 6,7 10 pages\n" in said.out
    (state,) = json.loads(hicache("replay", skipped, "--at", "33", "--rank", "2", "--json").out)["states"]
    held = sum(node["pages"] for node in state["nodes"] if "D" in node["tiers"])
    (device,) = [pool for pool in state["pools"] if pool["name"] == "device"]
    # What is in the tree and what running requests have beside it: never more than there is.
    assert held == device["evictable"] + device["protected"]
    assert held <= device["capacity"] - device["free"]
    # The node whose copy is late is pending, and locked until its ack.
    pending = [node for node in state["nodes"] if node["is_pending"]]
    assert [node["node"] for node in pending] == [6, 7]
    assert pending[-1]["locks"] > 0


def test_trees_of_two_ranks_are_compared_up_to_where_they_part(hicache: Hicache, skipped: Path) -> None:
    said = hicache("diff-tree", skipped, "--at", "30", "--rank", "0", "--rank", "3")
    assert (said.code, said.out[:37]) == (0, "ALIKE     ranks 0 and 3 have the same")
    said = hicache("diff-tree", skipped, "--at", "34", "--rank", "0", "--rank", "3")
    assert said.code == 4
    assert "record 406 at step 34 does not follow from its inputs" in " ".join(said.out.split())
    document = json.loads(hicache("diff-tree", skipped, "--at", "30", "--json").out)
    assert (document["schema"], document["ranks"], document["differing"]) == (
        *("hicache.diff_tree.v1", [0, 1]),
        [],
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["replay", "--at", "3", "--queue", "write"], "error: --at looks at whole ranks"),
        (["replay", "--at", "3", "--reenact"], "error: --reenact looks at whole ranks"),
        (["diff-tree", "--at", "3", "--rank", "1"], "error: diff-tree compares two ranks, not 1"),
        (["diff-tree", "--at", "3", "--rank", "1", "--rank", "7"], "error: --rank: rank 7 left no log"),
    ],
)
def test_whole_ranks_are_not_mixed_with_queues(
    hicache: Hicache, skipped: Path, words: list[str], told: str
) -> None:
    said = hicache(words[0], skipped, *words[1:])
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(told)


def test_a_step_behind_the_end_of_the_logs_is_refused(hicache: Hicache, skipped: Path) -> None:
    for command in ("replay", "diff-tree"):
        said = hicache(command, skipped, "--at", "4000")
        assert (said.code, said.out) == (2, "")
        assert said.err.startswith("error: --at 4000: the logs end with step ")


def test_a_rank_whose_log_was_cut_is_compared_as_far_as_it_goes(
    hicache: Hicache, skipped: Path, tmp_path: Path
) -> None:
    for file in skipped.glob("rank000[01].*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    first, *later = sorted(tmp_path.glob("rank0001.scheduler.*.jsonl"))
    for file in later:
        file.unlink()
    first.write_bytes(first.read_bytes()[:40_000])
    said = hicache("diff-tree", tmp_path, "--at", "30")
    assert said.code == 4
    assert said.out.startswith("ALIKE SO FAR  ranks 0 and 1 have the same ")
    assert "rank 1: its log ends with step " in " ".join(said.out.split())
    # Without a decision there is no state, and so nothing to be different.
    first.write_bytes(first.read_bytes().splitlines(keepends=True)[0])
    for words in (["diff-tree"], ["replay", "--rank", "1"]):
        said = hicache(words[0], tmp_path, *words[1:], "--at", "3")
        assert (said.code, said.out[:37]) == (4, "UNKNOWN   what rank 1 held can't be m")


def test_trees_of_two_replicas_are_not_compared(hicache: Hicache, tmp_path: Path) -> None:
    words = ["--dp", 2, "--page-size", 16, "--agentic", "conversations=2,rounds=2,max-context=400,output=8"]
    assert hicache("run", *words, "--out", tmp_path / "run", "--quiet").code == 0
    said = hicache("diff-tree", tmp_path / "run", "--at", "2", "--rank", "0", "--rank", "1")
    assert (said.code, said.err.splitlines()[0]) == (
        *(2, "error: --rank: ranks 0 and 1 are of two replicas, which have a tree each"),
    )
    # Nor by themselves, where no two ranks have one tree.
    assert hicache("diff-tree", tmp_path / "run", "--at", "2").code == 2


def test_logs_that_never_counted_leave_another_agreement_unknown(
    hicache: Hicache, skipped: Path, tmp_path: Path
) -> None:
    first = next(skipped.glob("rank0000.scheduler.*.jsonl"))
    (tmp_path / first.name).write_bytes(first.read_bytes().splitlines(keepends=True)[0])
    said = hicache("replay", tmp_path, "--queue", "write", "--policy", "local", "--quiet")
    assert (said.code, said.out.split()[0]) == (4, "UNKNOWN")
    assert hicache("replay", tmp_path).out.startswith("QUEUES    rank 0, without a step\n")


def test_quiet_is_the_whole_sentence_on_one_line(hicache: Hicache, skipped: Path) -> None:
    said = hicache("replay", skipped, "--reenact", "--quiet")
    assert said.out.endswith("does not follow from what it was given\n")
    assert said.out.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (b"\x1b[B\x1b[B\x1bOBn", ["+", "+", "+", "n"]),
        (b"\x1b[6~q", ["\x1b[6~", "q"]),
        (b"\x1b", ["q"]),
        (b"\x1b[1;5C\x04", ["\x1b[1;5C", "q"]),
        ("\u00e9\n".encode(), ["\u00e9", "\n"]),
        (b"\x1b[B" * 40, ["+"] * 40),
    ],
    ids=repr,
)
def test_a_key_is_one_key_however_its_bytes_come(typed: bytes, keys: list[str]) -> None:
    """A key that is held down, or that means nothing here, does not end the session."""
    end, start = os.pipe()
    os.write(start, typed)
    os.close(start)
    try:
        assert list(_read(end)) == keys
    finally:
        os.close(end)
