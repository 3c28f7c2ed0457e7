"""Where a lane is and what stands around a link, read from files that are still written."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest

from consensus_checker.live_digests import ChainDigests
from consensus_checker.live_stand import Lines, Links, declared, inside, lines_around, names_of
from tests.support.live import CALL, KINDS, MATCH, MEET, STATE
from tracer.calls import traced
from tracer.record import Kind, Place, header
from tracer.segments import SegmentSink
from tracer.tracer import Tracer

AXES = ("tp",)
BY_NAME = {kind.name: kind for kind in KINDS}


def lane(folder: Path, *, has_steps: bool = False, limit_bytes: int | None = None) -> Tracer:
    place = Place(0, {"tp": 0}, {"tp": 2}, {"tp0/main": [0, 1]})
    head = header(place, KINDS, lane="scheduler", run_id="stand", tool_version="test")
    sink = SegmentSink(folder, 0, "scheduler", limit_bytes=limit_bytes)
    return Tracer(sink, head, time.monotonic_ns, has_steps=has_steps)


def around(folder: Path, tracer: Tracer, digests: ChainDigests, place: int) -> Lines | None:
    first, links = digests.links(0, place + 2)
    chain = Links(first, names_of(links), place - 1, place + 2)
    return lines_around(folder, 0, "scheduler", BY_NAME, AXES, chain)


def test_a_lane_without_a_file_is_nowhere(tmp_path: Path) -> None:
    assert inside(tmp_path, 0, "scheduler", {}) is None
    assert inside(tmp_path / "none", 0, "scheduler", {}) is None


def test_a_lane_is_in_the_calls_that_have_not_returned(tmp_path: Path) -> None:
    tracer = lane(tmp_path)
    seen = []

    def look(rid: str) -> int:
        seen.append(inside(tmp_path, 0, "scheduler", {}))
        return 0

    inner = traced(tracer, CALL, params=["rid"], result=["result"])(look)

    def both(rid: str) -> int:
        return inner(rid) + inner("second")

    traced(tracer, CALL, params=["rid"], result=["result"])(both)("first")
    calls = [[call["rid"] for call in found.calls] for found in seen if found is not None]
    assert calls == [["first", "first"], ["first", "second"]]
    after = inside(tmp_path, 0, "scheduler", {})
    assert after is not None and after.calls == [] and after.last["phase"] == "return"


def test_a_lane_is_in_the_meeting_that_it_entered_last_until_it_does_anything_else(tmp_path: Path) -> None:
    tracer = lane(tmp_path)
    enter, leave = tracer.emitter(MEET, phase="enter"), tracer.emitter(MEET, phase="leave")
    groups = {"tp0/main": [0, 1]}
    enter("tp0/main", 7, "all_reduce", 1, "drain")
    found = inside(tmp_path, 0, "scheduler", groups)
    assert found is not None and found.meeting is not None
    assert (found.meeting["group_seq"], found.members, found.entered) == (7, [0, 1], {"tp0/main": 7})
    leave("tp0/main", 7, "all_reduce", 1, "drain")
    found = inside(tmp_path, 0, "scheduler", groups)
    assert found is not None and found.meeting is None and found.left == {"tp0/main": 7}
    enter("tp0/main", 8, "all_reduce", 1, "drain")
    tracer.emitter(MATCH)("r1", 1, 5)
    found = inside(tmp_path, 0, "scheduler", groups)
    assert found is not None and found.meeting is None


def test_a_lane_is_in_the_state_that_it_told_last(tmp_path: Path) -> None:
    tracer = lane(tmp_path)
    tracer.emitter(STATE)("backend", 17)
    found = inside(tmp_path, 0, "scheduler", {})
    assert found is not None and (found.state, found.last["op"]) == ("backend", 17)
    tracer.emitter(MATCH)("r1", 1, 5)
    found = inside(tmp_path, 0, "scheduler", {})
    assert found is not None and found.state == ""


def test_kinds_that_were_declared_later_are_those_of_the_newest_file(tmp_path: Path) -> None:
    tracer = lane(tmp_path)
    assert "late" not in declared(tmp_path, 0, "scheduler")
    tracer.declare([Kind("late", "decision", agree=AXES, compared=("rid",))])
    assert declared(tmp_path, 0, "scheduler")["late"]["compared"] == ["rid"]


@pytest.mark.parametrize("place", [5, 3_000, 6_100])
def test_the_lines_around_a_link_are_those_that_made_it(place: int, tmp_path: Path) -> None:
    tracer = lane(tmp_path)
    (chain,) = [chain for axes, chain in tracer.chains.items() if axes == AXES]
    digests = ChainDigests(chain)
    match, state = tracer.emitter(MATCH), tracer.emitter(STATE)
    call = traced(tracer, CALL, params=["rid"], result=["result"])(lambda rid: 0)
    for number in range(0, 6_200, 2):
        match(f"r{number}", 64, 5)
        # Neither a record nor its link for others, and two records with one link.
        state("idle", 0)
        call(f"r{number + 1}")
        digests.follow()
    found = around(tmp_path, tracer, digests, place)
    assert found is not None
    rids = [rid for line in found.lines if (rid := _rid(line)) is not None]
    # Of a call only the first of its two records has it.
    assert rids[:4] == [f"r{number}" for number in range(place - 1, place + 3)]
    # Three records for two links.
    assert found.records_of == {"tp": (place - 1) // 2 * 3 + (place - 1) % 2}


def _rid(line: bytes) -> str | None:
    rid: str | None = json.loads(line).get("rid")
    return rid


def test_lines_behind_steps_that_were_taken_back_are_found_too(tmp_path: Path) -> None:
    tracer = lane(tmp_path, has_steps=True)
    (chain,) = tracer.chains.values()
    digests = ChainDigests(chain)
    match = tracer.emitter(MATCH)
    for step in range(500):
        tracer.begin_step(step)
        is_idle = 10 <= step < 490
        match("idle" if is_idle else f"r{step}", 64, 5)
        tracer.end_step(is_idle=is_idle)
        digests.follow()
    found = around(tmp_path, tracer, digests, 495)
    assert found is not None
    assert [_rid(line) for line in found.lines][:3] == ["r494", "r495", "r496"]
    assert found.records_of == {"tp": 494}
    # Where the steps themselves are gone there is nothing to show.
    assert around(tmp_path, tracer, digests, 200) is None


def test_a_packed_file_is_read_as_well(tmp_path: Path) -> None:
    tracer = lane(tmp_path)
    (chain,) = tracer.chains.values()
    digests = ChainDigests(chain)
    match = tracer.emitter(MATCH)
    for number in range(3_000):
        match(f"r{number}", 64, 5)
        digests.follow()
    first = tmp_path / "rank0000.scheduler.000.jsonl"
    first.with_name(first.name + ".gz").write_bytes(gzip.compress(first.read_bytes()))
    first.unlink()
    found = around(tmp_path, tracer, digests, 20)
    assert found is not None and _rid(found.lines[0]) == "r19"


def test_a_ring_that_has_dropped_the_place_shows_nothing(tmp_path: Path) -> None:
    tracer = lane(tmp_path, limit_bytes=64 << 10)
    (chain,) = tracer.chains.values()
    digests = ChainDigests(chain)
    match = tracer.emitter(MATCH)
    for number in range(4_000):
        match(f"r{number}", 64, 5)
        digests.follow()
    assert around(tmp_path, tracer, digests, 20) is None


def test_a_spoilt_log_shows_nothing_and_raises_nothing(tmp_path: Path) -> None:
    tracer = lane(tmp_path)
    (chain,) = tracer.chains.values()
    digests = ChainDigests(chain)
    for number in range(50):
        tracer.emitter(MATCH)(f"r{number}", 64, 5)
    digests.follow()
    (path,) = tmp_path.glob("*.000.jsonl")
    path.write_bytes(b"\xff\xfe{]\n" * 100)
    assert around(tmp_path, tracer, digests, 20) is None
    path.write_bytes(b"\x1f\x8b not gzip")
    assert around(tmp_path, tracer, digests, 20) is None
    assert inside(tmp_path, 0, "scheduler", {}) is None
