"""Which tier served each prompt token, and why the first computed page was not a hit.

Owns the `hicache.hits.v1` numbers: sums and groups of rows, whatever those were read from. It adds up what
the records say and never repairs them: where the parts are not the prompt, that is reported.

In own logs counts are those of each replica's first rank (every axis but dp at 0), one replica for each dp.
A request's first life counts: what it computes again after it was retracted is not part of its prompt a
second time. Foreign files are read by `tracer.importers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import msgspec

from tracer.account import Account
from tracer.errors import HitsError
from tracer.log import LaneLog, Run
from tracer.prefixes import Pages, Paths, prefix_rows
from tracer.record import MAIN_LANE
from tracer.served import TIERS, RequestHits, Source

SCHEMA = "hicache.hits.v1"
TIME_BUCKETS_MAX = 20
# Replicas without a log that are named; a header may claim a million.
# The kind that begins a request: other logs may have kinds of the same names, and other fields.
REQUEST = "request"
MISSING_NAMED_MAX = 3
# Rows of `--by tier` that are there only when there is something in them: cached, and the source does not say
# where; neither cached nor computed.
UNTIERED = "untiered"
UNPLACED = "unplaced"
# The rest of a prompt where nobody tells what was computed.
UNCACHED = "uncached"

ROWS_A_TEXT = 20_000
ENCODE = msgspec.json.Encoder().encode

By = Literal["request", "tier", "conversation", "prefix", "reason", "time"]
GROUPINGS = ("request", "tier", "conversation", "prefix", "reason", "time")
Rows = tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Unaccounted:
    """A served request whose parts do not add up to its prompt."""

    rid: str
    input_tokens: int
    accounted_tokens: int


@dataclass
class Hits:
    """The result of `hits`. Sums are made once, when they are asked for: there may be a million rows.

    Attributes:
        requests: every request that was counted, by replica, then in order of arrival.
        make_rows: requests -> the table that was asked for.
        limits: what limits these numbers: a lane that was cut, a replica without a log.
        source: the foreign files that they are from; None for own logs.
    """

    by: By
    requests: tuple[RequestHits, ...]
    make_rows: Callable[[Sequence[RequestHits]], Rows]
    limits: tuple[str, ...] = ()
    source: Source | None = None

    @cached_property
    def rows(self) -> Rows:
        """The table, one dictionary a row, keys in the order of the columns."""
        return self.make_rows(self.requests)

    def rows_text(self) -> Iterator[str]:
        """The rows as JSON, many at a time, with commas between them: one a line."""
        # Where each row is a request, no more of them are there at once than go into one text.
        members: Sequence[Any] = self.requests if self.by == "request" else self.rows
        for start in range(0, len(members), ROWS_A_TEXT):
            some = members[start : start + ROWS_A_TEXT]
            rows = self.make_rows(some) if self.by == "request" else some
            yield ",\n  ".join([ENCODE(row).decode() for row in rows])

    def narrowed(self, rid: str) -> Hits:
        """The same, of the requests of that id alone."""
        requests = tuple(request for request in self.requests if request.rid == rid)
        return Hits(self.by, requests, self.make_rows, self.limits, self.source)

    @property
    def request_count(self) -> int:
        return len(self.requests)

    @property
    def row_count(self) -> int:
        return len(self.rows)

    def first_rows(self, count: int) -> Rows:
        """So many rows, and no more made than that where each is a request."""
        if self.by == "request":
            return self.make_rows(self.requests[:count])
        return self.rows[:count]

    def first_rids(self, count: int) -> list[str]:
        return [request.rid for request in self.requests[:count]]

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Those that occur."""
        return tuple(sorted({each.reason for each in self.requests if each.reason is not None}))

    @cached_property
    def odd(self) -> tuple[RequestHits, ...]:
        """Requests that are not like most: not served to their end, or whose parts are not their prompt."""
        return tuple(
            [
                each
                for each in self.requests
                if each.input_tokens != each.device + each.host + each.storage + each.untiered + each.computed
                or each.reason is None
                or each.is_aborted
                or not each.is_finished
            ]
        )

    @cached_property
    def unaccounted(self) -> tuple[Unaccounted, ...]:
        """Requests whose tokens do not add up."""
        return tuple(
            Unaccounted(request.rid, request.input_tokens, request.cached + request.computed)
            for request in self.odd
            if request.is_unaccounted
        )

    @property
    def _unserved(self) -> list[RequestHits]:
        """Requests that were never admitted and had no chance of a hit. In foreign files nobody knows."""
        return [] if self.source is not None else [each for each in self.odd if not each.is_admitted]

    @property
    def served_count(self) -> int:
        return self.request_count - len(self._unserved)

    @property
    def served_hit_rate(self) -> float:
        """The hit rate over the prompts of those that were admitted."""
        return _rate(self.cached, self.input_tokens - sum(each.input_tokens for each in self._unserved))

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What limits the numbers, of the logs and of the requests."""
        if self.source is not None:
            return (*self.limits, *_source_notes(self.source))
        return (*self.limits, *_unplaced_notes(self.odd))

    @cached_property
    def input_tokens(self) -> int:
        return sum([request.input_tokens for request in self.requests])

    @cached_property
    def cached_tokens(self) -> dict[str, int]:
        """By tier, and those of which the source does not say it."""
        parts = (*TIERS, UNTIERED)
        return {part: sum([getattr(request, part) for request in self.requests]) for part in parts}

    @property
    def cached(self) -> int:
        return sum(self.cached_tokens.values())

    @property
    def hit_rate(self) -> float:
        """Cached tokens divided by the prompt tokens of all listed requests; 0 without a prompt."""
        return _rate(self.cached, self.input_tokens)

    def to_json(self, *, with_rows: bool = True) -> dict[str, Any]:
        """The document of schema `hicache.hits.v1`; the last keys only when there is something to say.

        Args:
            with_rows: or an empty list in their place.
        """
        source = self.source
        cached: dict[str, Any] = dict(self.cached_tokens)
        untiered = cached.pop(UNTIERED)
        if source is not None and not source.tiers_are_told:
            cached = dict.fromkeys(cached)
        cached["total"] = self.cached
        if source is not None:
            cached[UNTIERED] = untiered
        is_counted = source is None or source.unit == "request"
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "requests": self.request_count if is_counted else None,
            "input_tokens": self.input_tokens,
            "cached_tokens": cached,
            "hit_rate": self.hit_rate,
            "by": self.by,
            "rows": list(self.rows) if with_rows else [],
        }
        if source is not None and source.unit == "event":
            # Nobody is served in it.
            nobody = {"input_tokens": None, "cached_tokens": dict.fromkeys((*TIERS, "total"))}
            document |= {**nobody, "hit_rate": None}
        elif source is not None and source.is_in_blocks:
            document["input_blocks"], document["cached_blocks"] = self.input_tokens, self.cached
            document["input_tokens"], document["cached_tokens"] = None, dict.fromkeys((*TIERS, "total"))
        if source is None:
            document |= _unplaced_json(self.odd)
        if self.unaccounted:
            document["unaccounted"] = [
                {
                    "rid": each.rid,
                    "input_tokens": each.input_tokens,
                    "accounted_tokens": each.accounted_tokens,
                }
                for each in self.unaccounted
            ]
        if source is not None:
            document["source"] = source.to_json()
        if self.notes:
            document["notes"] = list(self.notes)
        return document


def hits(run: Run, *, by: str = "request", since: int | None = None, until: int | None = None) -> Hits:
    """Account for every prompt token of a run.

    Args:
        by: `request`, `tier`, `conversation`, `prefix`, `reason` or `time` (buckets of the rank's clock,
            which is virtual in the simulator; at most 20, each 1, 2 or 5 times a power of ten nanoseconds
            wide).
        since: first scheduler step whose arrivals count; all records are read either way.
        until: last such step.
    Raises:
        HitsError: `by` is unknown, the logs are of several runs, or no replica's first rank left a log.
    """
    if by not in GROUPINGS:
        raise HitsError(f"can't group hits by {by!r}", expected=", ".join(GROUPINGS))
    replicas, notes = leaders(run)
    requests: list[RequestHits] = []
    for dp, lanes in replicas:
        account = Account(dp, page_size_tokens(lanes))
        for lane in lanes:
            try:
                account.read(lane)
            except HitsError:
                if REQUEST in lane.kinds or "admit" not in lane.kinds:
                    raise
                raise HitsError(
                    f"the logs in {run.path} know no requests",
                    expected=f"a header with the kind {REQUEST}, as docs/log_format.md has it",
                    hint=f"hicache check {run.path}",
                ) from None
            notes += [note for note in (lane.begin, lane.cut, lane.loss, *damage(lane)) if note]
        requests += account.results(_has_host_tier(lanes, account))
        notes += account.notes()
    chosen = tuple(
        request
        for request in requests
        if (since is None or request.step >= since) and (until is None or request.step <= until)
    )
    grouping: By = by  # type: ignore[assignment]  # it is one of GROUPINGS
    if by == "prefix":
        make_rows, more = _prefixes(replicas, chosen)
        notes += more
    else:
        make_rows = grouped_by(by)
    return Hits(grouping, chosen, make_rows, tuple(notes))


def grouped_by(by: str, source: Source | None = None) -> Callable[[Sequence[RequestHits]], Rows]:
    """Requests -> rows of that grouping, for any but `prefix`, which needs more than the requests."""
    return lambda requests: tuple(ROWS[by](requests, source))


def document_parts(found: Hits) -> Iterator[str]:
    """The document as it is printed. There may be a million rows, so the standard library is too slow."""
    text = _pretty(found.to_json(with_rows=False))
    before, _empty, after = text.partition(EMPTY_ROWS)
    yield f'{before}"rows": ['
    between = "\n  "
    for rows in found.rows_text():
        yield between + rows
        between = ",\n  "
    yield f"{'' if between[0] != ',' else chr(10) + ' '}]{after}\n"


EMPTY_ROWS = '"rows": []'


def _pretty(document: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode()


def damage(lane: LaneLog) -> tuple[str, ...]:
    """Blocks of the lane that are not what their writer wrote."""
    found: tuple[str, ...] = getattr(lane, "damage", ())
    return found


def _prefixes(
    replicas: Sequence[tuple[int, tuple[LaneLog, ...]]], chosen: Sequence[RequestHits]
) -> tuple[Callable[[Sequence[RequestHits]], Rows], list[str]]:
    """Requests -> their top shared prefixes, and what limits them. All replicas' pages are one tree.

    Raises:
        HitsError: no page size, or a record without a field that is needed.
    """
    pages = Pages()
    tips: dict[tuple[int, str, int, int], tuple[str, bool]] = {}
    page_tokens = 0
    for dp, lanes in replicas:
        page_tokens = page_size_tokens(lanes)
        if not page_tokens:
            raise HitsError(
                "can't group hits by prefix: the log's header has no page size",
                where=str(lanes[0].files[0]),
                expected="config.page_size_tokens",
            )
        for lane in lanes:
            if lane.lane == MAIN_LANE:
                paths = Paths(pages, page_tokens, is_whole=not lane.last_dropped_seq)
                paths.read(lane)
                tips |= {(dp, *key): tip for key, tip in paths.tips().items()}

    def tip_of(request: RequestHits) -> tuple[str | None, bool]:
        return tips.get((request.dp, request.rid, request.step, request.time_ns), (None, True))

    found = [tip_of(request) for request in chosen]
    notes = []
    if lost := sum(tip is None for tip, _is_end in found):
        notes.append(
            f"{_were(lost)} left out of the prefixes: this log does not tell which pages "
            f"{'it' if lost == 1 else 'they'} found (no hit_digest in its matches)"
        )
    if partial := sum(not is_end for _tip, is_end in found):
        notes.append(
            f"{_were(partial)} not computed to the end: of such a prompt no page is known behind the first "
            "one that it missed"
        )

    def make_rows(requests: Sequence[RequestHits]) -> Rows:
        with_tips = [(request, tip_of(request)[0]) for request in requests]
        return tuple(prefix_rows(pages, page_tokens, with_tips))

    return make_rows, notes


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


def _by_request(requests: Sequence[RequestHits], source: Source | None) -> Iterator[dict[str, Any]]:
    if source is not None:
        yield from _foreign_requests(requests, source)
        return
    for request in requests:
        unplaced = request.unplaced
        yield {
            "rid": request.rid,
            "input_tokens": request.input_tokens,
            "device": request.device,
            "host": request.host,
            "storage": request.storage,
            "computed": request.computed,
            "reason": request.reason,
            UNPLACED: unplaced,
            "unplaced_reason": request.unplaced_reason if unplaced else None,
        }


def _foreign_requests(requests: Sequence[RequestHits], source: Source) -> Iterator[dict[str, Any]]:
    """What the source can't know is null. A row says where it stands."""
    prompt = "input_blocks" if source.is_in_blocks else "input_tokens"
    files = source.files
    for request in requests:
        told = source.tiers_are_told
        yield {
            "rid": request.rid,
            prompt: request.input_tokens,
            "device": request.device if told else None,
            "host": request.host if told else None,
            "storage": request.storage if told else None,
            UNTIERED: request.untiered,
            "computed": request.computed if source.computed_is_told else None,
            UNCACHED: request.uncached,
            "reason": None,
            "file": files[request.file],
            "line": request.line,
        }


