"""Which requests start, with what, and in which order the group is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hicache.config import Config, StorageConfig
from hicache.control.active import Active
from hicache.control.admission import Admission, Batch
from hicache.control.node import Node
from hicache.control.tree import Match
from hicache.control.waiting import Waiting
from hicache.core import SIDE_POOLS
from hicache.errors import PromiseError
from tests.support import bench
from tests.support.bench import Bench

PAGES_OF_4 = Config(page_size_tokens=4, cache_output=False)


class Told:
    """Prefetches that answer what they are told and remember who asked, in order."""

    is_attached = True

    def __init__(self, *, blocked: str = "", lost: str = "") -> None:
        self.blocked = blocked
        self.lost = lost
        self.polled: list[str] = []
        self.admitted_rids: list[str] = []

    async def check(self, active: Active) -> bool:
        self.polled.append(active.rid)
        return active.rid not in self.blocked

    def is_lost(self, active: Active, match: Match) -> bool:
        return active.rid in self.lost

    def back_up(self, node: Node) -> None:
        """Nothing is written on from here."""

    def admitted(self, active: Active, *, used_pages: int) -> None:
        self.admitted_rids.append(active.rid)


class Queue:
    """Requests that wait on a bench, and the admission that looks at them."""

    def __init__(self, config: Config = PAGES_OF_4, told: Told | None = None, **options: Any) -> None:
        self.bench = Bench(**options)
        self.told = told
        if told is not None:
            self.bench.cache.prefetches = told  # type: ignore[assignment]
        self.waiting = Waiting()
        self.admission = Admission(self.bench.cache, self.bench.probes, config)

    def add(self, *pages: int, rid: str) -> Active:
        active = self.bench.request(*pages, rid=rid)
        self.waiting.add(active)
        return active

    def form(self, **options: Any) -> Batch:
        batch = bench.run(self.admission.form(self.waiting, 0, **options))
        assert isinstance(batch, Batch)
        return batch

    @property
    def rids_waiting(self) -> list[str]:
        return [active.rid for active in self.waiting]


def rids(actives: list[Active]) -> list[str]:
    return [active.rid for active in actives]


def test_the_loop_ends_at_the_first_that_finds_no_room() -> None:
    """10 pages: a takes 3, b needs 8; c would fit and is not asked, since b came first."""
    queue = Queue(device_pages=10)
    queue.add(1, 2, rid="a")
    queue.add(1, 3, 4, 5, 6, 7, 8, rid="b")
    queue.add(9, rid="c")
    batch = queue.form()
    assert rids(batch.admitted) == ["a"]
    assert queue.rids_waiting == ["b", "c"]
    assert [row["rid"] for row in queue.bench.written("match")] == ["a", "b"]


def test_pages_promised_to_others_of_the_batch_are_not_there_for_the_next() -> None:
    queue = Queue(device_pages=5)
    queue.add(1, 2, rid="a")
    queue.add(3, 4, rid="b")
    assert rids(queue.form().admitted) == ["a"]


def test_a_batch_takes_its_pages_at_once_and_after_everybody_has_been_asked() -> None:
    queue = Queue(device_pages=10)
    a, b = queue.add(1, 2, rid="a"), queue.add(3, rid="b")
    queue.form()
    (alloc,) = queue.bench.written("alloc")
    assert (alloc["purpose"], alloc["pages"]) == ("extend", 5)
    assert (len(a.slots), len(b.slots), a.pages_due, b.pages_due) == (3, 2, 0, 0)
    assert set(a.slots).isdisjoint(b.slots)


def test_a_request_whose_prefetch_goes_on_is_passed_over_and_keeps_its_place() -> None:
    queue = Queue(told=Told(blocked="b"))
    for rid in "abc":
        queue.add(ord(rid), rid=rid)
    batch = queue.form()
    assert (rids(batch.admitted), rids(batch.blocked), queue.rids_waiting) == (["a", "c"], ["b"], ["b"])


def test_everybody_who_may_be_admitted_is_polled_once_a_pass() -> None:
    told = Told(blocked="bd")
    queue = Queue(told=told)
    for rid in "abcd":
        queue.add(ord(rid), rid=rid)
    queue.form()
    assert told.polled == ["a", "b", "c", "d"]
    assert told.admitted_rids == ["a", "c"]
    queue.form()
    assert told.polled[4:] == ["b", "d"]


def test_nobody_is_polled_behind_one_that_finds_no_room_or_a_spent_batch() -> None:
    told = Told()
    queue = Queue(told=told, device_pages=4)
    queue.add(1, 2, rid="a")
    queue.add(3, 4, rid="b")
    queue.add(5, rid="c")
    queue.form()
    assert told.polled == ["a", "b"]

    told = Told()
    queue = Queue(replace(PAGES_OF_4, chunked_prefill_tokens=8), told)
    queue.add(1, 2, rid="a")
    queue.add(3, rid="b")
    queue.form()
    assert told.polled == ["a"]


def test_nobody_is_polled_while_those_who_run_are_short_of_memory() -> None:
    told = Told()
    queue = Queue(told=told)
    queue.add(1, rid="a")
    assert queue.form(is_full=True).admitted == []
    assert told.polled == []


def test_a_request_whose_prefix_was_lost_waits_for_its_new_prefetch() -> None:
    queue = Queue(told=Told(lost="a"))
    queue.add(1, rid="a")
    queue.add(2, rid="b")
    batch = queue.form()
    assert (rids(batch.admitted), queue.rids_waiting) == (["b"], ["a"])
    assert [row["rid"] for row in queue.bench.written("admit")] == ["b"]


def test_what_came_from_storage_is_told_from_what_the_host_had() -> None:
    """Of 3 pages on the host the last 2 have been fetched for this request."""
    queue = Queue(told=Told())
    queue.bench.on_host(1, 2, 3)
    active = queue.add(1, 2, 3, rid="a")
    active.storage_pages = 2
    queue.form()
    (admit,) = queue.bench.written("admit")
    names = ("device_tokens", "host_tokens", "storage_tokens", "extend_tokens")
    assert [admit[name] for name in names] == [0, 4, 8, 1]


def test_a_host_hit_is_loaded_and_takes_its_share_of_the_pages() -> None:
    queue = Queue(device_pages=5)
    queue.bench.on_host(1, 2, 3)
    active = queue.add(1, 2, 3, 4, rid="a")
    queue.form()
    assert [(row["purpose"], row["pages"]) for row in queue.bench.written("alloc")[1:]] == [
        ("load_back", 3),
        ("extend", 2),
    ]
    assert (active.prefix_tokens, active.owned_pages, len(active.slots)) == (12, 3, 5)


def test_a_short_host_hit_is_computed_again_and_does_not_stay_locked() -> None:
    """8 tokens on the host, where 10 are the least that is loaded."""
    queue = Queue()
    node = queue.bench.on_host(1, 2)
    active = queue.add(1, 2, rid="a")
    queue.form()
    (load_back,) = queue.bench.written("load_back")
    assert (load_back["declined"], load_back["pages"], load_back["tokens"]) == ("too_short", 2, 0)
    assert (active.prefix_tokens, node.lock_count) == (0, 0)


def test_the_quota_of_a_load_back_is_what_is_not_promised_to_others() -> None:
    """6 pages: a is promised 3, so of b's 4 on the host no more than 3 could be taken at once."""
    queue = Queue(device_pages=6)
    queue.bench.on_host(1, 2, 3, 4)
    queue.add(8, 9, rid="a")
    queue.add(1, 2, 3, 4, rid="b")
    assert rids(queue.form().admitted) == ["a"]
    (_, admit) = queue.bench.written("admit")
    assert (admit["rid"], admit["verdict"]) == ("b", "no_room")


