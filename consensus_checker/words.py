"""How ranks, values and records are named in text: the only place that knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from consensus_checker.consensus_words import payload_text
from tracer.record import Record

# Values longer than this say nothing more in a sentence.
VALUE_CHARS_MAX = 24


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2`, `ranks 0, 2, 5-7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    if not spans:
        return "no rank"
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in spans]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(texts)


def value_text(value: Any) -> str:
    text = payload_text(value)
    return text if len(text) <= VALUE_CHARS_MAX else text[: VALUE_CHARS_MAX - 2] + ".."


def call_text(name: str) -> str:
    return name.replace("_", " ")


def place_text(record: Record) -> str:
    """A meeting as people look for it in a stack or a flight recorder: `all_reduce tp0/events #412`."""
    return f"{record.get('op', 'meeting')} {record.get('group', '?')} #{record.get('group_seq', '?')}"
