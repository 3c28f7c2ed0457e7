"""The outside world played back: whatever came through a port of one rank, as its log has it.

    Transport   what the group agreed on, in the record that follows from it
    Engine      a copy is done where the log says that this rank saw it done
    queues      what background lanes had published by an event round, by their own logs
    Source      requests, aborts and commands of a step
    Memory      as much as is asked for: whether slots were there is never a reason for anything

Only the scheduler's lane is run. The lanes beside it have measured and met, which is observation; nothing
of them is decided.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from hicache.control.capacity import PURPOSE as CAPACITY_PURPOSE
from hicache.control.capacity import UNLIMITED
from hicache.control.commands import DONE
from hicache.control.mail import Mail, encode
from hicache.control.pools import SlotMemory
from hicache.control.prefetch import Prefetches
from hicache.control.queues import Hit, Prefetch, Progress, StorageBackup
from hicache.core import Abort, Arrival, Command, Queue, Slot, Transfer
from hicache.errors import HiCacheError
from hicache.ledger import Ledger, TierTags, WrongPage
from hicache.ports import Axis, Found, Reduce
from hicache.probes import Probes
from hicache.sim.reenact_prompts import Prompts
from hicache.topology import Topology
from hicache.transport.meetings import Call, Group, LaneTransport, Link, Seat

Record = Mapping[str, Any]
SCHEDULER = "scheduler"
RECEIVE, ROUND, TIMEOUT = "receive_requests", "event_round", "prefetch_timeout"
VOTES = ("storage_attach", "storage_detach")
STORAGE_READY = ("hits_ready", "prefetch_acks_ready", "storage_acks_ready")
STORAGE_COUNTS = ("hits_agreed", "prefetch_acks_agreed", "storage_acks_agreed", "releases_agreed")


class LogEndedError(Exception):
    """The log goes no further: its rank hung here, died, or its log was cut."""


class DiffersError(Exception):
    """What is done again is not what the log has next; `got` is None where nothing comes of it."""

    def __init__(self, got: Mapping[str, Any] | None, why: str = "") -> None:
        super().__init__(why)
        self.got = got
        self.why = why


class Tape:
    """One rank's scheduler records, and how far they have been done again.

    Args:
        records: without those that are nobody's decision.
        end: how many of them are done again; those behind only say what was observed.

    Attributes:
        own_digest: what the rank that is done again has sent with its newest event round.
    """

    def __init__(self, records: Sequence[Record], end: int) -> None:
        self.records = records
        self.end = end
        self.at = 0
        self.own_digest = 0
        self._places: dict[tuple[str, str], list[int]] = {}
        for place, record in enumerate(records):
            self._places.setdefault((record["kind"], record.get("phase", "")), []).append(place)

    @property
    def next(self) -> Record:
        """
        Raises:
            LogEndedError: there is none.
        """
        if self.at >= self.end:
            raise LogEndedError
        return self.records[self.at]

    def find(self, kind: str, phase: str = "") -> Record | None:
        """The next record of a kind, this one or a later one."""
        place = self.place(kind, phase)
        return None if place is None else self.records[place]

    def place(self, kind: str, phase: str = "") -> int | None:
        places = self._places.get((kind, phase), [])
        at = bisect_left(places, self.at)
        return places[at] if at < len(places) else None

    def last(self, kind: str, phase: str = "") -> Record:
        """The newest record of a kind that has been done again; there must be one."""
        places = self._places[kind, phase]
        return self.records[places[bisect_left(places, self.at) - 1]]

    def demand(self, kind: str, phase: str = "") -> Record:
        """
        Raises:
            LogEndedError: the log ends before.
        """
        found = self.find(kind, phase)
        if found is None:
            raise LogEndedError
        return found


class Published:
    """What the background lanes had published, and when the scheduler could see it.

    Args:
        lanes: lane -> its records; a lane that left no log, or too short a one, is made up from what the
            scheduler took.
    """

    def __init__(self, tape: Tape, lanes: Mapping[str, Sequence[Record]], page_tokens: int) -> None:
        self._tape = tape
        self._page_tokens = page_tokens

        def told(lane: str, kind: str, *names: str) -> list[tuple[Any, ...]]:
            records = tape.records if lane == SCHEDULER else lanes.get(lane, ())
            return [tuple(each[name] for name in names) for each in records if each["kind"] == kind]

        hits = [
            (op, tokens // page_tokens) for op, tokens in told(SCHEDULER, "prefetch_hit", "op", "hit_tokens")
        ]
        self._hits = _longer(told("prefetch", "query", "op", "agreed_pages"), hits)
        self._acks = _longer(
            told("sync", "progress", "op", "ack", "agreed_tokens"),
            told(SCHEDULER, "prefetch_ack", "op", "ack", "tokens"),
        )
        self._writes = _longer(
            told("backup", "storage_write", "op", "written_pages"),
            told(SCHEDULER, "storage_ack", "op", "written_pages"),
        )
        self._prefetches: dict[int, Prefetch] = {}
        self._backups: dict[int, StorageBackup] = {}
        self.prefetches: Prefetches | None = None

    def until_round(self) -> None:
        """As much as this rank had before it counted for the coming event round."""
        call = self._tape.find(ROUND, "call")
        if self.prefetches is None or call is None:
            return
        self._publish(
            call.get("hits_ready") or 0,
            call.get("prefetch_acks_ready") or 0,
            call.get("storage_acks_ready") or 0,
        )

    def until_agreed(self, agreed: Record) -> None:
        """As much as the group applies; a later stage waits until it has it."""
        if self.prefetches is not None:
            self._publish(*(agreed.get(name) or 0 for name in STORAGE_COUNTS[:3]))

    def _publish(self, hits: int, acks: int, writes: int) -> None:
        assert self.prefetches is not None
        queues = self.prefetches.queues
        self._take_work()
        while len(queues.hits) < hits:
            op, pages = self._nth(self._hits, queues.hits.put_count)
            queues.hits.put(Hit(self._of(self._prefetches, op), int(pages), queues.hits.put_count + 1))
        while len(queues.acks) < acks:
            op, ack, tokens = self._nth(self._acks, queues.acks.put_count)
            prefetch = self._of(self._prefetches, op)
            pages = int(tokens) // (1 if ack == "pool_hits" else self._page_tokens)
            queues.acks.put(Progress(prefetch, str(ack), pages, queues.acks.put_count + 1))
        while len(queues.backup_acks) < writes:
            op, written = self._nth(self._writes, queues.backup_acks.put_count)
            backup = self._of(self._backups, op)
            backup.written_pages = int(written)
            queues.backup_acks.put(backup)

    def _take_work(self) -> None:
        """What the scheduler has handed to lanes that do not run here."""
        assert self.prefetches is not None
        queues = self.prefetches.queues
        while len(queues.prefetch):
            prefetch = _taken(queues.prefetch)
            if prefetch is not None:
                self._prefetches[prefetch.op] = prefetch
        while len(queues.backup):
            backup = _taken(queues.backup)
            if backup is not None:
                self._backups[backup.op] = backup
        for queue in (queues.buffer, queues.sync):
            while len(queue):
                _taken(queue)

    @staticmethod
    def _nth(entries: Sequence[Any], number: int) -> Any:
        if number >= len(entries):
            raise LogEndedError
        return entries[number]

    @staticmethod
    def _of(known: Mapping[int, Any], op: int) -> Any:
        if op not in known:
            raise DiffersError(None, f"operation {op} was never submitted here")
        return known[op]


def _longer(own: list[Any], taken: list[Any]) -> list[Any]:
    """A lane's own records, and behind them what the scheduler says that it took."""
    return own if len(own) >= len(taken) else own + taken[len(own) :]


