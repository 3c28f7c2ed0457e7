"""Watched ranks as processes, over the stores of torch, with collectives that really hang."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from consensus_checker.live import FINDER
from hicache.forks import Forks
from tests.support.processes import Process, free_port, outputs, start_rank

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

MODULE = "tests.support.live_rank"
Line = dict[str, Any]
# Of ranks that are all there: on a busy machine one may well say nothing for two seconds.
PATIENT = {"silence_s": 30}
BEHIND = re.compile(r"the watcher of rank \d was \d+\.\d s behind its calls")


@pytest.fixture
def ranks(forks: Forks, tmp_path: Path) -> Ranks:
    return Ranks(forks, tmp_path)


@dataclass
class Ranks:
    """Starts ranks of one test, with logs and stores in its folder."""

    forks: Forks
    folder: Path

    @contextmanager
    def store(self, kind: str) -> Iterator[str]:
        """The place of a store that outlives all ranks."""
        if kind != "tcp":
            yield f"{kind}:{self.folder / 'store'}"
            return
        port = free_port()
        server = start_rank(self.forks, 0, 1, MODULE, f"serve:{port}")
        try:
            assert json.loads(server.stdout.readline())["serving"]
            yield f"tcp:{port}"
        finally:
            server.kill()
            server.communicate(timeout=60)

    def start(self, place: str, size: int, plan: Line) -> list[Process]:
        words = (place, str(self.folder / "logs"), json.dumps(plan))
        return [start_rank(self.forks, rank, size, MODULE, *words) for rank in range(size)]

    def ran(self, size: int, plan: Line, *, kind: str = "tcp") -> list[list[Line]]:
        with self.store(kind) as place:
            return finish(self.start(place, size, plan))


def finish(processes: list[Process]) -> list[list[Line]]:
    """What each has printed; none outlives this call."""
    said = outputs(processes, timeout_s=300)
    assert not any("Traceback" in err for _, err in said), said
    return [[json.loads(line) for line in out.splitlines()] for out, _ in said]


def wait_until_heard(posts: Path, rank: int) -> None:
    """Until whoever compares has looked at all posts since the rank's first one was there."""
    end_s = time.monotonic() + 60
    looks: set[int] = set()
    while len(looks) < 3:
        assert time.monotonic() < end_s, sorted(path.name for path in posts.iterdir())
        if list(posts.glob(f"*post_{rank}")):
            looks |= {path.stat().st_mtime_ns for path in posts.glob(f"*{FINDER}")}
        time.sleep(0.01)


def told(lines: list[Line]) -> list[str]:
    """What was said of ranks. On a busy machine a watcher may say of itself that it was behind."""
    return [line["told"] for line in lines if "told" in line and not BEHIND.fullmatch(line["told"])]


def ended(lines: list[Line]) -> Line:
    return next(line for line in lines if "ended" in line)


def test_processes_that_agree_are_compared_to_the_end_and_say_nothing(ranks: Ranks) -> None:
    found = ranks.ran(4, {"calls": 1_500, "rate": 1_000, **PATIENT}, kind="file")
    assert [told(lines) for lines in found] == [[]] * 4
    assert max(ended(lines)["compared"] for lines in found) == 1_500


@pytest.mark.parametrize("kind", ["tcp", "folder"])
def test_processes_that_part_all_tell_who_did_and_where(kind: str, ranks: Ranks) -> None:
    plan = {"calls": 3_000, "rate": 1_000, "acts": {"3": {"1500": "value"}}, **PATIENT}
    found = ranks.ran(4, plan, kind=kind)
    texts = {text for lines in found for text in told(lines)}
    assert len(texts) == 1, texts
    assert "rank 3 left the majority (3 of 4) at call 1500, step 75" in texts.pop()
    assert [ended(lines)["verdict"]["ranks"]["culprit"] for lines in found] == [[3]] * 4


def test_a_skipped_collective_is_found_while_gloo_pairs_what_does_not_belong_together(
    ranks: Ranks,
) -> None:
    plan = {"calls": 600, "rate": 400, "has_gloo": True, "acts": {"2": {"300": "skip", "500": "exit"}}}
    found = ranks.ran(4, plan)
    verdict = ended(found[0])["verdict"]
    assert (verdict["verdict"]["kind"], verdict["ranks"]["culprit"]) == ("divergence", [2])
    assert verdict["first_divergence"]["call"] == "reduce"


