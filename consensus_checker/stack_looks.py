"""Where every rank's main thread stands, by its stacks: the ground that the rules about stacks share.

    round     look1         look2         look3
    rank 0    broadcast     all_reduce    all_reduce      waits, and has not moved
    rank 1    broadcast     all_reduce    all_reduce
    rank 2    forward       -             -               stale: what it did before all others stopped

Looks are put into rounds by the folder that they came in, else by their number; never by a clock. One look of
a rank can't tell slow from stuck. Ranks are compared inside a replica and a stage, where their places are
known; where they are not, what stages do may differ by right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Literal

from tracer.importers.dossier import Dossier, Stack
from tracer.importers.stacks import is_main, is_pairwise, kind_of, meeting_of, same_place

Doing = Literal["meeting", "idle", "storage", "device", "gil", "lock", "helper", "running", "unknown"]

# Tools by how much they tell.
TOOLS = ("py_spy", "py_spy_json", "pystack", "faulthandler")
# Innermost functions of a loop that has nothing to do.
IDLE = re.compile(
    r"event_loop\w*|\w*busy_loop\w*|recv_requests|\w*recv_reqs?\w*|\w*idle\w*|run_forever|serve\w*|"
    r"poll_requests|get_next_request\w*"
)
REQUESTS = re.compile(
    r"broadcast_pyobj|recv_requests|\w*broadcast_req\w*|point_to_point_pyobj|\w*recv_reqs?\w*"
)
# A vote of the cache, by its function or by the file that it stands in.
CACHE = re.compile(
    r"writing_check|loading_check|check_hicache_events|event_round|can_terminate_prefetch|\w*prefetch\w*"
    r"|_(?:all_reduce|barrier)_attn_groups|drain_\w*(?:queue|ack|storage)\w*|query_storage\w*|write_backup"
    r"|load_back\w*|evict\w*"
)
CACHE_FILE = re.compile(r"\w*cache\w*\.pyx?")
# Wrappers, whose names say less than those of who calls them.
WRAPPER = re.compile(r"<\w+>|_\w+|wrapper|inner|all_reduce|broadcast|barrier|send|recv|receive|all_gather")
# One rank gives, the others take: they wait by right while it has nothing to give.
ONE_SOURCE = re.compile(r"broadcast\w*|scatter\w*")
# Two moves in a row: that a job stopped just before the last look is then unlikely.
STEADY_MOVES = 2
WATCHED = re.compile(r"watchdog|timeout|timed_out|py_spy_dump")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread is.

    Attributes:
        call: of a collective or message; empty where it is in none.
        path: its own frames, innermost first, as `file.py:line func`.
        functions: the same without lines: branches of one function make one call, and a loop goes on in it.
    """

    doing: Doing
    call: str
    path: tuple[str, ...]
    functions: tuple[str, ...]

    @classmethod
    def of(cls, stack: Stack) -> Place:
        path = tuple(same_place(entry) for entry in stack.signature)
        functions = tuple(_without_line(entry) for entry in path)
        return cls(_doing(stack, path), meeting_of(stack), path, functions)

    def is_same(self, other: Place) -> bool:
        """Whether a thread has not moved from one to the other, as far as anybody can tell."""
        if self.doing != other.doing or self.call != other.call:
            return False
        is_exact = self.doing in ("running", "unknown")
        return self.path == other.path if is_exact else self.functions == other.functions

    def meets_with(self, other: Place) -> bool:
        """Whether both wait in one call of the program; its ranks may take other lines of one function."""
        return (self.call, self.functions) == (other.call, other.functions)

    @property
    def purpose(self) -> Literal["cache", "requests", ""]:
        """What a meeting is for, by the innermost frame that tells."""
        for entry in self.functions:
            file, _, func = entry.rpartition(" ")
            if REQUESTS.fullmatch(func):
                return "requests"
            if CACHE.fullmatch(func) or CACHE_FILE.fullmatch(file):
                return "cache"
        return ""

    @property
    def where(self) -> str:
        """Its innermost own function that says something, as `writing_check, hiradix_cache.py:700`."""
        named = (entry for entry in self.path if not WRAPPER.fullmatch(entry.rpartition(" ")[2]))
        entry = next(named, self.path[0] if self.path else "")
        file, _, func = entry.rpartition(" ")
        return f"{func}, {file}" if entry else "no frame of its own"


