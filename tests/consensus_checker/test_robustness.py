"""Damage of every kind gives a verdict, never an exception, and never a wrong one with confidence."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from consensus_checker.check import check
from consensus_checker.explain import proof
from consensus_checker.history import History, MemoryLane
from consensus_checker.screen import first_screen
from tests.support.history import lanes

ROUND = "round?{writes_done=1} events! events. round=1:2"
TEXT = f"""
    0  match:r1=64  backup:17=64{{host_pages_free=5}}  |  {ROUND}  main!  #hung
    1  match:r1=64  backup:17=64{{host_pages_free=5}}  |  {ROUND}  main!  #hung
    2  match:r1=64  backup:17=64{{host_pages_free=5}}  |  {ROUND}  wrong_page  #hung
    3  match:r1=64  backup:17=0{{host_pages_free=0}}   |  {ROUND}  main!  #hung
"""
LANES = """
    0       match:r1=64  poll:r1=wait  |  round?  events!  mispaired:events  #hung
    0/io    state:backend=7  read:7=2  state:idle  #stopped
    0/sync  state:collective=7  progress!  #hung
    1       match:r1=64  poll:r1=wait  |  round?  events!  mispaired:events{purpose=poll}  #hung
    1/io    state:backend=7  #hung
    1/sync  state:idle  #hung
"""
VALUES: tuple[Any, ...] = (
    None,
    "text",
    "",
    -1,
    0,
    1,
    10**30,
    1.5,
    float("inf"),
    True,
    [],
    [[1], {}],
    {},
    {"a": [1]},
)


def mutated(seed: int, text: str) -> list[MemoryLane]:
    """One field of one record, header or trailer replaced by something else, or taken away."""
    chance = random.Random(seed)
    drawn = lanes(text, pp=chance.choice([1, 2]))
    at = chance.randrange(len(drawn))
    lane = drawn[at]
    part = chance.choice(["record", "record", "header", "trailer"])
    if part == "record":
        entries = [dict(entry) for entry in lane.entries]
        _damage(chance, chance.choice(entries))
        drawn[at] = replace(lane, entries=entries)
    elif part == "header":
        header = dict(lane.header)
        _damage(chance, header)
        drawn[at] = replace(lane, header=header)
    else:
        trailer = dict(lane.trailer or {})
        _damage(chance, trailer)
        drawn[at] = replace(lane, trailer=trailer)
    return drawn


def _damage(chance: random.Random, fields: dict[str, Any]) -> None:
    name = chance.choice(sorted(fields))
    if chance.random() < 0.1:
        del fields[name]
    else:
        fields[name] = chance.choice(VALUES)


@pytest.mark.parametrize("text", [TEXT, LANES], ids=["one lane", "lanes"])
@pytest.mark.parametrize("start", range(0, 1000, 100))
def test_no_damaged_field_ever_raises(start: int, text: str) -> None:
    for seed in range(start, start + 100):
        told = History.of(mutated(seed, text))
        verdict = check(told)
        verdict.to_text()
        first_screen(verdict, told)
        for finding in (verdict.finding, *verdict.findings):
            proof(finding, told)


def test_damage_in_one_log_never_accuses_another_rank() -> None:
    equal = "\n".join(f"{rank}  match:r1=64  evict:3=1  match:r2=0  evict:4=1" for rank in range(4))
    for seed in range(500):
        whole = {lane.rank: lane for lane in lanes(equal)}
        drawn = mutated(seed, equal)
        (at,) = [lane.rank for lane in drawn if repr(lane.entries) != repr(whole[lane.rank].entries)] or [-1]
        assert set(check(drawn).finding.culprit) <= {at}, seed


@pytest.mark.parametrize(
    ("name", "value"), [("step", "7"), ("step", None), ("phase", ["call"]), ("phase", {}), ("seq", None)]
)
def test_a_record_that_can_not_be_one_tears_its_lane(name: str, value: Any) -> None:
    drawn = lanes("0 match:r1=64 evict:1=1\n1 match:r1=64 evict:1=1\n2 match:r1=64 evict:1=1")
    broken = [drawn[2].entries[0], {**drawn[2].entries[1], name: value}]
    verdict = check([*drawn[:2], replace(drawn[2], entries=broken)])
    assert (verdict.kind, verdict.coverage.truncated) == ("incomplete", (2,))


@pytest.mark.parametrize(("name", "value"), [("group_seq", "7"), ("group", ["a"]), ("peer", "x"), ("op", 1)])
def test_a_meeting_that_is_nowhere_tears_its_lane(name: str, value: Any) -> None:
    drawn = lanes("0 match:r1=64 events! #hung\n1 match:r1=64 events! #hung")
    broken = [drawn[1].entries[0], {**drawn[1].entries[1], name: value}]
    verdict = check([drawn[0], replace(drawn[1], entries=broken)])
    assert (verdict.coverage.truncated, verdict.finding.culprit) == ((1,), ())


@pytest.mark.parametrize(("one", "two"), [(64, 64.0), (1, True), (0, False)])
def test_values_of_different_types_are_different(one: Any, two: Any) -> None:
    drawn = lanes("0 match:r1=64\n1 match:r1=64\n2 match:r1=64")
    for rank, value in ((0, one), (1, one), (2, two)):
        drawn[rank].entries[0]["tokens"] = value  # type: ignore[index]
    assert check(drawn).finding.culprit == (2,)
