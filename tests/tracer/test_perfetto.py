"""The trace is read back by `Chrome`, which knows the page on the format and nothing of our writer."""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from hicache.probes import KINDS
from hicache.sim.world import simulate
from hicache.zoo import find_scenario
from tests.support.logs import Fields, write_lane, write_run
from tracer.log import find_logs
from tracer.perfetto import write_perfetto
from tracer.record import LANE_STATE, Kind

MEETING = Kind("meeting", "meeting", info=("op", "purpose", "group", "group_seq", "peer"))
GROUPS = {"tp0/events": [0, 1]}
TWO = {"tp": 2}
MOVED = ["transfer_enqueue", "transfer_done", "transfer_ack", "request", "admit", "retract", "finish"]


@dataclass(slots=True)
class Slice:
    """A begin and its end; times in nanoseconds."""

    name: str
    rank: int
    thread: str
    start: int
    end: int = -1
    args: dict[str, Any] = field(default_factory=dict)
    depth: int = 0


class Chrome:
    """A reader of Chrome trace JSON that takes nothing that is not as it should be.

    Slices of a thread nest; an arrow begins before it goes on, each point of it in a slice; counters are
    numbers; a thread has one name; times are decimals with at most three places.
    """

    def __init__(self, text: bytes) -> None:
        document = json.loads(text, parse_float=Decimal, parse_constant=refuse)
        self.other = document["otherData"]
        assert document["displayTimeUnit"] == "ns"
        events: list[dict[str, Any]] = document["traceEvents"]
        self.count = len(events)
        self.processes: dict[int, str] = {}
        self.threads: dict[tuple[int, int], str] = {}
        self.slices: list[Slice] = []
        self.instants: list[dict[str, Any]] = []
        self.counters: dict[tuple[int, str, str], list[int]] = defaultdict(list)
        self.arrows: dict[int, list[Slice]] = defaultdict(list)
        self._over: set[int] = set()
        self._open: dict[tuple[int, int], list[Slice]] = defaultdict(list)
        for event in events:
            if event["ph"] == "M":
                self._meta(event)
        # As importers do: by time, and at one time in the order of the file.
        for event in sorted((event for event in events if event["ph"] != "M"), key=nanoseconds):
            PHASES[event["ph"]](self, event, nanoseconds(event))
        assert not any(self._open.values()), "slices without an end"

    def slice(self, name: str, rank: int = 0) -> Slice:
        (found,) = self.named(name, rank)
        return found

    def named(self, name: str, rank: int = 0) -> list[Slice]:
        return [each for each in self.slices if (each.name, each.rank) == (name, rank)]

    def names(self, thread: str, rank: int = 0) -> list[str]:
        return [each.name for each in self.slices if (each.thread, each.rank) == (thread, rank)]

    def _meta(self, event: dict[str, Any]) -> None:
        if event["name"] == "process_name":
            assert self.processes.setdefault(event["pid"], event["args"]["name"]) == event["args"]["name"]
        elif event["name"] == "thread_name":
            assert (event["pid"], event["tid"]) not in self.threads
            self.threads[event["pid"], event["tid"]] = event["args"]["name"]
        else:
            assert event["name"] in ("process_sort_index", "thread_sort_index")
            assert type(event["args"]["sort_index"]) is int

    def _begin(self, event: dict[str, Any], time_ns: int) -> None:
        row = event["pid"], event["tid"]
        assert event["pid"] in self.processes
        args = event.get("args", {})
        opened = Slice(
            event["name"], event["pid"], self.threads[row], time_ns, args=args, depth=len(self._open[row])
        )
        self._open[row].append(opened)
        self.slices.append(opened)

    def _end(self, event: dict[str, Any], time_ns: int) -> None:
        ended = self._open[event["pid"], event["tid"]].pop()
        ended.end = time_ns
        ended.args = ended.args | event.get("args", {})

    def _instant(self, event: dict[str, Any], time_ns: int) -> None:
        assert event["s"] in ("t", "p", "g")
        assert (event["pid"], event["tid"]) in self.threads
        self.instants.append(event | {"time_ns": time_ns})

    def _counter(self, event: dict[str, Any], time_ns: int) -> None:
        for series, value in event["args"].items():
            assert type(value) is int
            self.counters[event["pid"], event["name"], series].append(value)

    def _flow_begin(self, event: dict[str, Any], time_ns: int) -> None:
        assert event["id"] not in self.arrows
        self._point(event)

    def _flow_step(self, event: dict[str, Any], time_ns: int) -> None:
        assert event["id"] in self.arrows, "an arrow that goes on and has not begun"
        assert event["id"] not in self._over
        assert event["bp"] == "e"
        self._point(event)

    def _flow_end(self, event: dict[str, Any], time_ns: int) -> None:
        self._flow_step(event, time_ns)
        self._over.add(event["id"])

    def _point(self, event: dict[str, Any]) -> None:
        around = self._open[event["pid"], event["tid"]]
        assert around, f"an arrow that ends in no slice: {event}"
        self.arrows[event["id"]].append(around[-1])


