"""Which tier served each prompt token, and why the first computed page was not a hit.

Owns the `hicache.hits.v1` numbers. It adds up what the records say and
never repairs them: where device + host + storage + computed is not the prompt, that is reported.

Counts are those of each replica's first rank (every axis but dp at 0), one replica for each dp. A request's
first life counts: what it computes again after it was retracted is not part of its prompt a second time.

    0        device        host       storage              input_tokens
    |- on device -|- loaded -|- prefetched -|--- computed by forward ---|
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from tracer.account import Account, RequestHits
from tracer.errors import HitsError
from tracer.log import LaneLog, Run

SCHEMA = "hicache.hits.v1"
TIME_BUCKETS_MAX = 20
# Replicas without a log that are named; a header may claim a million.
MISSING_NAMED_MAX = 3
# The row of `--by tier` for what no tier served and nobody computed, there only when there is some.
UNPLACED = "unplaced"

By = Literal["request", "tier", "conversation", "reason", "time"]
GROUPINGS = ("request", "tier", "conversation", "reason", "time")


@dataclass(frozen=True, slots=True)
class Unaccounted:
    """A served request whose parts do not add up to its prompt."""

    rid: str
    input_tokens: int
    accounted_tokens: int


@dataclass(frozen=True, slots=True)
class Hits:
    """The result of `hits`.

    Attributes:
        requests: every request that was counted, by replica, then in order of arrival.
        rows: the table that was asked for, one dictionary a row, keys in the order of the columns.
        limits: what limits these numbers: a lane that was cut, a replica without a log.
    """

    by: By
    requests: tuple[RequestHits, ...]
    rows: tuple[dict[str, Any], ...]
    limits: tuple[str, ...] = ()

    @property
    def unaccounted(self) -> tuple[Unaccounted, ...]:
        """Served requests whose tokens do not add up."""
        return tuple(
            Unaccounted(request.rid, request.input_tokens, request.cached + request.computed)
            for request in self.requests
            if request.is_unaccounted
        )

    @property
    def served(self) -> tuple[RequestHits, ...]:
        """Requests that were admitted: the others had no chance of a hit."""
        return tuple(request for request in self.requests if request.is_admitted)

    @property
    def served_hit_rate(self) -> float:
        """The hit rate over the prompts of `served`."""
        served = self.served
        return _rate(
            sum(request.cached for request in served), sum(request.input_tokens for request in served)
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What limits the numbers, of the logs and of the requests."""
        return (*self.limits, *_unplaced_notes(self.requests))

    @property
    def input_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)

    @property
    def hit_rate(self) -> float:
        """Cached tokens divided by the prompt tokens of all listed requests; 0 without a prompt."""
        return _rate(sum(request.cached for request in self.requests), self.input_tokens)

    def to_json(self) -> dict[str, Any]:
        """The document of schema `hicache.hits.v1`; the last two keys only when there is something to say."""
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "requests": len(self.requests),
            "input_tokens": self.input_tokens,
            "cached_tokens": {
                "device": sum(request.device for request in self.requests),
                "host": sum(request.host for request in self.requests),
                "storage": sum(request.storage for request in self.requests),
                "total": sum(request.cached for request in self.requests),
            },
            "hit_rate": self.hit_rate,
            "by": self.by,
            "rows": list(self.rows),
        }
        if self.unaccounted:
            document["unaccounted"] = [
                {
                    "rid": each.rid,
                    "input_tokens": each.input_tokens,
                    "accounted_tokens": each.accounted_tokens,
                }
                for each in self.unaccounted
            ]
        if self.notes:
            document["notes"] = list(self.notes)
        return document


