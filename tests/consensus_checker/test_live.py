"""Watched ranks, as threads over a store in memory: what is told, by whom, once, and what never is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from consensus_checker.live import LocalStore
from tests.support.live import KINDS, MATCH, Rank, started, stop, until
from tracer.chain import LINKS
from tracer.record import Kind

ROOT = Path(__file__).parents[2]


@pytest.fixture
def running() -> Iterator[list[Rank]]:
    """Ranks that are stopped when the test is over."""
    ranks: list[Rank] = []
    yield ranks
    stop(ranks)


def have_verdict(ranks: Sequence[Rank]) -> bool:
    return until(lambda: all(rank.watcher.verdict is not None for rank in ranks))


def finding(rank: Rank) -> Any:
    assert rank.watcher.verdict is not None, rank.told
    return rank.watcher.verdict.finding


def compared(ranks: Sequence[Rank], calls: int) -> bool:
    return until(lambda: max(rank.watcher.compared for rank in ranks) >= calls)


def test_ranks_that_agree_are_compared_to_the_last_call_and_nobody_says_a_word(tmp_path: Path) -> None:
    ranks = started(4, tmp_path)
    for rank in ranks:
        rank.calls(0, 333)
    assert compared(ranks, 333)
    stop(ranks)
    assert [rank.told for rank in ranks] == [[]] * 4
    assert [rank.watcher.verdict for rank in ranks] == [None] * 4


def test_ranks_at_different_speeds_are_compared_and_not_accused(running: list[Rank]) -> None:
    running += started(3, None)
    running[0].calls(0, 5_000)
    running[1].calls(0, 777)
    running[2].calls(0, 1_200)
    assert compared(running, 777)
    running[1].calls(777, 5_000)
    running[2].calls(1_200, 5_000)
    assert compared(running, 5_000)
    assert [rank.told for rank in running] == [[], [], []]


def test_every_rank_tells_the_same_screen_once_with_the_fact_of_the_log(
    tmp_path: Path, running: list[Rank]
) -> None:
    running += started(4, tmp_path)
    for rank in running:
        rank.calls(0, 200)
    for rank in running:
        odd = rank.rank == 3
        rank.calls(200, 200, backup=(17, 0 if odd else 64, 0 if odd else 5, 1))
        rank.calls(201, 210)
    assert have_verdict(running)
    texts = {text for rank in running for text in rank.told}
    assert len(texts) == 1 and [len(rank.told) for rank in running] == [1] * 4
    (text,) = texts
    assert "DIVERGED  scope world: rank 3 left the majority (3 of 4) at call 200" in text
    assert "host_pages_free was 0 on rank 3 and 5 on\n          ranks 0-2 (needed 1)" in text
    found = finding(running[1])
    assert (found.code, found.culprit, found.first_divergence.index) == (10, (3,), 200)
    assert (found.trigger.rank, found.trigger.fact) == (3, "host_pages_free")
    assert [entry.file for entry in found.evidence] == [
        "rank0003.scheduler.000.jsonl",
        "rank0000.scheduler.000.jsonl",
    ]


def test_without_a_log_the_links_say_call_field_and_values(running: list[Rank]) -> None:
    running += started(3, None)
    for rank in running:
        rank.calls(0, 100, backup=(4, 16 if rank.rank == 1 else 32, 5, 1))
    assert have_verdict(running)
    first = finding(running[0]).first_divergence
    assert (first.index, first.call, first.field_diff[0].field) == (100, "write_backup", "tokens")
    assert (first.field_diff[0].majority, first.field_diff[0].values) == (32, {1: 16})
    assert finding(running[0]).trigger is None


def test_of_two_ranks_nobody_is_accused_and_both_sides_are_shown(running: list[Rank]) -> None:
    running += started(2, None)
    for rank in running:
        rank.calls(0, 70, backup=(4, 16 * (1 + rank.rank), 5, 1))
    assert have_verdict(running)
    found = finding(running[0])
    assert (found.kind, found.level, found.culprit, found.unknown) == (
        "divergence",
        "undetermined",
        (),
        (0, 1),
    )
    assert found.first_divergence.by_rank == {0: {"tokens": 16}, 1: {"tokens": 32}}


def test_two_of_four_are_no_majority_as_long_as_the_last_may_come_to_the_third(running: list[Rank]) -> None:
    running += started(4, None)
    for rank in running:
        rank.calls(0, 40)
    for number in (0, 1, 3):
        running[number].calls(40, 60, backup=(4, 16 if number == 1 else 32, 5, 1))
        running[number].calls(60, 70)
    watcher = running[0].watcher
    # It is found, and kept for later.
    assert until(lambda: watcher._finder is not None and bool(watcher._finder._search._later))
    running[2].calls(40, 60, backup=(4, 16, 5, 1))
    running[2].calls(60, 70)
    assert have_verdict(running)
    found = finding(running[0])
    assert (found.code, found.culprit, found.first_divergence.index) == (10, (), 60)


def test_a_skipped_call_is_missing_on_the_rank_that_skipped_it(tmp_path: Path, running: list[Rank]) -> None:
    running += started(4, tmp_path)
    for rank in running:
        rank.calls(0, 500)
        if rank.rank != 2:
            rank.backup(9, 64, 5, 1)
        rank.calls(500, 600)
    assert have_verdict(running)
    first = finding(running[0]).first_divergence
    assert finding(running[0]).culprit == (2,)
    assert (first.index, first.call, first.kind) == (500, "write_backup", "missing")


def test_an_extra_call_is_made_only_there(tmp_path: Path, running: list[Rank]) -> None:
    running += started(4, tmp_path)
    for rank in running:
        rank.calls(0, 130)
        if rank.rank == 0:
            rank.backup(9, 64, 5, 1)
        rank.calls(130, 200)
    assert have_verdict(running)
    first = finding(running[0]).first_divergence
    assert (finding(running[3]).culprit, first.index, first.kind) == ((0,), 130, "extra")


@pytest.mark.parametrize("has_log", [True, False])
def test_a_last_call_that_one_rank_never_made_is_found_when_all_have_ended(
    has_log: bool, tmp_path: Path
) -> None:
    ranks = started(3, tmp_path if has_log else None)
    for rank in ranks:
        rank.calls(0, 99 if rank.rank == 1 else 100)
    assert compared(ranks, 99)
    assert all(not rank.told for rank in ranks)
    stop(ranks)
    found = finding(ranks[0])
    assert (found.culprit, found.first_divergence.index) == ((1,), 99)
    assert found.first_divergence.kind == "missing"


def test_a_rank_that_ends_before_the_others_is_not_accused_as_long_as_they_do_no_more(
    running: list[Rank],
) -> None:
    running += started(3, None)
    for rank in running:
        rank.calls(0, 64)
    running[0].watcher.stop("completed")
    running[1].calls(64, 64)
    stop(running[1:])
    assert [rank.told for rank in running] == [[], [], []]


def test_a_shutdown_in_the_middle_of_a_vote_is_no_missing_call() -> None:
    ranks = started(3, None)
    for rank in ranks:
        rank.calls(0, 30)
    # It opened a vote that the others, who were done, never held.
    ranks[1].enter("tp0/main", 9, "all_reduce", 1, "drain")
    stop(ranks)
    assert [rank.told for rank in ranks] == [[], [], []]
    assert [rank.watcher.verdict for rank in ranks] == [None] * 3


def test_ranks_that_were_stopped_before_their_time_are_not_missed(running: list[Rank]) -> None:
    running += started(3, None)
    for rank in running:
        rank.calls(0, 64 + rank.rank)
    assert compared(running, 64)
    stop(running, "stopped")
    assert [rank.told for rank in running] == [[], [], []]


def has_looked_again(rank: Rank) -> bool:
    """Wait for a look that began when the last call was there."""
    beat = rank.watcher._own.beat + 2
    return until(lambda: rank.watcher._own.beat >= beat)


def test_a_divergence_thousands_of_calls_back_is_narrowed_to_its_call(
    tmp_path: Path, running: list[Rank]
) -> None:
    ranks = [Rank(rank, 3, store, tmp_path) for store in [LocalStore()] for rank in range(3)]
    running += ranks
    for rank in ranks:
        rank.watcher.start()
    # Rank 2 goes ahead by far before anybody else begins.
    for rank in reversed(ranks):
        for number in range(12_000):
            rank.match(f"r{number}", 1 if (rank.rank, number) == (2, 5_431) else 64, 5)
            if not number % LINKS:
                assert has_looked_again(rank)
    assert have_verdict(ranks)
    first = finding(ranks[0]).first_divergence
    assert (finding(ranks[0]).culprit, first.index, first.request) == ((2,), 5_431, "r5431")


def test_calls_that_were_gone_before_they_were_looked_at_accuse_nobody(running: list[Rank]) -> None:
    store = LocalStore()
    running += [Rank(rank, 3, store, None) for rank in range(3)]
    # Rank 1 is watched only after its first window was closed.
    running[1].calls(0, LINKS + 10)
    for rank in running:
        rank.watcher.start()
    for rank in (running[0], running[2]):
        rank.calls(0, LINKS + 10)
    text = (
        f"{LINKS:,} calls of rank 1 were gone before they were looked at: "
        "its scheduler lane is not compared any more"
    )
    assert until(lambda: all(text in rank.told for rank in running))
    for rank in running:
        rank.calls(0, 50)
    assert all(rank.watcher.verdict is None for rank in running)
    assert running[1].watcher.lost == LINKS
    assert any("the watch is behind" in told for told in running[1].told)


def test_a_kind_that_one_rank_dropped_is_told_and_accuses_nobody(running: list[Rank]) -> None:
    running += started(3, None)
    for rank in running:
        rank.calls(0, 40)
    assert compared(running, 40)
    # A set can't be written the same way twice.
    running[1].backup({1, 2}, 64, 5, 1)
    for rank in running:
        if rank.rank != 1:
            rank.backup(7, 64, 5, 1)
        rank.calls(40, 80)
    assert until(lambda: all(any("rank 1 dropped some of its records" in t for t in r.told) for r in running))
    assert all(rank.watcher.verdict is None for rank in running)


def test_a_rank_that_leaves_steps_out_is_told_and_accuses_nobody(running: list[Rank]) -> None:
    running += started(3, None)
    for rank in running:
        rank.calls(0, 40)
    assert compared(running, 40)
    running[2].tracer.is_quiet = True
    assert until(lambda: any("rank 2 leaves out steps" in text for text in running[0].told))
    running[0].calls(40, 300)
    running[1].calls(40, 300)
    running[2].calls(100, 300)
    stop(running)
    assert all(rank.watcher.verdict is None for rank in running)


def test_another_program_s_keys_are_told_and_do_no_harm(running: list[Rank]) -> None:
    store = LocalStore()
    prefix = "hicache.watch/live.0/0/"
    for name in ("post/1", "finder", "verdict", "answer/2"):
        store.set(prefix + name, b"\x00garbage")
    store.set(prefix + "post/2", b"\x81\xa1x")
    running += [Rank(rank, 3, store, None) for rank in range(3)]
    running[0].watcher.start()
    said = "the key post/1 holds something that is not a post of rank 1"
    assert until(lambda: said in running[0].told)
    for rank in running[1:]:
        rank.watcher.start()
    for rank in running:
        rank.calls(0, 100)
    assert compared(running, 100)
    assert all(rank.watcher.verdict is None for rank in running)


def test_posts_of_an_earlier_run_of_that_name_are_not_taken_for_members(running: list[Rank]) -> None:
    store = LocalStore()
    first = started(3, None, store)
    for rank in first:
        rank.calls(0, 90)
    assert compared(first, 90)
    stop(first)
    running += started(3, None, store)
    for rank in running:
        rank.calls(0, 20)
    assert compared(running, 20)
    assert [rank.told for rank in running] == [[], [], []]


def test_a_verdict_of_an_earlier_run_of_that_name_is_not_told_again(running: list[Rank]) -> None:
    store = LocalStore()
    first = started(3, None, store)
    for rank in first:
        rank.calls(0, 90, backup=(1, rank.rank // 2, 5, 1))
    assert have_verdict(first)
    stop(first)
    running += [Rank(rank, 3, store, None) for rank in range(3)]
    # The others are there before the one that compares.
    for rank in reversed(running):
        rank.watcher.start()
        rank.calls(0, 20)
        before = rank.watcher._own.beat
        assert until(lambda own=rank.watcher._own, beat=before: own.beat > beat + 5)  # type: ignore[misc]
    assert compared(running, 20)
    assert [rank.told for rank in running] == [[], [], []]
    for rank in running:
        rank.calls(20, 30, backup=(1, rank.rank // 2, 5, 1))
    assert have_verdict(running)
    assert [len(rank.told) for rank in running] == [1, 1, 1]


def test_a_process_that_was_started_again_is_not_compared(running: list[Rank]) -> None:
    store = LocalStore()
    running += started(3, None, store)
    for rank in running:
        rank.calls(0, 90)
    assert compared(running, 90)
    again = Rank(1, 3, store, None)
    running[1].watcher.stop("stopped")
    running.append(again)
    again.watcher.start()
    again.calls(5, 30)
    said = "rank 1: another process has taken its place: not compared"
    assert until(lambda: said in running[0].told)
    assert all(rank.watcher.verdict is None for rank in running)


def test_ranks_of_other_sizes_are_not_compared(running: list[Rank]) -> None:
    store = LocalStore()
    running += [Rank(0, 2, store, None), Rank(1, 4, store, None)]
    for rank in running:
        rank.watcher.start()
        rank.calls(0, 10 + rank.rank, backup=(1, rank.rank, 5, 1))
    said = "rank 1: its header declares something else: not compared"
    assert until(lambda: said in running[0].told)
    assert all(rank.watcher.verdict is None for rank in running)


WIDE = Kind("step", "decision", agree=("tp", "pp"), compared=("number",))
NARROW = Kind("shard", "decision", agree=("tp",), compared=("number",))


def test_records_that_agree_along_fewer_axes_are_compared_only_there(tmp_path: Path) -> None:
    store = LocalStore()
    ranks = [Grid(rank, store, tmp_path) for rank in range(4)]
    for rank in ranks:
        rank.watcher.start()
    for rank in ranks:
        for number in range(80):
            rank.wide(number)
            # Each pipeline stage has shards of its own.
            rank.narrow(number + 1000 * (rank.rank // 2))
    assert until(lambda: max(rank.watcher.compared for rank in ranks) == 80 * 3)
    assert [rank.told for rank in ranks] == [[]] * 4
    ranks[3].narrow(5)
    ranks[2].narrow(6)
    assert have_verdict(ranks)
    stop(ranks)
    found = finding(ranks[0])
    assert (found.first_divergence.scope, found.unknown) == ("pp1", (2, 3))
    # 80 of both kinds: the place is that among all that these two must agree on.
    assert (found.first_divergence.call, found.first_divergence.index) == ("shard", 160)


def test_a_call_skipped_along_all_axes_is_found_there_and_not_in_what_follows(tmp_path: Path) -> None:
    store = LocalStore()
    ranks = [Grid(rank, store, tmp_path) for rank in range(4)]
    for rank in ranks:
        rank.watcher.start()
    for rank in ranks:
        for number in range(60):
            if (rank.rank, number) != (1, 33):
                rank.wide(number)
            rank.narrow(number + 1000 * (rank.rank // 2))
    assert have_verdict(ranks)
    stop(ranks)
    found = finding(ranks[0])
    assert (found.culprit, found.first_divergence.call) == ((1,), "step")
    assert found.first_divergence.kind == "missing"


class Grid(Rank):
    """Two stages of two ranks."""

    def __init__(self, rank: int, store: LocalStore, folder: Path) -> None:
        from consensus_checker.live import Watcher
        from tracer.record import Place, header
        from tracer.segments import SegmentSink
        from tracer.tracer import Tracer

        self.rank = rank
        self.told = []
        place = Place(rank, {"pp": rank // 2, "tp": rank % 2}, {"pp": 2, "tp": 2}, {})
        head = header(place, (WIDE, NARROW), lane="scheduler", run_id="grid", tool_version="test")
        self.tracer = Tracer(SegmentSink(folder, rank, "scheduler"), head, time.monotonic_ns)
        self.lanes = {"scheduler": self.tracer}
        self.wide, self.narrow = self.tracer.emitter(WIDE), self.tracer.emitter(NARROW)
        self.watcher = Watcher(
            store=store,
            rank=rank,
            members=range(4),
            lanes=self.lanes,
            header=head,
            folder=folder,
            period_s=0.02,
            tell=self.told.append,
        )


class Moody(LocalStore):
    """A store that fails, or blocks, when told."""

    def __init__(self) -> None:
        super().__init__()
        self.is_down = False
        self.block_s = 0.0

    def _mood(self) -> None:
        if self.block_s:
            time.sleep(self.block_s)
        if self.is_down:
            raise ConnectionError("connection reset by peer\nwith much more that nobody needs")

    def set(self, key: str, value: str | bytes) -> None:
        self._mood()
        super().set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        self._mood()
        return super().check(keys)


def test_a_store_that_dies_is_told_once_and_when_it_is_back_the_watch_goes_on(running: list[Rank]) -> None:
    store = Moody()
    running += started(3, None, store)
    for rank in running:
        rank.calls(0, 30)
    assert compared(running, 30)
    store.is_down = True
    assert until(lambda: all(len(rank.told) == 1 for rank in running))
    assert all("the watch is blind since" in rank.told[0] for rank in running)
    assert running[2].told[0].startswith("rank 2: ")
    assert running[2].told[0].endswith("the store says: connection reset by peer")
    for rank in running:
        rank.calls(30, 90, backup=(1, 5 + (rank.rank == 1), 5, 1))
    store.is_down = False
    assert have_verdict(running)
    assert finding(running[0]).culprit == (1,)
    assert all("the store is back" in rank.told[1] for rank in running)


@pytest.mark.parametrize("trouble", ["down", "blocked"])
def test_stop_does_not_wait_for_a_store_that_is_gone(trouble: str) -> None:
    store = Moody()
    ranks = started(2, None, store)
    for rank in ranks:
        rank.calls(0, 30)
    assert compared(ranks, 30)
    store.is_down, store.block_s = trouble == "down", 8.0 if trouble == "blocked" else 0.0
    # No more than is promised, with room for a loaded machine: a blocked get would take eight seconds.
    assert stop(ranks) < 6.0


class Forgetful(LocalStore):
    """A store in which the first answers of a rank do not arrive."""

    drops = 3

    def set(self, key: str, value: str | bytes) -> None:
        if key.endswith("answer/1") and self.drops:
            self.drops -= 1
            return
        super().set(key, value)


def test_a_rank_that_does_not_answer_at_once_is_asked_again(running: list[Rank]) -> None:
    store = Forgetful()
    running += started(2, None, store)
    for rank in running:
        rank.calls(0, 70, backup=(4, 16 * (1 + rank.rank), 5, 1))
    assert have_verdict(running)
    first = finding(running[0]).first_divergence
    assert (store.drops, first.index, first.call) == (0, 70, "write_backup")


def test_when_the_finder_is_gone_the_next_rank_compares(running: list[Rank]) -> None:
    stores = [Moody(), LocalStore()]
    stores[0]._values = stores[1]._values
    running += [Rank(rank, 4, stores[rank > 0], None, silence_s=0.3) for rank in range(4)]
    for rank in running:
        rank.watcher.start()
        rank.calls(0, 50)
    assert compared(running, 50)
    # Rank 0 can't be heard any more.
    stores[0].is_down = True  # type: ignore[attr-defined]
    assert have_verdict(running[1:])
    assert (finding(running[1]).kind, finding(running[1]).culprit) == ("dead", (0,))
    for rank in running[1:]:
        rank.calls(50, 90, backup=(3, 1 if rank.rank == 2 else 0, 5, 1))
    assert until(lambda: all(finding(rank).kind == "divergence" for rank in running[1:]))
    assert finding(running[3]).culprit == (2,)


def test_what_goes_wrong_in_the_watch_stays_in_the_watch(
    running: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    running += started(2, None)
    rank = running[1]
    monkeypatch.setattr(rank.watcher._own, "follow", lambda: 1 // 0)
    assert until(lambda: any("an error of its own (ZeroDivisionError" in text for text in rank.told))
    rank.calls(0, 10)


def test_a_tell_that_raises_does_no_harm(running: list[Rank]) -> None:
    running += started(2, None)
    for rank in running:
        rank.told = None  # type: ignore[assignment]
        rank.calls(0, 70, backup=(4, 16 * (1 + rank.rank), 5, 1))
    assert have_verdict(running)


SCRIPT = """
import os, sys, time
from tests.support.live import started, until
ranks = started(3, None)
for rank in ranks:
    rank.calls(0, 100)
