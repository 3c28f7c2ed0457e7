"""Value types that every part of the runtime shares. No behaviour, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NodeId = int
OpId = int
# A place for one page in one tier of one rank. Slots differ legally between ranks; never compare them.
Slot = int

DIGEST_BYTES = 8
TOKEN_BYTES = 4

Queue = Literal["write", "load"]


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the front door received it, the same object on every rank.

    Attributes:
        rid: the client's id.
        tokens: the prompt, packed little-endian u32.
        output: what the model will answer, packed likewise; empty when only its length is known.
        output_tokens: tokens of the answer, also when `output` is empty.
        conversation: id of the conversation, or "" when unknown.
        arrival_ms: milliseconds from the start of the workload.
    """

    rid: str
    tokens: bytes
    output: bytes
    output_tokens: int
    conversation: str = ""
    arrival_ms: int = 0

    @property
    def input_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass(slots=True, eq=False)
class Transfer:
    """One merged copy between device and host: several nodes, one ack.

    Attributes:
        op: id, counted alike on every rank of a replica.
        queue: `write` moves device to host, `load` host to device.
        source, target: page slots, position by position.
        is_done: this rank has seen that the bytes have moved.
    """

    op: OpId
    queue: Queue
    source: list[Slot]
    target: list[Slot]
    is_done: bool = False