def hits(run: Run, *, by: str = "request", since: int | None = None, until: int | None = None) -> Hits:
    """Account for every prompt token of a run.

    Args:
        by: `request`, `tier`, `conversation`, `reason` or `time` (buckets of the rank's clock, which is
            virtual in the simulator; at most 20, each 1, 2 or 5 times a power of ten nanoseconds wide).
        since: first scheduler step whose arrivals count; all records are read either way.
        until: last such step.
    Raises:
        HitsError: `by` is unknown or not there yet, the logs are of several runs, or no replica's
            first rank left a log.
    """
    if by not in GROUPINGS:
        is_later = "; grouping by prefix is not there yet" if by == "prefix" else ""
        raise HitsError(f"can't group hits by {by!r}{is_later}", expected=", ".join(GROUPINGS))
    replicas, notes = leaders(run)
    requests: list[RequestHits] = []
    for dp, lanes in replicas:
        account = Account(dp, page_size_tokens(lanes))
        for lane in lanes:
            account.read(lane)
            notes += [note for note in (lane.begin, lane.cut, lane.loss) if note]
        requests += account.results(_has_host_tier(lanes, account))
        if unseen := account.unseen_count:
            notes.append(f"{_were(unseen)} received before the log begins: not counted")
    chosen = tuple(
        request
        for request in requests
        if (since is None or request.step >= since) and (until is None or request.step <= until)
    )
    grouping: By = by  # type: ignore[assignment]  # it is one of GROUPINGS
    return Hits(grouping, chosen, tuple(ROWS[by](chosen)), tuple(notes))


def leaders(run: Run) -> tuple[list[tuple[int, tuple[LaneLog, ...]]], list[str]]:
    """The lanes of each replica's first rank by dp, and a note for each replica without them."""
    if len(run.run_ids) > 1:
        raise HitsError(
            f"{run.path} holds {len(run.run_ids)} runs", where=", ".join(run.run_ids), hint="one folder a run"
        )
    found: dict[int, list[LaneLog]] = {}
    for lane in run.lanes:
        if not any(coordinate for axis, coordinate in lane.coordinates.items() if axis != "dp"):
            found.setdefault(lane.coordinates.get("dp", 0), []).append(lane)
    if not found:
        raise HitsError(
            f"no replica's first rank left a log in {run.path}",
            expected="a log of a rank with tp, cp and pp 0",
            hint=f"hicache check {run.path}",
        )
    replica_count = run.lanes[0].header.get("sizes", {}).get("dp", 1)
    missing = islice((dp for dp in range(replica_count) if dp not in found), MISSING_NAMED_MAX)
    notes = [f"replica dp{dp} is not counted: its first rank left no log" for dp in missing]
    if rest := replica_count - sum(dp < replica_count for dp in found) - len(notes):
        notes.append(f"nor are {rest:,} more replicas, for the same reason")
    return [(dp, tuple(found[dp])) for dp in sorted(found)], notes


def _has_host_tier(lanes: Sequence[LaneLog], account: Account) -> bool:
    return account.has_backups or lanes[0].header.get("config", {}).get("hierarchical_cache") is True


def page_size_tokens(lanes: Sequence[LaneLog]) -> int:
    """Tokens a page, or 0 where the header doesn't say."""
    size = lanes[0].header.get("config", {}).get("page_size_tokens", 0)
    return size if type(size) is int and size > 0 else 0


