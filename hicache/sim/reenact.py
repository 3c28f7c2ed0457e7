"""One rank's control plane, run again on what its log says that it was given.

    log of a rank -> observations -> ports (`reenact_ports`) -> the same scheduler -> records
                                                                          |
                           the first that is not what the log has next <--+

The runtime's decisions are a function of what came through its ports. So either every record comes out
again, or the first that does not was not decided by these rules from this input: a wrong part was wired in,
or something is nondeterministic that must not be. A log from any mode will do; no process, no clock.

What can't be done again is said: a log whose beginning is gone, steps that were left out, another program's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hicache.config import Config, StorageConfig
from hicache.control.cache import Cache
from hicache.errors import HiCacheError
from hicache.loop import Signal
from hicache.probes import KINDS, MISPAIRED, REPLICA, Probes
from hicache.rank import SCHEDULER, Parts, Ports, build_rank, lane_names
from hicache.sim.reenact_ports import (
    ROUND,
    DiffersError,
    EndlessMemory,
    LogEndedError,
    Published,
    Tape,
    TapeClock,
    TapeEngine,
    TapeSource,
    TapeStorage,
    TapeTransport,
    TapeWire,
    TrustedLedger,
)
from hicache.sim.reenact_prompts import Prompts
from hicache.topology import Topology
from tracer.log import LaneLog
from tracer.record import IDLE_STEPS, THROTTLE, Kind

Record = Mapping[str, Any]
KIND_BY_NAME = {kind.name: kind for kind in KINDS}
# Decided by nobody: what the recorder says of itself, and what was seen to be wrong.
PASSED_OVER = frozenset({"note", "anomaly"})
# Made up here, so that no two logs have them alike: what stands for the content of a prompt.
MADE_UP = {"request": frozenset({"content", "namespace"})}
DIGEST_KEY = b"reenact"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first record that does not come out again.

    Attributes:
        logged: what the log has there: kind, phase and the fields that are compared.
        done: what was decided from the same input; None where nothing was.
        why: in words, where that says more.
    """

    seq: int
    step: int
    logged: Record
    done: Record | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Reenacted:
    """What came of one rank.

    Attributes:
        records: that came out again, up to the end of the log or to the difference.
        agreed: those of them that all ranks of a replica write alike.
        limits: why it could not be done at all, or not to the end; empty otherwise.
        cut: why its log goes no further than it does, where that is not the end of its run.
        is_reached: whether every record up to there was looked at; not where what it follows from is cut off.
    """

    rank: int
    records: int
    difference: Difference | None
    limits: str = ""
    agreed: int = 0
    cut: str = ""
    is_reached: bool = True

    @property
    def is_same(self) -> bool:
        return self.difference is None and not self.limits


def reenact(lanes: Iterable[LaneLog], rank: int, *, until_seq: int | None = None) -> Reenacted:
    """Run one rank's scheduler again on its log.

    Args:
        lanes: of the run; those of other ranks are not looked at.
        until_seq: stop behind this record of the scheduler's lane.
    """
    ready = prepared(lanes, rank, until_seq=until_seq)
    return ready if isinstance(ready, Reenacted) else ready.run()


def prepared(
    lanes: Iterable[LaneLog],
    rank: int,
    *,
    until_seq: int | None = None,
    until_step: int | None = None,
    until_agreed: int | None = None,
) -> Reenacting | Reenacted:
    """A rank ready to be done again, up to a record or the end of a step; or why it can't be."""
    # Somebody else may be in the middle of reading them.
    own = {lane.lane: LaneLog(lane.segments) for lane in lanes if lane.rank == rank}
    if SCHEDULER not in own:
        return Reenacted(rank, 0, None, f"rank {rank} left no log of its scheduler")
    main = own[SCHEDULER]
    try:
        config = _config(main.header.get("config", {}))
    except (HiCacheError, KeyError, TypeError, ValueError):
        return Reenacted(rank, 0, None, "its log is not one of this runtime, or of another version of it")
    if main.begin:
        return Reenacted(rank, 0, None, main.begin)
    records = [*_scheduler_records(main)]
    if limits := _limits(main):
        return Reenacted(rank, 0, None, limits)
    if not records:
        return Reenacted(rank, 0, None, main.cut or f"rank {rank} has logged no decision")
    others = {name: [*lane.records(is_lenient=True)] for name, lane in own.items() if name != SCHEDULER}
    end = len(records)
    if until_seq is not None:
        end = sum(record["seq"] <= until_seq for record in records)
    if until_step is not None:
        end = sum(record["step"] <= until_step for record in records)
    if until_agreed is not None:
        places = [at for at, record in enumerate(records) if _is_agreed(record)]
        end = places[until_agreed] if until_agreed < len(places) else len(records)
    judged = _until_open_insert(records)
    return Reenacting(config, rank, records, others, min(end, judged), main, is_reached=end <= judged)