@dataclass(frozen=True, slots=True)
class Look:
    """One rank's threads at one time."""

    rank: int
    round: int
    threads: tuple[Stack, ...]

    @property
    def main(self) -> Stack | None:
        return next((stack for stack in self.threads if is_main(stack)), None)

    @property
    def gil_holder(self) -> Stack | None:
        return next((stack for stack in self.threads if holds_gil(stack)), None)


@dataclass(frozen=True, slots=True)
class Stand:
    """Where one rank stands.

    Attributes:
        look: the newest one.
        is_same: whether it has not moved since the look before; None where there is no other.
        is_stale: others have been looked at since, and had come elsewhere: it says nothing of the end.
    """

    rank: int
    look: Look
    main: Stack
    place: Place
    is_same: bool | None
    is_stale: bool = False

    @property
    def doing(self) -> Doing:
        return self.place.doing

    @property
    def is_waiting(self) -> bool:
        return self.doing == "meeting"


@dataclass(frozen=True, slots=True)
class Scope:
    """Ranks that ought to do the same: those of one replica and stage.

    Attributes:
        looks: rank -> its looks, the oldest first.
        silent: ranks known from other evidence, or by their number, of which there is no look at the end.
        is_placed: whether places say that no stage is missing from the comparison.
        is_watched: something else says that the job stands still.
        skipped: ranks that two processes claim to be.
    """

    name: str
    stands: tuple[Stand, ...]
    looks: Mapping[int, tuple[Look, ...]]
    silent: tuple[int, ...]
    is_placed: bool
    is_watched: bool
    skipped: tuple[int, ...] = ()

    @property
    def fresh(self) -> tuple[Stand, ...]:
        return tuple(stand for stand in self.stands if not stand.is_stale)

    @property
    def waiting(self) -> tuple[Stand, ...]:
        return tuple(stand for stand in self.fresh if stand.is_waiting)

    @property
    def absent(self) -> tuple[Stand, ...]:
        """Ranks that are in no meeting."""
        return tuple(stand for stand in self.fresh if not stand.is_waiting)

    @property
    def missing(self) -> tuple[int, ...]:
        stale = (stand.rank for stand in self.stands if stand.is_stale)
        return tuple(sorted({*self.silent, *stale}))

    @property
    def is_still(self) -> bool:
        """Whether every rank that waits was seen twice in the same call."""
        return bool(self.waiting) and all(stand.is_same is True for stand in self.waiting)

    @property
    def is_stuck(self) -> bool:
        """Whether anything tells a stall from a moment of a job that moves."""
        return self.is_still or (self.is_watched and not any(s.is_same is False for s in self.waiting))

    @property
    def is_steady(self) -> bool:
        """Whether every rank moved from each of three looks or more to the next: it does so now as well."""
        if self.missing or self.is_watched:
            return False
        return all(_moves(self.looks[stand.rank]) >= STEADY_MOVES for stand in self.fresh)

    @property
    def meetings(self) -> list[tuple[Stand, ...]]:
        """Ranks that wait, by the call that they wait in; the largest crowd first."""
        groups: list[list[Stand]] = []
        for stand in self.waiting:
            own = next((group for group in groups if group[0].place.meets_with(stand.place)), None)
            if own is None:
                groups.append([stand])
            else:
                own.append(stand)
        return sorted((tuple(group) for group in groups), key=lambda group: (-len(group), group[0].rank))

    @property
    def is_idle(self) -> bool:
        """Whether all that is waited for is something to do: from outside, or from the one that would say."""
        if not self.fresh or self.missing or self.is_watched:
            return False
        if not all(stand.doing == "idle" for stand in self.absent):
            return False
        calls = {stand.place.call for stand in self.waiting}
        if not all(ONE_SOURCE.fullmatch(call) or is_pairwise(call) for call in calls):
            return False
        return bool(self.absent) and not any(s.place.purpose == "cache" for s in self.waiting)


