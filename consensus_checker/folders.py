"""What lies at the places that were given: our logs, folders that hold one run together, or a server's logs.

Folders belong together when their logs have one run id and attempt, and no rank is in two of them, as where
every host has written its own. A rank that is in two is counted once where its files are the same bytes;
otherwise nobody can say which is the run's, so the folders are judged apart, and that is said.
"""

from __future__ import annotations

import filecmp
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from consensus_checker.words import ranks_text
from tracer.log import LaneLog, Run
from tracer.places import META, SEGMENT
from tracer.sinks import SUMMARY_NAME

RunKey = tuple[str, int]
HEAD_BYTES = 4096
# Folders below a given one that are looked into, and files that are read: launchers nest a folder a rank.
DEPTH_MAX = 4
FILES_MAX = 10_000


@dataclass(slots=True)
class Together:
    """The logs of one run, or whatever lies in one folder.

    Attributes:
        key: run id and attempt; None where a folder holds several, which belong to no other folder.
        unreadable: what of it could not be read, or can't be believed.
        notes: what was counted once.
    """

    key: RunKey | None
    places: list[Path]
    lanes: list[LaneLog]
    unreadable: list[str]
    notes: list[str] = field(default_factory=list)

    def place_of(self, rank: int) -> Path:
        """The folder with the logs of that rank; the first where none has."""
        found = (lane.files[0].parent for lane in self.lanes if lane.rank == rank)
        parent = next(found, None)
        return next((place for place in self.places if parent in (place, place.parent)), self.places[0])

    def by_rank(self) -> Mapping[int, list[LaneLog]]:
        found: dict[int, list[LaneLog]] = {}
        for lane in self.lanes:
            found.setdefault(lane.rank, []).append(lane)
        return found


def together(runs: Sequence[tuple[Path, Run]]) -> list[Together]:
    """Folders grouped by run, in the order in which the first of each was given."""
    groups: list[Together] = []
    for place, run in runs:
        own = Together(_key(run), [place], list(run.lanes), list(run.unreadable))
        same = [group for group in groups if own.key is not None and group.key == own.key]
        if not any(_join(group, own) for group in same):
            groups.append(own)
    return groups


def _key(run: Run) -> RunKey | None:
    keys = {(lane.run_id, int(lane.header.get("attempt", 0))) for lane in run.lanes}
    return keys.pop() if len(keys) == 1 else None


def _join(group: Together, own: Together) -> bool:
    """Add a folder's ranks to those of others; false where the two contradict each other."""
    have, more = group.by_rank(), own.by_rank()
    twice = sorted(have.keys() & more.keys())
    differing = [rank for rank in twice if not _are_copies(have[rank], more[rank])]
    places = " and ".join(str(place) for place in (group.places[0], own.places[0]))
    if differing:
        told = f"{ranks_text(differing)} of this run: other bytes in {places}, so these are judged apart"
        group.unreadable.append(told)
        own.unreadable.append(told)
        return False
    if twice:
        group.notes.append(f"{ranks_text(twice)}: the same bytes in {places}, counted once")
    group.places += own.places
    group.lanes += [lane for lane in own.lanes if lane.rank not in have]
    group.lanes.sort(key=lambda lane: (lane.run_id, lane.rank, lane.lane != "scheduler", lane.lane))
    group.unreadable += own.unreadable
    return True


def _are_copies(one: Sequence[LaneLog], two: Sequence[LaneLog]) -> bool:
    """Whether the files of a rank have the same names and bytes in two folders."""
    files = [{path.name: path for lane in lanes for path in lane.files} for lanes in (one, two)]
    if files[0].keys() != files[1].keys():
        return False
    try:
        return all(filecmp.cmp(path, files[1][name], shallow=False) for name, path in files[0].items())
    except OSError:
        return False


def server_logs(place: Path) -> list[Path] | None:
    """Files that are not this tool's; None where our own reader says best what is there, or is not."""
    try:
        mode = place.stat().st_mode
        if stat.S_ISREG(mode):
            return None if _is_ours(place) else [place]
        if not stat.S_ISDIR(mode):
            return None
        return _files_below(place)
    except (OSError, ValueError):
        return None


def _is_ours(file: Path) -> bool:
    if SEGMENT.fullmatch(file.name) or META.fullmatch(file.name) or file.name == SUMMARY_NAME:
        return True
    with file.open("rb") as stream:
        return b'"format":"hicache.' in stream.read(HEAD_BYTES).replace(b" ", b"")


def _files_below(place: Path) -> list[Path] | None:
    found: list[Path] = []
    for folder, folders, names in os.walk(place):
        depth = len(Path(folder).relative_to(place).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and depth < DEPTH_MAX)
        if any(SEGMENT.fullmatch(name) or name == SUMMARY_NAME for name in names):
            # A run, or runs below: its own reader says which.
            return None
        paths = (Path(folder, name) for name in sorted(names) if not name.startswith("."))
        found += [path for path in paths if path.is_file()]
        if len(found) >= FILES_MAX:
            break
    return found[:FILES_MAX] or None
