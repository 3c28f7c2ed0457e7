"""Faults bend the world in ways a correct runtime must survive. A fault alone is never a finding.

    alloc_fail:rank=2,pool=host,nth=5           the nth allocation finds no free page on that rank
    delay_done:rank=0,queue=write,op=3,steps=2  that copy is done so many polls later (op counts from 1)

What struck is kept in `FaultPlan.fired` and goes to `run.json`, never into a rank's log: a checker that
could read it would not have to find anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hicache.core import Queue, Slot
from hicache.errors import ConfigError
from hicache.ports import Memory
from hicache.sim.engine import Delay
from hicache.topology import Topology

# verb -> its keys, and for each either the words it takes or None for a whole number.
VERBS: dict[str, dict[str, tuple[str, ...] | None]] = {
    "alloc_fail": {"rank": None, "pool": ("host",), "nth": None},
    "delay_done": {"rank": None, "queue": ("write", "load"), "op": None, "steps": None},
}
# A later copy is as good as lost, which is another fault.
STEPS_MAX = 2_000
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
            raise ConfigError(f"--fault {text!r}: no fault {verb!r}; expected {EXAMPLES}")
        parts = [part.partition("=")[::2] for part in rest.split(",") if part]
        given = dict(parts)
        if set(given) != set(keys) or len(parts) != len(keys):
            raise ConfigError(f"--fault {text!r}: {verb} takes exactly {', '.join(keys)}")
        words: dict[str, str] = {}
        numbers: dict[str, int] = {}
        for key, value in given.items():
            allowed = keys[key]
            if allowed is not None:
                if value not in allowed:
                    raise ConfigError(f"--fault {text!r}: {key} is one of {', '.join(allowed)}")
                words[key] = value
            elif value.isascii() and value.isdecimal() and len(value) < 10:
                numbers[key] = int(value)
            else:
                raise ConfigError(f"--fault {text!r}: {key} is a whole number, not {value!r}")
        if numbers["rank"] >= topology.world_size:
            raise ConfigError(f"--fault {text!r}: this run has ranks 0..{topology.world_size - 1}")
        if numbers.get("steps", 0) > STEPS_MAX:
            raise ConfigError(f"--fault {text!r}: steps is at most {STEPS_MAX}")
        for key in ("nth", "op"):
            if numbers.get(key) == 0:
                raise ConfigError(f"--fault {text!r}: {key} counts from 1")
        return cls(verb, numbers.pop("rank"), words, numbers)


@dataclass(slots=True)
class FaultPlan:
    """All faults of a run, and which of them have struck."""

    faults: Sequence[Fault] = ()
    fired: list[str] = field(default_factory=list)

    def delay(self, rank: int) -> Delay:
        """Extra polls for the copies of one rank."""
        planned = {
            (fault.words["queue"], fault.numbers["op"] - 1): fault.numbers["steps"]
            for fault in self.faults
            if fault.verb == "delay_done" and fault.rank == rank
        }

        def extra_polls(queue: Queue, index: int) -> int:
            steps = planned.get((queue, index), 0)
            if steps:
                self.fired.append(f"delay_done on rank {rank}: {queue} {index + 1}, {steps} polls")
            return steps

        return extra_polls

    def memory(self, rank: int, pool: str, memory: Memory) -> Memory:
        """`memory`, or one that fails where the plan says."""
        failing = [
            fault.numbers["nth"]
            for fault in self.faults
            if fault.verb == "alloc_fail" and fault.rank == rank and fault.words["pool"] == pool
        ]
        return (
            FailingMemory(memory, failing, self.fired, f"{pool} memory of rank {rank}") if failing else memory
        )


class FailingMemory:
    """Memory that somebody else has filled up when its nth allocation comes. Implements `ports.Memory`."""

    def __init__(self, memory: Memory, failing: Sequence[int], fired: list[str], name: str) -> None:
        self._memory = memory
        self._failing = set(failing)
        self._fired = fired
        self._name = name
        self._count = 0

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