PHASES = {
    "B": Chrome._begin,
    "E": Chrome._end,
    "i": Chrome._instant,
    "C": Chrome._counter,
    "s": Chrome._flow_begin,
    "t": Chrome._flow_step,
    "f": Chrome._flow_end,
}


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a scenario's run in `hung` and its twin's in `twin`; not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    scenario = find_scenario("skip_collective_when_empty")
    simulate(scenario.plan(1), out=folder / "hung")
    simulate(scenario.plan(1, twin=True), out=folder / "twin")
    return folder


def spoil(path: Path) -> None:
    """Another letter in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def nanoseconds(event: dict[str, Any]) -> int:
    """Exact: a time that was ever a double would not be a whole number of nanoseconds."""
    scaled = Decimal(event["ts"]) * 1000
    assert scaled == int(scaled)
    return int(scaled)


def trace(path: Path) -> Chrome:
    out = io.BytesIO()
    count = write_perfetto(find_logs(path), out)
    read = Chrome(out.getvalue())
    assert count.events == read.count
    return read


def drawn(folder: Path, records: Sequence[Fields], **options: Any) -> Chrome:
    """The trace of one rank with these records, a microsecond apart where they don't say when."""
    options.setdefault("kinds", KINDS)
    timed = [{"time_ns": 1000 * number, **record} for number, record in enumerate(records)]
    write_lane(folder, timed, **options)
    return trace(folder)


def meet(phase: str, time_ns: int, group_seq: int = 0, **fields: Any) -> Fields:
    call = {"op": "all_reduce", "purpose": "events", "group": "tp0/events", "group_seq": group_seq}
    return {"kind": "meeting", "phase": phase, "time_ns": time_ns, **call, "peer": None, **fields}


def test_a_process_is_a_rank_with_its_coordinates(tmp_path: Path) -> None:
    write_run(tmp_path, {0: [], 1: []}, sizes={"dp": 1, "pp": 2, "cp": 1, "tp": 1})
    assert trace(tmp_path).processes == {0: "rank 0  dp0 pp0 cp0 tp0", 1: "rank 1  dp0 pp1 cp0 tp0"}


def test_a_rank_without_a_log_is_there_and_named(tmp_path: Path) -> None:
    write_run(tmp_path, {0: []}, sizes={"tp": 2})
    read = trace(tmp_path)
    assert read.processes[1] == "rank 1: no log"
    assert read.other["missing"] == ["no log of rank 1"]


def test_a_call_is_a_slice_with_what_it_was_called_with_and_what_it_returned(tmp_path: Path) -> None:
    read = drawn(
        tmp_path,
        [
            {"kind": "event_round", "phase": "call", "round": 7, "writes_done": 2},
            {"kind": "match", "rid": "r1"},
            {"kind": "event_round", "phase": "return", "round": 7, "writes_agreed": 1},
        ],
    )
    found = read.slice("event_round")
    assert (found.start, found.end) == (0, 2000)
    assert {name: found.args[name] for name in found.args if name != "writes_agreed"} == {
        "seq": 1,
        "step": 0,
        "round": 7,
        "writes_done": 2,
        "return_seq": 3,
        "return_step": 0,
    }
    assert found.args["writes_agreed"] == 1


