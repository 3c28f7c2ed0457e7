"""What hooks see besides arguments: keys by digest, requests once, idle steps, and who waits for whom."""

from __future__ import annotations

import queue
import threading
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from consensus_checker.sglang_place import place_of
from consensus_checker.sglang_see import See
from tests.support.fake_server import Key, Vector, request
from tracer.keyed import COMMON_ALGORITHM, keyed_digest
from tracer.record import Kind, Place, header
from tracer.sinks import MemorySink
from tracer.tracer import Tracer

ALONG = {"tp": (0, 1)}


class Seen:
    """A `See` with lanes in memory."""

    def __init__(self, place: Place | None = None, *, page_tokens: int = 0) -> None:
        place = place or place_of(0, ALONG, (0, 1), 2)
        self._sinks: dict[str, MemorySink] = {}
        lanes: dict[str, Tracer] = {}
        ticks = iter(range(1_000_000))
        for name in ("scheduler", "prefetch", "io", "sync", "backup"):
            sink = self._sinks[name] = MemorySink()
            top = header(place, [], lane=name, run_id="test", tool_version="test")
            lanes[name] = Tracer(sink, top, lambda: next(ticks), has_steps=name == "scheduler")
        self.lanes = lanes
        self.see = See()
        self.see.begin(lanes, place, keyed_digest(COMMON_ALGORITHM, 1), page_tokens=page_tokens)

    def records(self, lane: str = "scheduler") -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in self._sinks[lane].lines[1:]]


def test_a_key_that_differs_at_its_end_or_by_its_tenant_has_another_digest() -> None:
    see = Seen().see
    tokens = array("q", range(40_000))
    other = array("q", [*range(39_999), 7])
    keys = [Key(tokens), Key(other), Key(tokens, "adapter"), Key(tokens, None, "salt")]
    assert len({see.whole_key(key) for key in keys}) == 4
    # A match looks at some tokens, its last ones among them; a salt alone shows at the insert.
    assert len({see.key(key, 40_000) for key in keys[:3]}) == 3


def test_a_list_of_tokens_and_an_array_have_one_digest() -> None:
    see = Seen().see
    tokens = array("q", range(100))
    as_list: Any = Key(list(tokens))  # type: ignore[arg-type]
    assert see.key(Key(tokens), 100) == see.key(as_list, 100)
    assert see.whole_key(Key(tokens)) == see.whole_key(as_list)


def test_a_key_is_looked_at_up_to_its_limit() -> None:
    see = Seen().see
    short, long = array("q", range(50)), array("q", range(60))
    assert see.key(Key(short), 50) == see.key(Key(long), 50)


@pytest.mark.parametrize("count", [0, 1, 7, 33])
def test_short_keys_have_digests_too(count: int) -> None:
    see = Seen().see
    assert len(see.key(Key(array("q", range(count))), count)) == 16


def test_a_request_is_recorded_when_it_is_seen_first_and_again_after_it_has_ended() -> None:
    seen = Seen()
    first = request("r1")
    for _ in range(2):
        assert seen.see.request(first) == "r1"
    seen.see.released(first)
    seen.see.request(first)
    first.finished_reason = "length"
    seen.see.released(first)
    seen.see.request(first)
    assert seen.see.request(None) == ""
    received = [record for record in seen.records() if record["kind"] == "request"]
    found = [(record["rid"], record["order"], record["input_tokens"]) for record in received]
    assert found == [("r1", 0, 64), ("r1", 1, 64)]


def test_every_token_of_a_prompt_is_from_one_tier_or_computed() -> None:
    seen = Seen()
    req = SimpleNamespace(
        rid="r1",
        origin_input_ids=range(100),
        prefix_len=48,
        host_loaded_length=32,
        fulfilled_storage_hit_len=lambda prefix_len: 16,
    )
    # Two parts of the prompt, and then its end with some of the answer.
    for up_to in (80, 96, 120):
        seen.see.computed(req, up_to)
    admitted, *parts = seen.records()
    tiers = [admitted[f"{tier}_tokens"] for tier in ("device", "host", "storage")]
    assert [*tiers, admitted["extend_tokens"]] == [16, 16, 16, 52]
    assert [part["computed_tokens"] for part in parts] == [[32], [16], [4]]


