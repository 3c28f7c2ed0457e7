"""Which tier served each prompt token, and why the first computed page was not a hit.

Owns the `hicache.hits.v1` numbers. It adds up what the records say and
never repairs them: where device + host + storage + computed is not the prompt, that is reported.

Counts are those of each replica's first rank (every axis but dp at 0), one replica for each dp.

    0        device        host       storage              input_tokens
    |- on device -|- loaded -|- prefetched -|--- computed by forward ---|
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from tracer.errors import HitsError
from tracer.log import LaneLog, Run

SCHEMA = "hicache.hits.v1"
DIGEST_CHARS = 16
TIME_BUCKETS_MAX = 20
# Replicas without a log that are named; a header may claim a million.
MISSING_NAMED_MAX = 3
# The row of `--by tier` for what no tier served and nobody computed, there only when there is some.
UNPLACED = "unplaced"

By = Literal["request", "tier", "conversation", "reason", "time"]
GROUPINGS = ("request", "tier", "conversation", "reason", "time")

# What last happened to a page's content, by its digest.
RESIDENT, DEMOTED, DROPPED, DROPPED_FROM_HOST = "resident", "demoted", "dropped", "dropped_from_host"


@dataclass(frozen=True, slots=True)
class RequestHits:
    """One request's prompt, split by the tier that served it.

    Attributes:
        reason: why the first computed page was not a hit; None when the request was not admitted.
        refused: why it never will be, or "".
        step: scheduler iteration at which the request was received.
        time_ns: the same on the rank's clock.
        is_finished: whether a finish record was seen.
    """

    rid: str
    dp: int
    input_tokens: int
    device: int
    host: int
    storage: int
    computed: int
    reason: str | None
    conversation: str | None = None
    step: int = 0
    time_ns: int = 0
    is_finished: bool = False
    refused: str = ""

    @property
    def cached(self) -> int:
        return self.device + self.host + self.storage

    @property
    def is_admitted(self) -> bool:
        return self.reason is not None

    @property
    def unplaced(self) -> int:
        """Prompt tokens that no tier served and nobody computed."""
        return max(0, self.input_tokens - self.cached - self.computed)

    @property
    def is_unaccounted(self) -> bool:
        """Whether it was served to its end and its parts are not its prompt."""
        is_equal = self.cached + self.computed == self.input_tokens
        return self.is_admitted and self.is_finished and not is_equal


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
        account = _Account(dp, page_size_tokens(lanes))
        for lane in lanes:
            account.read(lane)
            notes += [note for note in (lane.cut, lane.loss) if note]
        requests += account.results(_has_host_tier(lanes, account))
    chosen = tuple(
        request
        for request in requests
        if (since is None or request.step >= since) and (until is None or request.step <= until)
    )
    grouping: By = by  # type: ignore[assignment]  # it is one of GROUPINGS
    return Hits(grouping, chosen, tuple(ROWS[by](chosen)), tuple(notes))


@dataclass(slots=True)
class _Draft:
    """A request while its records are read; the first admission is the one that counts."""

    rid: str
    input_tokens: int = 0
    conversation: str | None = None
    step: int = 0
    time_ns: int = 0
    tiers: tuple[int, int, int] = (0, 0, 0)
    computed: int = 0
    is_admitted: bool = False
    is_finished: bool = False
    matched: str = "unknown"
    declined: str = ""
    # From its admission to its first forward: whether the host's part is loaded is told in between.
    is_load_due: bool = False
    refused: str = ""


@dataclass(slots=True)
class _Account:
    """One replica's requests and the fate of every page, as its first rank recorded them."""

    dp: int
    page_size_tokens: int = 0
    drafts: dict[str, _Draft] = field(default_factory=dict)
    fates: dict[str, str] = field(default_factory=dict)
    has_backups: bool = False

    def read(self, lane: LaneLog) -> None:
        handlers: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "request": self._request,
            "match": self._match,
            "load_back": self._load_back,
            "admit": self._admit,
            "forward": self._forward,
            "finish": self._finish,
            "insert": self._insert,
            "evict": self._evict,
            "evict_host": self._evict_host,
            "write_backup": self._write_backup,
        }
        find = handlers.get
        seq = 0
        try:
            for record in lane.records():
                if handler := find(record["kind"]):
                    seq = record["seq"]
                    handler(record)
        except (LookupError, TypeError, ValueError) as error:
            raise HitsError(
                f"record {seq} lacks a count or field that the hit analysis needs: {error!r}",
                where=lane.file_of(seq).name,
                expected="the fields of the same kind in hicache/probes.py",
            ) from None

    def results(self, has_host_tier: bool) -> list[RequestHits]:
        return [self._result(draft, has_host_tier) for draft in self.drafts.values()]

    def _result(self, draft: _Draft, has_host_tier: bool) -> RequestHits:
        reason: str | None = None
        if draft.is_admitted:
            reason = f"declined_{draft.declined}" if draft.declined else draft.matched
            if reason == DROPPED:
                reason = "not_backed_up" if has_host_tier else "evicted_device"
        device, host, storage = draft.tiers
        return RequestHits(
            draft.rid,
            self.dp,
            draft.input_tokens,
            device,
            host,
            storage,
            draft.computed,
            reason,
            draft.conversation,
            draft.step,
            draft.time_ns,
            draft.is_finished,
            "" if draft.is_admitted else draft.refused,
        )

    def _draft(self, rid: str) -> _Draft:
        draft = self.drafts.get(rid)
        if draft is None:
            draft = self.drafts[rid] = _Draft(rid)
        return draft

    def _request(self, record: Mapping[str, Any]) -> None:
        draft = self._draft(record["rid"])
        draft.input_tokens = _count(record["input_tokens"])
        conversation = record.get("conversation")
        draft.conversation = None if conversation is None else str(conversation)
        draft.step, draft.time_ns = _whole(record["step"]), _whole(record["time_ns"])

    def _match(self, record: Mapping[str, Any]) -> None:
        draft = self._draft(record["rid"])
        if draft.is_admitted:
            return
        # A request that waits is matched again and again; the last match before admission decides.
        draft.declined = ""
        digest = record.get("miss_digest")
        if digest is None:
            draft.matched = "unknown"
        elif digest == "":
            # What is left is one token that must be computed, or a page too short to be kept.
            is_partial = self.page_size_tokens and draft.input_tokens % self.page_size_tokens
            draft.matched = "partial_page" if is_partial else "last_token"
        else:
            draft.matched = FATE_REASONS[self.fates.get(digest)]

    def _load_back(self, record: Mapping[str, Any]) -> None:
        draft = self._draft(record["rid"])
        if not draft.is_admitted or draft.is_load_due:
            draft.is_load_due = False
            draft.declined = str(record.get("declined") or "")

    def _admit(self, record: Mapping[str, Any]) -> None:
        draft = self._draft(record["rid"])
        if record["verdict"] == REFUSED and not draft.is_admitted:
            draft.refused = REFUSED
        if record["verdict"] == "admitted" and not draft.is_admitted:
            draft.is_admitted = draft.is_load_due = True
            device, host, storage = (
                _count(record[f"{tier}_tokens"]) for tier in ("device", "host", "storage")
            )
            draft.tiers = (device, host, storage)

    def _forward(self, record: Mapping[str, Any]) -> None:
        if record["mode"] == "extend":
            for rid, tokens in zip(record["rids"], record["computed_tokens"], strict=True):
                draft = self._draft(rid)
                draft.computed += _count(tokens)
                draft.is_load_due = False

    def _finish(self, record: Mapping[str, Any]) -> None:
        draft = self._draft(record["rid"])
        draft.is_finished = True
        if not draft.is_admitted:
            draft.refused = str(record.get("reason") or REFUSED)

    def _insert(self, record: Mapping[str, Any]) -> None:
        self._set_fates(record.get("new_digests"), RESIDENT)

    def _evict(self, record: Mapping[str, Any]) -> None:
        self._set_fates(record.get("demoted_digests"), DEMOTED)
        self._set_fates(record.get("dropped_digests"), DROPPED)

    def _evict_host(self, record: Mapping[str, Any]) -> None:
        self._set_fates(record.get("dropped_digests"), DROPPED_FROM_HOST)

    def _write_backup(self, record: Mapping[str, Any]) -> None:
        self.has_backups = True

    def _set_fates(self, digests: str | None, fate: str) -> None:
        fates = self.fates
        for digest in split_digests(digests):
            fates[digest] = fate


# The verdict of an admission on a request that can never fit.
REFUSED = "too_long"
# A page that is still somewhere and was missed all the same has a history that the log doesn't hold.
FATE_REASONS = {
    None: "cold",
    RESIDENT: "unknown",
    DEMOTED: "unknown",
    DROPPED: DROPPED,
    DROPPED_FROM_HOST: "evicted_host",
}


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.40} is not a count")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.40} is not a whole number")
    return value


def split_digests(digests: str | None) -> list[str]:
    """One digest a page out of a field that holds them one behind the other."""
    if not digests:
        return []
    return [digests[start : start + DIGEST_CHARS] for start in range(0, len(digests), DIGEST_CHARS)]


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


def _has_host_tier(lanes: Sequence[LaneLog], account: _Account) -> bool:
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
    unadmitted = [request for request in requests if not request.is_admitted]
    for reason, members in sorted(_grouped(unadmitted, lambda request: request.refused).items()):
        tokens = sum(request.input_tokens for request in members)
        how = f"refused ({reason.replace('_', ' ')})" if reason else "never admitted"
        yield f"{_were(len(members))} {how}: {counted(tokens, 'token')} that nobody served"
    pending = [
        request
        for request in requests
        if request.is_admitted and not request.is_finished and request.unplaced
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