def _until_open_insert(records: Sequence[Record]) -> int:
    """How many records can be judged: what an insert does follows from its pages, told where it returns."""
    for at in range(len(records) - 1, -1, -1):
        if records[at]["kind"] == "insert":
            return at + 1 if records[at].get("phase") == "call" else len(records)
    return len(records)


def _limits(main: LaneLog) -> str:
    if main.loss:
        return main.loss
    if THROTTLE.name in main.kinds_seen:
        return f"rank {main.rank}: steps were left out of its log"
    if MISPAIRED.name in main.kinds_seen:
        return f"rank {main.rank}: the meeting guard has ended a call, and no record has what it compared"
    return ""


def _config(described: Mapping[str, Any]) -> Config:
    """The configuration that `Config.describe` has described."""
    known = {field.name for field in fields(Config)} - {"topology", "storage"}
    sizes = {axis: described[axis] for axis in ("dp", "pp", "cp", "tp")}
    plain = {name: described[name] for name in known}
    plain["side_pools"] = tuple(plain["side_pools"])
    return Config(topology=Topology(**sizes), storage=StorageConfig(**described["storage"]), **plain)


def _scheduler_records(lane: LaneLog) -> Iterator[dict[str, Any]]:
    """Its records, idle steps written out again, without what nobody decided."""
    steps: list[dict[str, Any]] = []
    for record in lane.records():
        if record["kind"] == IDLE_STEPS.name:
            yield from _idle_steps(record, steps)
            continue
        kind = KIND_BY_NAME.get(record["kind"])
        steps.append(record)
        if len(steps) > IDLE_RECORDS_MAX:
            del steps[:-IDLE_RECORDS_KEPT]
        if kind is not None and kind.role not in PASSED_OVER:
            yield record


IDLE_RECORDS_KEPT, IDLE_RECORDS_MAX = 512, 4096


def _idle_steps(record: Record, before: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Steps like the one that stands in front of the record that counts them."""
    last_step = record["first_step"] - 1
    shape = [each for each in before if each["step"] == last_step][-record["records"] :]
    advance = list(record["advance"] or ())
    for number in range(1, record["count"] + 1):
        moved = iter(advance)
        for each in shape:
            kind = KIND_BY_NAME.get(each["kind"])
            if kind is None:
                continue
            counters = {
                name: each[name] + number * next(moved)
                for name in kind.counters
                if type(each.get(name)) is int
            }
            if kind.role not in PASSED_OVER:
                yield {**each, **counters, "step": last_step + number, "seq": record["seq"]}


class Reenacting:
    """One rank that is being done again.

    Args:
        end: records of the log that are; those behind are only looked ahead at.
        main: the scheduler's lane, which has been read.
        is_reached: whether `end` is what was asked for.

    Attributes:
        cache: of the rank, once it has been run.
        log_end: the last step of its log.
        is_whole: whether it came to the end of its run.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        records: Sequence[Record],
        lanes: Mapping[str, Sequence[Record]],
        end: int,
        main: LaneLog,
        *,
        is_reached: bool = True,
    ) -> None:
        self._is_reached = is_reached
        self.log_end = int(records[-1]["step"])
        self.is_whole = main.outcome == "completed"
        self._cut = main.cut
        self._config = config
        self._rank = rank
        self._tape = Tape(records, end)
        self.cache: Cache | None = None
        # A running digest of all decisions has the made-up content in it.
        made_up = {**MADE_UP, "event_round": frozenset({"digest"})} if config.in_band_digest else MADE_UP
        self._comparing = _Comparing(self._tape, made_up)
        self._published = Published(self._tape, lanes, config.page_size_tokens)

    def run(self) -> Reenacted:
        tape = self._tape
        coroutine = self._scheduler()
        difference: Difference | None = None
        try:
            while True:
                waits_for = coroutine.send(None)
                if isinstance(waits_for, Signal) and not waits_for.is_fired:
                    raise DiffersError(None, f"it waits for {waits_for.reason or 'work'}")
        except StopIteration:
            if tape.at < tape.end:
                difference = self._differs(None, "it had nothing left to do")
        except LogEndedError:
            pass
        except DiffersError as error:
            difference = self._differs(error.got, error.why)
        except (AssertionError, HiCacheError, LookupError) as error:
            # A rule was broken that every right history keeps; where the log stops too, so did its rank.
            if tape.at < tape.end:
                difference = self._differs(None, f"it stops: {error}")
        finally:
            coroutine.close()
        agreed = sum(map(_is_agreed, tape.records[: tape.at]))
        is_reached = self._is_reached and tape.at >= tape.end
        return Reenacted(self._rank, tape.at, difference, agreed=agreed, cut=self._cut, is_reached=is_reached)

    @property
    def last_step(self) -> int:
        """Of the last record that came out again; -1 where none did."""
        tape = self._tape
        return int(tape.records[tape.at - 1]["step"]) if tape.at else -1

    def _differs(self, got: Record | None, why: str) -> Difference | None:
        tape = self._tape
        if tape.at >= tape.end:
            return None
        logged = tape.records[tape.at]
        return Difference(logged["seq"], logged["step"], _compared(logged), got, why)

    def _scheduler(self) -> Any:
        config, tape = self._config, self._tape
        prompts = Prompts(tape.records, config.page_size_tokens, has_answers=config.cache_output)
        probes = {
            name: Probes(self._comparing if name == SCHEDULER else _Silent()) for name in lane_names(config)
        }
        own = probes[SCHEDULER]
        has_storage = config.storage.backend != "none"
        wire = TapeWire(tape, prompts, self._published)
        transport = TapeTransport(config.topology, self._rank, tape, wire, own, self._published)
        at = config.topology.coordinates(self._rank)
        pages = {each["pool"]: each["own_pages"] for each in tape.records if each["kind"] == "capacity"}
        is_first = (at.pp, at.cp, at.tp) == (0, 0, 0)
        ports = Ports(
            transports=dict.fromkeys(probes, transport),
            engine=TapeEngine(tape, own),
            device=EndlessMemory(pages.get("device", config.device_pages)),
            host=EndlessMemory(pages.get("host", config.host_pages)) if config.hierarchical_cache else None,
            source=TapeSource(wire) if is_first else None,
            clock=TapeClock(),
            signal=lambda reason: Signal(None, reason),
            storage=TapeStorage(tape) if has_storage else None,
            side={
                pool.name: EndlessMemory(pages.get(pool.name, config.side_pool_slots))
                for pool in config.pools
                if not pool.shares_slots
            },
        )
        built = build_rank(config, Parts(self._rank), ports, probes, TrustedLedger(), digest_key=DIGEST_KEY)
        for name, lane in built.lanes.items():
            if name != SCHEDULER:
                lane.close()
        self.cache = built.scheduler.cache
        self._published.prefetches = self.cache.prefetches
        return built.lanes[SCHEDULER]


