"""Long lines that several processes have written into one pipe, taken apart again.

A pipe takes a line of more than 4,096 bytes in pieces, and others' pieces come in between without a mark:

    A: [.. TP0] Found .. events = ['a', 'b|      |', 'c', 'd']
    B:                                    |[.. TP1] Found .. events = ['a', 'b'|, 'c', 'x']

Ranks print nearly the same, so one list that is known whole says how all others go on. Where the text leaves
what its writer would say next, and is what another one would say, there the piece ends. A writer that says
something of its own is followed until it comes back. All of it is a guess, and whoever asks has the hash that
proves it; nothing else may be believed.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# Bytes by which a writer is recognised, and by which two may look alike behind the end of a piece.
ALIKE = 40
OVERRUN_MAX = 64
# Where it is back, more is asked for: calls that are alike follow each other.
BACK = 192
# How much a writer may say of its own before it comes back, and how much it may leave out.
OWN_MAX = 4096
SKIPPED_MAX = 1 << 16
# And how often, in all: lists that differ more than that are not followed.
OWN_COUNT_MAX = 200
# How long the rest of a list may be that never comes back.
OWN_END_MAX = 1 << 20
END = re.compile(rb"['\"]\]\n")
BLOCK = 4096


@dataclass(slots=True, eq=False)
class Writer:
    """One list while it is followed.

    Attributes:
        at: where in the known list it goes on.
        parts: what it has said, as slices of the text.
    """

    at: int = 0
    parts: list[tuple[int, int]] = field(default_factory=list)
    is_done: bool = False


def untangled(
    text: bytes, known: bytes, starts: Sequence[tuple[int, int]], own_lines: re.Pattern[bytes]
) -> set[bytes]:
    """The texts of the lists that could be followed to their ends.

    Which is whose stays open: two that had come to the same place can't be told apart from there on.

    Args:
        known: a whole list from its first event on, with what ends its line.
        starts: of each list, where its line and where its first event begins.
        own_lines: how a line begins that is no piece of another.
    """
    heads = dict(starts)
    marks = sorted({*heads, *(match.start() for match in own_lines.finditer(text))})
    writers: list[Writer] = []
    at = marks[0] if marks else len(text)
    current: Writer | None = None
    own_count = 0
    # Writers that have been asked how it goes on from one place: each is once, or two that are alike there
    # would send it back and forth.
    asked: list[Writer] = []
    asked_at = -1
    while at < len(text):
        mark = marks[bisect_left(marks, at)] if at <= marks[-1] else len(text)
        if at == mark:
            if at in heads:
                current = Writer()
                writers.append(current)
                at = heads[at]
            else:
                # A short line goes through in one piece.
                at = text.find(b"\n", at) + 1 or len(text)
                current = None
            continue
        if current is None or current.is_done:
            current = next(_going_on(text, known, at, writers), None)
            if current is None:
                break
        length = _alike(text, at, known, current.at, mark)
        end = at + length
        if current.at + length == len(known):
            current.is_done = True
            _say(current, at, end)
            at = end
            continue
        if end == mark:
            _say(current, at, end)
            at = end
            continue
        asked, asked_at = [*(asked if at == asked_at else ()), current], at
        found = _next_writer(text, known, at, end, [one for one in writers if one not in asked])
        if found is not None:
            end, other = found
            _say(current, at, end)
            at, current = end, other
            continue
        own_count += 1
        if own_count > OWN_COUNT_MAX:
            break
        back = _comes_back(text, known, end, current.at + length, mark)
        if back is None:
            # It may differ up to its end.
            last = END.search(text, end, min(mark, end + OWN_END_MAX))
            if last is None:
                break
            _say(current, at, last.end())
            current.is_done = True
            at = last.end()
            continue
        _say(current, at, back[0])
        current.at = back[1]
        at = back[0]
    return {b"".join(text[low:high] for low, high in one.parts) for one in writers if one.is_done}


def _say(writer: Writer, at: int, end: int) -> None:
    writer.parts.append((at, end))
    writer.at += end - at


def _going_on(text: bytes, known: bytes, at: int, writers: Sequence[Writer]) -> Iterator[Writer]:
    """Writers that would say next what stands at `at`."""
    for writer in writers:
        expected = known[writer.at : writer.at + ALIKE]
        if not writer.is_done and expected and text.startswith(expected, at):
            yield writer


def _next_writer(
    text: bytes, known: bytes, at: int, end: int, others: Sequence[Writer]
) -> tuple[int, Writer] | None:
    """Where another one goes on: here, or a little before, where both would have said the same."""
    for start in range(end, max(at, end - OVERRUN_MAX) - 1, -1):
        if (writer := next(_going_on(text, known, start, others), None)) is not None:
            return start, writer
    return None


def _comes_back(text: bytes, known: bytes, at: int, expected: int, mark: int) -> tuple[int, int] | None:
    """Where a writer that says something of its own is back in the known list, in both."""
    for start in range(at, min(at + OWN_MAX, mark - BACK)):
        found = known.find(text[start : start + BACK], expected, expected + SKIPPED_MAX)
        if found >= 0:
            return start, found
    return None


def _alike(text: bytes, at: int, known: bytes, start: int, mark: int) -> int:
    """How far the text is the known one."""
    length = 0
    most = min(mark - at, len(known) - start)
    while length < most:
        step = min(BLOCK, most - length)
        one = text[at + length : at + length + step]
        two = known[start + length : start + length + step]
        if one != two:
            return length + next(index for index in range(step) if one[index] != two[index])
        length += step
    return length