def test_two_prompts_have_two_digests_and_no_token_is_written() -> None:
    seen = Seen()
    seen.see.request(request("a"))
    other = request("b")
    other.origin_input_ids[5] = 424_242_424_242_424
    seen.see.request(other)
    first, second = seen.records()
    assert first["content"] != second["content"]
    assert "424242424242424" not in str(seen.records())


def test_of_a_full_trace_it_is_known_which_pages_of_prompts_are_the_same() -> None:
    seen = Seen(page_tokens=16)
    one, other = request("a"), request("b")
    one.origin_input_ids = array("q", range(40))
    other.origin_input_ids = array("q", [*range(16), *range(100, 124)])
    seen.see.request(one)
    seen.see.request(other)
    first, second = (record["pages"] for record in seen.records())
    # Two whole pages of 12 hexadecimal digits each, of which the first is the same.
    assert (len(first), len(second)) == (24, 24)
    assert first[:12] == second[:12]
    assert first[12:] != second[12:]


def test_what_was_put_out_goes_on_in_the_page_in_which_the_prompt_ends() -> None:
    see = Seen(page_tokens=16).see
    ended, longer = request("a"), request("b")
    ended.origin_input_ids, ended.output_ids = array("q", range(40)), list(range(40, 52))
    longer.origin_input_ids = array("q", range(52))
    assert see.pages_put_out(ended) == (see._pages(longer.origin_input_ids, 52) or "")[24:]


@pytest.mark.parametrize("page_tokens", [0, 1, 15])
def test_small_pages_have_no_digests_for_they_could_be_counted(page_tokens: int) -> None:
    seen = Seen(page_tokens=page_tokens)
    seen.see.request(request("a"))
    assert seen.records()[0]["pages"] is None
    assert seen.see.pages_put_out(request("a")) is None


def one_round(seen: Seen, *counts: int) -> None:
    seen.see.begin_round(None)
    emit = seen.lanes["scheduler"].emitter(ROUND)
    emit(seen.see.round)
    seen.see.agreed((counts[0], counts[1], counts[2:], ()))
    seen.see.end_round()


ROUND = Kind("event_round", "decision", agree=("tp",), compared=("round",), counters=("round",))


def test_rounds_in_which_nothing_happened_are_counted_and_not_kept() -> None:
    seen = Seen()
    one_round(seen, 1, 0)
    for _ in range(1000):
        one_round(seen, 0, 0)
    one_round(seen, 0, 2)
    found = [(record["kind"], record.get("count")) for record in seen.records()]
    assert ("idle", 999) in found or ("idle", 1000) in found
    assert len(found) < 8


def test_a_round_with_a_decision_behind_it_is_kept() -> None:
    seen = Seen()
    for number in range(4):
        one_round(seen, 0, 0)
        seen.see.request(request(f"r{number}"))
    assert sum(record["kind"] == "event_round" for record in seen.records()) == 4


def test_this_ranks_own_counts_are_facts_and_a_later_stage_has_none() -> None:
    see = Seen().see
    assert see.own_counts(0) == (None, None, (None, None, None, None, []))
    see.meet_attention("ReduceOp.MIN", Vector([3, 1, 5, 4, 2, 7, 8, 9, 99, -99]))
    assert see.own_counts(6) == (3, 1, (5, 4, 2, 7, [8, 9]))
    # Without a store the vector goes on with something else.
    assert see.own_counts(0) == (3, 1, (None, None, None, None, []))


def test_a_version_that_counts_no_acks_of_prefetches_has_none() -> None:
    assert Seen().see.of_storage((5, 2, 7)) == (5, None, 2, 7, [])


