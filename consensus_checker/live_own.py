"""This process as its watcher sees it: heads and digests of its chains, where its lanes are, its answers.

Owns the look at the tracers of other threads. It reads and never writes, and takes no lock that a lane takes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from consensus_checker.live_digests import ChainDigests, as_json
from consensus_checker.live_posts import (
    ANSWER_BYTES_MAX,
    VERSION,
    ChainPost,
    Inside,
    LanePost,
    Post,
    Question,
    Told,
    place_of,
)
from consensus_checker.live_stand import Links, declared, inside, lines_around, names_of
from tracer.chain import ALGORITHM, LINKS, digest_of
from tracer.record import MAIN_LANE, Kind
from tracer.tracer import Tracer

# What is short enough for whoever waits for 2 s, and long enough for a file to be read.
STILL_S = 0.25
# Links in the last post, by which a rank that has left can still be compared.
TAIL_LINKS = 64
TAIL_BYTES_MAX = 8 << 10
# Links read to find a place in the log: steps may be long, and a checkpoint waits for the end of one.
LINKS_ALIGNED = 4 * LINKS


class Own:
    """One rank.

    Args:
        header: of its lanes.
        still_s: a lane that has been still for so long is looked for in its log.
    """

    def __init__(
        self,
        rank: int,
        lanes: Mapping[str, Tracer],
        header: Mapping[str, Any],
        folder: Path | None,
        members: Sequence[int],
        *,
        still_s: float = STILL_S,
    ) -> None:
        self.rank = rank
        self.session = os.urandom(8).hex()
        self.coordinates = {str(axis): int(at) for axis, at in header.get("coordinates", {}).items()}
        self._lanes = lanes
        self._header = header
        self._folder = folder
        self._still_s = still_s
        self._sizes = dict(header.get("sizes", {}))
        self._is_alone = len(members) < 2
        self._contract = contract(header)
        self._host = _host()
        self._pid = os.getpid()
        self._digests: dict[tuple[str, tuple[str, ...]], ChainDigests] = {}
        # Lane -> what was seen of it last, since when, and what was read of it there.
        self._seen: dict[str, tuple[tuple[int, ...], float]] = {}
        self._inside: dict[str, tuple[int, Inside | None]] = {}
        self._thinned: set[str] = set()
        self.beat = 0
        # Links that were digested since the start.
        self.links = 0

    @property
    def main(self) -> str:
        """The lane that decides."""
        return MAIN_LANE if MAIN_LANE in self._lanes else next(iter(self._lanes), MAIN_LANE)

    @property
    def step(self) -> int:
        lane = self._lanes.get(self.main)
        return lane.step if lane is not None else 0

    @property
    def lost(self) -> int:
        return sum(chain.lost for chain in self._digests.values())

    def follow(self) -> None:
        """Digest what has come since the last time."""
        for name, lane in list(self._lanes.items()):
            for axes, chain in list(lane.chains.items()):
                if not self._has_partners(axes):
                    continue
                digests = self._digests.get((name, axes))
                if digests is None:
                    digests = self._digests[name, axes] = ChainDigests(chain)
                self.links += digests.follow()

    def post(self, now_s: float, *, told: int, lag_s: float, ended: str = "") -> Post:
        self.beat += 1
        lanes = [self._lane(name, lane, now_s, ended) for name, lane in list(self._lanes.items())]
        return Post(
            VERSION,
            self.rank,
            self.session,
            self.beat,
            self._contract,
            self.coordinates,
            self._host,
            self._pid,
            lanes,
            told,
            ended,
            round(lag_s, 3),
        )

    def _lane(self, name: str, lane: Tracer, now_s: float, ended: str) -> LanePost:
        seq = lane.seq
        chains = [
            _chain_post(digests, is_last=bool(ended))
            for (lane_name, _axes), digests in self._digests.items()
            if lane_name == name
        ]
        # Idle steps are taken back: only their numbers, and their links, go on.
        state = (seq, lane.step, *(chain.head for chain in chains))
        before, since_s = self._seen.get(name, ((), now_s))
        if state != before:
            since_s = now_s
            self._seen[name] = state, now_s
        # Asked behind the links: whatever they lack was left out before.
        if lane.is_quiet or lane.was_throttled:
            self._thinned.add(name)
        is_still = now_s - since_s >= self._still_s
        return LanePost(
            name,
            lane.step,
            seq,
            chains,
            self._where(name, lane, seq) if is_still else None,
            dict(lane.dropped),
            name in self._thinned,
        )

    def _where(self, name: str, lane: Tracer, seq: int) -> Inside | None:
        """Where the lane is, read once for each place."""
        at, found = self._inside.get(name, (-1, None))
        if at != seq:
            found = inside(self._folder, self.rank, name, self._groups) if self._folder is not None else None
            if found is None:
                last = self._last_link(lane)
                found = Inside(last=last, calls=[last] if last.get("phase") == "call" else [])
            self._inside[name] = seq, found
        return found

    @property
    def _groups(self) -> Mapping[str, Sequence[int]]:
        groups: Mapping[str, Sequence[int]] = self._header.get("groups", {})
        return groups

    def _last_link(self, lane: Tracer) -> dict[str, Any]:
        """Without a log, the last link says which call it was."""
        heads = [(chain.head, chain) for chain in list(lane.chains.values())]
        if not heads:
            return {}
        head, chain = max(heads, key=lambda one: one[0])
        _, links = chain.since(max(0, head - 1))
        kind, phase = names_of(links[-1:])[0] if links else ("", "")
        return place_of({"kind": kind, "phase": phase, "step": lane.step}) if kind else {}

    def _has_partners(self, axes: tuple[str, ...]) -> bool:
        return not self._is_alone and any(self._sizes.get(axis, 2) > 1 for axis in axes)

    def declarations(self, lane: str = "") -> dict[str, Any]:
        """What this rank declares by now; kinds may have come since its lanes began."""
        known: Mapping[str, Any] = self._header.get("kinds", {})
        more = declared(self._folder, self.rank, lane or self.main) if self._folder is not None else {}
        return {**known, **more}

    def _chain(self, question: Question) -> ChainDigests | None:
        """The chain that is meant, in whatever order its axes are named here."""
        axes = frozenset(question.axes)
        return next(
            (
                digests
                for (lane, own), digests in self._digests.items()
                if lane == question.lane and frozenset(own) == axes
            ),
            None,
        )

    def answers(self, questions: Sequence[Question]) -> list[Told]:
        return [self._answer(question) for question in questions]

    def _answer(self, question: Question) -> Told:
        digests = self._chain(question)
        lane = self._lanes.get(question.lane)
        if digests is None or lane is None:
            return Told()
        if question.links is None:
            return Told(digests.digests_at(question.counts))
        # Nothing goes out that the last post did not know of: it says what is left out, too.
        start, stop = question.links[0], min(question.links[1], digests.head)
        first, links = digests.links(start, stop)
        told = Told([], first, _fitting(links), step=lane.step)
        if not question.has_records:
            return told
        declarations = self.declarations(question.lane)
        told = msgspec.structs.replace(told, kinds=msgspec.json.encode(declarations))
        if self._folder is None or first > start:
            return told
        kinds = kinds_of(declarations)
        begin, behind = digests.links(max(0, start - LINKS_ALIGNED), stop)
        chain = Links(begin, names_of(behind), start, stop)
        found = lines_around(self._folder, self.rank, question.lane, kinds, digests.axes, chain)
        if found is None or sum(map(len, found.lines)) > ANSWER_BYTES_MAX // 2:
            return told
        return msgspec.structs.replace(
            told,
            has_lines=True,
            lines=b"\n".join(found.lines),
            records_of=dict(found.records_of),
            file=found.file,
        )


def kinds_of(declarations: Mapping[str, Any]) -> dict[str, Kind]:
    """The kinds of a header; those that make no sense are left out."""
    found = {}
    for name, parts in declarations.items():
        with suppress(ValueError):
            found[name] = Kind.from_declaration(name, parts)
    return found


def _fitting(links: Sequence[Any]) -> bytes:
    """As many of the links as an answer has room for, as JSON."""
    data = as_json(links)
    while len(data) > ANSWER_BYTES_MAX // 2:
        links = links[: len(links) // 2]
        data = as_json(links)
    return data


def _chain_post(digests: ChainDigests, *, is_last: bool) -> ChainPost:
    if digests.lost:
        return ChainPost(digests.axes, digests.head, "", [], digests.lost)
    first, tail = 0, b""
    if is_last:
        first, links = digests.links(digests.head - TAIL_LINKS, digests.head)
        tail = as_json(links)
        if len(tail) > TAIL_BYTES_MAX:
            first, tail = 0, b""
    return ChainPost(digests.axes, digests.head, digests.digest, digests.marks(), 0, first, tail)


def contract(header: Mapping[str, Any]) -> str:
    """What two ranks must have in common to be compared: run, axes, and how digests are made."""
    parts = [header.get("sizes", {}), header.get("run_id", ""), header.get("attempt", 0), ALGORITHM]
    return digest_of(msgspec.json.encode(parts))


def _host() -> str:
    """Of the machine and the namespace in which process ids count; "" where that can't be told."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return digest_of(f"{boot} {os.readlink('/proc/self/ns/pid')} {socket.gethostname()}".encode())
    except OSError:
        return ""


def host_of_this() -> str:
    return _host()


GONE = ("its process is gone", "its process is stopped")


def fate_of(pid: int) -> str:
    """What is known of a process of this machine."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return GONE[0]
    except (OSError, IndexError):
        return ""
    if state in "ZX":
        return GONE[0]
    return GONE[1] if state in "Tt" else "its process is there and does not run its watcher"
