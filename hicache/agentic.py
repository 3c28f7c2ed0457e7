"""Seeded agentic conversations: they grow by equal amounts and wait for their own answers, as agents do.

What a client does beside that (going away before its answer has come, a pause before its next turn) is drawn
from the seed, request by request, and never from how fast it is answered.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, fields, replace

from hicache.core import TOKEN_BYTES, Abort, Request
from hicache.errors import ConfigError

COUNT_MAX = 100_000
CONTEXT_TOKENS_MAX = 1 << 24
# A scheduler that has nothing to do for some thousand steps says that it hangs.
THINK_POLLS_MAX = 1_000
# key -> least and most; what is left is bounded by how they fit together.
RANGES = {
    "conversations": (1, COUNT_MAX),
    "rounds": (1, COUNT_MAX),
    "max_context": (1, CONTEXT_TOKENS_MAX),
    "output": (1, CONTEXT_TOKENS_MAX),
    "shared_prefix": (0, CONTEXT_TOKENS_MAX),
    "seed": (0, 999_999_999),
    "aborts": (0, 100),
    "priorities": (1, COUNT_MAX),
    "namespaces": (1, COUNT_MAX),
    "think": (0, THINK_POLLS_MAX),
}
# Keys that came later than the first runs: `text` leaves out their defaults, so that run ids stay.
LATER_KEYS = ("aborts", "priorities", "namespaces", "think")


@dataclass(frozen=True, slots=True)
class AgenticSpec:
    """Seeded conversations, all alike in length: a shared prefix, then equal growth to `max_context`.

    Attributes:
        output: tokens of each answer; the rest of a round's growth is what the tools said.
        shared_prefix: leading tokens that all conversations have in common.
        aborts: percent of the requests whose client goes away, unless it is answered before.
        priorities: distinct priorities, by conversation; 1 is none.
        namespaces: distinct pairs of extra key and cache salt, by conversation; 1 is none.
        think: polls of the front door between an answer and the conversation's next turn.
    """

    conversations: int = 6
    rounds: int = 8
    max_context: int = 4096
    output: int = 32
    shared_prefix: int = 256
    seed: int = 1
    aborts: int = 0
    priorities: int = 1
    namespaces: int = 1
    think: int = 0

    @classmethod
    def parse(cls, text: str) -> AgenticSpec:
        """Read `conversations=32,rounds=86,max-context=160000,output=200,shared-prefix=2000,seed=1`.

        Further keys: `aborts=10` percent, `priorities=3`, `namespaces=2`, `think=5` polls.

        Raises:
            ConfigError: an unknown key or a value that does not fit.
        """
        known = {item.name.replace("_", "-") for item in fields(cls)}
        spec = cls()
        given: set[str] = set()
        for part in filter(None, text.split(",")):
            key, _, value = part.partition("=")
            if key in given:
                raise ConfigError(f"--agentic {part!r}: {key} is given twice")
            given.add(key)
            if key not in known:
                raise ConfigError(f"--agentic {part!r}: expected {', '.join(sorted(known))}")
            least, most = RANGES[key.replace("-", "_")]
            if not (value.isascii() and value.isdecimal() and len(value) < 20):
                raise ConfigError(f"--agentic {part[:60]!r}: expected a whole number {least}..{most}")
            spec = replace(spec, **{key.replace("-", "_"): int(value)})
        spec.check()
        return spec

    def check(self) -> None:
        for name, (least, most) in RANGES.items():
            if not least <= getattr(self, name) <= most:
                option = name.replace("_", "-")
                raise ConfigError(f"--agentic: {option}={getattr(self, name)}, expected {least}..{most}")
        if self.output < 1 or self.growth <= self.output:
            raise ConfigError(
                f"--agentic: each round grows by (max-context - shared-prefix) / rounds = {self.growth} "
                f"tokens, of which output={self.output} are the answer; at least one must be new input"
            )

    def text(self) -> str:
        """What `parse` reads back."""
        pairs = [
            (item.name.replace("_", "-"), getattr(self, item.name))
            for item in fields(self)
            if item.name not in LATER_KEYS or getattr(self, item.name) != item.default
        ]
        return ",".join(f"{name}={value}" for name, value in pairs)

    @property
    def growth(self) -> int:
        """Tokens by which each prompt is longer than the one before."""
        return max(0, self.max_context - self.shared_prefix) // self.rounds


def keys_of(namespace: int) -> tuple[str, str]:
    """Extra key and cache salt of the namespace with that number: none, one, the other, or both."""
    extra_key = f"tenant-{namespace}" if namespace % 3 != 2 and namespace else ""
    cache_salt = f"salt-{namespace}" if namespace % 3 != 1 and namespace else ""
    return extra_key, cache_salt


@dataclass(slots=True)
class _Conversation:
    """One agent: everything said so far, and whether it waits for an answer.

    Attributes:
        chance: draws what is said.
        whims: draws when the client goes away, so that who does changes nothing that is said.
    """

    number: int
    chance: random.Random
    whims: random.Random
    history: bytes
    rounds_left: int
    last_answer: bytes = b""

    @property
    def name(self) -> str:
        return f"c{self.number}"


@dataclass(slots=True)
class Agentic:
    """Conversations in turn; each sends its next prompt once its last answer has come, or was given up.

    Request ids count conversations first, so that they do not depend on who answers faster:
    `c3.t5` is the fifth turn of conversation 3. A client that has gone away goes on with its next turn
    without the answer.
    """

    spec: AgenticSpec
    replica: int = 0
    replicas: int = 1
    limit: int | None = None
    _ready: deque[_Conversation] = field(default_factory=deque)
    _asked: dict[str, _Conversation] = field(default_factory=dict)
    # (poll from which on it is ready, conversation), in the order in which they were answered.
    _thinking: deque[tuple[int, _Conversation]] = field(default_factory=deque)
    # Poll -> requests whose client goes away then, unless they have ended before.
    _leaving: dict[int, list[str]] = field(default_factory=dict)
    _polls: int = 0
    _sent: int = 0
    _total: int = 0

    def __post_init__(self) -> None:
        spec = self.spec
        shared = random.Random(f"{spec.seed}/shared").randbytes(spec.shared_prefix * TOKEN_BYTES)
        for number in range(self.replica, spec.conversations, self.replicas):
            chance = random.Random(f"{spec.seed}/{number}")
            whims = random.Random(f"{spec.seed}/{number}/whims")
            self._ready.append(_Conversation(number, chance, whims, shared, spec.rounds))
        self._total = len(self._ready) * spec.rounds
        if self.limit is not None:
            # Replicas take turns, so each gets its share of the first `limit` requests.
            share = -(-(self.limit - self.replica) // self.replicas)
            self._total = min(self._total, max(0, share))

    def poll(self) -> list[Abort]:
        self._polls += 1
        while self._thinking and self._thinking[0][0] <= self._polls:
            self._ready.append(self._thinking.popleft()[1])
        return [Abort(rid) for rid in self._leaving.pop(self._polls, ())]

    def next(self) -> Request | None:
        if not self._ready or self.is_exhausted:
            return None
        talk = self._ready.popleft()
        spec = self.spec
        turn = spec.rounds - talk.rounds_left + 1
        prompt_tokens = spec.shared_prefix + turn * spec.growth
        missing = prompt_tokens - len(talk.history) // TOKEN_BYTES
        talk.history += talk.chance.randbytes(missing * TOKEN_BYTES)
        talk.last_answer = talk.chance.randbytes(spec.output * TOKEN_BYTES)
        talk.rounds_left -= 1
        rid = f"{talk.name}.t{turn}"
        self._asked[rid] = talk
        self._sent += 1
        self._maybe_leave(talk, rid)
        extra_key, cache_salt = keys_of(talk.number % spec.namespaces)
        return Request(
            rid,
            talk.history,
            talk.last_answer,
            spec.output,
            talk.name,
            priority=talk.number % spec.priorities,
            extra_key=extra_key,
            cache_salt=cache_salt,
        )

    def _maybe_leave(self, talk: _Conversation, rid: str) -> None:
        """Draw whether the client of this request goes away, and when.

        In twice the polls of a decode, so that some go while their request waits, some while it runs, and
        some after it has ended.
        """
        if self.spec.aborts and talk.whims.randrange(100) < self.spec.aborts:
            due = self._polls + talk.whims.randint(1, 2 * self.spec.output + 8)
            self._leaving.setdefault(due, []).append(rid)

    def finished(self, rid: str) -> None:
        talk = self._asked.pop(rid)
        talk.history += talk.last_answer
        self._go_on(talk)

    def aborted(self, rid: str) -> None:
        self._go_on(self._asked.pop(rid))

    def _go_on(self, talk: _Conversation) -> None:
        if talk.rounds_left:
            if self.spec.think:
                self._thinking.append((self._polls + 1 + self.spec.think, talk))
            else:
                self._ready.append(talk)

    @property
    def is_exhausted(self) -> bool:
        return self._sent >= self._total

    @property
    def fraction(self) -> float:
        return self._sent / self._total if self._total else 1.0