def scopes(dossier: Dossier) -> list[Scope]:
    """All ranks that have stacks, by replica and stage; none where no row has a rank."""
    looks, skipped = _looks(dossier)
    if not looks:
        return []
    places = {rank: found[-1].threads[0].who.places for rank, found in looks.items()}
    is_placed = all("tp" in own or "pp" in own for own in places.values())
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, own in places.items():
        key = (own.get("dp", 0), own.get("pp", 0)) if is_placed else (0, 0)
        groups.setdefault(key, []).append(rank)
    watched = any(WATCHED.search(line.event) for line in dossier.lines)
    everybody = set(dossier.ranks()) | set(range(max(looks)))
    silent = tuple(sorted(everybody - set(looks) - set(skipped))) if len(groups) == 1 else ()
    found = []
    for (dp, pp), ranks in sorted(groups.items()):
        name = "" if len(groups) == 1 else f"dp{dp}.pp{pp}"
        own_looks = {rank: looks[rank] for rank in sorted(ranks)}
        found.append(Scope(name, _stands(own_looks), own_looks, silent, is_placed, watched, skipped))
    return found


def helpers(scope: Scope, *, back: int = 0, rank: int | None = None) -> dict[str, dict[int, Stack]]:
    """Kind of thread -> rank -> its thread of that kind, of kinds that no rank has two of; without main ones.

    Args:
        back: looks before the newest one.
        rank: of this one only.
    """
    looks = {stand.rank: scope.looks[stand.rank] for stand in scope.fresh if rank in (None, stand.rank)}
    own = {number: found[-1 - back] for number, found in looks.items() if len(found) > back}
    by_name = all(stack.thread for stand in scope.fresh for stack in stand.look.threads)
    found: dict[str, dict[int, Stack]] = {}
    several = {"", "main"}
    for number, look in own.items():
        for stack in look.threads:
            kind = kind_of(stack, by_name=by_name)
            if number in found.setdefault(kind, {}):
                several.add(kind)
            found[kind][number] = stack
    return {kind: stacks for kind, stacks in found.items() if kind not in several}


def holds_gil(stack: Stack) -> bool:
    return "gil" in stack.state.split("+")


def is_of_cache(stack: Stack) -> bool:
    """Whether a thread begins in a function or a file of the cache."""
    if not stack.signature:
        return False
    file, _, func = _without_line(same_place(stack.signature[-1])).rpartition(" ")
    return CACHE.fullmatch(func) is not None or CACHE_FILE.fullmatch(file) is not None


def _looks(dossier: Dossier) -> tuple[dict[int, tuple[Look, ...]], tuple[int, ...]]:
    """Rank -> its looks by the tool that looked most often; and ranks that two processes claim to be."""
    rows: dict[int, dict[str, list[Stack]]] = {}
    for stack in dossier.stacks:
        if stack.who.rank is not None:
            tool = dossier.files[stack.at.file].format or ""
            rows.setdefault(stack.who.rank, {}).setdefault(tool, []).append(stack)
    rounds = _Rounds(dossier, rows)
    found: dict[int, tuple[Look, ...]] = {}
    skipped = []
    for rank, by_tool in sorted(rows.items()):
        own = [_of_one_tool(rank, stacks, rounds) for _, stacks in sorted(by_tool.items(), key=_tool_order)]
        best = max(own, key=lambda looks: len(looks or ()))
        if best is None:
            skipped.append(rank)
        elif best:
            found[rank] = best
    return found, tuple(skipped)


def _tool_order(item: tuple[str, list[Stack]]) -> int:
    return next((at for at, tool in enumerate(TOOLS) if tool in item[0].split("+")), len(TOOLS))


