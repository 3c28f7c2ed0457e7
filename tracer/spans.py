"""Spans: what a log's records say of things that take time, with ids that depend on nothing else.

    request      request ............................. finish     on every rank, in the request's own trace
    prefetch       prefetch_submit ... prefetch_insert            a child of its request
    transfer          transfer_enqueue .. done .. transfer_ack    linked with the requests it works for
    storage backup                     storage_backup .. storage_ack
    collective     meeting enter .. leave                         linked with the other ranks' calls

Owns their names, ids and links. One lane's spans need nothing but that lane's records and the facts of its
rank, so that a log that is still written gives the same spans as a finished one. An end that is not in the
log is never invented: such a span has none and says that it is open. A start that is not in the log (the
oldest part of a ring) gives no span.

**Ids** are hashes. Trace: of run and rid; of run, group and number for a collective; of run, replica, queue
and op for a transfer: so that all ranks' views of one thing are one trace. Span: of run, rank, stream and
number in the stream, where the stream is a group (`group_seq`), a queue (`op`) or, for a request, its lane
(`seq`). Whoever knows the key can name the span, without having seen it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from tracer.log import LaneLog, Run
from tracer.plausible import INTEGER_MAX
from tracer.record import BACKEND, Record
from tracer.span import (
    CLIENT,
    INTERNAL,
    SERVER,
    Attributes,
    Origin,
    Span,
    SpanEvent,
    SpanLink,
    Table,
    attributes_of,
    integer,
    origins,
    page_tokens,
    word,
)

# Above it, each call is linked with that of the group's first rank only: all pairs would be a square.
LINKED_RANKS_MAX = 16


@dataclass(frozen=True, slots=True)
class ExportCount:
    """What an export has read and written.

    Attributes:
        records: of the logs, without headers and trailers.
        events: spans written.
    """

    records: int
    events: int


def spans(run: Run) -> Iterator[tuple[Origin, LaneLog, Iterator[Span]]]:
    """Every lane of a run with its spans, to be read before the next lane is asked for.

    What is spoilt in the middle of a log is left out; what lasted over it is open or has no span.
    """
    found = origins(run)
    for lane in run.lanes:
        origin = found[lane.run_id, lane.rank]
        yield origin, lane, LaneSpans(origin, lane).read(lane.records(is_lenient=True))


STEP: Final = ("step", "hicache.step")
TOKENS: Final = ("tokens", "hicache.tokens")
PAGES: Final = ("pages", "hicache.pages")
OP: Final = ("op", "hicache.op_id")
OUTCOME: Final = ("outcome", "hicache.outcome")
MEETING_NUMBERS: Final[Table] = (
    STEP,
    ("group_seq", "hicache.group_seq"),
    ("numel", "hicache.numel"),
    ("peer", "hicache.peer"),
)
MEETING_WORDS: Final[Table] = (
    ("group", "hicache.group"),
    ("axis", "hicache.axis"),
    ("purpose", "hicache.purpose"),
    ("op", "hicache.collective"),
    ("reduce", "hicache.reduce"),
)
REQUEST_NUMBERS: Final[Table] = (
    STEP,
    ("order", "hicache.order"),
    ("priority", "hicache.priority"),
    ("input_tokens", "gen_ai.usage.input_tokens"),
)
REQUEST_WORDS: Final[Table] = (("rid", "rid"), ("conversation", "gen_ai.conversation.id"))
TIERS: Final[Table] = (
    ("device_tokens", "hicache.device.tokens"),
    ("host_tokens", "hicache.host.tokens"),
    ("storage_tokens", "hicache.storage.tokens"),
)
# Queue -> what such a copy is called, and the slower of the two tiers that it lies between.
QUEUES: Final = {"write": ("write_through", "host"), "load": ("load_back", "host")}


@dataclass(slots=True)
class _Open:
    """A span whose end has not been read."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    start_ns: int
    attributes: Attributes
    parent_id: str = ""
    events: list[SpanEvent] = field(default_factory=list)
    links: list[SpanLink] = field(default_factory=list)
    end_ns: int | None = None

    @property
    def link(self) -> SpanLink:
        return SpanLink(self.trace_id, self.span_id)

    def span(self) -> Span:
        if self.end_ns is None:
            self.attributes["hicache.open"] = True
        return Span(
            self.name,
            self.kind,
            self.trace_id,
            self.span_id,
            self.parent_id,
            self.start_ns,
            self.end_ns,
            self.attributes,
            tuple(self.events),
            tuple(self.links),
        )


