"""Meetings between processes: torch.distributed with gloo, the truth that the simulator imitates.

One process group for each group of ranks and channel, made in one order on all ranks. Every group has a
thread of its own, so the order of calls on it is the order in which lanes made them, and a call that
blocks holds up nobody else; messages to the next stage and from the one before have one each, so that a
blocked receive never holds up a send.

What travels says nothing of its purpose. Two calls that do not belong together complete with mixed
values, stand still, or end the process in gloo's own thread, as they would in production. With the
meeting guard each call is led by a small one that compares meanings.

The only module that imports torch, and only when it is asked for.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from hicache.errors import ConfigError
from hicache.loop import Signal
from hicache.topology import AXES, Topology
from hicache.transport.drive import DriveLoop, Watch, Worker, outcome
from hicache.transport.meetings import LOST, Call, Group, Link, LostPeerError, MispairedError, differing

INSTALL = "pip install 'hicache-toolkit[runtime]'"
# gloo gives up after the loop has, which knows better what to say.
MARGIN_S = 15.0
# Where a rank's ending is published, by rank; how often one looks for the others'.
ENDING = "hicache/ending/"
LOOK_S = 0.05
# What a call means, as text, when the guard has found that meanings differ.
TEXT_BYTES = 96
# First number of a message between stages, and of what announces a broadcast: what follows.
NOTHING, NUMBERS, BYTES = 0, 1, 2
LENGTH_MAX = 1 << 34


def import_torch() -> Any:
    """torch, or one error that says how to get it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            # A torch without numpy says so at import; nothing here needs it.
            warnings.simplefilter("ignore")
            import torch
            import torch.distributed
    except ImportError as error:
        raise ConfigError(f"--mode gloo needs torch, which can't be imported ({error}); {INSTALL}") from None
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise ConfigError(f"--mode gloo: this torch ({torch.__version__}) has no gloo; {INSTALL}")
    return torch


class GlooWorld:
    """This process's place among all processes of a job, from the environment that torchrun sets.

    Args:
        channels: names of the channels that this run uses, equal on all ranks.
        timeout_s: of connecting; calls may take `MARGIN_S` longer.

    Raises:
        ConfigError: no torch, or not as many processes as the topology has ranks.
        LostPeerError: the others did not come in time.
    """

    def __init__(self, topology: Topology, *, channels: tuple[str, ...], timeout_s: float) -> None:
        self.topology = topology
        self.rank = _from_environment("RANK")
        world_size = _from_environment("WORLD_SIZE")
        if world_size != topology.world_size:
            raise ConfigError(
                f"{world_size} processes were started for {topology.world_size} ranks; start as many with "
                "torchrun --nnodes and --nproc-per-node as dp x pp x cp x tp"
            )
        self._torch = torch = import_torch()
        self._dist = torch.distributed
        torch.set_num_threads(1)
        limit = timedelta(seconds=timeout_s)
        try:
            self._store, rank, size = next(self._dist.rendezvous("env://", timeout=limit))
            self._dist.init_process_group(
                "gloo", store=self._store, rank=rank, world_size=size, timeout=limit
            )
            self._groups = self._make_groups(channels, limit + timedelta(seconds=MARGIN_S))
        except Exception as error:
            raise LostPeerError(
                f"rank {self.rank} could not meet the other {world_size - 1} processes within "
                f"--timeout {timeout_s:g} seconds: {first_line(error)}"
            ) from None

    def _make_groups(self, channels: tuple[str, ...], timeout: timedelta) -> dict[str, Any]:
        """Every group of the job in one order; each process keeps those it is in."""
        topology, groups = self.topology, {}
        for axis in AXES[1:]:
            if getattr(topology, axis) == 1:
                continue
            for channel in channels:
                for rank in range(topology.world_size):
                    at = topology.coordinates(rank)
                    members = topology.members(axis, at)
                    if rank == members[0]:
                        made = self._dist.new_group(list(members), timeout=timeout, backend="gloo")
                        if self.rank in members:
                            groups[topology.group_name(axis, channel, at)] = made
        return groups

    @property
    def store(self) -> Any:
        """The job's store, where ranks may leave each other words; whoever waits in it should clone it."""
        return self._store

    def publish(self, ending: str) -> None:
        """Let the others know how this rank has ended, as far as there is still somebody to tell."""
        with suppress(Exception):
            self._store.set(f"{ENDING}{self.rank}", ending)

    def endings(self, *, wait_s: float) -> dict[int, str]:
        """What other ranks have published; waits a while for those that have not."""
        found: dict[int, str] = {}
        missing = set(range(self.topology.world_size)) - {self.rank}
        until = time.monotonic() + wait_s
        with suppress(Exception):
            while missing:
                for rank in sorted(missing):
                    if self._store.check([f"{ENDING}{rank}"]):
                        found[rank] = self._store.get(f"{ENDING}{rank}").decode()
                        missing.discard(rank)
                if time.monotonic() > until:
                    break
                time.sleep(LOOK_S)
        return found

    def part(self) -> None:
        """Leave when all others leave: a process that goes early can take unread messages with it."""
        with suppress(Exception):
            self._dist.monitored_barrier(timeout=timedelta(seconds=MARGIN_S))

    def wire(self, loop: DriveLoop, watch: Watch) -> GlooWire:
        return GlooWire(self._torch, self._groups, self.rank, loop, watch)