def _taken(mailbox: Any) -> Any:
    """The oldest item of a mailbox that has one."""
    try:
        mailbox.get().send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a mailbox with items made its reader wait")


class TapeWire:
    """What the others had to say. Implements `meetings.Wire`."""

    def __init__(self, tape: Tape, prompts: Prompts, published: Published) -> None:
        self._tape = tape
        self._prompts = prompts
        self._published = published

    async def meet(self, group: Group, call: Call, value: Any) -> Any:
        return self._outcome(value)

    def send(self, link: Link, call: Call, message: Any) -> None:
        """Nobody is there."""

    async def receive(self, link: Link, call: Call) -> Any:
        return self._outcome(None)

    async def drain(self, link: Link) -> None:
        """Nothing was sent."""

    def _outcome(self, value: Any) -> Any:
        """By the purpose of the meeting that was entered last; `value` where nobody reads it."""
        tape = self._tape
        purpose = tape.records[tape.at - 1].get("purpose") if tape.at else ""
        if purpose == RECEIVE:
            return encode(self.mail())
        if purpose == CAPACITY_PURPOSE:
            return self._capacity(len(value))
        if purpose == ROUND:
            return self._round()
        if purpose == TIMEOUT:
            return [int(tape.demand("prefetch_poll")["verdict"] == "end")]
        if purpose in VOTES:
            return [int(self._vote())]
        return value

    def mail(self) -> Mail:
        """What a step received: everything that came before its event round."""
        tape = self._tape
        until = tape.place(ROUND, "call")
        if until is None:
            # The last mail, if the run came to its end; a rank that was cut has not received it.
            tape.demand("pool_audit")
            return Mail([], is_last=True)
        arrivals: list[Arrival] = []
        for record in tape.records[tape.at : until]:
            kind = record["kind"]
            if kind == "request":
                arrivals.append(self._prompts.request(record))
            elif kind == "abort":
                arrivals.append(Abort(str(record["rid"])))
            elif kind == "command":
                arrivals.append(Command(record["verb"]))
        return Mail(arrivals, is_last=False)

    def _capacity(self, count: int) -> list[int]:
        tape = self._tape
        place = tape.place("capacity")
        if place is None:
            raise LogEndedError
        found = tape.records[place : place + count]
        return [int(record.get("pages") or 0) or UNLIMITED for record in found]

    def _round(self) -> list[int]:
        """The agreed vector, in the order of `event_round.Counts`; the digest is not voted on here."""
        agreed = self._tape.demand(ROUND, "return")
        self._published.until_agreed(agreed)
        storage: list[int] = []
        if "hits_agreed" in agreed:
            storage = [agreed[name] for name in STORAGE_COUNTS] + list(agreed["side_releases_agreed"])
        digest = self._tape.own_digest
        counts = [agreed["writes_agreed"], agreed["loads_agreed"], *storage, agreed["backups_agreed"]]
        return [*counts, digest, -digest]

    def _vote(self) -> bool:
        """Whether all ranks were ready: what became of the command, or of attaching at the start."""
        tape = self._tape
        for record in tape.records[tape.at :]:
            if record["kind"] != "meeting" or record.get("purpose") not in VOTES:
                return record["kind"] != "command" or record.get("verdict") == DONE
        raise LogEndedError


