"""Lines of a log as the transfer queues are read from them: few fields of many lines, not judged.

A field may hold anything; `number` says what counts as one.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import msgspec

from tracer.log import Layout
from tracer.plausible import Count, Integer

NEVER = (1 << 62) - 1


# In the order in which records have them: the decoder looks for a field behind the one before, and takes half
# as long again where it has to begin anew. What a line refers to never refers back, so it needs no collector.
class Line(msgspec.Struct, gc=False):
    """The fields that any queue needs; whatever type they have, for only a whole line decides what counts."""

    seq: Count
    step: Integer
    time_ns: Integer
    kind: str
    phase: str = ""
    round: Any = None
    writes_done: Any = None
    loads_done: Any = None
    hits_ready: Any = None
    prefetch_acks_ready: Any = None
    storage_acks_ready: Any = None
    writes_agreed: Any = None
    loads_agreed: Any = None
    hits_agreed: Any = None
    prefetch_acks_agreed: Any = None
    storage_acks_agreed: Any = None
    op: Any = None
    queue: Any = None
    nodes: Any = None
    pages: Any = None
    rid: Any = None
    attempt: Any = None
    node: Any = None
    tokens: Any = None
    outcome: Any = None
    ack: Any = None
    count: Any = None
    left: Any = None
    agreed_pages: Any = None
    local_pages: Any = None
    written_pages: Any = None


_LINE = msgspec.json.Decoder(Line)
LINES = Layout(_LINE.decode, _LINE.decode_lines, attrgetter("seq"), attrgetter("kind"), lambda records: True)


def number(value: Any, otherwise: Any = None) -> Any:
    """A count or a number of something; else what stands for none."""
    return value if type(value) is int and 0 <= value < NEVER else otherwise