class GlooWire:
    """One rank's way to the others over gloo, shared by its lanes. Implements `meetings.Wire`."""

    def __init__(self, torch: Any, groups: dict[str, Any], rank: int, loop: DriveLoop, watch: Watch) -> None:
        self._pipe = _Pipe(torch)
        self._groups = groups
        self._rank = rank
        self._loop = loop
        self._watch = watch
        self._workers: dict[str, Worker] = {}
        self._last_sent: dict[str, Signal] = {}

    async def meet(self, group: Group, call: Call, value: Any) -> Any:
        pipe, handle, members = self._pipe, self._groups[group.name], group.members

        def work() -> Any:
            if call.meaning:
                meanings = zip(members, pipe.meanings(handle, call.meaning, len(members)), strict=True)
                if others := differing(list(meanings), self._rank):
                    raise MispairedError(others)
            if call.op == "broadcast":
                return pipe.broadcast(handle, value, root=members[0], is_root=self._rank == members[0])
            return pipe.all_reduce(handle, value, call)

        return await outcome(self._ask(group.name, work, f"{call.op} {group.name} #{call.seq}"))

    def send(self, link: Link, call: Call, message: Any) -> None:
        pipe, handle = self._pipe, self._handle(link)

        def work() -> None:
            if call.meaning:
                pipe.send_text(handle, link.peer, call.meaning)
            pipe.send(handle, link.peer, message, call.numel)

        self._last_sent[link.name] = self._ask(f"send {link.name}", work, f"taken {link.name} #{call.seq}")

    async def receive(self, link: Link, call: Call) -> Any:
        pipe, handle = self._pipe, self._handle(link)

        def work() -> Any:
            if call.meaning and (other := pipe.receive_text(handle, link.peer)) != call.meaning:
                raise MispairedError([f"rank {link.peer}: {other}"])
            return pipe.receive(handle, link.peer, call.numel)

        return await outcome(self._ask(f"recv {link.name}", work, f"recv {link.name} #{call.seq}"))

    async def drain(self, link: Link) -> None:
        """gloo's send ends when the other side has asked for the message."""
        if (last := self._last_sent.get(link.name)) is not None:
            await outcome(last)

    def _handle(self, link: Link) -> Any:
        """A link's messages travel on the pipeline's group of the same channel."""
        return self._groups[link.name.rpartition(":")[0]]

    def _ask(self, thread: str, work: Callable[[], Any], reason: str) -> Signal:
        if thread not in self._workers:
            self._workers[thread] = Worker(thread, self._loop, self._watch)
        return self._workers[thread].ask(partial(_translated, work), reason)


