"""Whole verdicts: coverage, several runs, stalls, crashes, and the shape of the document."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import consensus_checker
from consensus_checker.check import check
from consensus_checker.finding import Finding
from consensus_checker.verdict import EXIT_CODES
from tests.support.history import history, lanes

SCHEMA = json.loads((Path(consensus_checker.__file__).parent / "verdict.schema.json").read_text())

HUNG = """
    0  match:r1=64  backup:17=64{host_pages_free=5}  match:r2=0  |  round?  events!  #hung
    1  match:r1=64  backup:17=64{host_pages_free=5}  match:r2=0  |  round?  events!  #hung
    2  match:r1=64  backup:17=64{host_pages_free=5}  match:r2=0  |  round?  events!  #hung
    3  match:r1=64  backup:17=0{host_pages_free=0}   match:r2=0  |  main!  #hung
"""
STALLED = "0 match:r1=64 events! #hung\n1 match:r1=64 events! #hung\n2 match:r1=64 #hung"


def test_nothing_compared_is_never_consistent() -> None:
    assert (check([]).kind, check([]).code) == ("nothing_compared", 4)
    assert check(history("0 match:r1=64")).kind == "nothing_compared"


def test_a_missing_rank_is_named_and_forbids_consistent() -> None:
    verdict = check(history("0 match:r1=64\n2 match:r1=64", world_size=3))
    assert (verdict.kind, verdict.coverage.missing, verdict.finding.silent) == ("incomplete", (1,), (1,))


def test_a_log_of_another_run_counts_as_missing_and_is_named() -> None:
    text = "0 match:r1=64\n1 match:r1=64\n2 match:r1=0"
    verdict = check(history(text, runs={2: "run-b"}))
    assert (verdict.kind, verdict.coverage.missing) == ("incomplete", (2,))
    assert verdict.coverage.other_runs == ("rank0002.scheduler.000.jsonl",)


def test_a_restarted_rank_is_not_compared_with_the_attempt_before() -> None:
    one, two, three = lanes("0 match:r1=64\n1 match:r1=64\n2 match:r1=0")
    restarted = replace(three, header={**three.header, "attempt": 1})
    assert (check([one, two, restarted]).kind, check([one, two, three]).kind) == ("incomplete", "divergence")


def test_lanes_are_compared_each_with_its_own_kind() -> None:
    scheduler = lanes("0 match:r1=64\n1 match:r1=64")
    io = [replace(lane, lane="io") for lane in lanes("0 finish:r1=8\n1 finish:r1=9")]
    first = check([*scheduler, *io]).finding.first_divergence
    assert first is not None
    assert (first.lane, first.call) == ("io", "finish")


def test_a_lane_that_one_rank_lacks_forbids_consistent() -> None:
    scheduler = lanes("0 match:r1=64\n1 match:r1=64")
    io = [replace(lane, lane="io") for lane in lanes("0 finish:r1=8\n1 finish:r1=8")]
    verdict = check([*scheduler, io[0]])
    assert (verdict.kind, verdict.coverage.truncated) == ("incomplete", (1,))


def test_a_hang_that_only_the_odd_rank_sees_is_shown_where_it_waits() -> None:
    text = "0 match:r1=64 #hung\n1 match:r1=64 #hung\n2 match:r1=0 events! #hung"
    finding = check(history(text)).finding
    assert finding.victim is not None
    assert (finding.culprit, finding.victims, finding.victim.ranks) == ((2,), (), (2,))


def test_a_hang_is_the_consequence_of_the_divergence() -> None:
    finding = check(history(HUNG)).finding
    assert finding.victim is not None
    assert (finding.culprit, finding.victims, finding.consequence) == ((3,), (0, 1, 2), ("stall", 11))
    assert (
        finding.victim.ranks,
        finding.victim.where,
        finding.victim.step,
        finding.victim.calls_later,
    ) == ((0, 1, 2), "all_reduce tp0/events #0", 1, 3)


def test_a_hang_without_a_divergence_names_the_rank_that_did_not_join() -> None:
    verdict = check(history(STALLED))
    assert (
        verdict.kind,
        verdict.code,
        verdict.finding.culprit,
        verdict.finding.victims,
    ) == ("stall", 11, (2,), (0, 1))


def test_a_stall_that_waits_for_a_cut_log_names_nobody() -> None:
    finding = check(history(STALLED.replace("2 match:r1=64 #hung", "2 match:r1=64 #cut"))).finding
    assert (finding.code, finding.culprit, finding.unknown, finding.level) == (20, (), (2,), "undetermined")


def test_a_stall_that_waits_for_a_rank_without_a_log_calls_it_silent() -> None:
    text = "0 match:r1=64 events! #hung\n1 match:r1=64 events! #hung"
    finding = check(history(text, world_size=3)).finding
    assert (finding.code, finding.culprit, finding.silent) == (20, (), (2,))
    assert finding.summary == "ranks 0-1 hung in all_reduce tp0/events #0, and rank 2 left no log"


def test_no_trailer_anywhere_is_incomplete_and_no_stall() -> None:
    assert check(history(STALLED.replace("#hung", "#cut"))).kind == "incomplete"


def test_all_joined_and_nobody_left_is_below_the_cache() -> None:
    assert check(history("0 events! #hung\n1 events! #hung")).code == 13


def test_a_hang_outside_of_any_meeting_is_frozen() -> None:
    assert check(history("0 match:r1=64 #hung\n1 match:r1=64 #hung")).code == 15


def test_one_call_with_two_shapes_is_a_mismatch() -> None:
    # Between stages nobody compares meetings, but a receive must have the length that was sent.
    text = "0 match:r1=64 send>1!8 send>1.8 events!\n1 match:r1=64 recv<0!4 #hung"
    finding = check(history(text.replace("events!", "#hung"), pp=2)).finding
    assert (finding.kind, finding.code) == ("mismatch", 16)


def test_a_receive_waits_for_its_peer_alone() -> None:
    text = "0 match:r1=64 #hung\n1 match:r1=64 recv<0! #hung"
    finding = check(history(text, pp=2)).finding
    assert (finding.code, finding.culprit, finding.victims) == (11, (0,), (1,))


def test_a_wrong_page_is_a_broken_invariant() -> None:
    finding = check(history("0 match:r1=64\n1 match:r1=64 wrong_page\n2 match:r1=64")).finding
    assert (finding.kind, finding.code, finding.culprit, finding.victims) == ("invariant", 18, (), (1,))


def test_a_wrong_page_after_a_divergence_is_another_finding() -> None:
    text = "0 match:r1=64 |\n1 match:r1=64 |\n2 match:r1=0 | wrong_page"
    verdict = check(history(text))
    assert (verdict.code, [finding.code for finding in verdict.findings]) == (10, [18])


def test_a_crash_is_a_broken_invariant_or_the_consequence_of_a_divergence() -> None:
    assert check(history("0 match:r1=64\n1 match:r1=64 #crashed")).code == 18
    text = "0 match:r1=64\n1 match:r1=64\n2 match:r1=0 #crashed"
    assert (
        check(history(text)).code,
        check(history(text)).finding.consequence,
    ) == (10, ("invariant", 18))


def test_every_rank_named_has_evidence() -> None:
    for text in (HUNG, STALLED, "0 match:r1=1\n1 match:r1=2"):
        finding = check(history(text)).finding
        told = {int(entry.supports.split()[1].rstrip(":")) for entry in finding.evidence}
        assert set(named(finding)) <= told


def named(finding: Finding) -> tuple[int, ...]:
    return (*finding.culprit, *finding.victims, *finding.silent, *finding.unknown)


def test_equal_input_gives_equal_bytes() -> None:
    assert check(history(HUNG)).to_text() == check(history(HUNG)).to_text()


@pytest.mark.parametrize(
    "text", [HUNG, STALLED, "0 match:r1=64\n1 match:r1=64", "0 match:r1=64", "0 match:r1=1\n1 match:r1=2"]
)
def test_a_verdict_has_the_published_shape(text: str) -> None:
    verdict = check(history(text))
    assert faults(verdict.to_json(), SCHEMA, "verdict") == []
    assert SCHEMA["required"] == list(verdict.to_json())
    assert verdict.code in EXIT_CODES


def faults(value: Any, schema: dict[str, Any], where: str) -> list[str]:
    """A structural check: types, required keys, enums; what our schema uses, nothing more."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].split("/")[-1]]
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer"}
    name = names.get(type(value), "number" if isinstance(value, float) else "null")
    types = schema.get("type", name)
    allowed = types if isinstance(types, list) else [types]
    if name not in allowed and not (name == "integer" and "number" in allowed):
        return [f"{where}: {name} is not {types}"]
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{where}: {value!r} is not one of {schema['enum']}")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        found += [f"{where}: {key} is missing" for key in schema.get("required", ()) if key not in value]
        if schema.get("additionalProperties") is False:
            found += [f"{where}: {key} is not expected" for key in value if key not in properties]
        for key, part in properties.items():
            if key in value:
                found += faults(value[key], part, f"{where}.{key}")
    if isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            found += faults(item, schema["items"], f"{where}[{number}]")
    return found


