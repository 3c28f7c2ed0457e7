"""Requests from outside: block traces from files, and seeded agentic conversations.

A trace is streamed: one line is in memory at a time. Each hash id stands for one page's worth of prompt,
so an id becomes a page of equal tokens; ids that are equal give pages that are equal, and nothing else is
known about the text. Conversations are made from a seed, grow by equal amounts, and wait for their
own answers, as an agent does.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import weakref
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any, Protocol

from hicache.core import TOKEN_BYTES, Request
from hicache.errors import ConfigError, WorkloadError

# Ids beyond this share a second range of tokens, handed out in order of appearance.
PLAIN_ID_MAX = 1 << 31
# Tokens of the last, partly filled page where the file gives it no id, and of unknown answers.
FILLER = b"\xff\xff\xff\xff"
OUTPUT_TOKENS_MAX = 1 << 24
INPUT_TOKENS_MAX = 1 << 28


class Workload(Protocol):
    """Requests of one replica, in order."""

    def next(self) -> Request | None:
        """The next request that may be sent now; None when one must wait for an answer, or at the end."""
        ...

    def finished(self, rid: str) -> None:
        """The answer to `rid` is complete."""
        ...

    @property
    def is_exhausted(self) -> bool: ...

    @property
    def fraction(self) -> float:
        """How much of the workload has been handed out, 0..1."""
        ...


class TraceFile:
    """A Mooncake-style JSONL(.gz) file, streamed; requests are `r0`, `r1`, ... by line.

    Args:
        page_size_tokens: must be the file's block size.
        limit: only the first so many requests; None for all.
        replica, replicas: this one takes every `replicas`-th request.

    Raises:
        WorkloadError: from the constructor when the file can't be opened or is empty, from `next` at a
            line that is cut, malformed or does not fit the page size.
    """

    def __init__(
        self,
        path: Path,
        page_size_tokens: int,
        *,
        limit: int | None = None,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        self.path = path
        self._page_size_tokens = page_size_tokens
        self._limit = limit
        self._replica = replica
        self._replicas = replicas
        self._wide_ids: dict[int, int] = {}
        try:
            self._raw: IO[bytes] = path.open("rb")
            self._size = max(1, path.stat().st_size)
        except OSError as error:
            raise WorkloadError(f"{path}: {error.strerror or error}") from None
        # A run may end before its workload does.
        weakref.finalize(self, self._raw.close)
        self._requests = self._read()
        self._ahead = next(self._requests, None)
        if self._ahead is None and limit != 0 and replica == 0:
            raise WorkloadError(f"{path}: no request in it; expected one JSON object a line with hash_ids")

    def next(self) -> Request | None:
        request = self._ahead
        if request is not None:
            self._ahead = next(self._requests, None)
        return request

    def finished(self, rid: str) -> None:
        """A trace's requests do not wait for each other."""

    @property
    def is_exhausted(self) -> bool:
        return self._ahead is None

    @property
    def fraction(self) -> float:
        return 1.0 if self._ahead is None else self._raw.tell() / self._size

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Lines with their numbers from 1; gzip is recognised by its first bytes, not by its name."""
        magic = self._raw.read(2)
        self._raw.seek(0)
        stream: IO[bytes] = self._raw
        if magic == b"\x1f\x8b":
            stream = io.BufferedReader(gzip.GzipFile(fileobj=self._raw), 1 << 16)
        number = 0
        try:
            for line in stream:
                number += 1
                if line.strip():
                    yield number, line
        except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
            raise WorkloadError(f"{self.path}: cut or damaged after line {number}: {error}") from None
        finally:
            self._raw.close()

    def _read(self) -> Iterator[Request]:
        for index, (number, line) in enumerate(self._lines()):
            if self._limit is not None and index >= self._limit:
                return
            request = self._request(index, number, line)
            if index % self._replicas == self._replica:
                yield request

    def _request(self, index: int, number: int, line: bytes) -> Request:
        where = f"{self.path} line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise WorkloadError(f"{where}: not a JSON object: {line[:60]!r}") from None
        if not isinstance(row, dict):
            raise WorkloadError(f"{where}: expected a JSON object, found {type(row).__name__}")
        if "block_tokens" in row:
            raise WorkloadError(
                f"{where}: blocks of varying length (block_tokens) do not fit pages of one size"
            )
        input_tokens = _whole_number(row, "input_length", where, low=1, high=INPUT_TOKENS_MAX)
        output_tokens = _whole_number(row, "output_length", where, low=0, high=OUTPUT_TOKENS_MAX)
        arrival_ms = row.get("timestamp", 0)
        if isinstance(arrival_ms, bool) or not isinstance(arrival_ms, int | float) or arrival_ms < 0:
            raise WorkloadError(f"{where}: timestamp is {arrival_ms!r}, expected milliseconds from the start")
        session = row.get("session_id", "")
        if not isinstance(session, str | int):
            raise WorkloadError(f"{where}: session_id is {session!r}, expected a name or a number")
        return Request(
            rid=f"r{index}",
            tokens=self._tokens(row, input_tokens, where),
            output=b"",
            output_tokens=output_tokens,
            conversation=str(session),
            arrival_ms=int(arrival_ms),
        )

    def _tokens(self, row: dict[str, Any], input_tokens: int, where: str) -> bytes:
        ids = row.get("hash_ids")
        if not isinstance(ids, list) or not all(type(item) is int for item in ids):
            raise WorkloadError(f"{where}: hash_ids is not a list of whole numbers")
        page_size = self._page_size_tokens
        full, partial = divmod(input_tokens, page_size)
        if not full <= len(ids) <= full + (partial > 0):
            raise WorkloadError(
                f"{where}: {len(ids)} hash ids for {input_tokens} tokens do not fit --page-size {page_size} "
                f"(expected {full}..{full + (partial > 0)}); --page-size must be the file's block size"
            )
        pages = [self._token(item) * page_size for item in ids]
        tokens = b"".join(pages)
        end = input_tokens * TOKEN_BYTES
        return (
            tokens[:end]
            if len(tokens) >= end
            else tokens + FILLER * (input_tokens - len(tokens) // TOKEN_BYTES)
        )

    def _token(self, block_id: int) -> bytes:
        if not 0 <= block_id < PLAIN_ID_MAX:
            block_id = PLAIN_ID_MAX + self._wide_ids.setdefault(block_id, len(self._wide_ids))
        return block_id.to_bytes(TOKEN_BYTES, "little")


def _whole_number(row: dict[str, Any], name: str, where: str, *, low: int, high: int) -> int:
    value = row.get(name)
    if type(value) is not int or not low <= value <= high:
        found = "missing" if value is None else repr(value)
        raise WorkloadError(f"{where}: {name} is {found}, expected a whole number {low}..{high}")
    return value


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
        for part in filter(None, text.split(",")):
            key, _, value = part.partition("=")
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
        if self.conversations < 1 or self.rounds < 1:
            raise ConfigError("--agentic: at least one conversation and one round")
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


class FrontDoor:
    """A workload behind a limit of requests in flight. Implements `ports.Source`."""

    def __init__(self, workload: Workload, concurrency: int) -> None:
        self.workload = workload
        self.served = 0
        self.refused = 0
        self._free = concurrency

    def poll(self) -> list[Request]:
        arrived: list[Request] = []
        while self._free:
            request = self.workload.next()
            if request is None:
                break
            self._free -= 1
            arrived.append(request)
        return arrived

    def finished(self, rid: str, *, is_served: bool) -> None:
        self._free += 1
        if is_served:
            self.served += 1
        else:
            self.refused += 1
        self.workload.finished(rid)

    @property
    def is_exhausted(self) -> bool:
        return self.workload.is_exhausted
