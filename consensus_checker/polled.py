"""Polls of NCCL's monitor as rules look at them: which global rank a member is, which two polls to compare.

    pid 310 @ a  is rank 2 of the communicator of all, and rank 0 of its tensor-parallel one

A communicator numbers its members by itself. The one that has all processes numbers the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tracer.importers.dossier import Dossier, Poll, Who

# A poll nearer than this to the one before it shows no standstill.
APART_NS = 10 * 10**9

Process = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Looks:
    """One communicator: its newest poll, and the newest one that is long enough before it.

    Attributes:
        earlier: None where there is none, so that one look is all there is.
    """

    newest: Poll
    earlier: Poll | None


def looks(dossier: Dossier) -> list[Looks]:
    """Every communicator of the newest polls, in the order in which they were found."""
    found: dict[str, list[Poll]] = {}
    for poll in dossier.polls:
        found.setdefault(poll.communicator, []).append(poll)
    return [Looks(polls[-1], _earlier(polls)) for polls in found.values()]


def _earlier(polls: Sequence[Poll]) -> Poll | None:
    newest = polls[-1]
    for poll in reversed(polls[:-1]):
        if newest.time_ns and poll.time_ns and newest.time_ns - poll.time_ns >= APART_NS:
            return poll
    return None


def global_ranks(dossier: Dossier) -> Mapping[Process, int]:
    """Process -> rank, by the communicator that has every process; nothing where none has."""
    newest = {poll.communicator: poll for poll in dossier.polls}
    everyone = {process for poll in newest.values() for who in poll.members.values() if (process := of(who))}
    for poll in newest.values():
        own = {process: rank for rank, who in poll.members.items() if (process := of(who))}
        if own.keys() == everyone and len(own) == len(poll.members) and poll.size == len(own):
            return own
    return {}


def of(who: Who) -> Process | None:
    return (who.host, who.pid) if who.pid is not None else None


def named(poll: Poll, ranks: Sequence[int], numbers: Mapping[Process, int]) -> tuple[int, ...]:
    """Members as global ranks; those of whom nobody knows are left out."""
    processes = [of(poll.members[rank]) for rank in ranks if rank in poll.members]
    return tuple(sorted({numbers[one] for one in processes if one is not None and one in numbers}))


def members_text(poll: Poll, ranks: Sequence[int]) -> str:
    """`member 3 (pid 310 on a)`, for whom no global rank is known as well."""
    texts = []
    for rank in list(ranks)[:4]:
        who = poll.members.get(rank, Who())
        place = f"pid {who.pid}" if who.pid is not None else ""
        place += f" on {who.host}" if who.host else ""
        texts.append(f"member {rank}" + (f" ({place.strip()})" if place else ""))
    return ", ".join(texts) + (" and others" if len(ranks) > 4 else "")