def test_a_stage_receives_goes_by_what_it_received_and_sends_it_on() -> None:
    place = place_of(2, {"tp": (2, 3), "pp": (0, 2, 4)}, range(6), 6)
    seen = Seen(place)
    cache = SimpleNamespace(pp_rank=1, pp_size=3)
    data = Vector([2, 0, 99, -99])
    seen.see.begin_round(None)
    seen.see.enter_pipeline(cache, data)
    seen.see.leave_pipeline(cache, data)
    seen.see.agreed((2, 0, (), ()))
    found = seen.records()
    calls = [(one["op"], one["phase"], one["peer"]) for one in found if one["kind"] == "meeting"]
    assert calls == [("recv", "enter", 0), ("recv", "leave", 0), ("send", "enter", 4), ("send", "leave", 4)]
    values = {one["value"] for one in found if one.get("value") is not None}
    assert len(values) == 1
    assert [one["kind"] for one in found if one["kind"] == "adopted"] == ["adopted"]


def test_calls_of_one_group_are_numbered_and_a_rank_alone_meets_nobody() -> None:
    op, tensor = "ReduceOp.MIN", Vector([1, 2, 3])
    see = Seen().see
    first, second = see.meet_attention(op, tensor), see.meet_attention("ReduceOp.MAX", Vector([1]))
    assert first is not None
    assert second is not None
    assert (first[1], first[2], first[3], first[5]) == ("events", "min", 3, 0)
    assert (second[1], second[2], second[3], second[5]) == ("deadline", "max", 1, 1)
    alone = Seen(place_of(0, {}, (0,), 1)).see
    assert alone.meet_attention(op, tensor) is None
    assert see.meet_storage(op, tensor, []) is None


def test_a_queue_has_one_digest_while_it_is_the_same() -> None:
    see = Seen().see
    scheduler = SimpleNamespace(waiting_queue=[request("a"), request("b")])
    see.loops(scheduler)
    first = see.waiting
    see.loops(scheduler)
    assert first == see.waiting
    scheduler.waiting_queue.reverse()
    see.loops(scheduler)
    assert (see.waiting[0], first != see.waiting) == (2, True)


def test_what_is_done_for_a_request_says_which_whatever_holds_it() -> None:
    see = Seen().see
    handle = SimpleNamespace(rid="r1", attempt_id=2)
    assert [(see.rid(one), see.attempt(one)) for one in (handle, SimpleNamespace(handle=handle))] == [
        ("r1", 2)
    ] * 2
    assert (see.rid("r2"), see.attempt("r2")) == ("r2", 0)
    assert see.rid(SimpleNamespace(request_id="r3")) == "r3"
    # An abort of all requests names none; an object's own text must not stand for it.
    assert [see.rid(one) for one in (SimpleNamespace(rid=""), SimpleNamespace(), None)] == ["", "", ""]


def test_lanes_carry_the_step_that_they_work_in(tmp_path: Path) -> None:
    seen = Seen()
    for _ in range(3):
        one_round(seen, 1, 0)
    seen.see.state("io", "backend", 7)
    (record,) = seen.records("io")
    assert (record["step"], record["state"], record["op"]) == (3, "backend", 7)


def test_a_lane_that_is_at_work_when_the_server_ends_has_not_completed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    see = Seen().see

    def outcome(lane: str) -> str:
        return see.outcome_of(lane, see.work_done(lane))

    assert outcome("io") == "completed"
    see.state("io", "backend", 7)
    assert outcome("io") == "stopped"
    # It would have been given what is read.
    assert outcome("sync") == "stopped"
    monkeypatch.setattr("consensus_checker.sglang_see.HUNG_S", 0.0)
    assert outcome("io") == "hung"
    see.state("io", "idle", None)
    assert outcome("io") == "completed"
    waiting = SimpleNamespace(prefetch_buffer=SimpleNamespace(qsize=lambda: 1))
    see.begin_round(SimpleNamespace(cache_controller=waiting))
    assert outcome("io") == "stopped"