def _rate(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0


def _by_request(requests: Sequence[RequestHits]) -> Iterator[dict[str, Any]]:
    for request in requests:
        yield {
            "rid": request.rid,
            "input_tokens": request.input_tokens,
            "device": request.device,
            "host": request.host,
            "storage": request.storage,
            "computed": request.computed,
            "reason": request.reason,
        }


def _by_tier(requests: Sequence[RequestHits]) -> Iterator[dict[str, Any]]:
    input_tokens = sum(request.input_tokens for request in requests)
    for tier in ("device", "host", "storage", "computed"):
        tokens = sum(getattr(request, tier) for request in requests)
        yield {
            "tier": tier,
            "tokens": tokens,
            "share": _rate(tokens, input_tokens),
            "requests": sum(getattr(request, tier) > 0 for request in requests),
        }
    if unplaced := sum(request.unplaced for request in requests):
        yield {
            "tier": UNPLACED,
            "tokens": unplaced,
            "share": _rate(unplaced, input_tokens),
            "requests": sum(request.unplaced > 0 for request in requests),
        }


def _unplaced_notes(requests: Sequence[RequestHits]) -> Iterator[str]:
    """Requests whose prompts no tier served and nobody computed, by what became of them."""
    aborted = [request for request in requests if request.is_aborted and request.unplaced]
    if aborted:
        tokens = sum(request.unplaced for request in aborted)
        early = sum(request.is_aborted and not request.is_admitted for request in requests)
        later = sum(request.is_aborted and request.is_admitted for request in requests)
        more = f" ({later:,} more while running)" if later else ""
        told = (
            f"{_were(early)} aborted before admission{more}"
            if early
            else f"{_were(later)} aborted while running"
        )
        yield f"{told}: {counted(tokens, 'token')} that nobody served"
    unadmitted = [request for request in requests if not (request.is_admitted or request.is_aborted)]
    for reason, members in sorted(_grouped(unadmitted, lambda request: request.refused).items()):
        tokens = sum(request.input_tokens for request in members)
        how = f"refused ({reason.replace('_', ' ')})" if reason else "never admitted"
        yield f"{_were(len(members))} {how}: {counted(tokens, 'token')} that nobody served"
    pending = [
        request
        for request in requests
        if request.is_admitted and not (request.is_finished or request.is_aborted) and request.unplaced
    ]
    if pending:
        tokens = sum(request.unplaced for request in pending)
        have = "has" if tokens == 1 else "have"
        yield f"{_were(len(pending))} still being computed: {counted(tokens, 'token')} {have} no place yet"


def _were(requests: int) -> str:
    return f"{counted(requests, 'request')} {'was' if requests == 1 else 'were'}"


def counted(number: int, noun: str) -> str:
    """A number and its noun, as a person says it."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _by_conversation(requests: Sequence[RequestHits]) -> Iterator[dict[str, Any]]:
    for conversation, members in _grouped(requests, lambda request: request.conversation).items():
        yield {"conversation": conversation, **_sums(members)}


def _by_reason(requests: Sequence[RequestHits]) -> Iterator[dict[str, Any]]:
    """Most computed tokens first: that is what each reason cost."""
    groups = _grouped(requests, lambda request: request.reason).items()
    for reason, members in sorted(
        groups, key=lambda item: (-sum(each.computed for each in item[1]), item[0] or "")
    ):
        yield {"reason": reason, **_sums(members)}


def _by_time(requests: Sequence[RequestHits]) -> Iterator[dict[str, Any]]:
    if not requests:
        return
    times = [request.time_ns for request in requests]
    width = _bucket_ns(max(times) - min(times))
    start = min(times) // width * width
    buckets = _grouped(requests, lambda request: (request.time_ns - start) // width)
    # A bucket in which nobody arrived is a fact too.
    for bucket in range(max(buckets) + 1):
        from_ns = start + bucket * width
        yield {"from_ns": from_ns, "to_ns": from_ns + width, **_sums(buckets.get(bucket, []))}


ROWS: Mapping[str, Callable[[Sequence[RequestHits]], Iterator[dict[str, Any]]]] = {
    "request": _by_request,
    "tier": _by_tier,
    "conversation": _by_conversation,
    "reason": _by_reason,
    "time": _by_time,
}


def _bucket_ns(span_ns: int) -> int:
    """The smallest of 1, 2 or 5 times a power of ten that needs no more than the allowed buckets."""
    decade = 1
    while True:
        for factor in (1, 2, 5):
            # One less, since the first bucket starts at a multiple of its width and not at the first arrival.
            if span_ns < factor * decade * (TIME_BUCKETS_MAX - 1):
                return factor * decade
        decade *= 10


def _grouped(
    requests: Sequence[RequestHits], key: Callable[[RequestHits], Any]
) -> dict[Any, list[RequestHits]]:
    groups: dict[Any, list[RequestHits]] = {}
    for request in requests:
        groups.setdefault(key(request), []).append(request)
    return groups


def _sums(requests: Sequence[RequestHits]) -> dict[str, Any]:
    input_tokens = sum(request.input_tokens for request in requests)
    return {
        "requests": len(requests),
        "input_tokens": input_tokens,
        "device": sum(request.device for request in requests),
        "host": sum(request.host for request in requests),
        "storage": sum(request.storage for request in requests),
        "computed": sum(request.computed for request in requests),
        "hit_rate": _rate(sum(request.cached for request in requests), input_tokens),
    }
