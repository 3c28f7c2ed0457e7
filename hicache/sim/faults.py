"""Faults bend the world; a correct runtime survives all but `storage_never`, and none makes ranks diverge.

    alloc_fail:rank=2,pool=host,nth=5             the nth allocation finds no free slot on that rank
    resize:rank=1,pool=device,pages=2             that rank's pool has so many pages less than its peers'
    delay_done:rank=0,queue=write,op=3,steps=2    that copy is done so many polls later (op counts from 1)
    delay_done:rank=0,queue=prefetch,op=3,steps=2 the same for a read of the external tier, or a write: backup
    storage_slow:rank=1,call=exists,nth=2,steps=9 that call takes so many turns more
    storage_never:rank=1,call=get,nth=2           that call never returns
    storage_fail:rank=1,call=set,nth=4            that call fails
    storage_down:rank=1,from=10,to=30             all calls from the 10th to the 30th fail, of whatever kind
    storage_short:rank=1,call=get,nth=2,pages=3   that call does so many pages fewer; without `call` a get
    shard_missing:rank=1,nth=6                    at the nth lookup, a page in the middle of what is there
                                                  has lost this rank's shard, until it is written again
    attach_fail:rank=1,nth=1                      the nth time that the external tier is opened, it can't be

What struck is kept in `FaultPlan.fired` and goes to `run.json`, never into a rank's log: a checker that
could read it would not have to find anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hicache.core import Queue, Slot
from hicache.errors import ConfigError, StorageError
from hicache.ports import Memory
from hicache.sim.engine import Delay
from hicache.topology import Topology

Call = Literal["exists", "get", "set"]
CALLS: tuple[Call, ...] = ("exists", "get", "set")
# Turns of a call that does not come back.
NEVER = -1
# verb -> its keys, and for each either the words it takes or None for a whole number.
VERBS: dict[str, dict[str, tuple[str, ...] | None]] = {
    "alloc_fail": {"rank": None, "pool": ("host", "mamba"), "nth": None},
    "resize": {"rank": None, "pool": ("device", "host", "mamba"), "pages": None},
    "delay_done": {
        "rank": None,
        "queue": ("write", "load", "prefetch", "backup"),
        "op": None,
        "steps": None,
    },
    "storage_slow": {"rank": None, "call": CALLS, "nth": None, "steps": None},
    "storage_never": {"rank": None, "call": CALLS, "nth": None},
    "storage_fail": {"rank": None, "call": CALLS, "nth": None},
    "storage_down": {"rank": None, "from": None, "to": None},
    "storage_short": {"rank": None, "call": CALLS, "nth": None, "pages": None},
    "shard_missing": {"rank": None, "nth": None},
    "attach_fail": {"rank": None, "nth": None},
}
# What a key is when it is not given.
DEFAULTS: dict[str, dict[str, str]] = {"storage_short": {"call": "get"}}
COUNTED_FROM_1 = ("nth", "op", "from", "to", "pages")
# Background copies by the name of their queue, and the call that each batch of them is.
BACKGROUND: dict[str, Call] = {"prefetch": "get", "backup": "set"}
# A later copy is as good as lost, which is another fault.
STEPS_MAX = 2_000
COUNT_MAX = 999_999_999
EXAMPLES = "alloc_fail:rank=2,pool=host,nth=5 or delay_done:rank=0,queue=write,op=1,steps=2"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong in the world, once, on one rank."""

    verb: str
    rank: int
    words: dict[str, str]
    numbers: dict[str, int]

    @classmethod
    def parse(cls, text: str, topology: Topology) -> Fault:
        """Read `verb:key=value,...`.

        Raises:
            ConfigError: unknown verb or key, a missing key, or a value that does not fit.
        """
        verb, _, rest = text.partition(":")
        keys = VERBS.get(verb)
        if keys is None:
            raise ConfigError(
                f"--fault {text!r}: no fault {verb!r}; expected one of {', '.join(VERBS)}, as in {EXAMPLES}"
            )
        parts = [part.partition("=")[::2] for part in rest.split(",") if part]
        given = DEFAULTS.get(verb, {}) | dict(parts)
        if set(given) != set(keys) or len(parts) != len(dict(parts)):
            raise ConfigError(f"--fault {text!r}: {verb} takes exactly {', '.join(keys)}")
        words: dict[str, str] = {}
        numbers: dict[str, int] = {}
        for key, value in given.items():
            allowed = keys[key]
            if allowed is not None:
                if value not in allowed:
                    raise ConfigError(f"--fault {text!r}: {key} is one of {', '.join(allowed)}")
                words[key] = value
            else:
                try:
                    numbers[key] = _number(key, value, topology)
                except ValueError as error:
                    raise ConfigError(f"--fault {text!r}: {error}") from None
        if numbers.get("from", 0) > numbers.get("to", 0):
            raise ConfigError(f"--fault {text!r}: from call {numbers['from']} to {numbers['to']} is no range")
        return cls(verb, numbers.pop("rank"), words, numbers)