def test_a_decision_is_an_instant_in_the_slice_of_its_step(tmp_path: Path) -> None:
    read = drawn(tmp_path, [{"kind": "write_backup", "step": 41, "node": 17, "host_pages_free": 5}])
    (decision, end) = read.instants
    assert (decision["name"], decision["cat"], decision["s"]) == ("write_backup", "decision", "t")
    assert decision["args"] == {"seq": 1, "step": 41, "node": 17, "host_pages_free": 5}
    assert end["name"] == "log ends: completed"
    assert read.names("scheduler") == ["step 41"]


def test_a_step_ends_with_its_last_record(tmp_path: Path) -> None:
    read = drawn(
        tmp_path,
        [
            {"kind": "match", "step": 1, "time_ns": 0},
            {"kind": "match", "step": 1, "time_ns": 10},
            {"kind": "match", "step": 2, "time_ns": 90},
        ],
    )
    assert [(step.name, step.start, step.end) for step in read.slices] == [
        ("step 1", 0, 10),
        ("step 2", 90, 90),
    ]


def test_times_are_exact_from_the_first_header_on(tmp_path: Path) -> None:
    late = 2**62
    read = drawn(tmp_path, [{"kind": "match", "step": 1, "time_ns": late + 1}])
    assert late + 1 == read.slice("step 1").start


def test_a_clock_that_runs_backwards_stands_still(tmp_path: Path) -> None:
    read = drawn(tmp_path, [{"kind": "match", "time_ns": 500}, {"kind": "match", "time_ns": -3}])
    assert [each["time_ns"] for each in read.instants[:2]] == [500, 500]
    assert read.instants[1]["args"]["log_time_ns"] == -3


def test_a_copy_is_moving_then_done_and_not_acked(tmp_path: Path) -> None:
    read = drawn(
        tmp_path,
        [
            {"kind": "transfer_enqueue", "op": 7, "queue": "write", "nodes": [3], "pages": 4},
            {"kind": "transfer_done", "op": 7, "queue": "write"},
            {"kind": "transfer_ack", "op": 7, "queue": "write", "nodes": [3], "locks": [0], "pages": 4},
        ],
    )
    assert read.names("queue write") == ["write 7", "moving", "done, not acked"]
    assert [(each.start, each.end) for each in read.slices if each.thread == "queue write"] == [
        (0, 2000),
        (0, 1000),
        (1000, 2000),
    ]
    assert tuple(read.slice("write 7").args[name] for name in ("seq", "ack_seq", "locks")) == (1, 3, [0])
    assert read.slice("moving").args["done_seq"] == 2


def test_an_arrow_goes_from_enqueue_to_done_to_ack(tmp_path: Path) -> None:
    read = drawn(
        tmp_path,
        [
            {"kind": "transfer_enqueue", "op": 7, "queue": "write"},
            {"kind": "transfer_done", "op": 7, "queue": "write", "step": 1},
            {"kind": "transfer_ack", "op": 7, "queue": "write", "step": 2},
        ],
    )
    (points,) = read.arrows.values()
    assert [each.name for each in points] == ["step 0", "done, not acked", "step 2"]


def test_copies_that_overlap_have_rows_of_their_own_and_rows_are_used_again(tmp_path: Path) -> None:
    records = [
        {"kind": f"transfer_{event}", "op": op, "queue": "load"}
        for event, op in (("enqueue", 1), ("enqueue", 2), ("ack", 1), ("enqueue", 3), ("ack", 2), ("ack", 3))
    ]
    read = drawn(tmp_path, records)
    rows = {each.name: each.thread for each in read.slices if each.depth == 0 and "load" in each.name}
    assert rows == {"load 1": "queue load", "load 2": "queue load 2", "load 3": "queue load"}
    assert read.counters[0, "queue load", "in flight"] == [1, 2, 1, 2, 1, 0]