def until(is_so: Any) -> None:
    deadline_s = time.monotonic() + 30
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert is_so()


def test_a_lane_has_completed_only_where_its_thread_waits_for_work_that_never_comes() -> None:
    see = Seen().see
    work: queue.Queue[int | None] = queue.Queue()
    see.begin_round(SimpleNamespace(cache_controller=SimpleNamespace(prefetch_queue=work)))
    goes_on = threading.Event()

    def lane() -> None:
        see.threads[threading.get_ident()] = "prefetch"
        while work.get() is not None:
            # Neither in a store nor in any function that is looked at, and its queue is empty.
            goes_on.wait()

    thread = threading.Thread(target=lane)
    thread.start()
    try:
        until(lambda: see.work_done("prefetch") == 0)
        assert see.outcome_of("prefetch", 0) == "completed"
        work.put(1)
        until(lambda: not work.qsize())
        assert see.work_done("prefetch") is None
        # It had nothing in hand when the records ended; what it did since then is in no log.
        assert see.outcome_of("prefetch", 0) == "stopped"
        goes_on.set()
        until(lambda: see.work_done("prefetch") == 1)
        assert see.outcome_of("prefetch", 0) == "stopped"
        assert see.outcome_of("prefetch", 1) == "completed"
    finally:
        goes_on.set()
        work.put(None)
        thread.join()


def test_a_server_without_rounds_has_steps_all_the_same() -> None:
    seen = Seen()
    scheduler = SimpleNamespace(waiting_queue=[])
    for number in range(5):
        seen.see.loops(scheduler)
        seen.see.request(request(f"r{number}"))
    # Passes in which nothing was decided are none.
    for _ in range(100):
        seen.see.loops(scheduler)
    assert seen.lanes["scheduler"].step == 5


def test_a_loop_that_nobody_knows_keeps_no_more_than_a_steps_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("consensus_checker.sglang_see.STEP_RECORDS_MAX", 10)
    seen = Seen()
    for number in range(100):
        seen.see.request(request(f"r{number}"))
    assert seen.lanes["scheduler"].step >= 8


def test_a_request_that_a_client_has_called_by_a_sentence_is_called_by_its_digest() -> None:
    seen = Seen()
    name = seen.see.request(request("my name is Smith"))
    assert name.startswith("text-")
    assert {seen.see.rid("my name is Smith"), seen.see.rid(SimpleNamespace(rid="my name is Smith"))} == {name}
    assert "Smith" not in str(seen.records())


def test_what_is_given_back_between_two_rounds_is_a_sum_in_the_second() -> None:
    see = Seen().see
    see.begin_round(None)
    see.host_has(None, 90)
    see.device_has(10)
    assert (see.host_gets_back(None, 3), see.host_gets_back(None, 4)) == (90, 93)
    # A pool beside the main one keeps no count here.
    assert see.host_gets_back("swa", 5) is None
    assert (see.device_gets_back(33, 16), see.device_room, see.host_room) == (13, 13, 97)
    see.begin_round(None)
    assert (see.freed_tokens, see.freed_host_pages) == (33, 7)
    see.begin_round(None)
    assert (see.freed_tokens, see.freed_host_pages) == (0, 0)


def test_room_is_asked_for_once_a_round() -> None:
    see = Seen().see
    assert (see.host_room, see.device_room) == (None, None)
    pools = [SimpleNamespace(available_size=lambda: 320), SimpleNamespace(available_size=lambda: 160)]
    controller = SimpleNamespace(mem_pool_host=pools[0])
    see.look_at_room(
        SimpleNamespace(cache_controller=controller, token_to_kv_pool_allocator=pools[1], page_size=16)
    )
    assert (see.host_room, see.device_room) == (20, 10)


