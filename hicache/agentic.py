"""Seeded agentic conversations: they grow by equal amounts and wait for their own answers, as agents do."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, fields, replace

from hicache.core import TOKEN_BYTES, Request
from hicache.errors import ConfigError

COUNT_MAX = 100_000
CONTEXT_TOKENS_MAX = 1 << 24


@dataclass(frozen=True, slots=True)
class AgenticSpec:
    """Seeded conversations, all alike in length: a shared prefix, then equal growth to `max_context`.

    Attributes:
        output: tokens of each answer; the rest of a round's growth is what the tools said.
        shared_prefix: leading tokens that all conversations have in common.
    """

    conversations: int = 6
    rounds: int = 8
    max_context: int = 4096
    output: int = 32
    shared_prefix: int = 256
    seed: int = 1

    @classmethod
    def parse(cls, text: str) -> AgenticSpec:
        """Read `conversations=32,rounds=86,max-context=160000,output=200,shared-prefix=2000,seed=1`.

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
            if key in ("aborts", "think") and value == "0":
                continue
            if key not in known:
                raise ConfigError(f"--agentic {part!r}: expected {', '.join(sorted(known))}")
            if not (value.isascii() and value.isdecimal() and len(value) < 10):
                raise ConfigError(f"--agentic {part!r}: expected a whole number")
            spec = replace(spec, **{key.replace("-", "_"): int(value)})
        spec.check()
        return spec

    def check(self) -> None:
        for name, most in (
            ("conversations", COUNT_MAX),
            ("rounds", COUNT_MAX),
            ("max_context", CONTEXT_TOKENS_MAX),
        ):
            if not 1 <= getattr(self, name) <= most:
                option = name.replace("_", "-")
                raise ConfigError(f"--agentic: {option}={getattr(self, name)}, expected 1..{most}")
        if self.output < 1 or self.growth <= self.output:
            raise ConfigError(
                f"--agentic: each round grows by (max-context - shared-prefix) / rounds = {self.growth} "
                f"tokens, of which output={self.output} are the answer; at least one must be new input"
            )

    def text(self) -> str:
        """What `parse` reads back."""
        pairs = [(item.name.replace("_", "-"), getattr(self, item.name)) for item in fields(self)]
        return ",".join(f"{name}={value}" for name, value in pairs)

    @property
    def growth(self) -> int:
        """Tokens by which each prompt is longer than the one before."""
        return max(0, self.max_context - self.shared_prefix) // self.rounds


@dataclass(slots=True)
class _Conversation:
    """One agent: everything said so far, and whether it waits for an answer."""

    name: str
    chance: random.Random
    history: bytes
    rounds_left: int
    last_answer: bytes = b""


@dataclass(slots=True)
class Agentic:
    """Conversations in turn; each sends its next prompt once its last answer has come.

    Request ids count conversations first, so that they do not depend on who answers faster:
    `c3.t5` is the fifth turn of conversation 3.
    """

    spec: AgenticSpec
    replica: int = 0
    replicas: int = 1
    limit: int | None = None
    _ready: deque[_Conversation] = field(default_factory=deque)
    _asked: dict[str, _Conversation] = field(default_factory=dict)
    _sent: int = 0
    _total: int = 0

    def __post_init__(self) -> None:
        spec = self.spec
        shared = random.Random(f"{spec.seed}/shared").randbytes(spec.shared_prefix * TOKEN_BYTES)
        for number in range(self.replica, spec.conversations, self.replicas):
            chance = random.Random(f"{spec.seed}/{number}")
            self._ready.append(_Conversation(f"c{number}", chance, shared, spec.rounds))
        self._total = len(self._ready) * spec.rounds
        if self.limit is not None:
            # Replicas take turns, so each gets its share of the first `limit` requests.
            share = -(-(self.limit - self.replica) // self.replicas)
            self._total = min(self._total, max(0, share))

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
        return Request(rid, talk.history, talk.last_answer, spec.output, talk.name)

    def finished(self, rid: str) -> None:
        talk = self._asked.pop(rid)
        talk.history += talk.last_answer
        if talk.rounds_left:
            self._ready.append(talk)

    @property
    def is_exhausted(self) -> bool:
        return self._sent >= self._total

    @property
    def fraction(self) -> float:
        return self._sent / self._total if self._total else 1.0
