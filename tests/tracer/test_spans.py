"""A log's records become spans whose ids, ends and words come from the log alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.probes import KINDS
from tests.support.logs import write_lane, write_run
from tracer.log import find_logs
from tracer.record import OWN_KINDS
from tracer.span import Origin, Span, origins
from tracer.spans import LINKED_RANKS_MAX, LaneSpans, spans

Fields = Mapping[str, Any]
GROUPS = {"tp0/main": [0, 1]}


def request(rid: str = "r0", tokens: int = 128, **more: Any) -> dict[str, Any]:
    return {"kind": "request", "rid": rid, "input_tokens": tokens, "order": 0, **more}


def admit(rid: str = "r0", device: int = 0, host: int = 0, storage: int = 0, **more: Any) -> dict[str, Any]:
    tiers = {"device_tokens": device, "host_tokens": host, "storage_tokens": storage}
    return {"kind": "admit", "rid": rid, "verdict": "admitted", **tiers, **more}


def insert(rid: str, tokens: int, new_tokens: int, *between: Fields) -> list[Fields]:
    call = {"kind": "insert", "phase": "call", "rid": rid, "tokens": tokens}
    answer = {"kind": "insert", "phase": "return", "rid": rid, "node": 7, "new_tokens": new_tokens}
    return [call, *between, answer]


def finish(rid: str = "r0", **more: Any) -> dict[str, Any]:
    return {"kind": "finish", "rid": rid, "reason": "stop", "output_tokens": 8, **more}


def backup(node: int) -> dict[str, Any]:
    return {"kind": "write_backup", "node": node, "reason": "threshold", "pages": 1, "tokens": 64}


def transfer(event: str, op: int = 1, queue: str = "write", **more: Any) -> dict[str, Any]:
    return {"kind": f"transfer_{event}", "op": op, "queue": queue, **more}


def meeting(phase: str, seq: int = 0, group: str = "tp0/main", **more: Any) -> dict[str, Any]:
    told = {"axis": "tp", "purpose": "events", "op": "all_reduce", "reduce": "min", "numel": 8, "peer": None}
    return {"kind": "meeting", "phase": phase, **told, "group": group, "group_seq": seq, **more}


def submit(op: int = 5, rid: str = "r0", outcome: str = "issued", **more: Any) -> dict[str, Any]:
    asked = {"rid": rid, "attempt": 0, "op": op, "pages": 2, "tokens": 128}
    return {"kind": "prefetch_submit", **asked, "outcome": outcome, **more}


def read(folder: Path, records: Sequence[Fields], **options: Any) -> list[Span]:
    """The spans of one lane, in the order in which they come."""
    run = find_logs(write_lane(folder, records, **options).parent)
    return [span for _origin, _lane, found in spans(run) for span in found]


def only(found: Sequence[Span], name: str) -> Span:
    (span,) = [span for span in found if span.name == name]
    return span


def test_a_request_says_what_it_used_in_the_conventions_words(tmp_path: Path) -> None:
    records = [
        request(tokens=256, conversation="c0", time_ns=10),
        admit(device=64, host=32, storage=32, time_ns=20),
        {"kind": "forward", "mode": "extend", "rids": ["r0"], "computed_tokens": [128], "time_ns": 30},
        *insert("r0", 256, 128),
        finish(time_ns=40),
    ]
    (span,) = read(tmp_path, records)
    assert (span.name, span.start_ns, span.end_ns, span.is_open) == ("request", 10, 40, False)
    assert span.attributes == {
        "hicache.step": 0,
        "hicache.order": 0,
        "rid": "r0",
        "gen_ai.conversation.id": "c0",
        "gen_ai.usage.input_tokens": 256,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 128,
        "gen_ai.usage.cache_creation.input_tokens": 128,
        "gen_ai.response.finish_reasons": ("stop",),
        "hicache.device.tokens": 64,
        "hicache.host.tokens": 32,
        "hicache.storage.tokens": 32,
        "hicache.computed.tokens": 128,
        "hicache.outcome": "stop",
    }
    assert [(event.name, event.time_ns) for event in span.events] == [("admit", 20), ("prefill", 30)]


def test_tokens_of_an_answer_that_enter_the_tree_are_not_created_of_the_prompt(tmp_path: Path) -> None:
    # 128 of the prompt are there already; of 192 new ones 72 lie behind it.
    records = [request(tokens=248), admit(device=128), *insert("r0", 320, 192), finish()]
    (span,) = read(tmp_path, records)
    assert span.attributes["gen_ai.usage.cache_creation.input_tokens"] == 120


def test_a_request_that_is_retracted_counts_its_first_life(tmp_path: Path) -> None:
    extend = {"kind": "forward", "mode": "extend", "rids": ["r0"], "computed_tokens": [128]}
    retract = {"kind": "retract", "rid": "r0", "attempt": 1, "pages": 2}
    records = [request(), admit(), extend, retract, admit(device=64), extend, finish()]
    (span,) = read(tmp_path, records)
    assert span.attributes["hicache.computed.tokens"] == 128
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 0
    assert [event.name for event in span.events] == ["admit", "prefill", "retract", "admit", "prefill"]


def test_the_ranks_of_a_request_share_its_trace_and_have_spans_of_their_own(tmp_path: Path) -> None:
    records = [request(), finish()]
    run = find_logs(write_run(tmp_path, {0: records, 1: records}))
    first, second = [span for _origin, _lane, found in spans(run) for span in found]
    assert first.trace_id == second.trace_id and first.span_id != second.span_id
    assert (len(first.trace_id), len(first.span_id)) == (32, 16)


def test_another_run_gives_other_ids(tmp_path: Path) -> None:
    (one,) = read(tmp_path / "a", [request(), finish()], run_id="a")
    (other,) = read(tmp_path / "b", [request(), finish()], run_id="b")
    assert one.trace_id != other.trace_id and one.span_id != other.span_id


def test_a_transfer_is_linked_with_the_request_that_it_works_for(tmp_path: Path) -> None:
    records = [
        request(),
        *insert("r0", 64, 64, backup(7)),
        transfer("enqueue", nodes=[7], pages=2, time_ns=10),
        transfer("done", time_ns=20),
        transfer("ack", time_ns=30),
        finish(),
    ]
    found = read(tmp_path, records, config={"page_size_tokens": 64})
    move, asked = only(found, "transfer write"), only(found, "request")
    assert (move.start_ns, move.end_ns) == (10, 30)
    assert [(event.name, event.time_ns) for event in move.events] == [("done", 20)]
    assert [(link.trace_id, link.span_id) for link in move.links] == [(asked.trace_id, asked.span_id)]
    assert [(link.trace_id, link.span_id) for link in asked.links] == [(move.trace_id, move.span_id)]
    told = move.attributes
    assert (told["hicache.op"], told["hicache.tier"], told["hicache.tokens"]) == (
        "write_through",
        "host",
        128,
    )


def test_a_write_that_is_enqueued_after_the_finish_is_linked_too(tmp_path: Path) -> None:
    records = [
        request(),
        *insert("r0", 64, 64, backup(7)),
        finish(time_ns=5),
        transfer("enqueue", nodes=[7], pages=1, time_ns=9),
        transfer("ack", time_ns=10),
    ]
    found = read(tmp_path, records)
    assert [link.span_id for link in only(found, "request").links] == [only(found, "transfer write").span_id]
    assert only(found, "request").end_ns == 5


def test_a_write_that_is_cancelled_holds_no_request_back(tmp_path: Path) -> None:
    records = [
        request(),
        *insert("r0", 64, 64, backup(7)),
        finish(),
        {"kind": "backup_cancel", "node": 7, "pages": 1},
        meeting("enter"),
        meeting("leave"),
    ]
    assert [span.name for span in read(tmp_path, records)] == ["request", "collective all_reduce"]


def test_a_load_back_is_linked_with_its_request(tmp_path: Path) -> None:
    load = {"kind": "load_back", "rid": "r0", "node": 3, "declined": "", "pages": 1, "tokens": 64}
    records = [request(), load, transfer("enqueue", 2, "load", nodes=[3], pages=1), finish()]
    found = read(tmp_path, records)
    assert [link.span_id for link in only(found, "request").links] == [only(found, "transfer load").span_id]


def test_the_ranks_of_a_collective_share_a_trace_and_are_linked(tmp_path: Path) -> None:
    records = [meeting("enter", 4), meeting("leave", 4)]
    run = find_logs(write_run(tmp_path, {0: records, 1: records}, groups=GROUPS))
    first, second = [span for _origin, _lane, found in spans(run) for span in found]
    assert first.trace_id == second.trace_id
    assert [(link.span_id, link.is_remote) for link in first.links] == [(second.span_id, True)]
    assert [(link.span_id, link.is_remote) for link in second.links] == [(first.span_id, True)]


def test_a_send_is_linked_with_the_peers_receive(tmp_path: Path) -> None:
    def lane(op: str, peer: int) -> list[Fields]:
        more = {"op": op, "peer": peer, "group": "pp0/main:0"}
        return [meeting("enter", **more), meeting("leave", **more)]

    run = find_logs(write_run(tmp_path, {0: lane("send", 1), 1: lane("recv", 0)}))
    first, second = [span for _origin, _lane, found in spans(run) for span in found]
    assert (first.name, second.name) == ("collective send", "collective recv")
    assert first.links[0].span_id == second.span_id and second.links[0].span_id == first.span_id


def test_in_a_large_group_each_call_is_linked_with_the_first_ranks(tmp_path: Path) -> None:
    size = LINKED_RANKS_MAX + 1
    records = [meeting("enter"), meeting("leave")]
    lanes = dict.fromkeys((0, 1), records)
    run = find_logs(write_run(tmp_path, lanes, groups={"tp0/main": list(range(size))}, sizes={"tp": size}))
    first, second = [span for _origin, _lane, found in spans(run) for span in found]
    assert [len(first.links), len(second.links)] == [0, 1]
    assert second.links[0].span_id == first.span_id


def test_a_call_that_is_never_left_has_no_end_and_says_so(tmp_path: Path) -> None:
    (span,) = read(tmp_path, [meeting("enter", time_ns=7)], outcome="hung")
    assert (span.start_ns, span.end_ns, span.attributes["hicache.open"]) == (7, None, True)


def test_everything_that_a_cut_log_leaves_open_is_there(tmp_path: Path) -> None:
    records = [
        request(),
        submit(),
        transfer("enqueue", nodes=[1], pages=1),
        {"kind": "storage_backup", "op": 1, "node": 2, "pages": 1},
        meeting("enter"),
        {"kind": "lane_state", "state": "backend", "op": 5},
    ]
    found = read(tmp_path, records, outcome=None)
    names = ["collective all_reduce", "store", "transfer write", "storage backup", "prefetch", "request"]
    assert [(span.name, span.end_ns) for span in found] == [(name, None) for name in names]


def test_what_was_begun_before_a_ring_does_not_get_a_start(tmp_path: Path) -> None:
    records = [meeting("leave", 3), transfer("ack"), finish(), {"kind": "storage_ack", "op": 1}]
    assert read(tmp_path, records) == []


def test_a_call_that_is_entered_twice_is_two_spans_with_two_ids(tmp_path: Path) -> None:
    found = read(tmp_path, [meeting("enter"), meeting("enter", time_ns=5), meeting("leave", time_ns=9)])
    assert [(span.start_ns, span.end_ns) for span in found] == [(0, None), (5, 9)]
    assert len({span.span_id for span in found}) == 2


def test_a_rid_that_comes_again_is_another_span_of_its_trace(tmp_path: Path) -> None:
    found = read(tmp_path, [request(), finish(), request(time_ns=3), finish(time_ns=4)])
    assert len({span.span_id for span in found}) == 2 and len({span.trace_id for span in found}) == 1


def test_a_prefetch_is_a_child_of_its_request_and_tells_its_turns(tmp_path: Path) -> None:
    records = [
        request(),
        submit(time_ns=1),
        {
            "kind": "prefetch_hit",
            "op": 5,
            "rid": "r0",
            "outcome": "allocated",
            "hit_tokens": 128,
            "tokens": 64,
        },
        {"kind": "prefetch_ack", "op": 5, "ack": "progress", "tokens": 64},
        {"kind": "prefetch_poll", "op": 5, "rid": "r0", "verdict": "end", "policy": "timeout"},
        {
            "kind": "prefetch_insert",
            "op": 5,
            "rid": "r0",
            "outcome": "loaded",
            "completed_tokens": 64,
            "matched_tokens": 0,
            "loaded_tokens": 64,
            "time_ns": 6,
        },
        finish(),
    ]
    found = read(tmp_path, records)
    ahead, asked = only(found, "prefetch"), only(found, "request")
    assert (ahead.parent_id, ahead.trace_id) == (asked.span_id, asked.trace_id)
    assert (ahead.start_ns, ahead.end_ns) == (1, 6)
    assert [event.name for event in ahead.events] == ["hit", "ack", "ended_by_poll"]
    told = ahead.attributes
    assert (told["hicache.outcome"], told["hicache.loaded.tokens"]) == ("loaded", 64)
    assert [link.span_id for link in asked.links] == [ahead.span_id]


@pytest.mark.parametrize(
    ("record", "outcome"),
    [
        ({"kind": "prefetch_hit", "op": 5, "outcome": "miss", "hit_tokens": 0, "tokens": 0}, "miss"),
        (
            {"kind": "prefetch_outcome", "rid": "r0", "attempt": 0, "outcome": "cancelled", "tokens": 128},
            "cancelled",
        ),
    ],
)
def test_a_prefetch_ends_where_nothing_more_comes_of_it(tmp_path: Path, record: Fields, outcome: str) -> None:
    ahead = only(read(tmp_path, [request(), submit(), {**record, "time_ns": 9}, finish()]), "prefetch")
    assert (ahead.end_ns, ahead.attributes["hicache.outcome"]) == (9, outcome)


def test_a_prefetch_that_is_declined_is_a_moment_of_its_request(tmp_path: Path) -> None:
    (span,) = read(tmp_path, [request(), submit(0, outcome="declined_too_short"), finish()])
    (event,) = span.events
    assert (event.name, event.attributes["hicache.outcome"]) == ("prefetch_declined", "declined_too_short")


def test_what_a_background_lane_asks_the_store_is_a_span_of_that_lane(tmp_path: Path) -> None:
    records = [
        {"kind": "lane_state", "state": "backend", "op": 5, "time_ns": 3},
        {"kind": "lane_state", "state": "idle", "op": None, "time_ns": 8},
    ]
    (span,) = read(tmp_path, records, lane="io")
    assert (span.name, span.start_ns, span.end_ns) == ("store", 3, 8)
    assert (span.attributes["hicache.op_id"], span.attributes["hicache.lane"]) == (5, "io")


def test_free_text_never_becomes_an_attribute(tmp_path: Path) -> None:
    text = "what the user has typed"
    words = ("purpose", "op", "reduce", "axis", "group")
    records = [
        request(text, conversation=text, namespace=text),
        admit(text),
        {"kind": "abort", "rid": text, "place": text},
        meeting("enter", **dict.fromkeys(words, text)),
        submit(rid=text),
        {"kind": "prefetch_hit", "op": 5, "outcome": text, "tokens": 0},
        {"kind": "lane_state", "state": "backend", "op": text},
        {"kind": "wrong_page", "rid": text, "found": text},
        transfer("enqueue", queue=text),
        finish(text, reason=text),
    ]
    found = read(tmp_path, records, config={"secret": text})
    assert {span.name for span in found} == {"request", "prefetch", "store", "collective unknown"}
    assert "typed" not in repr(found)


def test_a_wall_clock_of_the_side_file_makes_unix_time(tmp_path: Path) -> None:
    write_run(tmp_path, {0: [request(time_ns=5), finish(time_ns=9)], 1: []})
    for rank, start in ((0, 2_000), (1, 1_000)):
        meta = {"host": "node-a", "pid": 77, "wall_clock_ns": start, "monotonic_ns": 1}
        (tmp_path / f"rank000{rank}.meta.json").write_text(json.dumps(meta))
    ((origin, _lane, found), _) = [(o, lane, list(s)) for o, lane, s in spans(find_logs(tmp_path))]
    # Both ranks are one process, and so one clock.
    assert [(span.start_ns, span.end_ns) for span in found] == [(1_005, 1_009)]
    assert (origin.instance, origin.attributes["hicache.time_offset_ns"]) == ("node-a:77", 1_000)


@pytest.mark.parametrize(
    "meta",
    ["", "[]", '{"host":"a b","pid":1}', '{"host":"a","pid":-1}', '{"host":"a","pid":"1"}', "[" * 9999],
)
def test_a_side_file_that_can_not_be_believed_is_none(tmp_path: Path, meta: str) -> None:
    (tmp_path / "rank0000.meta.json").write_text(meta)
    write_lane(tmp_path, [])
    (origin,) = origins(find_logs(tmp_path)).values()
    assert (origin.instance, origin.time_offset_ns) == ("rank:0", 0)


def test_a_time_that_can_not_be_one_is_unknown(tmp_path: Path) -> None:
    (span,) = read(tmp_path, [request(time_ns=-5), finish(time_ns=2**63 - 1)])
    assert (span.start_ns, span.end_ns) == (0, 2**63 - 1)


NASTY = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        3,
        2**63 - 1,
        2**70,
        1.5,
        "",
        "x",
        "two words",
        "\ud800",
        [],
        ["x", 3, None],
        [[]],
        {},
    ]
)
FIELDS = sorted({field for kind in (*KINDS, *OWN_KINDS) for field in kind.fields})
USUAL = {"rid": "r0", "op": 5, "queue": "write", "group": "tp0/main", "group_seq": 1, "node": 7}


@st.composite
def hostile_records(draw: st.DrawFn) -> list[dict[str, Any]]:
    kinds = [kind.name for kind in KINDS] + ["no_such_kind"]
    records = []
    for _ in range(draw(st.integers(1, 30))):
        usual = draw(st.dictionaries(st.sampled_from(sorted(USUAL)), st.just(None)))
        record: dict[str, Any] = {name: USUAL[name] for name in usual}
        record |= draw(st.dictionaries(st.sampled_from(FIELDS), NASTY, max_size=6))
        record["kind"] = draw(st.sampled_from(kinds))
        record["phase"] = draw(st.sampled_from(["call", "return", "enter", "leave", ""]))
        record |= {"verdict": "admitted", "outcome": "issued"} if draw(st.booleans()) else {}
        records.append(record | draw(st.fixed_dictionaries({"seq": NASTY, "step": NASTY, "time_ns": NASTY})))
    return records


@given(hostile_records())
@settings(max_examples=80, deadline=None)
def test_no_record_raises(records: list[dict[str, Any]]) -> None:
    origin = Origin("run-a", 0, "rank:0", 0, "", {})
    builder = LaneSpans(origin, _lane())
    for record in records:
        builder.feed(record)
    for span in (*builder.take(), *builder.finish()):
        for value in (
            *span.attributes.values(),
            *(v for event in span.events for v in event.attributes.values()),
        ):
            assert type(value) in (int, bool, str, tuple)
            assert type(value) is not int or abs(value) < 2**63
        assert 0 <= span.start_ns < 2**63 and (span.end_ns is None or 0 <= span.end_ns < 2**63)


def _lane() -> Any:
    from tests.support.logs import SMALL_KINDS, place
    from tracer.log import LaneLog, Segment
    from tracer.record import header

    told = header(place(), SMALL_KINDS, lane="scheduler", run_id="run-a", tool_version="test")
    return LaneLog([Segment(Path("x"), 0, {"seq": 0, **told})])