def _by_tier(requests: Sequence[RequestHits], source: Source | None) -> Iterator[dict[str, Any]]:
    whole = sum(request.input_tokens for request in requests)
    is_counted = source is None or source.unit in ("request", "lookup")
    for tier in _tiers(source):
        parts = [getattr(request, tier) for request in requests]
        tokens = sum(parts)
        if tokens or tier not in (UNTIERED, UNPLACED):
            yield {
                "tier": tier,
                "blocks" if source is not None and source.is_in_blocks else "tokens": tokens,
                "share": _rate(tokens, whole),
                "lookups" if source is not None and source.unit == "lookup" else "requests": (
                    sum(part > 0 for part in parts) if is_counted else None
                ),
            }


def _tiers(source: Source | None) -> tuple[str, ...]:
    """Where a prompt's tokens may be, as far as the source tells it; together they are the prompt."""
    if source is None:
        return (*TIERS, "computed", UNPLACED)
    cached = (*TIERS, UNTIERED) if source.tiers_are_told else (UNTIERED,)
    return (*cached, "computed", UNPLACED) if source.computed_is_told else (*cached, UNCACHED)


def _source_notes(source: Source) -> Iterator[str]:
    """What limits numbers from foreign files: what was not understood, and what they can't know."""
    for file, lines, unparsed in zip(source.files, source.lines, source.unparsed, strict=True):
        if unparsed:
            yield f"{file}: {unparsed:,} of {counted(lines, 'line')} not understood, and not counted"
    yield from source.notes
    if source.unknown_keys:
        names = ", ".join(sorted(source.unknown_keys)[:UNKNOWN_NAMED_MAX])
        more = len(source.unknown_keys) - UNKNOWN_NAMED_MAX
        yield f"keys that are not known and were not read: {names}" + (
            f" and {more} more" if more > 0 else ""
        )
    if not source.computed_is_told:
        yield "this source does not say what was computed, nor why anything was not cached"


