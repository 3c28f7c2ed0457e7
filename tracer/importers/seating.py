"""Which rank a row is of, where its source does not say: by its file's name, its process, or its place.

What a row says itself goes first, then the name of its file, then what is known of its process. Where a file
that is of one rank names another one than its rows do, nobody can say which is right: such rows have no rank.
Places become ranks as SGLang numbers them, the last of dp, pp and tp fastest; under data-parallel attention
TP numbers go on over the replicas, and are the ranks of a stage then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tracer.importers.dossier import Dossier, Who

AXES = ("dp", "pp", "tp")
# `rank3` is global; `tp_rank3`, `local_rank3` and `node_rank3` are not.
NAMED = re.compile(
    r"(?:(?<![A-Za-z])(node|local|host|pod|group|tp|pp|dp|cp|ep|attn|moe)[-_]?)?(?<![A-Za-z])rank[-_]?(\d{1,6})(?!\d)",
    re.IGNORECASE,
)
PLACED = re.compile(r"(?<![A-Za-z])(dp|pp|tp)[-_]?(?:rank[-_]?)?(\d{1,6})(?![\dA-Za-z])", re.IGNORECASE)
# A flight recorder's rank is nowhere but at the end of its file's name.
NUMBER_LAST = re.compile(r"(\d{1,6})(?:\.(?:json|pickle|pkl|bin|dump|txt|log|gz|zst))*$", re.IGNORECASE)
TABLES = ("dumps", "stacks", "lines", "statuses")


def rank_of_name(name: str, *, is_number_enough: bool = False) -> int | None:
    """The global rank in a file's name or in that of its nearest folder; None where there is none.

    Args:
        is_number_enough: take the number at the end of the file's own name, where no part says `rank`.
    """
    parts = re.split(r"[/!]", name)
    for part in reversed(parts):
        found = [match for match in NAMED.finditer(part) if match[1] is None]
        if found:
            return int(found[-1][2])
    last = NUMBER_LAST.search(parts[-1]) if is_number_enough else None
    return int(last[1]) if last else None


class Seats:
    """Gives rows their ranks: `fill` behind each file, `settle` behind the last one.

    Args:
        processes: (host, pid) -> rank, as it is known from elsewhere; more may come while files are read.
        notes: where a contradiction is told.
    """

    def __init__(self, processes: Mapping[tuple[str, int], int], notes: list[str]) -> None:
        self._processes = processes
        self._notes = notes

    def fill(self, dossier: Dossier, index: int, begin: Sequence[int]) -> None:
        """The rows of file `index`, which stand behind those that `begin` counts."""
        name = dossier.files[index].name
        starts = dict(zip(TABLES, begin, strict=False))
        rows = [row for table in TABLES for row in getattr(dossier, table)[starts[table] :]]
        said = {row.who.rank for row in rows} - {None}
        named = rank_of_name(name)
        # A file with the lines of several ranks has a name of its own.
        is_contradicted = named is not None and len(said) == 1 and said != {named}
        if is_contradicted:
            (own,) = said
            dossier.files[index].notes.append(
                f"its content says rank {own}, its name rank {named}: {len(rows):,} rows have no rank"
            )
        places = {axis.lower(): int(number) for axis, number in PLACED.findall(re.split(r"[/!]", name)[-1])}
        for table in TABLES:
            is_dump = table == "dumps"
            by_name = rank_of_name(name, is_number_enough=True) if is_dump else named

            def seated(who: Who, by_name: int | None = by_name) -> Who:
                if is_contradicted:
                    return replace(who, rank=None)
                if who.rank is None and by_name is not None and len(said) < 2:
                    return replace(who, rank=by_name)
                if who.rank is None and places and not who.places:
                    return replace(who, places=places)
                return who

            _change(dossier, table, seated, starts[table])

    def settle(self, dossier: Dossier) -> None:
        """Rows that are of a known process, or whose place says which rank it is."""
        pids: dict[int, set[int]] = {}
        for (_host, pid), rank in self._processes.items():
            pids.setdefault(pid, set()).add(rank)
        for table in TABLES:
            for row in getattr(dossier, table):
                if row.who.pid is not None and row.who.rank is not None:
                    pids.setdefault(row.who.pid, set()).add(row.who.rank)
        grid = _Grid({frozenset(_place(row.who).items()) for row in _unseated(dossier)})

        def seated(who: Who) -> Who:
            if who.rank is not None:
                return who
            rank = self._processes.get((who.host, who.pid)) if who.pid is not None else None
            if rank is None and who.pid is not None and len(pids.get(who.pid, ())) == 1:
                # On one host a number is one process; two hosts that share one leave it open.
                (rank,) = pids[who.pid]
            if rank is None and _place(who):
                rank = grid.rank(_place(who))
            return who if rank is None else replace(who, rank=rank)

        for table in TABLES:
            _change(dossier, table, seated, 0)


class _Grid:
    """Places numbered through."""

    def __init__(self, places: set[frozenset[tuple[str, int]]]) -> None:
        known = [{axis: dict(place).get(axis, 0) for axis in AXES} for place in places if place]
        self._sizes = {axis: 1 + max((place[axis] for place in known), default=0) for axis in AXES}
        replicas = self._sizes["dp"]
        each = -(-self._sizes["tp"] // replicas)
        # DP1 begins at TP4, not at TP0: one numbering for all replicas of a stage.
        self._is_shared = replicas > 1 and all(place["tp"] // each == place["dp"] for place in known)

    def rank(self, place: Mapping[str, int]) -> int:
        dp, pp, tp = (place.get(axis, 0) for axis in AXES)
        stage = pp if self._is_shared else dp * self._sizes["pp"] + pp
        return stage * self._sizes["tp"] + tp


def _place(who: Who) -> dict[str, int]:
    return {axis: who.places[axis] for axis in AXES if axis in who.places}


def _unseated(dossier: Dossier) -> list[Any]:
    rows = [row for table in TABLES for row in getattr(dossier, table)]
    return [row for row in rows if _place(row.who)]


def _change(dossier: Dossier, table: str, seated: Callable[[Who], Who], start: int) -> None:
    rows = getattr(dossier, table)
    for at in range(start, len(rows)):
        who = seated(rows[at].who)
        if who is not rows[at].who:
            rows[at] = replace(rows[at], who=who)