def test_hits_are_proposed_only_where_requests_are_logged() -> None:
    text = "0 match:r1=64\n1 match:r1=64"
    assert check(history(text)).next == (
        ("hicache hits PATH", "which tier served what, and why the rest was computed"),
    )
    without = [
        replace(one, kinds={name: kind for name, kind in one.kinds.items() if name != "request"})
        for one in lanes(text)
    ]
    assert check(without).next == ()


def test_of_an_object_the_field_that_differs_is_named() -> None:
    def matched(tokens: int) -> list[object]:
        return ["MatchParams", {"rid": "r7", "key": ["RadixKey", tokens, "00112233445566aa"]}]

    told = [
        replace(one, entries=[{**one.entries[0], "tokens": matched(64 if one.rank != 1 else 48)}])
        for one in lanes("0 match:r1=64\n1 match:r1=64\n2 match:r1=64")
    ]
    finding = check(told).finding
    first = finding.first_divergence
    assert first is not None and finding.culprit == (1,)
    assert [diff.field for diff in first.field_diff] == ["tokens.key"]
    assert finding.summary.endswith(": tokens.key RadixKey of 48 001122 instead of RadixKey of 64 001122"), (
        finding.summary
    )


def test_a_request_may_be_named_inside_of_an_object() -> None:
    def matched(tokens: int) -> list[object]:
        return ["MatchParams", {"rid": "r7", "tokens": tokens}]

    told = []
    for one in lanes("0 evict:3=2\n1 evict:3=2\n2 evict:3=2"):
        value = matched(1 if one.rank == 2 else 2)
        told.append(replace(one, entries=[{**one.entries[0], "pages_freed": value}]))
    first = check(told).finding.first_divergence
    assert first is not None and first.request == "r7"