def _of_one_tool(rank: int, stacks: Sequence[Stack], rounds: _Rounds) -> tuple[Look, ...] | None:
    """Looks with a main thread; None where two processes have as many."""
    by_process: dict[int | None, dict[tuple[int, int], list[Stack]]] = {}
    for stack in stacks:
        looks = by_process.setdefault(stack.who.pid, {})
        looks.setdefault((stack.at.file, stack.sample), []).append(stack)
    mains = {
        pid: [own for own in looks.values() if any(map(is_main, own))] for pid, looks in by_process.items()
    }
    most = max((len(looks) for looks in mains.values()), default=0)
    if not most:
        return ()
    best = [looks for looks in mains.values() if len(looks) == most]
    if len(best) > 1:
        return None
    return tuple(Look(rank, rounds.of(own[0]), tuple(own)) for own in best[0])


def _moves(looks: Sequence[Look]) -> int:
    """How often in a row, up to the newest look, a rank's main thread was elsewhere than before."""
    places = [Place.of(look.main) for look in reversed(looks) if look.main is not None]
    pairs = pairwise(places)
    return sum(1 for _ in takewhile(lambda pair: not pair[0].is_same(pair[1]), pairs))


class _Rounds:
    """Which looks at different ranks belong together."""

    def __init__(self, dossier: Dossier, rows: Mapping[int, Mapping[str, Sequence[Stack]]]) -> None:
        self._folders = [file.name.rpartition("/")[0] for file in dossier.files]
        files = [
            {stack.at.file for stacks in by_tool.values() for stack in stacks} for by_tool in rows.values()
        ]
        folders = [{self._folders[file] for file in own} for own in files]
        self._is_by_folder = any(len(own) > 1 for own in folders)
        ordered = dict.fromkeys(self._folders[file] for file in sorted(set().union(*files)))
        self._order = {folder: number for number, folder in enumerate(ordered)}

    def of(self, stack: Stack) -> int:
        return self._order[self._folders[stack.at.file]] if self._is_by_folder else stack.sample


def _stands(looks: Mapping[int, tuple[Look, ...]]) -> tuple[Stand, ...]:
    last = max(look.round for own in looks.values() for look in own)
    found = []
    for rank, own in looks.items():
        main = own[-1].main
        assert main is not None
        place = Place.of(main)
        before = own[-2].main if len(own) > 1 else None
        is_same = place.is_same(Place.of(before)) if before is not None else None
        found.append(Stand(rank, own[-1], main, place, is_same))
    return tuple(_in_time(stand, found, looks, last) for stand in found)


def _in_time(
    stand: Stand, stands: Sequence[Stand], looks: Mapping[int, tuple[Look, ...]], last: int
) -> Stand:
    """A rank whose newest look is of an older round: it counts where the others stood there already."""
    own = stand.look.round
    if own == last:
        return stand
    others = [other for other in stands if other.look.round == last]
    for other in others:
        then = next((look.main for look in looks[other.rank] if look.round == own), None)
        if then is None or not other.place.is_same(Place.of(then)):
            return Stand(stand.rank, stand.look, stand.main, stand.place, None, is_stale=True)
    # Nobody has moved since; whether it moved before says nothing.
    return Stand(stand.rank, stand.look, stand.main, stand.place, None)


def _without_line(entry: str) -> str:
    file, _, func = entry.rpartition(" ")
    return f"{file.rpartition(':')[0]} {func}"


def _doing(stack: Stack, path: tuple[str, ...]) -> Doing:
    if stack.wait == "collective":
        return "meeting"
    if holds_gil(stack) and stack.wait in ("queue", "running", "unknown"):
        return "running"
    innermost = path[0].rpartition(" ")[2] if path else ""
    if stack.wait in ("queue", "running", "unknown") and IDLE.fullmatch(innermost):
        return "idle"
    if stack.wait == "queue":
        return "helper" if path else "idle"
    return stack.wait