class _Comparing:
    """Takes records as a tracer does, and holds each against the log. Implements `probes.Emitters`."""

    def __init__(self, tape: Tape, made_up: Mapping[str, frozenset[str]]) -> None:
        self._tape = tape
        self._made_up = made_up
        self.step = 0

    def begin_step(self, step: int) -> None:
        self.step = step

    def end_step(self, *, is_idle: bool) -> None:
        """The log has idle steps written out."""

    def emitter(
        self, kind: Kind, *, phase: str = "", fields: Sequence[str] | None = None
    ) -> Callable[..., None]:
        if kind.role in PASSED_OVER:
            return _nothing
        names = kind.fields if fields is None else tuple(fields)
        passed = self._made_up.get(kind.name, frozenset())
        told = [(at, name) for at, name in enumerate(names) if name in kind.compared and name not in passed]
        tape = self._tape
        digest_at = names.index("digest") if kind.name == ROUND and "digest" in names else None

        def compare(*values: Any) -> None:
            if digest_at is not None:
                tape.own_digest = values[digest_at]
            logged = tape.next
            if (
                logged["kind"] == kind.name
                and logged.get("phase", "") == phase
                and logged["step"] == self.step
            ):
                for at, name in told:
                    if logged.get(name) != values[at]:
                        break
                else:
                    tape.at += 1
                    return
            own = {name: values[at] for at, name in told}
            raise DiffersError({"kind": kind.name, **({"phase": phase} if phase else {}), **own})

        return compare


class _Silent:
    """Nobody listens to lanes that do not run. Implements `probes.Emitters`."""

    step = 0

    def emitter(
        self, kind: Kind, *, phase: str = "", fields: Sequence[str] | None = None
    ) -> Callable[..., None]:
        return _nothing

    def begin_step(self, step: int) -> None:
        """No log."""

    def end_step(self, *, is_idle: bool) -> None:
        """No log."""


def _nothing(*_values: Any) -> None:
    """The writer of a record that nobody compares."""


def _is_agreed(record: Record) -> bool:
    return KIND_BY_NAME[record["kind"]].agree == REPLICA


def _compared(record: Record) -> dict[str, Any]:
    kind = KIND_BY_NAME[record["kind"]]
    names = [name for name in ("kind", "phase", *kind.compared) if name in record]
    return {name: record[name] for name in names}