def test_a_prefetch_passes_two_queues(tmp_path: Path) -> None:
    read = drawn(
        tmp_path,
        [
            {"kind": "prefetch_submit", "op": 4, "outcome": "declined"},
            {"kind": "prefetch_submit", "op": 5, "outcome": "issued"},
            {"kind": "query", "op": 5},
            {"kind": "prefetch_hit", "op": 5, "tokens": 64},
            {"kind": "progress", "op": 5, "ack": "progress"},
            {"kind": "progress", "op": 5, "ack": "completed"},
            {"kind": "prefetch_ack", "op": 5, "ack": "completed"},
        ],
    )
    assert read.names("queue prefetch") == ["prefetch 5", "asking", "done, not acked"]
    assert read.names("queue read") == ["read 5", "reading", "done, not acked"]
    assert len([each for each in read.instants if each["cat"] != "log"]) == 7


def test_a_request_waits_then_runs(tmp_path: Path) -> None:
    read = drawn(
        tmp_path,
        [
            {"kind": "request", "rid": "r1", "input_tokens": 9},
            {"kind": "admit", "rid": "r1", "verdict": "no_room"},
            {"kind": "admit", "rid": "r1", "verdict": "admitted"},
            {"kind": "retract", "rid": "r1"},
            {"kind": "admit", "rid": "r1", "verdict": "admitted"},
            {"kind": "finish", "rid": "r1", "reason": "stop"},
        ],
    )
    assert read.names("requests") == ["r1", "waiting", "running", "waiting, retracted", "running"]
    assert (
        read.slice("r1").start,
        read.slice("r1").end,
        read.slice("r1").args["reason"],
    ) == (0, 5000, "stop")
    assert not any("open" in each.args for each in read.slices)


def test_requests_are_drawn_on_the_first_rank_of_a_replica_only(tmp_path: Path) -> None:
    request = [{"kind": "request", "rid": "r1"}, {"kind": "finish", "rid": "r1"}]
    write_run(
        tmp_path, {0: request, 1: request, 2: request, 3: request}, sizes={"dp": 2, "tp": 2}, kinds=KINDS
    )
    assert [each.rank for each in trace(tmp_path).slices if each.name == "r1"] == [0, 2]


def test_a_forward_lasts_from_its_batch_to_its_record(tmp_path: Path) -> None:
    read = drawn(
        tmp_path,
        [
            {"kind": "batch", "mode": "extend", "rids": ["r1"], "tokens": 64},
            {"kind": "meeting", "phase": "enter", "op": "all_reduce", "purpose": "forward"},
            {"kind": "meeting", "phase": "leave", "op": "all_reduce", "purpose": "forward"},
            {"kind": "forward", "mode": "extend", "tokens": 64, "computed_tokens": [64]},
        ],
    )
    assert (read.slice("forward extend").start, read.slice("forward extend").end) == (0, 3000)
    assert read.slice("forward extend").args["computed_tokens"] == [64]
    assert read.slice("all_reduce forward").depth == 2


def test_a_collective_is_one_arrow_in_the_order_in_which_ranks_came(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        {0: [meet("enter", 30), meet("leave", 40)], 1: [meet("enter", 10), meet("leave", 41)]},
        kinds=[MEETING],
        groups=GROUPS,
    )
    (points,) = trace(tmp_path).arrows.values()
    assert [(each.name, each.rank) for each in points] == [("all_reduce events", 1), ("all_reduce events", 0)]


def test_a_send_is_an_arrow_to_its_receive(tmp_path: Path) -> None:
    sent: dict[str, Any] = {"group": "pp0/main:0", "op": "send", "peer": 1}
    received: dict[str, Any] = {"group": "pp0/main:0", "op": "recv", "peer": 0}
    write_run(
        tmp_path,
        {
            0: [meet("enter", 10, **sent), meet("leave", 11, **sent)],
            1: [meet("enter", 5, **received), meet("leave", 12, **received)],
        },
        kinds=[MEETING],
    )
    assert [[each.rank for each in points] for points in trace(tmp_path).arrows.values()] == [[1, 0]]