class TapeTransport(LaneTransport):
    """The scheduler's way to its peers, all of whom are the log."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        tape: Tape,
        wire: TapeWire,
        probes: Probes,
        published: Published,
    ) -> None:
        super().__init__(Seat(topology, rank), wire, probes)
        self._tape = tape
        self._published = published
        # A rank that has its stage to itself meets nobody: what it saw itself is what the stage agrees on.
        self._is_alone = topology.cp == topology.tp == 1

    async def all_reduce(
        self, axis: Axis, values: Sequence[int], *, op: Reduce, purpose: str, channel: str
    ) -> list[int]:
        if self._is_alone:
            values = self._seen(list(values), purpose)
        return await super().all_reduce(axis, values, op=op, purpose=purpose, channel=channel)

    def _seen(self, values: list[int], purpose: str) -> list[int]:
        """`values` with what only this rank's clock and memory could say, by its log."""
        if purpose == TIMEOUT:
            return [int(bool(self._tape.demand("prefetch_poll").get("is_late")))]
        if purpose == ROUND:
            own = self._tape.last(ROUND, "call")
            # Slots never run out here; there they did. Behind the count come the digest and its negative.
            values[-3] = own.get("backups_reserved") or 0
        return values

    async def drain_sends(self, channel: str) -> None:
        # An event round begins so, and then counts what has been published.
        self._published.until_round()