def test_a_load_back_that_keeps_half_of_its_promise_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()
    queue.bench.on_host(1, 2, 3)
    queue.add(1, 2, 3, rid="a")
    monkeypatch.setattr(queue.bench.tree, "device_slots", lambda node: [0])
    with pytest.raises(PromiseError, match="3 pages of its prefix were promised"):
        queue.form()


def test_refused_requests_leave_no_lock_behind() -> None:
    queue = Queue(device_pages=4)
    queue.bench.add(1, 2)
    queue.bench.write_all()
    queue.bench.acknowledge_all()
    queue.add(1, 2, 3, 4, 5, rid="too long")
    batch = queue.form()
    assert [(active.rid, active.abort_reason) for active in batch.refused] == [("too long", "too_long")]
    assert queue.bench.tree.protected_pages == 0


@pytest.mark.parametrize(("percent", "pages"), [(0, 3), (50, 4), (99, 5), (100, 6)])
def test_a_share_of_the_answer_is_set_aside_at_admission(percent: int, pages: int) -> None:
    """9 tokens of prompt are 3 pages; an answer of 13 has KV for 12 more, 3 pages."""
    config = replace(PAGES_OF_4, cache_output=True, decode_reserve_percent=percent)
    queue = Queue(config)
    active = queue.add(1, 2, rid="a")
    active.request = replace(active.request, output_tokens=13)
    queue.form()
    assert len(active.slots) == pages


def test_a_prefix_that_lacks_only_its_state_needs_no_pages_for_what_the_device_has() -> None:
    """Pages 1 and 2 stay on the device without a state; 3 is on the host with the state of its end."""
    queue = Queue(device_pages=6, pools=(SIDE_POOLS["mamba"],), state_slots=4)
    node = queue.bench.on_host(1, 2, 3)
    queue.bench.add(1, 2, 9)
    queue.bench.write_all()
    queue.bench.acknowledge_all()
    match = queue.bench.find(1, 2, 3)
    assert (match.device_pages, match.host_pages, match.node) == (0, 3, node)
    active = queue.add(1, 2, 3, 4, rid="a")
    queue.form()
    (*_, admit) = queue.bench.written("admit")
    assert (admit["verdict"], admit["pages"], admit["host_tokens"]) == ("admitted", 3, 12)
    assert (len(active.slots), queue.bench.device.pages_used) == (5, 6)


def test_without_an_external_tier_nobody_is_polled() -> None:
    queue = Queue(replace(PAGES_OF_4, storage=StorageConfig(backend="none")))
    queue.add(1, rid="a")
    assert rids(queue.form().admitted) == ["a"]