def test_a_hang_is_open_to_the_end_of_the_log(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        {
            0: [{"kind": "event_round", "phase": "call", "time_ns": 5}, meet("enter", 10)],
            1: [{"kind": "match", "time_ns": 90}],
        },
        kinds=KINDS,
        groups=GROUPS,
        outcome="hung",
    )
    read = trace(tmp_path)
    waits = [read.slice(name) for name in ("step 0", "event_round", "all_reduce events")]
    assert [(each.args.get("open"), each.end) for each in waits] == [(True, 10)] * 3
    assert [each["name"] for each in read.instants if each["cat"] == "log"] == ["log ends: hung"] * 2


def test_what_is_under_way_when_a_log_is_cut_is_open(tmp_path: Path) -> None:
    read = drawn(
        tmp_path,
        [
            {"kind": "request", "rid": "r1"},
            {"kind": "transfer_enqueue", "op": 1, "queue": "write"},
            {"kind": "transfer_done", "op": 1, "queue": "write"},
        ],
        outcome=None,
    )
    assert [each.name for each in read.slices if each.args.get("open")] == [
        "step 0",
        "r1",
        "waiting",
        "write 1",
        "done, not acked",
    ]
    assert {2000} == {each.end for each in read.slices if each.args.get("open")}
    (said,) = [each for each in read.instants if each["cat"] == "log"]
    assert (
        said["name"],
        said["args"]["why"],
    ) == ("log is cut", "rank0000.scheduler.000.jsonl: cut behind record 3, without a trailer")
    assert [said["args"]["why"]] == read.other["missing"]


def test_a_torn_line_ends_the_trace_of_that_rank_alone(tmp_path: Path) -> None:
    write_run(tmp_path, {0: [{"kind": "match"}] * 3, 1: [{"kind": "match"}] * 3}, kinds=KINDS)
    path = tmp_path / "rank0001.scheduler.000.jsonl"
    path.write_bytes(path.read_bytes()[:-90])
    read = trace(tmp_path)
    assert [
        sum(each["name"] == "match" and each["pid"] == rank for each in read.instants) for rank in (0, 1)
    ] == [3, 2]
    assert "the line was not finished" in read.other["missing"][0]


def test_a_return_whose_call_is_gone_is_an_instant(tmp_path: Path) -> None:
    read = drawn(tmp_path, [{"kind": "insert", "phase": "return", "rid": "r1"}])
    assert read.instants[0]["name"] == "insert return"


def test_a_call_that_never_returned_ends_with_the_call_around_it(tmp_path: Path) -> None:
    read = drawn(
        tmp_path,
        [
            {"kind": "event_round", "phase": "call"},
            {"kind": "insert", "phase": "call"},
            {"kind": "event_round", "phase": "return"},
        ],
    )
    assert (read.slice("insert").end, read.slice("insert").args["open"]) == (2000, True)
    assert "open" not in read.slice("event_round").args


def test_a_call_that_raised_ends_there_and_says_what(tmp_path: Path) -> None:
    read = drawn(
        tmp_path,
        [{"kind": "insert", "phase": "call"}, {"kind": "insert", "phase": "raise", "error": "KeyError"}],
    )
    assert (read.slice("insert").end, read.slice("insert").args["error"]) == (1000, "KeyError")
    assert read.slice("insert").args["raise_seq"] == 2


def test_a_call_over_the_end_of_a_step_keeps_the_step_open(tmp_path: Path) -> None:
    read = drawn(
        tmp_path,
        [
            {"kind": "insert", "phase": "call", "step": 1},
            {"kind": "insert", "phase": "return", "step": 2},
            {"kind": "match", "step": 3},
        ],
    )
    assert read.names("scheduler") == ["step 1", "insert", "step 3"]


def test_a_call_without_a_return_does_not_hold_up_the_steps_for_ever(tmp_path: Path) -> None:
    records: list[Fields] = [
        {"kind": "insert", "phase": "call", "step": 1},
        *({"kind": "match", "step": n} for n in (2, 3, 4)),
    ]
    read = drawn(tmp_path, records)
    assert read.names("scheduler") == ["step 1", "insert", "step 3", "step 4"]
    assert [(each.end, each.args.get("open")) for each in read.slices[:3]] == [
        (1000, True),
        (1000, True),
        (2000, None),
    ]


