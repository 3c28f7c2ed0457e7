"""Requests from outside: the front door, and block traces from files.

A trace is streamed: one line is in memory at a time. Each hash id stands for one page's worth of prompt,
so an id becomes a page of equal tokens; ids that are equal give pages that are equal, and nothing else is
known about the text. Seeded conversations are in `agentic`.
"""

from __future__ import annotations

import gzip
import io
import json
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from hicache.core import TOKEN_BYTES, Abort, Arrival, Command, Request
from hicache.errors import ConfigError, WorkloadError

# Ids beyond this share a second range of tokens, handed out in order of appearance.
PLAIN_ID_MAX = 1 << 31
GZIP_MAGIC = b"\x1f\x8b"
# Tokens of the last, partly filled page where the file gives it no id, and of unknown answers.
FILLER = b"\xff\xff\xff\xff"
OUTPUT_TOKENS_MAX = 1 << 24
INPUT_TOKENS_MAX = 1 << 28
# A hundred years.
ARRIVAL_MS_MAX = 1 << 42
# A prompt of 838,246 tokens in blocks of 16 is a line of half a megabyte.
LINE_BYTES_MAX = 1 << 26
# A command's poll; by then every workload has ended.
POLLS_MAX = 1 << 40
COMMANDS = {"flush": Command("flush"), "attach": Command("attach"), "detach": Command("detach")}


class Workload(Protocol):
    """Requests of one replica, in order."""

    def poll(self) -> Sequence[Abort]:
        """The front door is looked at once more: time for its clients; says which of them go away now."""
        ...

    def next(self) -> Request | None:
        """The next request that may be sent now; None when one must wait for an answer, or at the end."""
        ...

    def finished(self, rid: str) -> None:
        """The answer to `rid` is complete, or was refused."""
        ...

    def aborted(self, rid: str) -> None:
        """`rid` has ended without its answer because its client had gone."""
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
            self._raw: io.BufferedReader = path.open("rb")
            self._size = max(1, path.stat().st_size)
        except OSError as error:
            raise WorkloadError(f"{path}: {error.strerror or error}") from None
        # A run may end before its workload does.
        weakref.finalize(self, self._raw.close)
        self._requests = self._read()
        self._ahead = next(self._requests, None)
        if self._ahead is None and limit != 0 and replica == 0:
            raise WorkloadError(f"{path}: no request in it; expected one JSON object a line with hash_ids")

    def poll(self) -> Sequence[Abort]:
        """A trace does not say whose client went away."""
        return ()

    def next(self) -> Request | None:
        request = self._ahead
        if request is not None:
            self._ahead = next(self._requests, None)
        return request

    def finished(self, rid: str) -> None:
        """A trace's requests do not wait for each other."""

    def aborted(self, rid: str) -> None:
        """Nor for one that was given up."""

    @property
    def is_exhausted(self) -> bool:
        return self._ahead is None

    @property
    def fraction(self) -> float:
        if self._ahead is None:
            return 1.0
        # A pipe has no length to be a fraction of.
        return self._raw.tell() / self._size if self._raw.seekable() else 0.0

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Lines with their numbers from 1; gzip is recognised by its first bytes, not by its name."""
        number = 0
        try:
            stream = self._raw
            if self._raw.peek(2)[:2] == GZIP_MAGIC:
                stream = io.BufferedReader(gzip.GzipFile(fileobj=self._raw), 1 << 16)
            while line := stream.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise WorkloadError(
                        f"{self.path} line {number}: longer than {LINE_BYTES_MAX} bytes; "
                        "expected one JSON object a line"
                    )
                if line.strip():
                    yield number, line
        except (EOFError, zlib.error, OSError) as error:
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
            raise WorkloadError(f"{where}: not a JSON object: {_shown(line)}") from None
        if not isinstance(row, dict):
            raise WorkloadError(f"{where}: expected a JSON object, found {_shown(line)}")
        if "block_tokens" in row:
            raise WorkloadError(
                f"{where}: blocks of varying length (block_tokens) do not fit pages of one size"
            )
        input_tokens = _whole_number(row, "input_length", where, low=1, high=INPUT_TOKENS_MAX)
        output_tokens = _whole_number(row, "output_length", where, low=0, high=OUTPUT_TOKENS_MAX)
        arrival_ms = row.get("timestamp", 0)
        is_number = isinstance(arrival_ms, int | float) and not isinstance(arrival_ms, bool)
        # Written this way round, NaN does not pass.
        if not (is_number and 0 <= arrival_ms <= ARRIVAL_MS_MAX):
            raise WorkloadError(f"{where}: timestamp is {arrival_ms!r}, expected milliseconds from the start")
        session = row.get("session_id", "")
        if not isinstance(session, str | int) or not _is_text(str(session)):
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


def _is_text(value: str) -> bool:
    """JSON can spell half a surrogate pair; no log can carry it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(line: bytes) -> str:
    """The beginning of a line, on one line."""
    return repr(line[:60].decode(errors="replace").strip())


