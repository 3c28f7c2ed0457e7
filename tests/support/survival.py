"""Worlds of chance that a correct runtime must survive, one kind of trouble at a time.

Everything that may be small is small: pages, pools, batches, deadlines. So each run meets many times what a
server meets once a day.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import patch

from consensus_checker.check import check
from consensus_checker.verdict import Verdict
from hicache.agentic import AgenticSpec
from hicache.config import Config, EvictionPolicy, PrefetchPolicy, StorageConfig, WritePolicy
from hicache.control import keys
from hicache.core import HASH_BYTES, Abort, Request
from hicache.ledger import split_digests
from hicache.sim.world import Plan, Result, simulate
from hicache.storage.make import make_backend
from hicache.topology import Topology
from hicache.workload import Workload
from tests.support.runs import agentic_plan, lanes

TOPOLOGIES = {
    "tp=2,pp=2": Topology(tp=2, pp=2),
    "tp=4": Topology(tp=4),
    "cp=2,tp=2": Topology(cp=2, tp=2),
    "pp=4": Topology(pp=4),
}
# Further ones for the long sweep.
EVERY_TOPOLOGY = {
    **TOPOLOGIES,
    "dp=2,tp=2": Topology(dp=2, tp=2),
    "pp=2,cp=2,tp=2": Topology(pp=2, cp=2, tp=2),
    "one rank": Topology(),
}
WRITE_POLICIES: tuple[WritePolicy, ...] = ("write_through", "write_through_selective", "write_back")
PREFETCH_POLICIES: tuple[PrefetchPolicy, ...] = ("wait_complete", "timeout", "best_effort")
EVICTION_POLICIES: tuple[EvictionPolicy, ...] = (
    *("lru", "lru", "lru"),
    *("lfu", "fifo", "filo", "mru", "priority", "slru", "tlru"),
)
SIDE_POOLS = ((), (), ("draft",), ("mamba",), ("indexer", "mamba"), ("draft", "indexer"))
CALLS = ("exists", "get", "set")
# Fields of decisions whose few values say what happened.
WORDS = ("outcome", "verdict", "declined", "cause", "reason", "place", "drop_reason", "purpose", "ack")


@dataclass(frozen=True, slots=True)
class World:
    """A run that is about to be: everything but the schedule's seed, which is `config.seed`.

    Attributes:
        commands: as `parse_commands` reads them.
    """

    config: Config
    spec: AgenticSpec
    faults: tuple[str, ...] = ()
    commands: str = ""

    def plan(self) -> Plan:
        return agentic_plan(
            self.config, self.spec, seed=self.config.seed, faults=self.faults, commands=self.commands
        )


@dataclass(frozen=True, slots=True)
class Survived:
    """How a world ended, without its logs.

    Attributes:
        complaints: what should not be; empty for a run that was survived.
        seen: kinds of record, and `kind.field=value` for the short words of decisions, on all ranks.
        fired: verbs of the faults that struck.
    """

    complaints: tuple[str, ...]
    seen: frozenset[str]
    fired: Counter[str]


@cache
def survive(name: str, trouble: str, seed: int) -> Survived:
    """Run a world and judge it. Asked twice, it is run once."""
    made = world(name, trouble, seed)
    requests: list[Request] = []
    plan = made.plan()
    open_workload = plan.workload
    plan = replace(plan, workload=lambda replica: _Kept(open_workload(replica), requests))
    with patch("hicache.job.make_backend", wraps=make_backend) as maker:
        result = simulate(plan, trace="memory")
    stored = maker.call_args.kwargs["shared"]
    decoded = lanes(result)
    rows = [row for lane in decoded for row in lane.entries]
    seen = {str(row["kind"]) for row in rows}
    seen |= {f"{row['kind']}.{word}={row[word]}" for row in rows for word in WORDS if word in row}
    if any(_has_reordered_writes(lane.entries) for lane in decoded):
        seen.add("transfer_done.reordered")
    fired = Counter(fired.split(" ", 1)[0] for fired in plan.faults.fired)
    complaints = [*_complaints(made, result, check(decoded), rows), *_strangers(plan, requests, stored)]
    return Survived(tuple(complaints), frozenset(seen), fired)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A workload whose requests are kept. Implements `workload.Workload`."""

    own: Workload
    requests: list[Request]

    def poll(self) -> Sequence[Abort]:
        return self.own.poll()

    def next(self) -> Request | None:
        request = self.own.next()
        if request is not None:
            self.requests.append(request)
        return request

    def finished(self, rid: str) -> None:
        self.own.finished(rid)

    def aborted(self, rid: str) -> None:
        self.own.aborted(rid)

    @property
    def is_exhausted(self) -> bool:
        return self.own.is_exhausted

    @property
    def fraction(self) -> float:
        return self.own.fraction