def test_ranks_that_hang_in_gloo_tell_who_did_not_come(ranks: Ranks) -> None:
    plan = {"calls": 400, "rate": 400, "has_gloo": True, "acts": {"2": {"200": "sleep:4"}}}
    found = ranks.ran(4, plan)
    for lines in found:
        first, over = told(lines)
        assert "STALLED   rank 2 did not come to reduce" in first
        assert "ranks 0-1, 3 wait in reduce" in first.replace("\n          ", " ")
        assert over == "it is over: rank 2 goes on (stall)"


@pytest.mark.parametrize("rank", [2, 0])
def test_a_rank_that_is_killed_is_named_by_all_others_also_if_it_compared(rank: int, ranks: Ranks) -> None:
    plan = {"calls": 200, "rate": 100, "acts": {str(rank): {"100": "die"}}, "linger_s": 10, "silence_s": 1}
    found = ranks.ran(4, plan, kind="folder")
    others = [lines for number, lines in enumerate(found) if number != rank]
    for lines in others:
        verdict = ended(lines)["verdict"]
        assert (verdict["verdict"]["code"], verdict["ranks"]["silent"]) == (14, [rank])
        assert "its process is gone" in verdict["verdict"]["summary"]
        assert "its last call: step" in verdict["verdict"]["summary"]


def test_a_rank_that_holds_its_interpreter_is_told_as_running(ranks: Ranks) -> None:
    plan = {"calls": 1_400, "rate": 200, "acts": {"1": {"100": "hold:4"}}, "silence_s": 1}
    found = ranks.ran(3, plan, kind="folder")
    summary = ended(found[0])["verdict"]["verdict"]["summary"]
    # From a second on, as soon as somebody looks.
    assert re.match(r"rank 1 said nothing for [1-6]\.", summary), summary
    assert "its process is there and does not run its watcher" in summary
    assert any(text.startswith("it is over: rank 1 goes on") for text in told(found[0]))


def test_all_ranks_end_with_1_when_the_policy_says_so(ranks: Ranks) -> None:
    plan = {"calls": 30_000, "rate": 1_000, "policy": "abort", "acts": {"1": {"500": "value"}}, **PATIENT}
    with ranks.store("folder") as place:
        processes = ranks.start(place, 3, plan)
        found = finish(processes)
    assert [process.returncode for process in processes] == [1, 1, 1]
    assert all("rank 1 left the majority (2 of 3) at call 500" in told(lines)[0] for lines in found)


def test_a_store_that_is_killed_blinds_the_watch_and_stops_nobody(ranks: Ranks) -> None:
    plan = {"calls": 600, "rate": 200}
    with ranks.store("tcp") as place:
        processes = ranks.start(place, 3, plan)
        # All have met when one says that it has; then the store is killed.
        json.loads(processes[0].stdout.readline())
        time.sleep(0.5)
    found = finish(processes)
    assert [process.returncode for process in processes] == [0, 0, 0]
    for lines in found:
        assert all("the watch is blind since" in text for text in told(lines))
        assert ended(lines)["stop_s"] < 4
    assert any(told(lines) for lines in found)


def test_a_process_that_is_stopped_and_goes_on_is_told_twice(ranks: Ranks) -> None:
    plan = {"calls": 1_200, "rate": 200, "silence_s": 1}
    with ranks.store("folder") as place:
        processes = ranks.start(place, 3, plan)
        first = processes[0].stdout
        json.loads(first.readline())
        # Who never was heard is not missed.
        wait_until_heard(ranks.folder / "store", 2)
        processes[2].send_signal(signal.SIGSTOP)
        try:
            line = json.loads(first.readline())
        finally:
            processes[2].send_signal(signal.SIGCONT)
        found = finish(processes)
    assert re.search(r"rank 2 said nothing for \d+\.", line["told"]), line
    assert "its process is stopped" in line["told"].replace("\n          ", " ")
    assert any("it is over: rank 2 goes on (dead)" in text for text in told(found[1]))
    assert ended(found[1])["verdict"]["verdict"]["code"] == 14