def _whole_number(row: dict[str, Any], name: str, where: str, *, low: int, high: int) -> int:
    value = row.get(name)
    if type(value) is not int or not low <= value <= high:
        found = "missing" if value is None else repr(value)
        raise WorkloadError(f"{where}: {name} is {found}, expected a whole number {low}..{high}")
    return value


def parse_commands(text: str) -> list[tuple[int, Command]]:
    """Read `attach@40,detach@90,flush@120`: commands with the poll at which each is given, earliest first.

    Raises:
        ConfigError: not a command, or not a poll; polls count from 1.
    """
    found: list[tuple[int, Command]] = []
    for part in filter(None, text.split(",")):
        verb, _, poll = part.partition("@")
        is_poll = poll.isascii() and poll.isdecimal() and len(poll) < 14
        if verb not in COMMANDS or not (is_poll and 1 <= int(poll) <= POLLS_MAX):
            raise ConfigError(
                f"command {part!r}: expected one of {', '.join(COMMANDS)} and the poll from 1 on at which it "
                "is given, as in attach@40,detach@90"
            )
        found.append((int(poll), COMMANDS[verb]))
    return sorted(found, key=lambda pair: pair[0])


class FrontDoor:
    """A workload behind a limit of requests in flight. Implements `ports.Source`.

    Args:
        commands: an operator's commands and the poll from which each is due, earliest first. While one is
            due nobody new is let in, and it is given once the replica has come to rest, one a poll; what is
            due after the last request has ended is given then.

    Attributes:
        carried: what became of each command that was given: `attach done`, `flush refused: not_idle`.
    """

    def __init__(
        self, workload: Workload, concurrency: int, commands: Sequence[tuple[int, Command]] = ()
    ) -> None:
        self.workload = workload
        self.served = 0
        self.refused = 0
        self.aborted = 0
        self._free = concurrency
        self._in_flight: set[str] = set()
        # Requests in flight whose client has gone.
        self._left: set[str] = set()
        self._commands = deque(commands)
        self._polls = 0
        self.carried: list[str] = []

    def poll(self, *, is_idle: bool = True) -> list[Arrival]:
        self._polls += 1
        arrived: list[Arrival] = []
        for abort in self.workload.poll():
            # A client may go just as its answer is complete, so an abort is handed on whatever it meets.
            arrived.append(abort)
            if abort.rid in self._in_flight:
                self._left.add(abort.rid)
        if self._is_command_due():
            # A command is refused by whoever is at work, so an operator lets the work run out first.
            return [*arrived, self._commands.popleft()[1]] if is_idle else arrived
        while self._free:
            request = self.workload.next()
            if request is None:
                break
            self._free -= 1
            self._in_flight.add(request.rid)
            arrived.append(request)
        return arrived

    def _is_command_due(self) -> bool:
        is_over = self.workload.is_exhausted and not self._in_flight
        return bool(self._commands) and (self._commands[0][0] <= self._polls or is_over)

    def carried_out(self, command: Command, reason: str) -> None:
        self.carried.append(f"{command.verb} {f'refused: {reason}' if reason else 'done'}")

    def finished(self, rid: str, *, is_served: bool) -> None:
        self._free += 1
        self._in_flight.remove(rid)
        has_left = rid in self._left
        self._left.discard(rid)
        if is_served:
            self.served += 1
        elif has_left:
            self.aborted += 1
        else:
            self.refused += 1
        if has_left and not is_served:
            self.workload.aborted(rid)
        else:
            self.workload.finished(rid)

    @property
    def is_exhausted(self) -> bool:
        return self.workload.is_exhausted and not self._commands
