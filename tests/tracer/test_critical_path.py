"""What requests waited for, from logs one can read; and what-ifs held against runs that have that speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache.config import Config, StorageConfig, WritePolicy
from hicache.job import PlanSpec
from hicache.topology import Topology
from tests.support.logs import write_lane
from tests.support.timed_world import MS, Costs, timed_run
from tracer.critical_path import RankPath, critical_path, leading
from tracer.log import find_logs
from tracer.path_moments import TIERS
from tracer.record import Kind
from tracer.what_if_speed import what_if_speed

NAMES = (
    "request prefetch_submit prefetch_poll prefetch_hit prefetch_ack prefetch_insert admit batch forward "
    "finish event_round meeting transfer_enqueue transfer_done transfer_ack storage_backup storage_ack "
    "lane_state query read progress storage_write"
)
KINDS = tuple(Kind(name, "note") for name in NAMES.split())
Fields = Mapping[str, Any]


def at(ms: float, step: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time_ns": round(ms * MS), "step": step, "kind": kind, **fields}


def looks(ms: float, step: int) -> list[dict[str, Any]]:
    """An event round that takes a millisecond."""
    return [
        at(ms, step, "event_round", phase="call"),
        at(ms + 1, step, "event_round", phase="return"),
    ]


def computes(ms: float, step: int, until: float, *rids: str) -> list[dict[str, Any]]:
    return [at(ms, step, "batch", rids=list(rids)), at(until, step, "forward", rids=list(rids))]


def lane_state(ms: float, step: int, state: str, op: int | None = None) -> dict[str, Any]:
    return at(ms, step, "lane_state", state=state, op=op)


def path_of(folder: Path, main: Sequence[Fields], **lanes: Sequence[Fields]) -> RankPath:
    write_lane(folder, main, kinds=KINDS)
    for lane, records in lanes.items():
        write_lane(folder, records, lane=lane, kinds=KINDS)
    return critical_path(find_logs(folder), 0)


def ms_by_tier(by_tier: Mapping[str, int]) -> dict[str, float]:
    return {tier: round(ns / MS, 3) for tier, ns in by_tier.items()}


ASKED = [
    at(0, 0, "request", rid="a"),
    at(1, 0, "prefetch_submit", rid="a", attempt=0, op=1, outcome="issued"),
    *looks(2, 0),
    at(4, 0, "prefetch_poll", rid="a", attempt=0, op=1, verdict="wait"),
]
READ_AHEAD = {
    "prefetch": [
        lane_state(2, 0, "backend", 1),
        lane_state(8, 0, "collective", 1),
        at(9, 0, "query", op=1),
        lane_state(9, 0, "idle"),
    ],
    "io": [lane_state(13, 1, "backend", 1), at(33, 2, "read", op=1), lane_state(33, 2, "idle")],
    "sync": [lane_state(33, 2, "collective", 1), at(35, 2, "progress", op=1), lane_state(35, 2, "idle")],
}


@pytest.fixture
def read_ahead(tmp_path: Path) -> RankPath:
    """One request: asked of storage for 6 ms, read for 20, with nothing else for its scheduler to do."""
    main = [
        *ASKED,
        *looks(10, 1),
        at(12, 1, "prefetch_hit", op=1, rid="a", attempt=0, tokens=64),
        *looks(20, 2),
        *looks(40, 3),
        at(42, 3, "prefetch_ack", op=1, ack="completed"),
        at(43, 3, "admit", rid="a", verdict="admitted"),
        *computes(44, 3, 64, "a"),
        at(65, 3, "finish", rid="a"),
    ]
    return path_of(tmp_path, main, **READ_AHEAD)


def test_the_chain_of_a_request_goes_through_the_lanes_that_read_for_it(read_ahead: RankPath) -> None:
    (request,) = read_ahead.requests
    assert request.is_gated
    assert [(tier, ns / MS) for tier, ns in request.chain] == [
        ("scheduler", 2),
        ("storage_read", 6),
        ("peers", 1),
        ("scheduler", 4),
        ("storage_read", 20),
        ("peers", 2),
        ("scheduler", 9),
        ("forward", 20),
        ("scheduler", 1),
    ]
    assert "storage_read" == read_ahead.bound == request.bound
    assert ms_by_tier(read_ahead.busy) == {"storage_read": 26, "forward": 20}


def test_a_slower_store_makes_the_wait_longer_in_either_reading(read_ahead: RankPath) -> None:
    slow = what_if_speed(read_ahead, {"storage_read": 0.5})
    (request,) = slow.requests
    assert (request.before / MS, request.in_place / MS, request.in_order / MS) == (65, 91, 91)
    # Until 4 the scheduler itself had something to do, and did not wait yet.
    assert (slow.run.before / MS, slow.run.in_place / MS, slow.run.in_order / MS) == (65, 89, 91)
    both = what_if_speed(read_ahead, {"storage_read": 2, "forward": 0.25}).requests[0]
    assert (65 - 13 + 60) * MS == both.in_place == both.in_order


def test_at_its_own_speed_a_run_takes_what_it_took(read_ahead: RankPath) -> None:
    same = what_if_speed(read_ahead, dict.fromkeys(TIERS, 1.0))
    assert (same.run.before, same.run.in_place, same.run.in_order) == (65 * MS, 65 * MS, 65 * MS)
    assert same.moved == 0


def test_a_wall_clock_is_as_exact_as_one_that_begins_at_zero(tmp_path: Path) -> None:
    begin = 1_764_000_000_000_000_001
    main = [
        {**record, "time_ns": record["time_ns"] + begin}
        for record in (at(0, 0, "request", rid="a"), *computes(1, 0, 9, "a"), at(9, 0, "finish", rid="a"))
    ]
    path = path_of(tmp_path, main)
    assert what_if_speed(path, {"d2h": 3.0}).run.in_order == 9 * MS
    assert what_if_speed(path, {"forward": 2.0}).requests[0].in_order == 5 * MS


# A rank that reads from storage for request a, beside a forward of request b.
READ_BESIDE = [
    at(0, 0, "request", rid="b"),
    *ASKED,
    at(5, 0, "admit", rid="b", verdict="admitted"),
    *computes(5, 0, 10, "b"),
    *looks(10, 1),
    at(12, 1, "prefetch_hit", op=1, rid="a", attempt=0, tokens=64),
    at(13, 1, "prefetch_poll", rid="a", attempt=0, op=1, verdict="wait"),
    *computes(13, 1, 40, "b"),
    *looks(40, 2),
    at(42, 2, "prefetch_ack", op=1, ack="completed"),
    at(43, 2, "admit", rid="a", verdict="admitted"),
    *computes(44, 2, 64, "a", "b"),
    at(64, 2, "finish", rid="b"),
    at(65, 2, "finish", rid="a"),
]


def test_what_is_read_beside_a_forward_of_others_counts_for_the_request_and_not_for_the_run(
    tmp_path: Path,
) -> None:
    path = path_of(tmp_path, READ_BESIDE, **READ_AHEAD)
    assert ms_by_tier(path.by_tier) == {"forward": 52, "scheduler": 13}
    by_rid = {request.rid: ms_by_tier(request.by_tier) for request in path.requests}
    # From the end of the read to the look at 40 the scheduler was at b's forward: a queue to a.
    assert by_rid["a"] == {"storage_read": 26, "forward": 20, "queue": 6, "peers": 3, "scheduler": 10}
    assert by_rid["b"] == {"forward": 52, "scheduler": 12}
    slow = what_if_speed(path, {"storage_read": 0.5})
    # In place the run does not feel it; to keep every decision it would have to wait until 58.
    assert (slow.run.in_place, slow.run.in_order) == (65 * MS, 81 * MS)
    assert slow.moved == 2


def test_a_request_that_found_no_room_waited_for_the_copy_that_gave_some(tmp_path: Path) -> None:
    main = [
        at(0, 0, "request", rid="a"),
        at(1, 0, "transfer_enqueue", queue="write", op=7),
        at(2, 0, "admit", rid="a", verdict="no_room"),
        *looks(10, 1),
        at(12, 1, "admit", rid="a", verdict="no_room"),
        at(29, 2, "transfer_done", queue="write", op=7),
        *looks(30, 2),
        at(32, 2, "transfer_ack", queue="write", op=7),
        at(33, 2, "admit", rid="a", verdict="admitted"),
        *computes(34, 2, 44, "a"),
        at(45, 2, "finish", rid="a"),
    ]
    path = path_of(tmp_path, main)
    assert ms_by_tier(path.by_tier) == {"d2h": 27, "forward": 10, "scheduler": 8}
    assert path.by_tier == path.requests[0].by_tier
    assert what_if_speed(path, {"d2h": 0.5}).run.in_order == 73 * MS


def test_a_request_that_is_refused_waited_as_well_and_what_comes_after_it_is_no_request(
    tmp_path: Path,
) -> None:
    main = [
        *ASKED,
        *looks(10, 1),
        at(12, 1, "prefetch_hit", op=1, rid="a", attempt=0, tokens=64),
        *looks(40, 2),
        at(42, 2, "prefetch_ack", op=1, ack="completed"),
        at(43, 2, "admit", rid="a", verdict="too_long"),
        at(44, 2, "finish", rid="a"),
        *looks(50, 3),
        at(60, 4, "request", rid="b"),
        at(61, 4, "finish", rid="b"),
    ]
    path = path_of(tmp_path, main, **READ_AHEAD)
    told = {request.rid: ms_by_tier(request.by_tier) for request in path.requests}
    assert told == {"a": {"storage_read": 26, "peers": 3, "scheduler": 15}, "b": {"scheduler": 1}}
    assert ms_by_tier(path.by_tier)["no_request"] == 16


def test_under_write_back_one_waits_for_the_eviction_and_for_what_gave_the_host_room(
    tmp_path: Path,
) -> None:
    main = [
        at(0, 0, "request", rid="a"),
        at(1, 0, "storage_backup", op=3),
        at(2, 0, "admit", rid="a", verdict="no_room"),
        *looks(10, 1),
        at(12, 1, "admit", rid="a", verdict="no_room"),
        *looks(30, 2),
        at(32, 2, "storage_ack", op=3),
        at(33, 2, "transfer_enqueue", queue="write", op=7),
        at(40, 2, "transfer_done", queue="write", op=7),
        at(40, 2, "transfer_ack", queue="write", op=7),
        at(41, 2, "admit", rid="a", verdict="admitted"),
        *computes(42, 2, 50, "a"),
        at(50, 2, "finish", rid="a"),
    ]
    backup = [lane_state(1, 0, "backend", 3), at(28, 1, "storage_write", op=3)]
    path = path_of(tmp_path, main, backup=backup)
    assert ms_by_tier(path.by_tier) == {"d2h": 7, "storage_write": 26, "forward": 8, "scheduler": 9}
    assert what_if_speed(path, {"storage_write": 0.5}).run.in_order / MS == 50 + 27


def test_a_forward_waits_for_its_load_back(tmp_path: Path) -> None:
    main = [
        at(0, 0, "request", rid="a"),
        *looks(1, 0),
        at(3, 0, "admit", rid="a", verdict="admitted"),
        at(4, 0, "transfer_enqueue", queue="load", op=1),
        at(5, 0, "batch", rids=["a"]),
        at(14, 0, "transfer_done", queue="load", op=1),
        at(20, 0, "forward", rids=["a"]),
        at(20, 0, "finish", rid="a"),
    ]
    path = path_of(tmp_path, main)
    assert ms_by_tier(path.by_tier) == {"h2d": 9, "forward": 6, "scheduler": 5}
    fast = what_if_speed(path, {"h2d": 2})
    # Of the ten milliseconds of the copy one was not seen: in order it is still there.
    assert (fast.run.in_place / MS, fast.run.in_order / MS) == (20 - 4.5, 20 - 5)
    assert (fast.run.high / MS, fast.run.low / MS) == (15.5, 15.0)


def test_a_deadline_is_no_ones_speed(tmp_path: Path) -> None:
    main = [
        *ASKED,
        *looks(10, 1),
        at(12, 1, "prefetch_poll", rid="a", attempt=0, op=1, verdict="wait"),
        *looks(24, 2),
        at(26, 2, "prefetch_poll", rid="a", attempt=0, op=1, verdict="end"),
        at(27, 2, "admit", rid="a", verdict="admitted"),
        *computes(28, 2, 38, "a"),
        at(38, 2, "finish", rid="a"),
    ]
    path = path_of(tmp_path, main, prefetch=[lane_state(2, 0, "backend", 1)])
    assert ms_by_tier(path.by_tier) == {"forward": 10, "deadline": 24, "scheduler": 4}
    assert path.limits == ("1 request waited for storage until a deadline, which another speed may spare",)


def test_without_the_lanes_of_storage_the_wait_is_unknown_and_that_is_said(tmp_path: Path) -> None:
    main = [
        *ASKED,
        *looks(10, 1),
        *looks(20, 2),
        at(22, 2, "prefetch_ack", op=1, ack="completed"),
        at(23, 2, "admit", rid="a", verdict="admitted"),
        *computes(24, 2, 30, "a"),
        at(30, 2, "finish", rid="a"),
    ]
    path = path_of(tmp_path, main)
    assert ms_by_tier(path.by_tier)["unknown"] == 20
    assert path.limits == ("no log of the lanes that read from storage, so waits for it are not seen",)


def test_a_log_that_begins_late_or_ends_early_follows_whom_it_has_whole(tmp_path: Path) -> None:
    main = [
        *computes(0, 7, 4, "early"),
        at(4, 7, "finish", rid="early"),
        at(5, 8, "request", rid="a"),
        at(6, 8, "request", rid="late"),
        *looks(6, 8),
        at(8, 8, "admit", rid="a", verdict="admitted"),
        *computes(8, 8, 12, "a"),
        at(13, 8, "finish", rid="a"),
    ]
    write_lane(tmp_path, main, kinds=KINDS, outcome=None)
    path = critical_path(find_logs(tmp_path), 0)
    assert [request.rid for request in path.requests] == ["a"]
    assert path.limits == (
        "rank0000.scheduler.000.jsonl: cut behind record 11, without a trailer",
        "1 request ended that came before the log begins",
        "1 request had not ended where the log ends",
    )


def test_of_a_log_of_sglang_what_it_does_not_record_is_said(tmp_path: Path) -> None:
    """A plan before the forward and a batch behind it; admission is told late; copies never."""
    main = [
        at(0, 0, "request", rid="a"),
        at(1, 0, "plan", mode="extend", rids=[1, "ab"]),
        at(9, 0, "batch", mode="extend", rids=[1, "ab"]),
        at(9, 0, "admit", rid="a", verdict="admitted"),
        at(10, 0, "finish", rid="a"),
    ]
    kinds = [Kind(name, "note") for name in ("request", "plan", "batch", "admit", "finish")]
    write_lane(tmp_path, main, kinds=kinds)
    path = critical_path(find_logs(tmp_path), 0)
    assert ms_by_tier(path.by_tier) == {"forward": 8, "scheduler": 2}
    assert path.limits == ("no record says when a copy was done, so waits for d2h and h2d are not seen",)


@pytest.mark.parametrize("value", [None, [], {}, [1], "x", True, -1, 1 << 70, 1.5])
def test_values_of_any_type_end_nothing(tmp_path: Path, value: Any) -> None:
    names = ("rid", "op", "queue", "state", "phase_", "rids", "attempt", "verdict", "outcome", "tokens")
    records = [
        at(number, 0, name, **dict.fromkeys(names, value)) for number, name in enumerate(NAMES.split())
    ]
    whole = [at(50, 1, "request", rid="a"), at(60, 1, "finish", rid="a")]
    path = path_of(tmp_path, [*records, *whole], io=records, prefetch=records, sync=records, backup=records)
    assert [sum(each.by_tier.values()) for each in path.requests if each.rid == "a"] == [10 * MS]
    assert path.ns == what_if_speed(path, {"d2h": 1}).run.in_order


def test_of_a_replica_the_rank_is_shown_that_waited_least_for_others(tmp_path: Path) -> None:
    for rank, came in ((0, 4), (1, 18)):
        main = [
            at(0, 0, "request", rid="a"),
            at(1, 0, "batch", rids=["a"]),
            at(came, 0, "meeting", phase="enter", group="tp0/main", group_seq=0),
            at(20, 0, "meeting", phase="leave", group="tp0/main", group_seq=0),
            at(21, 0, "forward", rids=["a"]),
            at(21, 0, "finish", rid="a"),
        ]
        write_lane(tmp_path, main, rank=rank, sizes={"tp": 2}, kinds=KINDS)
    run = find_logs(tmp_path)
    paths = [critical_path(run, rank) for rank in run.ranks]
    assert [ms_by_tier(path.by_tier)["peers"] for path in paths] == [16, 2]
    assert [path.rank for path in leading(paths)] == [1]


# Against runs that have that speed


def spec(
    *,
    tp: int = 1,
    concurrency: int = 4,
    pages: tuple[int, int] = (160, 240),
    requests: str = "conversations=3,rounds=7",
    write_policy: WritePolicy = "write_through",
) -> PlanSpec:
    """Conversations over three tiers, none of them large enough for all."""
    storage = StorageConfig(
        backend="memory", prefetch_policy="wait_complete", prefetch_threshold_tokens=64, polls_max=0
    )
    config = Config(
        topology=Topology(tp=tp),
        device_pages=pages[0],
        host_pages=pages[1],
        concurrency=concurrency,
        transfer_polls_max=0,
        chunked_prefill_tokens=1024,
        write_policy=write_policy,
        storage=storage,
    )
    return PlanSpec(config, agentic=f"{requests},output=24,max-context=6000", schedule="list:0")


SERIAL = spec(concurrency=1, pages=(80, 80), requests="conversations=3,rounds=4")
CROWDED = spec()
MORE = spec(requests="conversations=6,rounds=6")
WRITE_BACK = spec(write_policy="write_back")
SPEEDS = (
    *(("storage_read", 0.25), ("storage_read", 4), ("storage_write", 0.5)),
    *(("forward", 0.5), ("forward", 2)),
    *(("h2d", 0.1), ("h2d", 4), ("d2h", 0.2)),
)


def run_at(folder: Path, plan: PlanSpec, **speeds: float) -> RankPath:
    return critical_path(find_logs(timed_run(plan, folder / "run", Costs(speeds=speeds))), 0)


@pytest.mark.parametrize(
    ("tier", "write_policy", "concurrency", "costs"),
    [
        ("forward", "write_through", 4, Costs(forward=(9 * MS, MS // 20))),
        ("h2d", "write_through", 4, Costs(h2d=(40 * MS, 2 * MS), forward=(MS, 0))),
        ("storage_read", "write_through", 1, Costs(storage_read=(40 * MS, MS), forward=(MS, 0))),
        ("d2h", "write_back", 4, Costs(d2h=(40 * MS, MS), forward=(MS, 0))),
    ],
)
def test_a_run_is_bound_by_the_tier_that_is_slow_in_it(
    tmp_path: Path, tier: str, write_policy: WritePolicy, concurrency: int, costs: Costs
) -> None:
    pages = (160, 240) if concurrency > 1 else (120, 120)
    requests = "conversations=3,rounds=6"
    plan = spec(write_policy=write_policy, pages=pages, requests=requests, concurrency=concurrency)
    path = critical_path(find_logs(timed_run(plan, tmp_path / "run", costs)), 0)
    assert tier == path.bound
    assert path.by_tier[tier] > 0.5 * path.ns


def test_two_ranks_tell_the_same_of_their_run(tmp_path: Path) -> None:
    run = find_logs(timed_run(spec(tp=2), tmp_path / "run", Costs()))
    first, second = (critical_path(run, rank) for rank in (0, 1))
    assert first.ns == pytest.approx(second.ns, rel=0.01)
    for speeds in ({"h2d": 0.25}, {"forward": 2.0}, dict.fromkeys(TIERS, 1.0)):
        told, other = what_if_speed(first, speeds), what_if_speed(second, speeds)
        assert told.run.in_place == pytest.approx(other.run.in_place, rel=0.01)
    assert told.run.in_order == told.run.before


# How far off the estimate in place is at most, of the run's time, and how many of eight are in the range.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan", "off_max", "inside_min"),
    [
        ("one at a time", SERIAL, 0.01, 8),
        ("crowded", CROWDED, 0.09, 7),
        ("more of them", MORE, 0.15, 4),
        ("write_back", WRITE_BACK, 0.005, 8),
    ],
)
def test_an_estimate_is_held_against_the_run_that_has_that_speed(
    tmp_path: Path, name: str, plan: PlanSpec, off_max: float, inside_min: int
) -> None:
    base = run_at(tmp_path / "base", plan)
    inside, worst = 0, 0.0
    print(f"\n{name}: {len(base.requests)} requests in {base.ns / MS:,.0f} ms, {base.bound}")
    for tier, speed in SPEEDS:
        told = what_if_speed(base, {tier: speed})
        true = run_at(tmp_path / f"{tier}{speed}", plan, **{tier: speed})
        off = told.run.in_place / true.ns - 1
        worst = max(worst, abs(off))
        is_inside = told.run.low * 0.99 <= true.ns <= told.run.high * 1.01
        inside += is_inside
        print(
            f"  {tier} x{speed}: {true.ns / MS:,.0f} ms, in place {off:+.1%}, "
            f"in order {told.run.in_order / true.ns - 1:+.1%}, moved {told.moved} of {told.taken}"
            f"{'' if is_inside else ', outside'}"
        )
        if not told.moved:
            # Whatever was taken over comes in the same step: nothing was to be decided anew.
            assert true.ns == pytest.approx(told.run.in_place, rel=0.002)
            assert true.ns == pytest.approx(told.run.in_order, rel=0.002)
            times = {request.rid: request.ns for request in true.requests}
            for request, estimate in zip(base.requests, told.requests, strict=True):
                assert times[request.rid] == pytest.approx(estimate.in_order, rel=0.005)
    assert worst <= off_max
    assert inside >= inside_min