def test_an_ack_whose_enqueue_is_gone_is_an_instant(tmp_path: Path) -> None:
    read = drawn(tmp_path, [{"kind": "transfer_ack", "op": 1, "queue": "write"}])
    assert read.instants[0]["name"] == "transfer_ack"
    assert not read.counters


def test_an_op_that_is_enqueued_twice_does_not_cross_itself(tmp_path: Path) -> None:
    read = drawn(tmp_path, [{"kind": "transfer_enqueue", "op": 1, "queue": "write"}] * 2)
    assert [each.args["open"] for each in read.named("write 1")] == [True, True]
    assert sorted({each.thread for each in read.named("write 1")}) == ["queue write"]


def test_a_lane_shows_what_it_is_at(tmp_path: Path) -> None:
    states = [("idle", None), ("backend", 1), ("collective", 1), ("idle", None), ("backend", 2)]
    records = [{"kind": LANE_STATE, "state": state, "op": op} for state, op in states]
    read = drawn(tmp_path, records, lane="io", outcome="hung")
    assert [(each.name, each.start, each.end, each.args["op"]) for each in read.slices] == [
        ("backend", 1000, 2000, 1),
        ("collective", 2000, 3000, 1),
        ("backend", 4000, 4000, 2),
    ]
    assert ["open" in each.args for each in read.slices] == [False, False, True]


def test_an_anomaly_is_drawn_over_all_ranks(tmp_path: Path) -> None:
    assert drawn(tmp_path, [{"kind": "wrong_page", "slot": 3}]).instants[0]["s"] == "g"


def test_a_kind_that_nobody_declared_is_drawn(tmp_path: Path) -> None:
    read = drawn(tmp_path, [{"kind": "gossip", "count": 3}, {"kind": "future", "phase": "call"}])
    assert (read.instants[0]["name"], read.instants[0]["cat"]) == ("gossip", "undeclared")
    assert "future" in read.names("scheduler")


def test_pages_are_counted_when_they_change(tmp_path: Path) -> None:
    records = [{"kind": "match", "device_pages_free": free, "host_pages_free": None} for free in (9, 9, 7)]
    assert drawn(tmp_path, records).counters == {(0, "pages free", "device"): [9, 7]}


def test_long_values_are_cut(tmp_path: Path) -> None:
    record = {"kind": "insert", "phase": "return", "new_digests": "ab" * 4000, "node": 2, "rids": ["r"] * 900}
    args = drawn(tmp_path, [record]).instants[0]["args"]
    assert args["new_digests"][120:] == "... (8,000 characters)"
    assert (len(args["rids"]), args["rids"][-1]) == (17, "... (900 items)")
    assert args["node"] == 2


@pytest.mark.parametrize("value", [None, [], {}, [[1]], "x", 3.5, -1, 2**80, True])
def test_fields_of_any_type_leave_a_readable_trace(tmp_path: Path, value: Any) -> None:
    names = (
        "op",
        "queue",
        "rid",
        "group",
        "group_seq",
        "purpose",
        "state",
        "mode",
        "tokens",
        "peer",
        "verdict",
    )
    records = [
        {"kind": kind.name, **({"phase": phase} if phase else {}), **dict.fromkeys(names, value)}
        for kind in KINDS
        for phase in ("", "call", "enter", "leave", "return")
    ]
    assert drawn(tmp_path, records).count > len(records)


def test_clocks_that_started_apart_are_brought_together_by_their_collectives(tmp_path: Path) -> None:
    """Rank 1's clock began 1,000 later: its calls seem to end before rank 0 had come."""
    ranks = {
        0: [
            meet(phase, at, seq)
            for seq, enter in enumerate((2000, 3000, 4000))
            for phase, at in (("enter", enter), ("leave", enter + 50))
        ],
        1: [
            meet(phase, at, seq)
            for seq, enter in enumerate((990, 1990, 2900))
            for phase, at in (("enter", enter), ("leave", 1051 + 1000 * seq))
        ],
    }
    write_run(tmp_path, ranks, kinds=[MEETING], groups=GROUPS)
    read = trace(tmp_path)
    assert read.other["clock_shifts_ns"] == {"0": 0, "1": 999}
    starts = [each.start + read.other["zero_ns"] for each in read.named("all_reduce events", 1)]
    assert starts == [1989, 2989, 3899]


