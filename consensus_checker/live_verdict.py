"""From what ranks sent around the first link that differs to a verdict, by the same check that reads logs.

Owns how a window of a running lane is put before `check`: with the records of the log where every rank has
them, else with records made up from the links, which have the compared values and nothing else.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from consensus_checker.check import check
from consensus_checker.finding import Evidence, Finding
from consensus_checker.history import History, MemoryLane
from consensus_checker.live_compare import Found, Known, parts
from consensus_checker.live_posts import Told
from consensus_checker.screen import first_screen
from consensus_checker.verdict import Coverage, Verdict
from consensus_checker.words import ranks_text
from tracer.record import Kind

# Phases of a link that stands for a call and its outcome.
OUTCOMES = ("return", "raise")
ERROR = "error"
_RECORDS = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Rank:
    """What a verdict must know of one member besides its window.

    Attributes:
        ended: how it closed its lanes, or "".
        dropped: kinds that this lane has given up, with how many records of each.
    """

    coordinates: Mapping[str, int]
    ended: str = ""
    head: int = 0
    dropped: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class LiveLane(MemoryLane):
    """A window of a lane that is being written; `file` is where most of it stands, or ""."""

    file: str = ""

    def file_of(self, seq: int) -> Path:
        return Path(self.file or f"rank{self.rank:04d}.{self.lane} (in memory)")


@dataclass(frozen=True, slots=True)
class Screen:
    verdict: Verdict
    lines: tuple[str, ...]


def divergence(
    header: Mapping[str, Any],
    known: Known,
    found: Found,
    ranks: Mapping[int, Rank],
    coverage: Coverage,
    folder: Path | None,
) -> Screen | None:
    """The verdict on one window; None where `check` sees nothing wrong in it."""
    if found.place is None or not found.window:
        return narrowed(known, found, coverage)
    lanes = _lanes(header, known, found, ranks)
    history = History.of(lanes)
    verdict = check(history, path=shlex.quote(str(folder)) if folder else "PATH")
    if verdict.finding.first_divergence is None:
        return _by_links(known, found, coverage, verdict, folder)
    if min(told.first for told in found.window.values()):
        verdict = replace(verdict, finding=_bounded(verdict.finding))
    dropped = verdict.coverage.dropped_kinds
    doubts = [*coverage.doubts, *(doubt for doubt in verdict.coverage.doubts if doubt not in coverage.doubts)]
    verdict = replace(
        verdict,
        coverage=replace(coverage, dropped_kinds=dropped, doubts=tuple(doubts)),
        # They read logs, which are where the ranks write them.
        next=verdict.next if folder else (),
    )
    return Screen(verdict, tuple(first_screen(verdict, history)))


def _bounded(finding: Finding) -> Finding:
    """Of a window nobody can say that what its first records show did not begin before them."""
    trigger = finding.trigger
    if trigger is None or trigger.since_step is None:
        return finding
    since = f", apart since step {trigger.since_step}"
    summary = trigger.summary.replace(since, f"{since} or before")
    return replace(finding, trigger=replace(trigger, summary=summary, since_step=None))


def plain(finding: Finding, coverage: Coverage, folder: Path | None) -> Screen:
    """A verdict that needs no window."""
    check_it = ((f"hicache check {shlex.quote(str(folder))}", "what the logs say"),) if folder else ()
    verdict = Verdict(finding, coverage, (), check_it)
    return Screen(verdict, tuple(first_screen(verdict, History.of([]))))


def narrowed(known: Known, found: Found, coverage: Coverage) -> Screen:
    """The digests differ, and the links themselves are gone."""
    low, high = found.range
    axes = ", ".join(known.axes)
    finding = Finding(
        "undetermined",
        20,
        "agreement",
        f"the {known.name} lanes part between call {low} and call {high} of those that agree along {axes}; "
        "what they wrote there is no longer kept",
        "undetermined",
        ("digests of what was written differ",),
        unknown=known.ranks,
    )
    return plain(finding, coverage, None)


@dataclass(frozen=True, slots=True)
class _Frame:
    """How all windows of one hunt are read.

    Attributes:
        axes: kinds that agree at least along these are compared; the others only explain.
        is_exact: only those that agree along just these.
        first: number of the first link of all windows, where records are made up.
        before: kind -> records before all windows; one kind stands for all that agree as it does.
        extra: counts behind the values of a link: of a record, and of a call with its outcome.
    """

    axes: frozenset[str]
    is_exact: bool
    has_lines: bool
    first: int
    before: Mapping[str, int]
    extra: tuple[int, int]

    @classmethod
    def of(
        cls, header: Mapping[str, Any], known: Known, window: Mapping[int, Told], kinds: Mapping[str, Kind]
    ) -> _Frame:
        has_lines = all(told.has_lines for told in window.values())
        counts = [told.records_of for told in window.values()]
        own = frozenset(known.axes)
        is_counted = has_lines and bool(counts) and all(each and each == counts[0] for each in counts)
        split = {axis for axis, size in header.get("sizes", {}).items() if size > 1}
        axes = own & split if is_counted else own
        wider = {frozenset(kind.agree) for kind in kinds.values() if own < frozenset(kind.agree)}
        # All windows begin at one link; where one rank has kept less, where that begins.
        first = max((told.first for told in window.values()), default=0)
        frame = cls(axes, not is_counted, has_lines, first, {}, (len(wider), 2 * len(wider) + 1))
        shown = frame.shown(kinds)
        named = next((name for name, kind in shown.items() if kind.agree), "")
        return replace(frame, before=_before(shown, counts[0]) if is_counted else {named: first})

    def shown(self, kinds: Mapping[str, Kind]) -> dict[str, Kind]:
        """The kinds as `check` is to see them."""
        return {
            name: kind if self._is_compared(kind) else Kind(name, kind.role, info=kind.fields)
            for name, kind in kinds.items()
        }

    def _is_compared(self, kind: Kind) -> bool:
        agree = frozenset(kind.agree)
        return agree == self.axes if self.is_exact else bool(agree) and self.axes <= agree


def _before(kinds: Mapping[str, Kind], counts: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    named: set[frozenset[str]] = set()
    by_axes: dict[frozenset[str], int] = {}
    for axes, count in counts.items():
        key = frozenset(axes.split(","))
        by_axes[key] = by_axes.get(key, 0) + count
    for name, kind in kinds.items():
        axes_of = frozenset(kind.agree)
        if axes_of and axes_of not in named:
            named.add(axes_of)
            found[name] = by_axes.get(axes_of, 0)
    return found


def _by_links(
    known: Known, found: Found, coverage: Coverage, verdict: Verdict, folder: Path | None
) -> Screen | None:
    """The ranks by what their link itself says, where its record looks alike on all of them.

    A link also counts what came before it along other axes. None where a rank has no such link, dropped some
    of its records, or declares them otherwise.
    """
    place = found.place or 0
    sides: dict[bytes, list[int]] = {}
    for rank, told in sorted(found.window.items()):
        links = parts(told)
        if not 0 <= place - told.first < len(links):
            return None
        sides.setdefault(bytes(links[place - told.first]), []).append(rank)
    if len(sides) < 2 or verdict.coverage.dropped_kinds or verdict.coverage.doubts:
        return None
    ordered = sorted(sides.values(), key=len, reverse=True)
    is_majority = 2 * len(ordered[0]) > len(known.ranks)
    odd = tuple(sorted(rank for side in ordered[1:] for rank in side))
    who = f"{ranks_text(odd)} against {ranks_text(ordered[0])}"
    finding = Finding(
        "divergence",
        10,
        "agreement",
        f"{who}: call {place} of those that agree along {', '.join(known.axes)} came behind different "
        "numbers of other calls",
        "medium" if is_majority else "undetermined",
        (f"majority {len(ordered[0])}/{len(known.ranks)}" if is_majority else "no majority",),
        culprit=odd if is_majority else (),
        unknown=() if is_majority else tuple(sorted(found.window)),
        evidence=tuple(Evidence(None, None, f"{'culprit' if is_majority else 'unknown'} {r}") for r in odd),
    )
    return plain(finding, coverage, folder)


def _lanes(
    header: Mapping[str, Any], known: Known, found: Found, ranks: Mapping[int, Rank]
) -> list[LiveLane]:
    kinds_of_rank = {rank: _kinds(header, known, told) for rank, told in found.window.items()}
    every = {name: kind for kinds in kinds_of_rank.values() for name, kind in kinds.items()}
    frame = _Frame.of(header, known, found.window, every)
    lanes = []
    for rank, told in sorted(found.window.items()):
        place = ranks[rank]
        end = told.first + len(_links(told))
        is_whole = place.ended == "completed" and end >= place.head
        trailer: dict[str, Any] = {"outcome": "completed" if is_whole else "stopped"}
        if place.dropped:
            trailer["dropped"] = dict(place.dropped)
        own = {"rank": rank, "lane": known.name, "coordinates": dict(place.coordinates), "groups": {}}
        # What a rank has not met yet it declares as the others do.
        kinds = frame.shown({**every, **kinds_of_rank[rank]})
        lanes.append(
            LiveLane(
                rank,
                known.name,
                {**header, **own},
                kinds,
                _records(told) if frame.has_lines else _made_up(told, frame, kinds),
                trailer=trailer,
                counts_before=frame.before,
                file=told.file,
            )
        )
    return lanes


def _kinds(header: Mapping[str, Any], known: Known, told: Told) -> dict[str, Kind]:
    """What a rank declares; a kind of which nobody has told the fields has them by number."""
    declared: dict[str, Any] = msgspec.json.decode(told.kinds) or dict(header.get("kinds", {}))
    kinds = {name: Kind.from_declaration(name, parts) for name, parts in declared.items()}
    for link in _links(told):
        if link[0] not in kinds:
            values = tuple(f"value_{number}" for number in range(len(link) - 2))
            kinds[link[0]] = Kind(link[0], "decision", agree=known.axes, compared=values)
    return kinds


def _records(told: Told) -> list[dict[str, Any]]:
    return [_RECORDS.decode(line) for line in told.lines.split(b"\n") if line]


def _links(told: Told) -> list[list[Any]]:
    links: list[list[Any]] = msgspec.json.decode(told.links)
    return links


def _made_up(told: Told, frame: _Frame, kinds: Mapping[str, Kind]) -> list[dict[str, Any]]:
    """A record for each link: its own values, the lane's present step, and no time."""
    links = _links(told)[frame.first - told.first :]
    # Calls whose outcome has a link of its own.
    apart = {link[0] for link in links if link[1] == "call"}
    return [
        {
            "seq": number,
            "step": told.step,
            "time_ns": 0,
            "kind": link[0],
            **({"phase": link[1]} if link[1] else {}),
            **_named(kinds.get(link[0]), link, frame.extra, is_apart=link[0] in apart),
        }
        for number, link in enumerate(links, start=frame.first)
    ]


def _named(
    kind: Kind | None, link: Sequence[Any], extra: tuple[int, int], *, is_apart: bool
) -> dict[str, Any]:
    """Values by the kind's compared fields, in the order in which they are declared.

    A call and its outcome share them: what it was asked stands first, what came of it last.
    """
    is_outcome = link[1] in OUTCOMES
    values = link[2 : len(link) - extra[is_outcome and not is_apart]]
    names = () if kind is None else kind.compared
    if is_outcome and is_apart:
        names = tuple(name for name in names if (name == ERROR) == (link[1] == "raise"))
        names = names[max(0, len(names) - len(values)) :]
    return dict(zip(names, values, strict=False))
