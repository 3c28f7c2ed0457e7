"""Value types that every part of the runtime shares. No behaviour, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

NodeId = int
OpId = int
# A place for one page in one tier of one rank. Slots differ legally between ranks; never compare them.
Slot = int

DIGEST_BYTES = 8
TOKEN_BYTES = 4

# SHA-256 of a page and everything before it, as an external store names it.
HASH_BYTES = 32

Queue = Literal["write", "load"]
# What makes a prefix's namespace when nothing does.
PLAIN = b""

# Every pool that may travel with a node, in the order in which collectives carry one number for each,
# whether or not the model has it. The families at the end are told apart by number only.
POOL_NAMES = (
    "kv",
    "mamba",
    "swa",
    "auxiliary_swa",
    "indexer",
    "draft",
    "draft_indexer",
    "draft_swa",
    *(f"compressed_{number}" for number in range(15)),
)


def vector_digest(values: Sequence[int]) -> int:
    """A number that two ranks get for equal vectors of counts: the interpreter salts no hash of integers."""
    return hash(tuple(values))


@dataclass(frozen=True, slots=True)
class SidePool:
    """A pool beside the KV pages, as counts of slots.

    Attributes:
        name: one of `POOL_NAMES` but `kv`.
        policy: `all_pages` is needed for every page of a prefix; `trailing` for its last page only.
        shares_slots: lives in the KV pages' own slots and is never allocated; else one slot a node.
    """

    name: str
    policy: Literal["all_pages", "trailing"]
    shares_slots: bool


# What `--side-pools` may name.
SIDE_POOLS = {
    "draft": SidePool("draft", "all_pages", True),
    "indexer": SidePool("indexer", "all_pages", True),
    "mamba": SidePool("mamba", "trailing", False),
}


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
        priority: higher goes first, where the scheduler heeds priorities.
        extra_key, cache_salt: two prompts with other values here never share a page; "" is none.
    """

    rid: str
    tokens: bytes
    output: bytes
    output_tokens: int
    conversation: str = ""
    arrival_ms: int = 0
    priority: int = 0
    extra_key: str = ""
    cache_salt: str = ""

    @property
    def input_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Abort:
    """The client of `rid` has gone: wherever the request sits, it ends there."""

    rid: str


@dataclass(frozen=True, slots=True)
class Command:
    """What an operator asks of all ranks at once; each carries it out at the same logical step."""

    verb: Literal["flush", "attach", "detach"]


# What the front door hands in, in order of arrival.
Arrival = Request | Abort | Command


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