def _strangers(plan: Plan, requests: list[Request], stored: Mapping[str, bytes]) -> Iterator[str]:
    """Pages in the external tier that are not what their names say."""
    size = keys.page_bytes(plan.config.page_size_tokens)
    digest_of: dict[str, bytes] = {}
    for request in requests:
        first = keys.namespace(request.extra_key, request.cache_salt)
        whole = request.tokens + request.output
        hashes = keys.chain_hashes(whole, first_page=0, page_size_bytes=size, previous=first)
        digests = keys.chain_digests(
            whole, first_page=0, page_size_bytes=size, previous=first, key=plan.digest_key
        )
        digest_of |= zip(keys.hash_names(hashes), split_digests(digests), strict=True)
    for name, page in stored.items():
        if digest_of.get(name[: 2 * HASH_BYTES]) != page:
            yield f"stored page {name} is another's"


def _has_reordered_writes(own: Sequence[Mapping[str, Any]]) -> bool:
    """Was a copy done before one that had been submitted earlier?

    Loads are not asked: each batch waits for its own, so there are never two of them on their way.
    """
    ops = [row["op"] for row in own if row["kind"] == "transfer_done" and row["queue"] == "write"]
    return ops != sorted(ops)


def _complaints(
    made: World, result: Result, found: Verdict, rows: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    if result.outcome != "completed":
        yield f"{result.outcome}: {result.error} {result.parked}"
    accounted = result.served + result.refused + result.aborted
    asked = made.spec.conversations * made.spec.rounds
    if result.outcome == "completed" and accounted != asked:
        yield f"{asked} requests, {result.served} served, {result.refused} refused, {result.aborted} aborted"
    topology = made.config.topology
    if found.kind != ("consistent" if topology.world_size > topology.dp else "nothing_compared"):
        yield f"{found.kind}: {found.finding.summary}"
    yield from _odd_ends(rows)
    for row in rows:
        if row["kind"] == "wrong_page":
            yield f"wrong page: {row}"
        elif row["kind"] == "pool_audit" and row["total"] is not None:
            total = row["available"] + row["evictable"] + row["protected"]
            if total != row["total"] or row["protected"]:
                yield f"{row['pool']}: {total} of {row['total']}, {row['protected']} protected"


def _odd_ends(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Requests that do not end once on every rank that they came to, or that got half an answer."""
    asked = {row["rid"]: row for row in rows if row["kind"] == "request"}
    came = Counter(row["rid"] for row in rows if row["kind"] == "request")
    ended = Counter(row["rid"] for row in rows if row["kind"] == "finish")
    if came != ended:
        yield f"requests came and ended on so many ranks: {came - ended} and {ended - came} more"
    for row in rows:
        if row["kind"] == "finish" and row["reason"] == "stop":
            wanted = asked[row["rid"]]["output_tokens"]
            if row["output_tokens"] != wanted:
                yield f"{row['rid']}: {row['output_tokens']} of {wanted} tokens of its answer"
        elif row["kind"] == "admit" and row["verdict"] == "admitted":
            tokens = sum(row[f"{tier}_tokens"] for tier in ("device", "host", "storage", "extend"))
            # A retracted request comes again with what it had answered so far.
            if tokens < asked[row["rid"]]["input_tokens"]:
                yield f"{row['rid']}: admitted with {tokens} tokens"


def world(name: str, trouble: str, seed: int) -> World:
    """The `seed`-th world of a topology and a kind of trouble, one of `TROUBLES`."""
    chance = random.Random(f"survival/{name}/{trouble}/{seed}")
    # Each trouble meets all nine pairs of policies within nine seeds, and all troubles together in each seed.
    pair = (seed + list(TROUBLES).index(trouble)) % 9
    plain = _plain(EVERY_TOPOLOGY[name], chance, seed, WRITE_POLICIES[pair // 3], PREFETCH_POLICIES[pair % 3])
    return TROUBLES[trouble](plain, chance)


def _plain(
    topology: Topology,
    chance: random.Random,
    seed: int,
    write_policy: WritePolicy,
    prefetch_policy: PrefetchPolicy,
) -> World:
    page = chance.choice([4, 8])
    rounds = chance.randint(3, 4)
    shared_pages = chance.choice([0, 2, 6, 16])
    spec = AgenticSpec(
        conversations=chance.randint(4, 7),
        rounds=rounds,
        max_context=page * (shared_pages + rounds * chance.randint(4, 9))
        + rounds * chance.randint(0, page - 1),
        output=chance.randint(1, page),
        shared_prefix=page * shared_pages + chance.randint(0, page - 1),
        seed=seed,
        aborts=chance.choice([0, 0, 10]),
        priorities=chance.choice([1, 3]),
        namespaces=chance.choice([1, 1, 2, 4]),
        think=chance.choice([0, 0, 2, 12]),
    )
    # A conversation or two fit on the device, and a few more on the host: who comes back later finds its
    # pages in the external tier or nowhere.
    longest_pages = -(-(spec.max_context + spec.output) // page)
    device_pages = int(longest_pages * chance.choice([0.9, 1.1, 1.1, 1.3, 1.6]))
    config = config_of_chance(
        topology,
        chance,
        page=page,
        device_pages=device_pages,
        write_policy=write_policy,
        prefetch_policy=prefetch_policy,
    )
    return World(replace(config, seed=seed), spec, commands=_commands(config, chance))


def config_of_chance(
    topology: Topology,
    chance: random.Random,
    *,
    page: int,
    device_pages: int,
    write_policy: WritePolicy,
    prefetch_policy: PrefetchPolicy,
) -> Config:
    """A cache with an external tier in which everything else is chance."""
    return Config(
        topology=topology,
        page_size_tokens=page,
        device_pages=device_pages,
        host_pages=int(device_pages * chance.choice([0.5, 1.2, 1.5, 2, 4])),
        write_policy=write_policy,
        eviction_policy=chance.choice(EVICTION_POLICIES),
        storage=StorageConfig(
            backend="memory",
            attached=chance.random() < 0.9,
            prefetch_policy=prefetch_policy,
            prefetch_threshold_tokens=chance.choice([0, page, 3 * page]),
            prefetch_timeout_base_s=chance.choice([0.0, 0.002, 0.01, 1.0]),
            prefetch_timeout_per_ki_token_s=chance.choice([0.0, 0.25]),
            prefetch_capacity_fraction=chance.choice([0.2, 0.5, 1.0]),
            retry_poll_interval=chance.choice([0, 1, 3, 8]),
            retry_max_attempts=chance.choice([0, 1, 8]),
            pass_prefix_keys=chance.random() < 0.3,
            batch_pages=chance.choice([1, 2, 5, 128]),
            polls_max=chance.choice([0, 2, 6]),
        ),
        concurrency=chance.randint(1, 6),
        cache_output=chance.random() < 0.85,
        decode_steps="one" if chance.random() < 0.3 else "all",
        transfer_polls_max=chance.choice([0, 1, 3, 12]),
        load_back_min_tokens=chance.choice([1, 10, 3 * page]),
        chunked_prefill_tokens=page * chance.choice([0, 0, 1, 3, 8]),
        decode_reserve_percent=chance.choice([100, 100, 50, 0]),
        priority_scheduling=chance.random() < 0.4,
        side_pools=chance.choice(SIDE_POOLS),
        side_pool_slots=chance.choice([0, 2, 5, 30]),
        in_band_digest=chance.random() < 0.5,
        meeting_guard=chance.random() < 0.5,
    )


def _commands(config: Config, chance: random.Random) -> str:
    """Now and then an operator: attach what is not attached, detach, flush; most come at a bad moment."""
    verbs = [chance.choice(["flush", "attach", "detach"]) for _ in range(chance.choice([0, 0, 0, 3]))]
    given = [f"{verb}@{chance.randint(1, 200)}" for verb in verbs]
    if not config.storage.attached:
        given.append(f"attach@{chance.randint(1, 60)}")
    return ",".join(given)


# Troubles


def _quiet(plain: World, chance: random.Random) -> World:
    return plain


def _late_copies(plain: World, chance: random.Random) -> World:
    """Delayed and reordered completions of every queue, on several ranks."""
    faults = []
    for _ in range(12):
        queue = chance.choice(["write", "load", "prefetch", "backup"])
        faults.append(
            f"delay_done:rank={_rank(plain, chance)},queue={queue},op={chance.randint(1, 15)},"
            f"steps={chance.choice([1, 3, 9, 40])}"
        )
    return replace(plain, faults=_once(faults))


def _slow_storage(plain: World, chance: random.Random) -> World:
    slow = _rank(plain, chance)
    faults = [
        f"storage_slow:rank={slow if chance.random() < 0.6 else _rank(plain, chance)},"
        f"call={chance.choice(CALLS)},nth={chance.randint(1, 20)},steps={chance.choice([5, 30, 150])}"
        for _ in range(14)
    ]
    return replace(plain, faults=_once(faults))


def _failing_storage(plain: World, chance: random.Random) -> World:
    faults = [
        f"storage_fail:rank={_rank(plain, chance)},call={chance.choice(CALLS)},nth={chance.randint(1, 15)}"
        for _ in range(10)
    ]
    first = chance.randint(1, 40)
    faults.append(f"storage_down:rank={_rank(plain, chance)},from={first},to={first + chance.randint(0, 30)}")
    if chance.random() < 0.5:
        return replace(plain, faults=_once(faults))
    # It is attached by an operator, who has to try twice before the first request has come.
    faults.append(f"attach_fail:rank={_rank(plain, chance)},nth=1")
    storage = replace(plain.config.storage, attached=False)
    commands = ",".join(filter(None, ["attach@1", "attach@1", plain.commands]))
    return World(replace(plain.config, storage=storage), plain.spec, _once(faults), commands)


def _short_storage(plain: World, chance: random.Random) -> World:
    """What one rank gets is less than what the others get, or than it was told."""
    faults = []
    for _ in range(8):
        call = chance.choice(["get", "get", "exists", "set"])
        faults.append(
            f"storage_short:rank={_rank(plain, chance)},call={call},nth={chance.randint(1, 8)},"
            f"pages={chance.randint(1, 6)}"
        )
    faults += [f"shard_missing:rank={_rank(plain, chance)},nth={chance.randint(1, 12)}" for _ in range(6)]
    return replace(plain, faults=_once(faults))


def _full_host(plain: World, chance: random.Random) -> World:
    """A host that holds little, memory that somebody else has taken on one rank, and a smaller pool there."""
    faults = [
        f"alloc_fail:rank={_rank(plain, chance)},pool={pool},nth={chance.randint(1, 25)}"
        for pool in ["host"] * 8 + ["mamba"] * 3
    ]
    pool = chance.choice(["device", "host", "host", "mamba"])
    faults.append(f"resize:rank={_rank(plain, chance)},pool={pool},pages={chance.randint(1, 3)}")
    config = replace(
        plain.config, host_pages=max(4, int(plain.config.device_pages * chance.choice([0.3, 1.1])))
    )
    return replace(plain, config=config, faults=_once(faults))


def _abort_storm(plain: World, chance: random.Random) -> World:
    """Clients go away in every queue there is, also while the pages that they wait for are being read."""
    spec = replace(plain.spec, aborts=chance.choice([30, 60, 100]), output=max(plain.spec.output, 8))
    faults = [
        f"storage_slow:rank={_rank(plain, chance)},call={call},nth={nth},steps={chance.choice([10, 60])}"
        for call, nth in product(["exists", "get", "get"], range(1, 9))
    ]
    return replace(plain, spec=spec, faults=_once([*plain.faults, *faults]))


def _retraction(plain: World, chance: random.Random) -> World:
    """Long answers, nothing set aside for them, and a device that holds a few."""
    page = plain.config.page_size_tokens
    spec = replace(plain.spec, output=page * chance.randint(2, 3))
    growth = max(spec.growth, spec.output + page)
    spec = replace(spec, max_context=spec.shared_prefix + growth * spec.rounds)
    longest_pages = -(-(spec.max_context + spec.output) // page)
    config = replace(
        plain.config,
        device_pages=longest_pages + chance.randint(1, longest_pages // 2),
        concurrency=chance.randint(3, 8),
        cache_output=True,
        decode_steps="all",
        decode_reserve_percent=0,
    )
    return replace(plain, config=config, spec=spec)


def _everything(plain: World, chance: random.Random) -> World:
    """Some of it all at once."""
    faults: list[str] = []
    for trouble in (_late_copies, _slow_storage, _failing_storage, _short_storage, _full_host):
        faults += chance.sample(trouble(plain, chance).faults, 5)
    return _abort_storm(_retraction(replace(plain, faults=_once(faults)), chance), chance)


TROUBLES: dict[str, Callable[[World, random.Random], World]] = {
    "quiet": _quiet,
    "late copies": _late_copies,
    "slow storage": _slow_storage,
    "failing storage": _failing_storage,
    "short storage": _short_storage,
    "full host": _full_host,
    "abort storm": _abort_storm,
    "retraction": _retraction,
    "everything": _everything,
}


def _rank(world: World, chance: random.Random) -> int:
    return chance.randrange(world.config.topology.world_size)


def _once(faults: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(faults))
