"""Divergence lines that went through one pipe in pieces, put together where their own hash proves it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from tracer.errors import TracerError
from tracer.importers.interleaved import untangled
from tracer.importers.rank_divergence import (
    HEAD,
    HEAD_BYTES,
    NEEDLE,
    OWN,
    OWN_LINE,
    Event,
    Printed,
    Scan,
    chunks_of,
    event_of,
    texts_of,
)
from tracer.importers.sniff import File

# What goes through a pipe in one piece, whoever else writes into it.
ATOMIC_BYTES = 4096
# More of a file than this is not taken apart.
PART_BYTES_MAX = 64 << 20
GUIDES_MAX = 5


def put_together(printed: Sequence[Printed]) -> list[Printed]:
    """The same lines in the same order, more of them proven."""
    found = [_as_its_hash_says(one, printed) for one in printed]
    proven = {one.hash for one in found if one.is_proven}
    made: dict[str, Printed] = {}
    guides = _guides(found)
    with suppress(TracerError):
        for number, guide in enumerate(guides):
            left = [one for one in found if one.byte_count > ATOMIC_BYTES and one.hash not in proven]
            if not left or number == GUIDES_MAX:
                break
            known = f"{texts_of(guide)}\n".encode("utf-8", "surrogateescape")[1:]
            for file in {one.file.path: one.file for one in left}.values():
                for whole in _pieced(file, [one for one in found if one.file == file], known):
                    if whole.hash not in proven:
                        # One that is proven tells more than one that only looks whole.
                        proven.add(whole.hash)
                        made[whole.hash] = whole
                        guides.insert(number + 1, whole)
    return [_with(one, made.get(one.hash)) for one in found]


def _guides(found: Sequence[Printed]) -> list[Printed]:
    """Lists along which others are followed: one of each hash that is proven, then those that look whole."""
    proven = {one.hash: one for one in found if one.is_proven}
    whole = [one for one in found if one.actual and not one.is_proven]
    whole.sort(key=lambda one: len(one.read) != one.count)
    return [*proven.values(), *whole]


def _as_its_hash_says(one: Printed, printed: Sequence[Printed]) -> Printed:
    """A line with the list of another behind it: two that had come equally far have changed their rests."""
    if one.is_proven:
        return one
    others = (other for other in printed if other.actual == one.hash and other.file == one.file)
    return _with(one, next(others, None))


def _with(one: Printed, whole: Printed | None) -> Printed:
    """A line with the events of a list that has its hash."""
    if one.is_proven or whole is None or not one.hash or whole.file != one.file:
        return one
    return replace(
        one,
        events=whole.read,
        read=whole.read,
        origin=whole.origin,
        text=whole.text,
        actual=one.hash,
        is_proven=True,
        damage="",
    )


def _pieced(file: File, printed: Sequence[Printed], known: bytes) -> Iterator[Printed]:
    """Lists with a hash that nothing has proven yet, put together along a known one."""
    base = max(0, min(one.offset for one in printed) - HEAD_BYTES)
    text = _part(file, base)
    starts = []
    for match in HEAD.finditer(text):
        start, end = max(0, match.start() - HEAD_BYTES), match.start()
        before = [own.start() for own in OWN.finditer(text, start, end)]
        if before and match["list"]:
            starts.append((before[-1], match.end()))
    memory: dict[bytes, Event] = {}
    hashes = {one.hash for one in printed if not one.is_proven}
    for own in untangled(text, known, starts, OWN_LINE):
        for hash_ in sorted(hashes):
            line = b"%s0 events(s)! local hash: %s, events = [%s" % (NEEDLE, hash_.encode(), own)
            scan = Scan(file, lambda _offset, _index, event: event_of(event, memory), [line])
            yield from (replace(whole, text=line) for whole in scan.lists() if whole.is_proven)


def _part(file: File, start: int) -> bytes:
    part = bytearray()
    offset = 0
    for chunk in chunks_of(file):
        if offset + len(chunk) > start:
            part += chunk[max(0, start - offset) :]
        offset += len(chunk)
        if len(part) >= PART_BYTES_MAX:
            break
    return bytes(part[:PART_BYTES_MAX])