@pytest.mark.parametrize("seed", range(40))
def test_no_order_of_records_makes_a_trace_that_can_not_be_read(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed).choice
    kinds = [
        *(kind.name for kind in KINDS),
        *["meeting", "insert", "batch", "forward", LANE_STATE] * 5,
        *MOVED * 5,
    ]
    values: dict[str, tuple[Any, ...]] = {
        "kind": tuple(kinds),
        "phase": ("", "", "call", "return", "raise", "enter", "leave"),
        "step": (0, 0, 1, 2),
        "time_ns": (0, 1, 5, 5, 1000),
        "op": (1, 2, "recv"),
        "queue": ("write", "load"),
        "rid": ("a", "b"),
        "verdict": ("admitted", "no_room"),
        "outcome": ("issued",),
        "ack": ("completed",),
        "tokens": (0, 5),
        "group": ("tp0/events", "other"),
        "group_seq": (0, 1, 2),
        "peer": (None, 0, 1),
        "state": ("idle", "backend", "collective"),
    }
    for rank in (0, 1):
        for lane in ("scheduler", "io"):
            records = [{name: choose(those) for name, those in values.items()} for _ in range(60)]
            outcome = choose(("completed", "hung", None))
            write_lane(
                tmp_path,
                records,
                rank=rank,
                lane=lane,
                sizes=TWO,
                kinds=KINDS,
                groups=GROUPS,
                outcome=outcome,
            )
    assert trace(tmp_path).slices


def test_two_exports_of_one_run_are_equal(runs: Path) -> None:
    first, second = io.BytesIO(), io.BytesIO()
    write_perfetto(find_logs(runs / "hung"), first)
    write_perfetto(find_logs(runs / "hung"), second)
    assert first.getvalue() == second.getvalue()


def test_every_record_of_a_real_run_is_in_its_trace(runs: Path) -> None:
    run = find_logs(runs / "twin")
    read = trace(runs / "twin")
    seqs = {
        (each.rank, value)
        for each in read.slices
        for name, value in each.args.items()
        if name.endswith("seq")
    }
    seqs |= {(each["pid"], each["args"].get("seq")) for each in read.instants}
    # A collective's leave is the end of its slice, and nothing else.
    wanted = {
        (lane.rank, record["seq"])
        for lane in run.lanes
        for record in lane.records()
        if record.get("phase") != "leave"
    }
    assert set() == wanted - seqs
    assert not [each for each in read.slices if "open" in each.args]


def test_a_block_that_is_spoilt_is_a_gap_in_the_trace(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "twin", tmp_path / "run")
    spoil(tmp_path / "run" / "rank0001.scheduler.001.jsonl")
    read = trace(tmp_path / "run")
    (gap,) = [each for each in read.instants if each["name"] == "records are lost"]
    assert gap["pid"] == 1
    assert [gap["args"]["why"]] == read.other["missing"]
    steps = {int(each.name[5:]) for each in read.slices if each.name.startswith("step ") and each.rank == 1}
    assert 0 in steps
    assert max(steps) > len(steps)
    assert sum(each["name"] == "log ends: completed" for each in read.instants) == 4


def test_a_hung_run_shows_who_waits_where(runs: Path) -> None:
    read = trace(runs / "hung")
    waits = {
        (each.rank, each.args["group"], each.args["group_seq"], each.name)
        for each in read.slices
        if "open" in each.args and "group" in each.args
    }
    assert {0, 1, 2, 3} == {rank for rank, *_ in waits}
    assert sum(each["name"] == "log ends: hung" for each in read.instants) == 4


def test_it_shrinks_well(runs: Path) -> None:
    """Formats 3.12: some 15 bytes an event, packed."""
    out = io.BytesIO()
    count = write_perfetto(find_logs(runs / "twin"), out)
    assert len(gzip.compress(out.getvalue(), mtime=0)) < 30 * count.events