def _number(key: str, value: str, topology: Topology) -> int:
    """A number of a fault.

    Raises:
        ValueError: it is none, or out of range.
    """
    if not (value.isascii() and value.isdecimal()):
        raise ValueError(f"{key} is a whole number, not {value[:60]!r}")
    # Python itself makes no number of thousands of digits.
    number = int(value[:20])
    most = STEPS_MAX if key == "steps" else COUNT_MAX
    if key == "rank" and number >= topology.world_size:
        raise ValueError(f"this run has ranks 0..{topology.world_size - 1}")
    if number > most:
        raise ValueError(f"{key} is at most {most}")
    if key in COUNTED_FROM_1 and not number:
        raise ValueError(f"{key} counts from 1")
    return number


@dataclass(slots=True)
class FaultPlan:
    """All faults of a run, and which of them have struck."""

    faults: Sequence[Fault] = ()
    fired: list[str] = field(default_factory=list)

    def delay(self, rank: int) -> Delay:
        """Extra polls for the copies of one rank."""
        planned = {
            (fault.words["queue"], fault.numbers["op"] - 1): fault.numbers["steps"]
            for fault in self._of(rank, "delay_done")
        }

        def extra_polls(queue: Queue, index: int) -> int:
            steps = planned.get((queue, index), 0)
            if steps:
                self.fired.append(f"delay_done on rank {rank}: {queue} {index + 1}, {steps} polls")
            return steps

        return extra_polls

    def memory(self, rank: int, pool: str, memory: Memory) -> Memory:
        """`memory`, or one that fails where the plan says. `pool` is device, host or a side pool's name."""
        own = [fault for fault in self.faults if fault.rank == rank and fault.words.get("pool") == pool]
        name = f"{pool} memory of rank {rank}"
        for fault in own:
            if fault.verb == "resize" and memory.page_count:
                memory = SmallerMemory(memory, fault.numbers["pages"])
                self.fired.append(f"resize of {name}: {memory.page_count} pages")
        failing = [fault.numbers["nth"] for fault in own if fault.verb == "alloc_fail"]
        return FailingMemory(memory, failing, self.fired, name) if failing else memory

    def storage(self, rank: int) -> StorageFaults:
        """What is planned for one rank's external tier; one object a rank, as it counts calls."""
        return StorageFaults(rank, [fault for fault in self.faults if fault.rank == rank], self.fired)

    def _of(self, rank: int, verb: str) -> list[Fault]:
        return [fault for fault in self.faults if fault.rank == rank and fault.verb == verb]


