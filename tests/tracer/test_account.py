"""Worlds of chance: every token of every prompt has one place, every miss a reason, every prefix its sharers.

The numbers are counted again from the records and the prompts, in another way. A failing world is run alone
with `world(name, trouble, seed)` of tests/support/survival.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from hicache.control import keys
from hicache.core import Request
from hicache.ledger import split_digests
from hicache.sim.world import simulate
from tests.support import survival
from tests.support.survival import TROUBLES, world
from tracer.hits import hits, leaders
from tracer.log import Run, find_logs
from tracer.prefixes import COMMON_SHARE_MAX

# Topology -> seeds, so many that all troubles together take half a minute.
SEEDS = {"one rank": range(5), "dp=2,tp=2": range(1), "tp=4": range(1)}
WORLDS = [(name, trouble, seed) for name, seeds in SEEDS.items() for trouble in TROUBLES for seed in seeds]
# Where a page left the host in the eviction that had brought it there.
WORLDS += [("dp=2,tp=2", "full host", 3), ("tp=4", "late copies", 7), ("one rank", "failing storage", 4)]
Prompts = dict[str, Request]


def param(place: tuple[str, str, int]) -> Any:
    """Whoever has simulated a world has all its tests."""
    name = "/".join(map(str, place))
    return pytest.param(place, id=name, marks=pytest.mark.xdist_group(f"account {name}"))


@pytest.fixture(scope="module", params=map(param, WORLDS))
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, Prompts, bytes]:
    """A world's logs, its requests by id, and the key of its digests."""
    folder = tmp_path_factory.mktemp("world")
    requests: list[Request] = []
    plan = world(*request.param).plan()
    opened = plan.workload
    plan = replace(plan, workload=lambda replica: survival._Kept(opened(replica), requests))
    simulate(plan, out=folder)
    return find_logs(folder), {each.rid: each for each in requests}, plan.digest_key


def test_every_token_has_one_place_and_every_miss_a_reason(told: tuple[Run, Prompts, bytes]) -> None:
    run, prompts, _key = told
    found = hits(run)
    assert found.unaccounted == ()
    assert sorted(request.rid for request in found.requests) == sorted(prompts)
    for row in found.rows:
        places = ("device", "host", "storage", "computed", "unplaced")
        assert row["input_tokens"] == sum(row[place] for place in places), row
        assert row["input_tokens"] == prompts[row["rid"]].input_tokens
        assert (row["unplaced"] > 0) == (row["unplaced_reason"] is not None), row
        assert row["unplaced_reason"] != "unaccounted", row
        assert row["reason"] != "unknown", row
        assert row["computed"] == 0 or row["reason"], row


def test_the_numbers_are_those_of_the_records_counted_in_another_way(
    told: tuple[Run, Prompts, bytes],
) -> None:
    run, _prompts, _key = told
    rows = {row["rid"]: row for row in hits(run).rows}
    parts = ("device", "host", "storage", "computed")
    assert {rid: tuple(row[part] for part in parts) for rid, row in rows.items()} == dict(_recount(run))


def test_prefixes_are_shared_by_those_whose_prompts_begin_with_them(told: tuple[Run, Prompts, bytes]) -> None:
    run, prompts, key = told
    found = hits(run, by="prefix")
    truth = _truth(run, prompts, key)
    left_out = [note for note in found.notes if "left out" in note or "is known" in note]
    for row in found.rows:
        pages, rids = truth[row["prefix"]]
        assert row["tokens"] == pages * _page_tokens(run)
        # No more than share it, ever; all of them where the log names all pages of all prompts.
        assert row["requests"] <= len(rids)
        assert left_out or row["requests"] == len(rids)
        served = sum(row[part] for part in ("device", "host", "storage", "computed", "unplaced"))
        assert served == row["input_tokens"] == row["tokens"] * row["requests"]
    if not left_out:
        assert {row["prefix"] for row in found.rows} == set(_chosen(truth))


def _page_tokens(run: Run) -> int:
    size: int = run.lanes[0].header["config"]["page_size_tokens"]
    return size


def _recount(run: Run) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Request -> device, host, storage of its first admission, computed before a retraction."""
    for _dp, lanes in leaders(run)[0]:
        records = [record for lane in lanes if lane.lane == "scheduler" for record in lane.records()]
        for rid in [record["rid"] for record in records if record["kind"] == "request"]:
            own = [record for record in records if record.get("rid") == rid or rid in record.get("rids", ())]
            ends = [at for at, record in enumerate(own) if record["kind"] == "retract"]
            first_life = own[: ends[0]] if ends else own
            admits = [each for each in own if each["kind"] == "admit" and each["verdict"] == "admitted"] or [
                {}
            ]
            tiers = tuple(admits[0].get(f"{tier}_tokens", 0) for tier in ("device", "host", "storage"))
            yield rid, (*tiers, sum(_prefilled(record, rid) for record in first_life))


def _prefilled(record: Mapping[str, Any], rid: str) -> int:
    if record["kind"] != "forward" or record["mode"] != "extend":
        return 0
    tokens: int = record["computed_tokens"][record["rids"].index(rid)]
    return tokens


def _truth(run: Run, prompts: Prompts, key: bytes) -> dict[str, tuple[int, set[str]]]:
    """Digest of every whole page of every prompt -> pages up to there, requests that begin with them."""
    size = keys.page_bytes(_page_tokens(run))
    truth: dict[str, tuple[int, set[str]]] = {}
    for rid, request in prompts.items():
        first = keys.namespace(request.extra_key, request.cache_salt)
        digests = keys.chain_digests(
            request.tokens, first_page=0, page_size_bytes=size, previous=first, key=key
        )
        for pages, digest in zip(count(1), split_digests(digests), strict=False):
            truth.setdefault(digest.hex(), (pages, set()))[1].add(rid)
    return truth


def _chosen(truth: Mapping[str, tuple[int, set[str]]]) -> Iterator[str]:
    """The rule again, on sets of requests: the last page that all of a set share, the weightiest first."""
    by_sharers: dict[frozenset[str], tuple[int, str]] = defaultdict(lambda: (0, ""))
    for digest, (pages, rids) in truth.items():
        if len(rids) > 1:
            by_sharers[frozenset(rids)] = max(by_sharers[frozenset(rids)], (pages, digest))
    weights = sorted(
        ((pages * len(rids), pages, digest, rids) for rids, (pages, digest) in by_sharers.items()),
        key=lambda each: (-each[0], each[1], each[2]),
    )
    listed: list[tuple[int, int, frozenset[str]]] = []
    for weight, pages, digest, rids in weights:
        shares = (
            len(rids & other) * min(pages, its) / (weight + its_weight - len(rids & other) * min(pages, its))
            for its_weight, its, other in listed
        )
        if len(listed) < 20 and all(share <= COMMON_SHARE_MAX for share in shares):
            listed.append((weight, pages, rids))
            yield digest