def test_a_round_of_the_former_cache_is_idle_where_nothing_under_way_has_changed() -> None:
    seen = Seen()
    cache = SimpleNamespace(ongoing_write_through={}, ongoing_load_back={})
    emit = seen.lanes["scheduler"].emitter(ROUND)
    for number in range(50):
        before = seen.see.in_flight(cache)
        seen.see.begin_round(cache)
        emit(seen.see.round)
        if number == 10:
            cache.ongoing_write_through[7] = None
        seen.see.end_former_round(cache, before)
        emit(seen.see.round)
    assert sum(record["kind"] == "event_round" for record in seen.records()) < 20


def test_what_came_has_another_digest_in_another_order() -> None:
    see = Seen().see
    one, two = SimpleNamespace(rid="a"), SimpleNamespace(rid="b")
    both = SimpleNamespace(batch=[one, two], rid=None)
    assert see.received([one, two]) != see.received([two, one])
    assert see.received([both]) == see.received([SimpleNamespace(batch=[one, two])])
    assert see.types([one, both]) == ["SimpleNamespace"]


def test_the_batch_of_a_plan_is_found_in_either_form() -> None:
    see = Seen().see
    batch = SimpleNamespace(extend_lens=[3, 5], extend_num_tokens=8)
    assert see.planned(SimpleNamespace(batch_to_run=batch)) is batch
    assert see.planned(batch) is batch
    assert see.planned(SimpleNamespace(batch_to_run=None)) is None
    lengths = see.lengths(batch)
    assert lengths is not None
    assert lengths[0] == 2
    # Of a batch that decodes they are those of some time before.
    assert see.lengths(SimpleNamespace(extend_lens=[3, 5], extend_num_tokens=0)) is None


def test_polls_are_recorded_where_what_was_agreed_on_has_changed() -> None:
    transfers = Seen().see.transfers
    assert [transfers.has_changed("stage", polls) for polls in ([1, 1], [1, 1], [1, 2], [2], [1, 2])] == [
        True,
        False,
        True,
        True,
        False,
    ]
    assert not transfers.has_changed("stage", [])


def test_of_a_poll_the_first_flags_are_this_ranks_own() -> None:
    see = Seen().see
    for own, reduced in (([1, 2], [1, 1]), ([3], [2])):
        see.transfers.begin_polls()
        # Along one axis, and then along the other.
        see.meet_flags(own, None, "ReduceOp.MIN")
        see.meet_flags(reduced, None, "ReduceOp.MIN")
        assert see.transfers.own_polls == own


def test_a_queue_gives_requests_or_those_and_what_failed() -> None:
    transfers = Seen().see.transfers
    one, held = SimpleNamespace(rid="a"), SimpleNamespace(req=SimpleNamespace(rid="a"))
    assert transfers.moved([one], 0) == transfers.moved(([held], []), 0)
    assert (transfers.moved([], 0), transfers.moved([one], 1)) == ([0, ""], [0, ""])
    assert transfers.moved(([], [held]), 1)[0] == 1
    assert [transfers.has_moved(result) for result in ([], ([], []), ([], [held]), [one])] == [
        False,
        False,
        True,
        True,
    ]
    assert transfers.ring(["b", "a"], 0) == transfers.ring([["a", "b"], []], 0)


def test_ranks_that_share_a_context_are_not_compared_by_what_only_some_are_told() -> None:
    assert Seen().see.transfers.without_cp(32) == 32
    shared = Seen(place_of(0, {"cp": (0, 1)}, (0, 1), 2))
    assert shared.see.transfers.without_cp(32) is None


def test_stages_hand_polls_on_with_their_digest() -> None:
    seen = Seen(place_of(2, {"tp": (2, 3), "pp": (0, 2, 4)}, range(6), 6))
    seen.see.enter_polls(1, 3)
    seen.see.leave_polls(1, 3, [2, 1])
    found = [(one["op"], one["phase"], one["purpose"], one["peer"]) for one in seen.records()]
    assert found == [
        ("recv", "enter", "polls", 0),
        ("recv", "leave", "polls", 0),
        ("send", "enter", "polls", 4),
        ("send", "leave", "polls", 4),
    ]
    assert len({one["value"] for one in seen.records() if one["value"] is not None}) == 1