class EndlessMemory:
    """Slots without end, under the size that this rank had. Implements `ports.Memory`.

    Decisions count on what was agreed; memory that failed on this rank alone was a fact, never a reason.
    """

    def __init__(self, page_count: int) -> None:
        self.page_count = page_count
        self._memory = SlotMemory(0)

    @property
    def pages_free(self) -> int | None:
        return None

    @property
    def pages_used(self) -> int:
        return self._memory.pages_used

    def alloc(self, page_count: int) -> list[Slot] | None:
        return self._memory.alloc(page_count)

    def free(self, slots: Sequence[Slot]) -> None:
        self._memory.free(slots)


class TapeEngine:
    """Copies that are done where the log says so. Implements `ports.Engine`."""

    def __init__(self, tape: Tape, probes: Probes) -> None:
        self._tape = tape
        self._probes = probes
        self._moving: dict[int, Transfer] = {}

    def submit(self, transfer: Transfer) -> None:
        self._moving[transfer.op] = transfer

    def ready(self, transfer: Transfer) -> bool:
        self._advance()
        return transfer.is_done

    async def wait(self, transfer: Transfer) -> None:
        self._advance()
        if not transfer.is_done:
            # Whoever waits writes nothing before the copy is done.
            self._tape.next  # noqa: B018
            raise DiffersError(
                {"kind": "transfer_done", "op": transfer.op, "queue": transfer.queue},
                f"it waits for copy {transfer.op}",
            )

    def _advance(self) -> None:
        tape = self._tape
        while tape.at < tape.end and tape.records[tape.at]["kind"] == "transfer_done":
            record = tape.records[tape.at]
            transfer = self._moving.pop(record.get("op", -1), None)
            if transfer is None:
                raise DiffersError(None, f"copy {record.get('op')} was never submitted here")
            transfer.is_done = True
            queue: Queue = transfer.queue
            self._probes.transfer_done(transfer.op, queue)


class TapeSource:
    """The front door, on the rank that has one. Implements `ports.Source`."""

    def __init__(self, wire: TapeWire) -> None:
        self._wire = wire
        self.is_exhausted = False

    def poll(self, *, is_idle: bool) -> list[Arrival]:
        mail = self._wire.mail()
        self.is_exhausted = mail.is_last
        return list(mail.arrivals)

    def carried_out(self, command: Command, reason: str) -> None:
        """Nobody waits for it."""

    def finished(self, rid: str, *, is_served: bool) -> None:
        """Nobody waits for it."""


class TapeStorage:
    """The external tier, of which the scheduler only opens and closes. Implements `ports.Storage`."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    async def exists(self, hashes: Sequence[str], *, pools: Sequence[str], prefix: Sequence[str]) -> Found:
        raise AssertionError("a lane runs that should not")

    async def get(self, pool: str, hashes: Sequence[str], *, prefix: Sequence[str]) -> list[bytes | None]:
        raise AssertionError("a lane runs that should not")

    async def set(
        self, pool: str, hashes: Sequence[str], pages: Sequence[bytes], *, prefix: Sequence[str]
    ) -> list[bool]:
        raise AssertionError("a lane runs that should not")

    async def open(self) -> None:
        tape = self._tape
        for record in tape.records[tape.at :]:
            if record["kind"] == "command" and record.get("verb") == "attach" and record.get("error"):
                raise HiCacheError(str(record["error"]))
            if record["kind"] not in ("command", "meeting"):
                return

    async def close(self) -> None:
        """Nothing was opened."""


class TapeClock:
    """No time passes: the one decision that reads a clock is in the log. Implements `ports.Clock`."""

    is_real = True

    def now_ns(self) -> int:
        return 0

    async def idle(self) -> None:
        """The next step, at once."""


class TrustedTags(TierTags):
    """Tags that nobody has moved, for nothing is copied here: whatever is read is as it should be."""

    def check(self, slots: Sequence[int], expected: bytes) -> WrongPage | None:
        return None


class TrustedLedger(Ledger):
    """A ledger of such tags."""

    def __init__(self) -> None:
        self.device = TrustedTags()
        self.host = TrustedTags()
