"""Lines of logs that stand for a rank: where it waits, what it wrote last, or that it left nothing."""

from __future__ import annotations

from collections.abc import Sequence

from consensus_checker.finding import Evidence
from consensus_checker.history import History
from consensus_checker.stall import Stall, Wait


def waiting_lines(waits: Sequence[Wait], role: str) -> tuple[Evidence, ...]:
    entries: dict[int, Evidence] = {}
    for wait in waits:
        for rank in wait.ranks:
            seq = int(wait.enters[rank]["seq"])
            entries.setdefault(rank, Evidence(wait.lanes[rank].file_of(seq), seq, f"{role} {rank}"))
    return tuple(entries[rank] for rank in sorted(entries))


def last_lines(history: History, ranks: Sequence[int], stall: Stall, role: str) -> tuple[Evidence, ...]:
    entries = []
    for rank in ranks:
        # Of several lanes the one that says most: where the chain of waits ends.
        standing = stall.standing(rank, stall.lanes_for(rank)[-1]) or stall.standing(rank)
        if standing is not None and standing.last is None:
            standing = stall.standing(rank)
        if standing is None or standing.last is None:
            entries.append(Evidence(None, None, f"{role} {rank}: no log of this rank"))
        else:
            seq = int(standing.last["seq"])
            entries.append(Evidence(standing.lane.file_of(seq), seq, f"{role} {rank}"))
    return tuple(entries)


def last_step(stall: Stall, ranks: Sequence[int]) -> int:
    last = [standing.last for rank in ranks if (standing := stall.standing(rank)) and standing.last]
    return min((int(record["step"]) for record in last), default=0)


def silent_lines(ranks: Sequence[int]) -> tuple[Evidence, ...]:
    return tuple(Evidence(None, None, f"silent {rank}: no log of this rank") for rank in ranks)
