"""What our own evidence says of a job: logs of the recorder, and lines of SGLang's own checker.

    folders -> runs -> newest attempt of each -> hearts tell who hung -> check -> helper lanes, pace of steps

`check` keeps its contract: logs without an end are `incomplete` to it. Here the hearts may say more.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from consensus_checker import skip
from consensus_checker.background import dead_lanes
from consensus_checker.check import check
from consensus_checker.divergence_lines import judge_lines
from consensus_checker.ending import STALL
from consensus_checker.finding import Alternative, Finding
from consensus_checker.folders import Together, together
from consensus_checker.hearts import last_beats, longest_s, tell
from consensus_checker.history import History
from consensus_checker.open_calls import behind_in_calls
from consensus_checker.reenact import Reenacting
from consensus_checker.slow import slow
from consensus_checker.stall import Wait
from consensus_checker.verdict import Verdict
from consensus_checker.weigh import LEVELS, ORDER, named
from consensus_checker.words import ranks_text
from tracer.errors import LogError
from tracer.importers.gather import Gathered
from tracer.log import LaneLog, find_logs


@dataclass(frozen=True, slots=True)
class Own:
    """What our own evidence says.

    Attributes:
        history: of the run that it is about; of lines of SGLang's checker, made up from these.
        name: what it is of, in a word or two.
        is_closed: every log was closed as completed.
        is_lines: it comes from lines of SGLang's own checker.
    """

    verdict: Verdict
    history: History
    name: str
    is_closed: bool = False
    is_lines: bool = False


@dataclass(slots=True)
class Case:
    """Everything that is known so far, and what is to be told beside it."""

    found: Gathered
    owns: list[Own] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    other_runs: list[str] = field(default_factory=list)

    def told(self) -> tuple[str, ...]:
        """The notes, in which a folder that an archive was unpacked into is called by the archive's name."""
        names = sorted(self.found.names.items(), key=lambda entry: -len(str(entry[0])))
        told = []
        for note in self.notes:
            for folder, archive in names:
                note = note.replace(str(folder), str(archive))
            told.append(note)
        return tuple(told)


def own_evidence(case: Case, reenacting: Reenacting | None) -> None:
    """Judge all runs, and the lines, into `case.owns`.

    Raises:
        LogError: there are logs of ours and none can be read, and nothing else is there.
    """
    _judge_runs(case, reenacting)
    _judge_lines(case)


def _judge_runs(case: Case, reenacting: Reenacting | None) -> None:
    runs = []
    errors: list[LogError] = []
    for place in case.found.runs:
        try:
            runs.append((place, find_logs(place)))
        except LogError as error:
            errors.append(error)
            case.doubts.append(f"{_called(case, place)}: {error.what}")
    if errors and not runs and not case.found.has_foreign and not case.found.divergences:
        raise errors[0]
    groups = _newest(case, together(runs))
    if len(groups) > 1:
        case.notes.append(
            f"{len(groups)} runs, each judged for itself; the one that went wrong first is told"
        )
    for group in groups:
        case.owns.append(_judge_run(case, group, reenacting))


def _called(case: Case, place: Path) -> str:
    return str(case.found.names.get(place, place))


def _newest(case: Case, groups: Sequence[Together]) -> list[Together]:
    """Of several attempts at one run the last; a job that was started again is another one."""
    newest: dict[str, int] = {}
    for group in groups:
        if group.key is not None:
            newest[group.key[0]] = max(group.key[1], newest.get(group.key[0], 0))
    kept = []
    for group in groups:
        case.notes += group.notes
        if group.key is not None and group.key[1] < newest[group.key[0]]:
            case.notes.append(
                f"attempt {group.key[1]} of run {group.key[0]} is left out: there is attempt "
                f"{newest[group.key[0]]}"
            )
            case.other_runs += sorted({lane.files[0].name for lane in group.lanes})
        else:
            kept.append(group)
    return kept


def _judge_run(case: Case, group: Together, reenacting: Reenacting | None) -> Own:
    """What `check` says, and what the hearts, the helper lanes and the pace of steps add to it."""
    path = shlex.quote(_called(case, group.places[0]))
    history = History.of(group)
    beats = last_beats(lane for lane in group.lanes if _is_of(lane, history))
    hung = tell(history, beats)
    reenact = reenacting(group.lanes) if reenacting is not None else None
    verdict = check(history, path=path, reenact=reenact)
    if hung:
        waited = f"by their hearts they had waited for {longest_s(beats, hung):.1f} s"
        finding = replace(verdict.finding, basis=(*verdict.finding.basis, waited))
        verdict = replace(verdict, finding=finding)
    stall = skip.ending(history)
    more = [one for one in dead_lanes(history, stall, beats) if not set(named(one)) & set(hung)]
    if verdict.code == 4 and not hung and (late := behind_in_calls(history, stall, beats)) is not None:
        more = [late, *more]
    is_closed = all(lane.outcome == "completed" for lane in history.lanes)
    if verdict.code in (0, 4) and verdict.kind != "nothing_compared":
        if not more and not hung and not all(lane.is_closed for lane in history.lanes):
            late = slow(history)
            more += [late] if late is not None else []
        if more:
            verdict = replace(verdict, finding=more[0], findings=(*more[1:], *verdict.findings))
        elif verdict.code == 4 and not hung:
            verdict = replace(verdict, finding=_with_open_ends(verdict.finding, stall.waits))
    else:
        verdict = replace(verdict, findings=(*verdict.findings, *more))
    run_id = str(history.lanes[0].header.get("run_id", "?")) if history.lanes else "?"
    return Own(verdict, history, f"run {run_id}", is_closed)


def _is_of(lane: LaneLog, history: History) -> bool:
    """Whether a lane is of the run that is judged, where several lie in one folder."""
    keys = {(one.header.get("run_id"), one.header.get("attempt", 0)) for one in history.lanes}
    return (lane.header.get("run_id"), lane.header.get("attempt", 0)) in keys


def _with_open_ends(finding: Finding, waits: Sequence[Wait]) -> Finding:
    """Where ranks stood when logs without an end break off: a stall, if that lasted."""
    wait = next((wait for wait in waits if wait.absent and len(wait.ranks) >= len(wait.absent)), None)
    if wait is None:
        return finding
    told = (
        f"{ranks_text(wait.ranks)} {'is' if len(wait.ranks) == 1 else 'are'} in {wait.where} and "
        f"{ranks_text(wait.absent)} {'is' if len(wait.absent) == 1 else 'are'} not where the logs break off: "
        "a stall, if that lasted"
    )
    return replace(finding, alternatives=(*finding.alternatives, Alternative(told, STALL)))


def _judge_lines(case: Case) -> None:
    if not case.found.divergences:
        return
    try:
        told = judge_lines([file.path for file in case.found.divergences])
    except LogError as error:
        case.notes.append(error.what)
        return
    name = f"lines in {case.found.divergences[0].name}"
    case.owns.append(Own(told.verdict, told.history, name, is_lines=True))


def first_of(owns: Sequence[Own]) -> Own | None:
    """The one whose finding comes first in causal order; of equal ones, the one that was given first."""

    def place(own: Own) -> tuple[int, int]:
        code = own.verdict.code
        return (
            ORDER.index(code) if code in ORDER else len(ORDER),
            -LEVELS.index(own.verdict.finding.level),
        )

    return min(owns, key=place, default=None)