class StorageFaults:
    """What goes wrong with the external tier of one rank, call by call.

    Calls of a kind are counted apart, in the order in which they are made. How long a call takes is asked
    before it, by whoever can wait; what it does, by `sim.storage.FaultyBackend`.
    """

    def __init__(self, rank: int, faults: Sequence[Fault] = (), fired: list[str] | None = None) -> None:
        self._rank = rank
        self._faults = faults
        self._fired = fired if fired is not None else []
        self._asked: Counter[str] = Counter()
        self._made: Counter[str] = Counter()

    def turns(self, call: Call) -> int:
        """Turns that the next call of this kind takes beyond what chance gives it; NEVER for no end."""
        self._asked[call] += 1
        nth = self._asked[call]
        turns = 0
        for fault in self._faults:
            is_background = BACKGROUND.get(fault.words.get("queue", "")) == call
            if is_background and fault.verb == "delay_done" and fault.numbers["op"] == nth:
                turns += fault.numbers["steps"]
                self._note(fault, call, nth)
        for fault in self._matching(call, nth, "storage_slow"):
            turns += fault.numbers["steps"]
            self._note(fault, call, nth)
        for fault in self._matching(call, nth, "storage_never"):
            turns = NEVER
            self._note(fault, call, nth)
        return turns

    def begin(self, call: Call) -> int:
        """Count a call that is made now; returns the pages by which it will fall short.

        Raises:
            StorageError: it fails.
        """
        self._made[call] += 1
        self._made["any"] += 1
        nth, any_nth = self._made[call], self._made["any"]
        is_down = [
            fault
            for fault in self._faults
            if fault.verb == "storage_down" and fault.numbers["from"] <= any_nth <= fault.numbers["to"]
        ]
        for fault in [*self._matching(call, nth, "storage_fail"), *is_down]:
            self._note(fault, call, nth)
            raise StorageError(f"{call} {nth} on rank {self._rank}: fails as {fault.verb} says")
        pages = 0
        for fault in self._matching(call, nth, "storage_short"):
            pages += fault.numbers["pages"]
            self._note(fault, call, nth)
        return pages

    def loses_shard(self) -> bool:
        """Does the lookup that has just begun find out that a page's shard is gone?"""
        return any(
            fault.verb == "shard_missing" and fault.numbers["nth"] == self._made["exists"]
            for fault in self._faults
        )

    def lost(self, page: str) -> None:
        """That page's shard was there, and is gone."""
        self._fired.append(f"shard_missing on rank {self._rank}: page {page[:8]}")

    def open(self) -> None:
        """The external tier is opened.

        Raises:
            StorageError: it can't be reached this time.
        """
        self._made["open"] += 1
        for fault in self._faults:
            if fault.verb == "attach_fail" and fault.numbers["nth"] == self._made["open"]:
                self._note(fault, "open", self._made["open"])
                raise StorageError(f"rank {self._rank}: can't be reached, as attach_fail says")

    def _matching(self, call: Call, nth: int, verb: str) -> list[Fault]:
        return [
            fault
            for fault in self._faults
            if fault.verb == verb and (fault.words["call"], fault.numbers["nth"]) == (call, nth)
        ]

    def _note(self, fault: Fault, call: str, nth: int) -> None:
        self._fired.append(f"{fault.verb} on rank {self._rank}: {call} {nth}")


class FailingMemory:
    """Memory that somebody else has filled up when its nth allocation comes. Implements `ports.Memory`."""

    def __init__(self, memory: Memory, failing: Sequence[int], fired: list[str], name: str) -> None:
        self._memory = memory
        self._failing = set(failing)
        self._fired = fired
        self._name = name
        self._count = 0

    @property
    def page_count(self) -> int:
        return self._memory.page_count

    @property
    def pages_free(self) -> int | None:
        if self._count + 1 in self._failing:
            return 0
        return self._memory.pages_free

    @property
    def pages_used(self) -> int:
        return self._memory.pages_used

    def alloc(self, page_count: int) -> list[Slot] | None:
        self._count += 1
        if self._count in self._failing:
            self._fired.append(f"alloc_fail in {self._name}: allocation {self._count}, {page_count} pages")
            return None
        return self._memory.alloc(page_count)

    def free(self, slots: Sequence[Slot]) -> None:
        self._memory.free(slots)


class SmallerMemory:
    """Memory of which this rank has less than its peers, from the start. Implements `ports.Memory`."""

    def __init__(self, memory: Memory, pages_less: int) -> None:
        self._memory = memory
        # One page at least: none would mean that there is no limit.
        self.page_count = max(1, memory.page_count - pages_less)

    @property
    def pages_free(self) -> int | None:
        return self.page_count - self._memory.pages_used

    @property
    def pages_used(self) -> int:
        return self._memory.pages_used

    def alloc(self, page_count: int) -> list[Slot] | None:
        if page_count > self.page_count - self._memory.pages_used:
            return None
        return self._memory.alloc(page_count)

    def free(self, slots: Sequence[Slot]) -> None:
        self._memory.free(slots)