assert until(lambda: ranks[0].watcher.compared == 100)
{end}
"""
ENDS = {
    "exit": "",
    "raise": "raise SystemExit(3)",
    "fork": """
child = os.fork()
if not child:
    ranks[0].watcher.stop("completed")
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert ranks[0].watcher.is_alive and not any(rank.told for rank in ranks)
""",
}


@pytest.mark.parametrize(("end", "code"), [("exit", 0), ("raise", 3), ("fork", 0)])
def test_a_watched_process_may_end_or_fork_as_it_likes(end: str, code: int) -> None:
    begin_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT.format(end=ENDS[end])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )
    assert (done.returncode, done.stderr) == (code, ""), done.stdout
    assert time.monotonic() - begin_s < 20


def test_idle_ranks_are_heard_often_enough_however_short_a_silence_may_be(running: list[Rank]) -> None:
    class FileStore(LocalStore):
        """One that grows, by its name: ranks post less often."""

    running += started(2, None, FileStore(), silence_s=0.9)
    for rank in running:
        rank.calls(0, 10)
    assert until(lambda: all(rank.watcher._own.beat >= 4 for rank in running))
    assert [rank.told for rank in running] == [[], []]


def test_the_store_holds_a_few_keys_a_member_however_long_it_goes_on(running: list[Rank]) -> None:
    store = LocalStore()
    running += started(3, None, store)
    for rank in running:
        rank.calls(0, 500)
    assert compared(running, 500)
    keys = store.keys()
    for rank in running:
        rank.calls(500, 900, backup=(1, rank.rank // 2, 5, 1))
    assert have_verdict(running)
    assert len(store.keys()) <= 2 * 3 + 2
    assert set(keys) <= set(store.keys())


def test_a_call_is_found_whatever_kinds_the_header_knew_when_the_watch_began(running: list[Rank]) -> None:
    late = Kind("late", "decision", agree=("tp",), compared=("rid",))
    running += started(3, None, kinds=KINDS)
    for rank in running:
        rank.calls(0, 10)
        rank.tracer.emitter(late)("a" if rank.rank == 0 else "b")
    assert have_verdict(running)
    first = finding(running[2]).first_divergence
    assert (finding(running[2]).culprit, first.call, first.index) == ((0,), "late", 10)
    assert MATCH.name not in {first.call}
