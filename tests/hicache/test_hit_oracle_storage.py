"""The runtime's hits with an external tier, request by request, against a set of seen prefixes.

One request after the other, and a pause after each in which its pages reach the external tier. Device and
host hold two of the longest prompts, so most of what is seen again has left both of them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from hicache.config import Config, StorageConfig
from hicache.control.keys import pack
from hicache.core import Request
from hicache.schedule import Schedule
from hicache.sim.world import Plan
from hicache.topology import Topology
from hicache.workload import parse_commands
from tests.support.naive_storage import SeenPrefixes
from tests.support.runs import Listed, of_kind, run_in_memory

PAGE = 8
LONGEST_PAGES = 20
PAUSE_POLLS = 25
TOPOLOGIES = [
    pytest.param(Topology(), id="one rank"),
    pytest.param(Topology(tp=2, pp=2), id="tp=2,pp=2", marks=pytest.mark.slow),
]


def requests(chance: random.Random, count: int) -> list[Request]:
    """Prompts that continue, cut and repeat each other, some after a long time."""
    prompts = [[chance.randrange(1000) for _ in range(6 * PAGE)] for _ in range(3)]
    made = []
    for number in range(count):
        base = chance.choice(prompts)
        kept = chance.randint(1, len(base)) if chance.random() < 0.4 else len(base)
        tokens = base[:kept] + [chance.randrange(1000) for _ in range(chance.randint(0, 5 * PAGE))]
        tokens = tokens[: (LONGEST_PAGES - 3) * PAGE]
        output = [chance.randrange(1000) for _ in range(chance.choice([1, 2, PAGE, 2 * PAGE + 3]))]
        prompts.append(tokens + output[:-1])
        made.append(Request(f"q{number}", pack(tokens), pack(output), len(output)))
    return made


def config(topology: Topology, *, threshold_pages: int) -> Config:
    return Config(
        topology=topology,
        page_size_tokens=PAGE,
        device_pages=2 * LONGEST_PAGES,
        # What is on the device has a copy on the host, which the host can't give up.
        host_pages=4 * LONGEST_PAGES,
        storage=StorageConfig(
            backend="memory",
            prefetch_policy="wait_complete",
            prefetch_threshold_tokens=threshold_pages * PAGE,
            batch_pages=5,
        ),
        concurrency=1,
        load_back_min_tokens=1,
    )


def cached_pages(
    topology: Topology, asked: list[Request], *, threshold_pages: int, commands: str = ""
) -> dict[int, list[dict[str, Any]]]:
    """Rank -> what each request was admitted with, in order."""
    plan = Plan(
        config(topology, threshold_pages=threshold_pages),
        "listed",
        lambda replica: Listed(asked, pause_polls=PAUSE_POLLS),
        Schedule(seed=1),
        commands=parse_commands(commands),
    )
    result, rows = run_in_memory(plan)
    assert (result.outcome, result.error, result.served) == ("completed", "", len(asked))
    admits = {
        rank: [row for row in of_kind(own, "admit") if row["verdict"] == "admitted"]
        for rank, own in rows.items()
    }
    for own in admits.values():
        assert [row["rid"] for row in own] == [request.rid for request in asked]
    return admits


def pages(row: dict[str, Any], *tiers: str) -> int:
    return sum(int(row[f"{tier}_tokens"]) for tier in tiers) // PAGE


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_what_was_seen_before_is_a_hit_on_whatever_tier_it_is(topology: Topology) -> None:
    asked = requests(random.Random("tiers"), 100)
    naive = SeenPrefixes(PAGE)
    expected = [naive.request(request) for request in asked]
    by_tier = {"device": 0, "host": 0, "storage": 0}
    for own in cached_pages(topology, asked, threshold_pages=1).values():
        assert [pages(row, "device", "host", "storage") for row in own] == expected
        for tier in by_tier:
            by_tier[tier] += sum(pages(row, tier) for row in own)
    assert min(by_tier.values()) > 100, f"a tier has done next to nothing: {by_tier}"


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_after_a_flush_only_the_external_tier_has_what_was_seen_and_short_prefixes_are_not_fetched(
    topology: Topology,
) -> None:
    asked = requests(random.Random("flush"), 60)
    naive = SeenPrefixes(PAGE, least_pages=5)
    expected = [naive.request(request) for request in asked]
    # Refused while a request is at work, so it comes in every pause.
    flushes = ",".join(f"flush@{poll}" for poll in range(5, 60 * len(asked), 5))
    for own in cached_pages(topology, asked, threshold_pages=5, commands=flushes).values():
        assert [pages(row, "storage") for row in own] == expected
        assert {pages(row, "device", "host") for row in own} == {0}, "a flush came too late"
    assert expected.count(0) > 5 and sum(expected) > 200, "both sides of the threshold must be met"