@dataclass(slots=True)
class _Request:
    """A request while its records are read; its first life counts, as in the hit analysis.

    Attributes:
        inserted_tokens: of its prefix, as the insert that has not returned said.
        created_tokens: of its prompt that its inserts brought into the tree.
        queued: nodes that wait for their copy to the host, so that one that is over may yet get a link.
    """

    own: _Open
    input_tokens: int
    inserted_tokens: int = 0
    created_tokens: int = 0
    computed_tokens: int = 0
    is_admitted: bool = False
    is_retracted: bool = False
    queued: set[int] = field(default_factory=set)


class LaneSpans:
    """Makes the spans of one lane, record by record; never raises for what a record holds.

    Read records with `read`, or with `feed` and `take` while they are still written and `finish` at the end.
    """

    def __init__(self, origin: Origin, lane: LaneLog) -> None:
        self.origin = origin
        self.records_read = 0
        self._lane = lane.lane
        self._page_tokens = page_tokens(lane)
        self._replica = f"dp{lane.coordinates.get('dp', 0)}"
        self._groups = {
            name: [rank for rank in ranks if rank != origin.rank]
            if len(ranks) <= LINKED_RANKS_MAX
            else [rank for rank in ranks[:1] if rank != origin.rank]
            for name, ranks in lane.header.get("groups", {}).items()
        }
        self._done: list[Span] = []
        self._seeds: dict[tuple[int | None, str], bytes] = {}
        # Stream -> the newest number in it: one that does not go up gets an id by its record instead.
        self._newest: dict[str, int] = {}
        self._calls: dict[tuple[str, int], _Open] = {}
        self._moves: dict[tuple[str, int], _Open] = {}
        self._requests: dict[str, _Request] = {}
        self._over: dict[int, _Request] = {}
        self._prefetches: dict[int, tuple[_Open, str, int | None]] = {}
        self._store_call: _Open | None = None
        self._inserting: _Request | None = None
        # Node -> requests whose pages wait there for a copy of theirs, by queue.
        self._waiting: dict[str, dict[int, list[_Request]]] = {"write": {}, "load": {}}
        self._find = {
            "meeting": self._meeting,
            "mispaired": self._mispaired,
            "lane_state": self._lane_state,
            "request": self._request,
            "admit": self._admit,
            "forward": self._forward,
            "insert": self._insert,
            "retract": self._retract,
            "abort": self._abort,
            "wrong_page": self._wrong_page,
            "finish": self._finish,
            "write_backup": self._write_backup,
            "backup_cancel": self._backup_cancel,
            "load_back": self._load_back,
            "transfer_enqueue": self._transfer_enqueue,
            "transfer_done": self._transfer_done,
            "transfer_ack": self._transfer_ack,
            "storage_backup": self._storage_backup,
            "storage_ack": self._storage_ack,
            "prefetch_submit": self._prefetch_submit,
            "prefetch_hit": self._prefetch_hit,
            "prefetch_ack": self._prefetch_ack,
            "prefetch_poll": self._prefetch_poll,
            "prefetch_insert": self._prefetch_insert,
            "prefetch_outcome": self._prefetch_outcome,
        }.get

    def read(self, records: Iterable[Record]) -> Iterator[Span]:
        """The spans of all of a lane's records, each as soon as it has ended, the open ones last."""
        find, done, count = self._find, self._done, 0
        for record in records:
            count += 1
            if handler := find(record["kind"]):
                handler(record)
                if done:
                    self.records_read = count
                    yield from done
                    done.clear()
        self.records_read = count
        yield from self.finish()

    def feed(self, record: Record) -> None:
        self.records_read += 1
        kind = record.get("kind")
        if type(kind) is str and (handler := self._find(kind)):
            handler(record)

    def take(self) -> list[Span]:
        """Spans that have ended since the last call."""
        taken = self._done[:]
        self._done.clear()
        return taken

    def finish(self) -> list[Span]:
        """What is left when no more records come: the spans that are still open."""
        left = chain(
            self._calls.values(),
            [self._store_call] if self._store_call else [],
            self._moves.values(),
            (prefetch for prefetch, _rid, _attempt in self._prefetches.values()),
        )
        self._done += [each.span() for each in left]
        for request in chain(self._over.values(), self._requests.values()):
            self._emit_request(request)
        for table in (self._calls, self._moves, self._prefetches, self._over, self._requests):
            table.clear()
        self._store_call = None
        return self.take()

    # Ids and times.

    def _trace_id(self, stream: str, number: int | str) -> str:
        return str(xxh3_128_hexdigest(self._seed(None, stream) + str(number).encode(errors="surrogatepass")))

    def _span_id(self, stream: str, number: int, rank: int) -> str:
        return str(xxh3_64_hexdigest(self._seed(rank, stream) + b"%d" % number))

    def _seed(self, rank: int | None, stream: str) -> bytes:
        """What an id is hashed from, up to its number."""
        seed = self._seeds.get((rank, stream))
        if seed is None:
            parts = (self.origin.run_id, "trace" if rank is None else str(rank), stream, "")
            seed = self._seeds[rank, stream] = "\0".join(parts).encode(errors="surrogatepass")
        return seed

    def _own_id(self, record: Record) -> str:
        """The id of a span that only its record numbers."""
        return self._span_id(f"lane {self._lane}", integer(record.get("seq")) or 0, self.origin.rank)

    def _next_id(self, stream: str, number: int, record: Record) -> str:
        """The id by the number in the stream, once."""
        if number <= self._newest.get(stream, -1):
            return self._own_id(record)
        self._newest[stream] = number
        return self._span_id(stream, number, self.origin.rank)

    def _time(self, record: Record) -> int:
        time_ns = record.get("time_ns")
        if type(time_ns) is not int:
            return 0
        time_ns += self.origin.time_offset_ns
        return time_ns if 0 <= time_ns <= INTEGER_MAX else 0

    def _event(self, name: str, record: Record, numbers: Table, words: Table = ()) -> SpanEvent:
        return SpanEvent(name, self._time(record), attributes_of(record, numbers, words))

    def _end(self, opened: _Open, record: Record) -> None:
        opened.end_ns = self._time(record)
        self._done.append(opened.span())

    # Collectives.

    def _meeting(self, record: Record) -> None:
        group, number = record.get("group"), integer(record.get("group_seq"))
        if type(group) is not str or number is None:
            return
        key = group, number
        opened = self._calls.pop(key, None)
        phase = record.get("phase")
        if phase == "leave":
            if opened is not None:
                self._end(opened, record)
            return
        if opened is not None:
            self._done.append(opened.span())
        if phase == "enter":
            self._calls[key] = self._entered(record, group, number)

    def _entered(self, record: Record, group: str, number: int) -> _Open:
        stream = f"group {group}"
        trace_id = self._trace_id(stream, number)
        peer = integer(record.get("peer"))
        others = self._groups.get(group, ()) if peer is None else (peer,)
        called = _Open(
            f"collective {word(record.get('op')) or 'unknown'}",
            INTERNAL,
            trace_id,
            self._next_id(stream, number, record),
            self._time(record),
            attributes_of(record, MEETING_NUMBERS, MEETING_WORDS),
        )
        called.attributes["hicache.lane"] = self._lane
        called.links = [SpanLink(trace_id, self._span_id(stream, number, rank), True) for rank in others]
        return called

    def _mispaired(self, record: Record) -> None:
        group, number = record.get("group"), integer(record.get("group_seq"))
        if type(group) is str and number is not None and (called := self._calls.get((group, number))):
            called.events.append(self._event("mispaired", record, ()))

    # What a lane asks the external store.

    def _lane_state(self, record: Record) -> None:
        if self._store_call is not None:
            self._end(self._store_call, record)
            self._store_call = None
        if record.get("state") != BACKEND:
            return
        span_id = self._own_id(record)
        trace_id = self._trace_id(
            f"rank {self.origin.rank} lane {self._lane}", integer(record.get("seq")) or 0
        )
        told = attributes_of(record, (STEP, OP)) | {"hicache.tier": "storage", "hicache.lane": self._lane}
        self._store_call = _Open("store", CLIENT, trace_id, span_id, self._time(record), told)

    # Requests.

    def _request(self, record: Record) -> None:
        rid = record.get("rid")
        if type(rid) is not str:
            return
        if (earlier := self._requests.pop(rid, None)) is not None:
            self._emit_request(earlier)
        trace_id, span_id = self._trace_id("request", rid), self._own_id(record)
        told = attributes_of(record, REQUEST_NUMBERS, REQUEST_WORDS)
        own = _Open("request", SERVER, trace_id, span_id, self._time(record), told)
        self._requests[rid] = _Request(own, max(0, integer(record.get("input_tokens")) or 0))

    def _of(self, record: Record) -> _Request | None:
        rid = record.get("rid")
        return self._requests.get(rid) if type(rid) is str else None

    def _tell(self, name: str, record: Record, numbers: Table, words: Table = ()) -> _Request | None:
        """An event of the record's request, where that is known."""
        request = self._of(record)
        if request is not None:
            request.own.events.append(self._event(name, record, numbers, words))
        return request

    def _admit(self, record: Record) -> None:
        if record.get("verdict") != "admitted":
            return
        request = self._tell("admit", record, (STEP, *TIERS, ("extend_tokens", "hicache.extend.tokens")))
        if request is None or request.is_admitted:
            return
        request.is_admitted = True
        tiers = attributes_of(record, TIERS)
        told = request.own.attributes
        told |= tiers
        told["gen_ai.usage.cache_read.input_tokens"] = sum(
            each for each in tiers.values() if type(each) is int
        )

    def _forward(self, record: Record) -> None:
        rids, computed = record.get("rids"), record.get("computed_tokens")
        if record.get("mode") != "extend" or type(rids) is not list or type(computed) is not list:
            return
        # Not strict: a list that is too short says nothing of the rest.
        for rid, tokens in zip(rids, computed, strict=False):
            request = self._requests.get(rid) if type(rid) is str else None
            if request is None or integer(tokens) is None:
                continue
            request.own.events.append(
                SpanEvent("prefill", self._time(record), {"hicache.computed.tokens": tokens})
            )
            if not request.is_retracted:
                request.computed_tokens += tokens

    def _insert(self, record: Record) -> None:
        request = self._of(record)
        if record.get("phase") == "call":
            self._inserting = request
            if request is not None:
                request.inserted_tokens = integer(record.get("tokens")) or 0
            return
        self._inserting = None
        new_tokens = integer(record.get("new_tokens"))
        if request is None or new_tokens is None:
            return
        # What is new lies at the end of what was inserted; the part behind the prompt is its answer.
        end = integer(record.get("tokens")) or request.inserted_tokens
        of_prompt = min(end, request.input_tokens) - (end - new_tokens)
        request.created_tokens += max(0, of_prompt)

    def _retract(self, record: Record) -> None:
        request = self._tell("retract", record, (STEP, PAGES, ("attempt", "hicache.attempt")))
        if request is not None:
            request.is_retracted = True

    def _abort(self, record: Record) -> None:
        self._tell("abort", record, (STEP,), (("place", "hicache.place"),))

    def _wrong_page(self, record: Record) -> None:
        self._tell("wrong_page", record, (STEP, ("page_index", "hicache.page_index")))

    def _finish(self, record: Record) -> None:
        request = self._of(record)
        if request is None:
            return
        rid = record["rid"]
        request.own.end_ns = self._time(record)
        told = request.own.attributes
        told |= attributes_of(record, (("output_tokens", "gen_ai.usage.output_tokens"),))
        if (reason := word(record.get("reason"))) is not None:
            told |= {"hicache.outcome": reason, "gen_ai.response.finish_reasons": (reason,)}
        del self._requests[rid]
        if request.queued:
            self._over[id(request)] = request
        else:
            self._emit_request(request)

    def _emit_request(self, request: _Request) -> None:
        if request.is_admitted:
            told = request.own.attributes
            told["hicache.computed.tokens"] = min(request.computed_tokens, INTEGER_MAX)
            told["gen_ai.usage.cache_creation.input_tokens"] = min(request.created_tokens, INTEGER_MAX)
        self._done.append(request.own.span())

    # Copies between device and host.

    def _write_backup(self, record: Record) -> None:
        node, request = integer(record.get("node")), self._inserting
        if node is not None and request is not None and integer(record.get("tokens")):
            self._wait_for("write", node, request)
            request.queued.add(node)

    def _backup_cancel(self, record: Record) -> None:
        node = integer(record.get("node"))
        if node is not None:
            for request in self._waiting["write"].pop(node, ()):
                self._no_longer_queued(request, node)

    def _load_back(self, record: Record) -> None:
        request = self._tell("load_back", record, (STEP, PAGES, TOKENS), (("declined", "hicache.declined"),))
        node = integer(record.get("node"))
        if node is not None and request is not None and integer(record.get("tokens")):
            self._wait_for("load", node, request)

    def _wait_for(self, queue: str, node: int, request: _Request) -> None:
        self._waiting[queue].setdefault(node, []).append(request)

    def _no_longer_queued(self, request: _Request, node: int) -> None:
        request.queued.discard(node)
        if not request.queued and self._over.pop(id(request), None) is not None:
            self._emit_request(request)

    def _transfer_enqueue(self, record: Record) -> None:
        queue, op = word(record.get("queue")), integer(record.get("op"))
        if queue is None or op is None:
            return
        name, tier = QUEUES.get(queue, (queue, ""))
        move = self._move(f"transfer {queue}", queue, op, record, name, tier)
        nodes = record.get("nodes")
        nodes = nodes if type(nodes) is list else []
        move.attributes |= {"hicache.queue": queue, "hicache.node_count": len(nodes)}
        waiting = self._waiting.get(queue, {})
        for node in nodes:
            for request in waiting.pop(node, ()) if type(node) is int else ():
                # One request may have several nodes in a merged copy.
                if move.link not in request.own.links:
                    request.own.links.append(move.link)
                    move.links.append(request.own.link)
                self._no_longer_queued(request, node)

    def _move(self, name: str, queue: str, op: int, record: Record, what: str, tier: str) -> _Open:
        """A span of pages on their way, keyed by queue and op."""
        if (earlier := self._moves.pop((queue, op), None)) is not None:
            self._done.append(earlier.span())
        told = attributes_of(record, (STEP, OP, PAGES)) | {"hicache.op": what, "hicache.lane": self._lane}
        pages = told.get("hicache.pages")
        if type(pages) is int and self._page_tokens and pages * self._page_tokens <= INTEGER_MAX:
            told["hicache.tokens"] = pages * self._page_tokens
        if tier:
            told["hicache.tier"] = tier
        trace_id = self._trace_id(f"{self._replica} queue {queue}", op)
        span_id = self._next_id(f"queue {queue}", op, record)
        kind = CLIENT if tier == "storage" else INTERNAL
        move = _Open(name, kind, trace_id, span_id, self._time(record), told)
        self._moves[queue, op] = move
        return move

    def _transfer_done(self, record: Record) -> None:
        if (move := self._moves.get(self._move_key(record))) is not None:
            move.events.append(self._event("done", record, (STEP,)))

    def _transfer_ack(self, record: Record) -> None:
        if (move := self._moves.pop(self._move_key(record), None)) is not None:
            self._end(move, record)

    def _move_key(self, record: Record) -> tuple[str, int]:
        return word(record.get("queue")) or "", integer(record.get("op")) or 0

    # Copies between host and external tier. Their numbers are their own, beside those of the queues.

    def _storage_backup(self, record: Record) -> None:
        if (op := integer(record.get("op"))) is not None:
            self._move("storage backup", "storage backup", op, record, "backup", "storage")

    def _storage_ack(self, record: Record) -> None:
        move = self._moves.pop(("storage backup", integer(record.get("op")) or 0), None)
        if move is not None:
            move.attributes |= attributes_of(record, (("written_pages", "hicache.written_pages"),))
            self._end(move, record)

    # Prefetches.

    def _prefetch_submit(self, record: Record) -> None:
        op, rid = integer(record.get("op")), record.get("rid")
        if record.get("outcome") != "issued":
            self._tell("prefetch_declined", record, (STEP, PAGES), (OUTCOME,))
            return
        if op is None or type(rid) is not str:
            return
        self._end_prefetch(op, None)
        told = attributes_of(
            record, (STEP, OP, PAGES, TOKENS, ("attempt", "hicache.attempt")), (("rid", "rid"),)
        )
        told |= {"hicache.op": "prefetch", "hicache.tier": "storage"}
        trace_id, span_id = self._trace_id("request", rid), self._next_id("prefetch", op, record)
        opened = _Open("prefetch", CLIENT, trace_id, span_id, self._time(record), told)
        request = self._requests.get(rid)
        if request is not None:
            opened.parent_id = request.own.span_id
            opened.links.append(request.own.link)
            request.own.links.append(opened.link)
        self._prefetches[op] = opened, rid, integer(record.get("attempt"))

    def _end_prefetch(self, op: int, record: Record | None) -> None:
        if (found := self._prefetches.pop(op, None)) is None:
            return
        if record is None:
            self._done.append(found[0].span())
            return
        found[0].attributes |= attributes_of(record, (), (OUTCOME,))
        self._end(found[0], record)

    def _prefetch(self, record: Record) -> _Open | None:
        found = self._prefetches.get(integer(record.get("op")) or 0)
        return None if found is None else found[0]

    def _prefetch_hit(self, record: Record) -> None:
        if (opened := self._prefetch(record)) is None:
            return
        hit = ("hit_tokens", "hicache.hit.tokens")
        opened.attributes |= attributes_of(record, (hit,))
        opened.events.append(self._event("hit", record, (STEP, hit, TOKENS), (OUTCOME,)))
        # Nothing was taken over, so that nothing will be read.
        if not integer(record.get("tokens")):
            self._end_prefetch(integer(record.get("op")) or 0, record)

    def _prefetch_ack(self, record: Record) -> None:
        if (opened := self._prefetch(record)) is not None:
            opened.events.append(self._event("ack", record, (STEP, TOKENS), (("ack", "hicache.ack"),)))

    def _prefetch_poll(self, record: Record) -> None:
        if record.get("verdict") == "end" and (opened := self._prefetch(record)) is not None:
            completed = ("completed_tokens", "hicache.completed.tokens")
            opened.events.append(
                self._event("ended_by_poll", record, (STEP, completed), (("policy", "hicache.policy"),))
            )

    def _prefetch_insert(self, record: Record) -> None:
        if (opened := self._prefetch(record)) is not None:
            opened.attributes |= attributes_of(
                record,
                (
                    ("completed_tokens", "hicache.completed.tokens"),
                    ("matched_tokens", "hicache.matched.tokens"),
                    ("loaded_tokens", "hicache.loaded.tokens"),
                ),
            )
            self._end_prefetch(integer(record.get("op")) or 0, record)

    def _prefetch_outcome(self, record: Record) -> None:
        reason = ("reason", "hicache.reason")
        self._tell("prefetch_outcome", record, (STEP, TOKENS), (OUTCOME, reason))
        if record.get("outcome") != "cancelled":
            return
        asked = record.get("rid"), integer(record.get("attempt"))
        for op in [op for op, found in self._prefetches.items() if found[1:] == asked]:
            self._end_prefetch(op, record)