class _Pipe:
    """Blocking calls: plain values in and out, int64 and bytes on the way."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._dist = torch.distributed

    def all_reduce(self, handle: Any, values: list[int] | None, call: Call) -> list[int]:
        tensor = self._zeros(call.numel) if values is None else self._numbers(values)
        self._dist.all_reduce(tensor, op=self._reduce(call.reduce), group=handle)
        # Values that nobody reads are not worth a list: a forward is as long as its batch has tokens.
        return [] if values is None else tensor.tolist()

    def broadcast(self, handle: Any, message: Any, *, root: int, is_root: bool) -> Any:
        """The length first, since only the first member knows it."""
        head = self._numbers(_head(message) if is_root else [NOTHING, 0])
        self._dist.broadcast(head, root, group=handle)
        kind, length = head.tolist()
        if kind == NOTHING:
            return None
        tensor, read = self._room(kind, length, message if is_root else None)
        if length:
            self._dist.broadcast(tensor, root, group=handle)
        return read()

    def send(self, handle: Any, peer: int, message: Any, numel: int) -> None:
        """`numel` numbers led by what they are; bytes follow in a message of their own."""
        kind, length = _head(message)
        numbers = [length] if kind == BYTES else message or ()
        assert len(numbers) <= numel, f"{len(numbers)} numbers in a message of {numel}"
        head = self._zeros(numel + 1)
        head[: 1 + len(numbers)] = self._numbers([kind, *numbers])
        self._dist.send(head, peer, group=handle)
        if kind == BYTES and length:
            self._dist.send(self._room(kind, length, message)[0], peer, group=handle)

    def receive(self, handle: Any, peer: int, numel: int) -> Any:
        head = self._zeros(numel + 1)
        self._dist.recv(head, peer, group=handle)
        kind = int(head[0])
        if kind == NOTHING:
            return None
        if kind == NUMBERS:
            return head[1:].tolist()
        tensor, read = self._room(kind, int(head[1]), None)
        if len(tensor):
            self._dist.recv(tensor, peer, group=handle)
        return read()

    def meanings(self, handle: Any, meaning: str, count: int) -> list[str]:
        """Every member's meaning, in order of members; all alike costs one small reduction."""
        own = int.from_bytes(hashlib.blake2b(meaning.encode(), digest_size=7).digest(), "little")
        pair = self._numbers([own, -own])
        self._dist.all_reduce(pair, op=self._reduce("min"), group=handle)
        least, negated_most = pair.tolist()
        if least == -negated_most:
            return [meaning] * count
        # All members see that they differ, so all come here.
        texts = [self._text("") for _ in range(count)]
        self._dist.all_gather(texts, self._text(meaning), group=handle)
        return [_read_text(text) for text in texts]

    def send_text(self, handle: Any, peer: int, text: str) -> None:
        self._dist.send(self._text(text), peer, group=handle)

    def receive_text(self, handle: Any, peer: int) -> str:
        tensor = self._text("")
        self._dist.recv(tensor, peer, group=handle)
        return _read_text(tensor)

    def _room(self, kind: int, length: int, message: Any) -> tuple[Any, Callable[[], Any]]:
        """A tensor for `length` numbers or bytes, filled with the message if there is one; how to read it."""
        if not 0 <= length <= LENGTH_MAX or kind not in (NUMBERS, BYTES):
            raise LostPeerError(f"a message of kind {kind} and length {length}: another call's numbers")
        if kind == NUMBERS:
            numbers = self._zeros(length) if message is None else self._numbers(message)
            return numbers, numbers.tolist
        room = bytearray(length) if message is None else bytearray(message)
        return self._over(room), lambda: bytes(room)

    def _over(self, room: bytearray) -> Any:
        """A tensor in the same memory; there is none without memory."""
        torch = self._torch
        return torch.frombuffer(room, dtype=torch.uint8) if room else torch.zeros(0, dtype=torch.uint8)

    def _text(self, text: str) -> Any:
        return self._over(bytearray(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")))

    def _numbers(self, values: Sequence[int]) -> Any:
        return self._torch.tensor(values, dtype=self._torch.int64)

    def _zeros(self, count: int) -> Any:
        return self._torch.zeros(count, dtype=self._torch.int64)

    def _reduce(self, name: str) -> Any:
        return getattr(self._dist.ReduceOp, name.upper())


def first_line(error: BaseException) -> str:
    """An error of torch without its place in torch, its stack and its advice."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\] ", "", lines[0]).split(". This is typically", 1)[0]


def _head(message: Any) -> list[int]:
    """What a message is and how long."""
    if message is None:
        return [NOTHING, 0]
    return [BYTES if isinstance(message, bytes) else NUMBERS, len(message)]


def _read_text(tensor: Any) -> str:
    return bytes(tensor.tolist()).rstrip(b"\0").decode(errors="replace")


def _translated(work: Callable[[], Any]) -> Any:
    """Whatever gloo raises means that a call to somebody has failed."""
    try:
        return work()
    except (MispairedError, LostPeerError, AssertionError):
        raise
    except Exception as error:
        raise LostPeerError(f"{LOST}{first_line(error)}") from None


def _from_environment(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise ConfigError(
            f"{name} is {value!r}: this process was not started by torchrun or by hicache run --mode gloo"
        )
    return int(value)