def _unplaced_json(requests: Sequence[RequestHits]) -> dict[str, Any]:
    """Prompt tokens without a place, by why; nothing where there are none."""
    by_reason: dict[str, int] = {}
    for request in requests:
        if reason := request.unplaced_reason:
            by_reason[reason] = by_reason.get(reason, 0) + request.unplaced
    if not by_reason:
        return {}
    return {UNPLACED: {"total": sum(by_reason.values()), "by_reason": dict(sorted(by_reason.items()))}}


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


def _by_conversation(requests: Sequence[RequestHits], source: Source | None) -> Iterator[dict[str, Any]]:
    for conversation, members in _grouped(requests, lambda request: request.conversation).items():
        yield {"conversation": conversation, **_sums(members, source)}


def _by_reason(requests: Sequence[RequestHits], source: Source | None) -> Iterator[dict[str, Any]]:
    """Most computed tokens first: that is what each reason cost."""
    groups = _grouped(requests, lambda request: request.reason).items()
    for reason, members in sorted(
        groups, key=lambda item: (-sum(each.computed for each in item[1]), item[0] or "")
    ):
        yield {"reason": reason, **_sums(members, source)}


def _by_time(requests: Sequence[RequestHits], source: Source | None) -> Iterator[dict[str, Any]]:
    if not requests:
        return
    times = [request.time_ns for request in requests]
    width = _bucket_ns(max(times) - min(times))
    start = min(times) // width * width
    buckets = _grouped(requests, lambda request: (request.time_ns - start) // width)
    # A bucket in which nobody arrived is a fact too.
    for bucket in range(max(buckets) + 1):
        from_ns = start + bucket * width
        yield {"from_ns": from_ns, "to_ns": from_ns + width, **_sums(buckets.get(bucket, []), source)}


# Keys of foreign rows that are named when they are not known.
UNKNOWN_NAMED_MAX = 8
ROWS: Mapping[str, Callable[[Sequence[RequestHits], Source | None], Iterator[dict[str, Any]]]] = {
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


def _sums(requests: Sequence[RequestHits], source: Source | None) -> dict[str, Any]:
    whole = sum(request.input_tokens for request in requests)
    sums = {part: sum(getattr(request, part) for request in requests) for part in _tiers(source)}
    is_counted = source is None or source.unit == "request"
    return {
        # A prompt in chunks is in several batches.
        "requests" if is_counted or source is None else PLURALS[source.unit]: len(requests),
        "input_blocks" if source is not None and source.is_in_blocks else "input_tokens": whole,
        **sums,
        "hit_rate": _rate(sum(request.cached for request in requests), whole),
    }


PLURALS = {"batch": "batches", "run": "runs", "lookup": "lookups"}
