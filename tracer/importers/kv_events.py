"""Recorded KV cache events of SGLang and vLLM: what entered and what left each tier. No requests are in them.

A recording is batches one behind the other in msgpack, bare or in their three frames (topic, sequence,
payload), or one batch a line in JSON. A batch is an array or a map, an event too: every version of both
servers is read by what it holds. Token ids are counted and dropped.

    [ts, [event, ...], rank]    {"ts": ..., "events": [...]}    ["BlockStored", hashes, parent, tokens, size]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tracer.errors import HitsError
from tracer.importers.sniff import COUNT_MAX, File, Imported, Tally, is_msgpack, is_too_deep
from tracer.served import TIERS

FORMAT = "kv_cache_events"
IS_MSGPACK = True
MSGPACK_BYTES_MAX = 512 << 20
STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
# Positions of an event that is an array; behind them stand fields that are not read here.
POSITIONS = {
    STORED: ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    REMOVED: ("block_hashes", "medium"),
    CLEARED: (),
}
KNOWN = {
    *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("cache_salt", "session_id", "lora_name", "extra_keys", "group_idx"),
}
KNOWN_PREFIX = "kv_cache_spec_"
TIER_OF = {"GPU": "device", "CPU": "host", "CPU_PINNED": "host", "DISK": "storage", "EXTERNAL": "storage"}
# Medium of an event that does not say it: servers without tiers leave it out.
UNTOLD = "untold"
# Bytes that a value takes beside its own, by the first byte: msgpack's fixed sizes, and bytes of a length.
FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
FIXED |= {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
LENGTHS = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
LENGTHS |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
MEMBERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
Key = int | str | bytes


@dataclass(slots=True)
class Holding:
    """What one medium holds of one publisher, block by block.

    Attributes:
        left: blocks that were there and are not: storing one of them again costs what it had cost before.
    """

    blocks: dict[Key, int] = field(default_factory=dict)
    left: set[Key] = field(default_factory=set)
    tokens: int = 0
    tokens_max: int = 0
    stored_blocks: int = 0
    stored_tokens: int = 0
    again_blocks: int = 0
    again_tokens: int = 0
    removed_blocks: int = 0
    removed_tokens: int = 0
    unseen_removed: int = 0

    def store(self, block: Key, tokens: int) -> None:
        self.stored_blocks += 1
        self.stored_tokens += tokens
        if block in self.left:
            self.left.discard(block)
            self.again_blocks += 1
            self.again_tokens += tokens
        if block not in self.blocks:
            self.blocks[block] = tokens
            self.tokens += tokens
            self.tokens_max = max(self.tokens_max, self.tokens)

    def remove(self, block: Key) -> None:
        if block not in self.blocks:
            # Stored before the recording began, or in a batch that is missing.
            self.unseen_removed += 1
            return
        tokens = self.blocks.pop(block)
        self.left.add(block)
        self.tokens -= tokens
        self.removed_blocks += 1
        self.removed_tokens += tokens

    def clear(self) -> None:
        for block in list(self.blocks):
            self.remove(block)


@dataclass(slots=True)
class _Recording:
    """All publishers' events.

    Attributes:
        holdings: (publisher, medium) -> what is there.
        last_seq: publisher -> sequence of its last batch.
    """

    holdings: dict[tuple[str, str], Holding] = field(default_factory=dict)
    last_seq: dict[str, int] = field(default_factory=dict)
    events: int = 0
    unread: int = 0
    missing: int = 0
    gaps: int = 0
    restarts: int = 0
    unknown: dict[str, int] = field(default_factory=dict)

    def batch(self, found: Any) -> bool:
        """Take one batch in any of its shapes; whether it is one."""
        seq, topic, batch = _unframed(found)
        if isinstance(batch, Mapping):
            events = [batch] if "type" in batch else batch.get("events")
            rank = batch.get("data_parallel_rank", batch.get("attn_dp_rank"))
        elif isinstance(batch, list) and len(batch) >= 2:
            events, rank = batch[1], batch[2] if len(batch) > 2 else None
        else:
            return False
        if not isinstance(events, list):
            return False
        publisher = f"{topic}/{rank}"
        if seq is not None:
            self._follow(publisher, seq)
        for event in events:
            self.unread += not self._event(event, publisher)
        return True

    def _follow(self, publisher: str, seq: int) -> None:
        last = self.last_seq.get(publisher)
        self.last_seq[publisher] = seq
        if last is None or seq == last + 1:
            return
        if seq > last:
            self.gaps += 1
            self.missing += seq - last - 1
        else:
            # A publisher that was started anew counts from 0, and its cache is empty.
            self.restarts += 1
            for (name, _medium), holding in self.holdings.items():
                if name == publisher:
                    holding.clear()

    def _event(self, event: Any, publisher: str) -> bool:
        fields = self._fields(event)
        name = fields.get("type")
        if name == CLEARED:
            for (owner, _medium), holding in self.holdings.items():
                if owner == publisher:
                    holding.clear()
            self.events += 1
            return True
        blocks = fields.get("block_hashes")
        if name not in (STORED, REMOVED) or not isinstance(blocks, list):
            return False
        if not all(isinstance(block, int | str | bytes) for block in blocks):
            return False
        medium = fields.get("medium")
        medium = medium if isinstance(medium, str) and medium in TIER_OF else UNTOLD
        holding = self.holdings.setdefault((publisher, medium), Holding())
        self.events += 1
        tokens = _tokens(fields, len(blocks)) if name == STORED else 0
        for block in blocks:
            if name == STORED:
                holding.store(block, tokens)
            else:
                holding.remove(block)
        return True

    def _fields(self, event: Any) -> Mapping[str, Any]:
        """An event as a map, whichever it was; keys that are not known are counted."""
        if isinstance(event, list) and event and isinstance(event[0], str) and event[0] in POSITIONS:
            names = POSITIONS[event[0]]
            return {"type": event[0], **dict(zip(names, event[1:], strict=False))}
        if not isinstance(event, Mapping):
            return {}
        for key in event.keys() - KNOWN:
            if not (isinstance(key, str) and key.startswith(KNOWN_PREFIX)):
                self.unknown[str(key)] = self.unknown.get(str(key), 0) + 1
        return event

    def rows(self) -> tuple[dict[str, Any], ...]:
        """By tier and medium, all publishers together."""
        rows = []
        media = {medium for _publisher, medium in self.holdings}
        order = {medium: ((*TIERS, None).index(TIER_OF.get(medium)), medium) for medium in media}
        for medium in sorted(media, key=order.__getitem__):
            parts = [holding for (_owner, own), holding in self.holdings.items() if own == medium]
            rows.append(
                {
                    "tier": TIER_OF.get(medium),
                    "medium": None if medium == UNTOLD else medium,
                    "stored_tokens": sum(part.stored_tokens for part in parts),
                    "stored_again_tokens": sum(part.again_tokens for part in parts),
                    "removed_tokens": sum(part.removed_tokens for part in parts),
                    "held_tokens": sum(part.tokens for part in parts),
                    "held_tokens_max": sum(part.tokens_max for part in parts),
                    "stored_blocks": sum(part.stored_blocks for part in parts),
                    "stored_again_blocks": sum(part.again_blocks for part in parts),
                    "removed_blocks": sum(part.removed_blocks for part in parts),
                }
            )
        return tuple(rows)

    def notes(self) -> list[str]:
        notes = ["events say what each tier holds; who was served from it, and so a hit rate, is not in them"]
        if self.gaps:
            batches = "1 batch is" if self.missing == 1 else f"{self.missing:,} batches are"
            where = "1 gap" if self.gaps == 1 else f"{self.gaps:,} gaps"
            notes.append(f"{batches} missing in {where} of the sequence: what they held is not counted")
        if not self.last_seq:
            notes.append("no sequence numbers: nobody knows whether batches are missing")
        if self.restarts:
            notes.append(f"the sequence began anew {self.restarts:,} times: a publisher was restarted")
        if unseen := sum(holding.unseen_removed for holding in self.holdings.values()):
            notes.append(f"{unseen:,} removed blocks had not been stored in this recording: they are older")
        if self.unread:
            notes.append(f"{self.unread:,} events were not understood")
        return notes


def is_mine(line: bytes) -> bool:
    names = (STORED, REMOVED, CLEARED)
    return line.lstrip()[:1] in (b"{", b"[") and any(f'"{name}"'.encode() in line for name in names)


def read(files: Sequence[File]) -> Imported:
    tally = Tally()
    recording = _Recording()
    for file in files:
        index = tally.begin(file)
        for batch in _packed(file) if is_msgpack(file) else _lines(file):
            tally.lines[index] += 1
            if batch is None or not recording.batch(batch):
                tally.unparsed[index] += 1
    if not recording.events:
        raise HitsError("no event in the recording", where=", ".join(tally.files))
    for key, rows in recording.unknown.items():
        tally.unknown([key], rows)
    source = tally.source(FORMAT, notes=recording.notes(), unit="event")
    return Imported(source, (), ("tier",), tables={"tier": recording.rows()})


def _lines(file: File) -> Iterator[Any]:
    for _number, line in file.lines():
        try:
            yield None if is_too_deep(line) else msgspec.json.decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            yield None


def _packed(file: File) -> Iterator[Any]:
    """The objects of a recording in msgpack; None for one that is damaged, the last where its end is lost."""
    data = bytearray()
    for chunk in file.chunks():
        data += chunk
        if len(data) > MSGPACK_BYTES_MAX:
            raise HitsError(
                f"{file.name}: more than {MSGPACK_BYTES_MAX >> 20} MiB of events", hint="a part of it"
            )
    view = memoryview(data)
    at = 0
    while at < len(data):
        end = _end(data, at)
        try:
            found = None if end is None else msgspec.msgpack.decode(view[at:end])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            found = None
        yield found
        if end is None:
            return
        at = end


def _end(data: bytearray, at: int) -> int | None:
    """Where the object that begins at `at` ends; None where the data ends first, or is none."""
    due = 1
    size = len(data)
    while due:
        if at >= size:
            return None
        first = data[at]
        at += 1
        due -= 1
        if first <= 0x7F or first >= 0xE0:
            continue
        if first <= 0x8F:
            due += 2 * (first & 0x0F)
        elif first <= 0x9F:
            due += first & 0x0F
        elif first <= 0xBF:
            at += first & 0x1F
        elif first in FIXED:
            at += FIXED[first]
        elif first in LENGTHS:
            width, more = LENGTHS[first]
            at += width + more + int.from_bytes(data[at : at + width], "big")
        elif first in MEMBERS:
            width, each = MEMBERS[first]
            due += each * int.from_bytes(data[at : at + width], "big")
            at += width
        else:
            return None
        if due > size:
            # More members than there are bytes.
            return None
    return at if at <= size else None


def _unframed(found: Any) -> tuple[int | None, str, Any]:
    """Sequence, topic and batch; a recording without frames has neither of the first two."""
    if isinstance(found, list) and len(found) == 3 and isinstance(found[2], bytes):
        topic, seq, payload = found
        try:
            return _seq(seq), _word(topic), msgspec.msgpack.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None, "", None
    if isinstance(found, Mapping) and ("seq" in found or "sequence" in found):
        seq = _seq(found.get("seq", found.get("sequence")))
        inner = next((found[name] for name in ("payload", "batch") if name in found), found)
        if isinstance(inner, bytes):
            try:
                inner = msgspec.msgpack.decode(inner)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                inner = None
        return seq, _word(found.get("topic")), inner
    return None, "", found


def _seq(value: Any) -> int | None:
    if isinstance(value, bytes) and len(value) == 8:
        value = int.from_bytes(value, "big", signed=True)
    return value if type(value) is int and 0 <= value <= COUNT_MAX else None


def _word(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else ""


def _tokens(fields: Mapping[str, Any], blocks: int) -> int:
    """Tokens of each block that was stored."""
    size = fields.get("block_size")
    if type(size) is int and 0 < size <= COUNT_MAX:
        return size
    tokens = fields.get("token_ids")
    return len(tokens) // blocks if isinstance(tokens, list) and blocks else 0
