"""Events of a Tair KVCache manager: lookups with how many leading blocks it had, and writes.

Counts are blocks: how many tokens a block has is not in them. What a lookup found is the manager's own
word (`block_mask`). Beside it the file is replayed from an empty store, in which a block is there from the
start of its write on: where the manager had more, it knew blocks from before the file began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from tracer.errors import HitsError
from tracer.importers.sniff import COUNT_MAX, File, Imported, Tally, is_too_deep, keys_of
from tracer.served import RequestHits, foreign_row

FORMAT = "tair_kvcm_events"
LOOKUP, START, FINISH = "GetCacheLocation", "StartWriteCache", "FinishWriteCache"
TYPES = (LOOKUP, START, FINISH)
KNOWN = {
    *("id", "source", "component", "type", "trigger_time_us", "query_type", "keys", "tokens", "block_mask"),
    *("sw_size", "location_spec_names", "location_spec_group_names", "write_session_id"),
    *("write_timeout_seconds", "success_block"),
}
Micros = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]


class Event(msgspec.Struct):
    """One line. `tokens` is no field: nobody decodes it."""

    type: str
    id: str = ""
    trigger_time_us: Micros = 0
    keys: list[int] = []
    block_mask: int | list[bool] | None = None
    write_session_id: str = ""


_EVENT = msgspec.json.Decoder(Event)


@dataclass(slots=True)
class _Replay:
    """The store as the file alone would have it.

    Attributes:
        held: keys of every write that has begun.
        open: writes that have begun and not ended.
        more, less: lookups for which the manager had more, or less, than the replay.
    """

    requests: list[RequestHits] = field(default_factory=list)
    paths: list[tuple[int, ...]] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    open: set[str] = field(default_factory=set)
    writes: int = 0
    more: int = 0
    less: int = 0

    def event(self, event: Event, file: int, line: int) -> bool:
        """Take one event; whether it says what it should."""
        if event.type == START:
            self.writes += 1
            self.held.update(event.keys)
            self.open.add(event.write_session_id)
        elif event.type == FINISH:
            self.open.discard(event.write_session_id)
        else:
            return self._lookup(event, file, line)
        return True

    def _lookup(self, event: Event, file: int, line: int) -> bool:
        mask = event.block_mask
        found = mask if isinstance(mask, int) else _leading(mask or [])
        if mask is None or not 0 <= found <= len(event.keys):
            return False
        replayed = _leading([key in self.held for key in event.keys])
        self.more += found > replayed
        self.less += found < replayed
        self.paths.append(tuple(event.keys))
        self.requests.append(
            foreign_row(
                event.id,
                len(event.keys),
                cached=found,
                time_ns=event.trigger_time_us * 1000,
                file=file,
                line=line,
            )
        )
        return True

    def notes(self) -> list[str]:
        notes = ["counts are blocks: how many tokens a block has is not in these events"]
        looked = f"{len(self.requests):,} lookups"
        if self.more:
            notes.append(
                f"{self.more:,} of {looked} found more than the writes before them explain: the cache was "
                "warm before the first event"
            )
        if self.less:
            notes.append(f"{self.less:,} of {looked} found less than was written before: blocks were lost")
        if self.open:
            notes.append(f"{len(self.open):,} of {self.writes:,} writes never finish")
        return notes


def _leading(flags: Sequence[bool]) -> int:
    return next((at for at, flag in enumerate(flags) if not flag), len(flags))


def is_mine(line: bytes) -> bool:
    return b'"trigger_time_us"' in line and any(f'"{name}"'.encode() in line for name in TYPES)


def read(files: Sequence[File]) -> Imported:
    tally = Tally()
    replay = _Replay()
    for file in files:
        index = tally.begin(file)
        for number, line in file.lines():
            tally.lines[index] = number
            event = _event(line)
            if event is None or not replay.event(event, index, number):
                tally.unparsed[index] += 1
            else:
                tally.unknown(sorted(keys_of(line) - KNOWN))
    if not replay.requests:
        raise HitsError(f"no {LOOKUP} in the events", where=", ".join(tally.files))
    source = tally.source(
        FORMAT, notes=replay.notes(), unit="lookup", is_in_blocks=True, tiers_are_told=False
    )
    groupings = ("request", "tier", "prefix", "time")
    return Imported(source, tuple(replay.requests), groupings, tuple(replay.paths))


def _event(line: bytes) -> Event | None:
    if is_too_deep(line):
        return None
    try:
        event = _EVENT.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return event if event.type in TYPES else None
