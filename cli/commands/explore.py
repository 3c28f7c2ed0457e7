"""`hicache explore`: many schedules of one run, the first that breaks it, and the dullest that still does."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.errors import OK, UNREADABLE, CliError
from cli.options import ExitZero, Json, Overwrite, Quiet, a_path

if TYPE_CHECKING:
    from consensus_checker.verdict import Verdict
    from hicache.schedule import Schedule
    from hicache.sim.explore import Found, Tick
    from hicache.sim.world import Plan

SCHEMA = "hicache.explore.v1"
# Runs that are made to shrink one schedule, and by preemptions.
SHRINK_RUNS_MAX = 400


@dataclass(frozen=True, slots=True)
class Explored:
    """What is run: a plan for each schedule, and how a test of it is written.

    Attributes:
        plan: schedule -> the run with it; nothing of one run is left in another.
        code: Python that gives `plan`, for the test file.
    """

    name: str
    plan: Callable[[Schedule], Plan]
    code: str


def explore(
    context: typer.Context,
    spec: Annotated[
        str,
        typer.Argument(
            metavar="SPEC",
            help="A plan, as hicache run --plan-out writes it, or a scenario of the zoo.",
            show_default=False,
        ),
    ],
    seeds: Annotated[int, typer.Option(metavar="N", help="Schedules by chance: seeds 1 to N.", min=1)] = 200,
    preemptions: Annotated[
        int | None,
        typer.Option(
            metavar="B",
            help="Instead: all dull but one choice, then two, up to B; within --runs.",
            min=1,
            max=4,
            show_default=False,
        ),
    ] = None,
    runs: Annotated[int, typer.Option(metavar="N", help="Runs that --preemptions may take.", min=1)] = 2000,
    seed: Annotated[int, typer.Option(metavar="S", help="Of a scenario's world.", min=0)] = 1,
    shrink: Annotated[
        bool, typer.Option("--shrink/--no-shrink", help="Look for the dullest schedule that breaks it alike.")
    ] = True,
    test: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.py",
            help="Write a test that fails as long as this schedule breaks it.",
            show_default=False,
            parser=a_path,
        ),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
    exit_zero: ExitZero = False,
) -> int:
    """Run one plan under many schedules, until one of them brings its ranks apart or leaves them hanging.

    The exit code is the verdict on that run; 0 where every run was consistent.
    """
    from cli.commands.run import refuse_what_does_not_apply
    from cli.output import refuse_unwritable
    from hicache.zoo import SCENARIOS

    sources = {name: str(getattr(context.get_parameter_source(name), "name", "")) for name in context.params}
    refuse_what_does_not_apply(
        {name for name, source in sources.items() if source == "COMMANDLINE"},
        {
            "seeds": "" if preemptions is None else "schedules by chance: no --preemptions",
            "runs": "" if preemptions is not None else "--preemptions",
            "seed": "" if spec in SCENARIOS else "a scenario of the zoo; a plan has its own seed",
        },
    )
    what = explored(spec, seed)
    if test is not None:
        if test.exists() and not overwrite:
            raise CliError(f"{test} is there already", hint="another --test, or --overwrite")
        if not test.parent.is_dir():
            raise CliError(
                f"--test {test}: no folder {test.parent}", expected="a file in a folder that is there"
            )
        refuse_unwritable(test)
    verdicts: dict[str, Verdict] = {}

    def broken(schedule: Schedule) -> str | None:
        verdict = judged(what.plan(schedule))
        if verdict.code == OK:
            return None
        how = told(verdict)
        verdicts[how] = verdict
        return how

    found, tried, is_all = search(broken, seeds, preemptions, runs, quiet=quiet)
    shrunk = None
    if found is not None and shrink:
        shrunk = shrunk_of(broken, found, quiet=quiet)
    code = OK
    if found is not None:
        last = shrunk or found
        broken(_schedule(last))
        verdict = verdicts[last.how]
        code = verdict.code
        if test is not None:
            write_test(test, what, last, verdict)
        show_found(what, found, shrunk, verdict, test, is_json=json, quiet=quiet)
    else:
        show_nothing(what, tried, is_all=is_all, is_json=json)
    return OK if exit_zero else code


def explored(spec: str, seed: int) -> Explored:
    """What SPEC stands for.

    Raises:
        CliError: it is neither a file nor a scenario.
        ConfigError: the file is no plan.
    """
    from dataclasses import replace

    from hicache.job import PlanSpec
    from hicache.zoo import SCENARIOS

    if spec in SCENARIOS:
        scenario = SCENARIOS[spec]
        code = f'SCENARIOS["{spec}"].plan({seed})'
        return Explored(spec, lambda schedule: replace(scenario.plan(seed), schedule=schedule), code)
    path = Path(spec)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise CliError(
            f"{spec}: {reason}",
            code=UNREADABLE,
            expected=f"a plan, or one of {', '.join(sorted(SCENARIOS))}",
            hint="hicache run ... --plan-out plan.json --out runs/last",
        ) from None
    read = PlanSpec.from_json(text)
    # A test file holds the plan as it is; nothing of ours is in its strings that Python would read otherwise.
    code = f"PlanSpec.from_json({jsonlib.dumps(read.to_json())}).plan()"
    return Explored(path.name, lambda schedule: replace(read.plan(), schedule=schedule), code)


def judged(plan: Plan) -> Verdict:
    """One simulated run, and the verdict on what its ranks have logged."""
    from consensus_checker.check import check
    from consensus_checker.history import MemoryLane
    from hicache.probes import KINDS
    from hicache.sim.world import simulate
    from tracer.log import WHOLE
    from tracer.record import OWN_KINDS

    kinds = {kind.name: kind for kind in (*KINDS, *OWN_KINDS)}
    lanes = []
    for (rank, lane), lines in simulate(plan, trace="memory").lane_lines.items():
        header, *records, trailer = (WHOLE.decode(line) for line in lines)
        lanes.append(MemoryLane(rank, lane, header, kinds, records, trailer))
    return check(lanes)


def told(verdict: Verdict) -> str:
    """How a run is broken: what has to be the same for two runs to be broken alike."""
    finding = verdict.finding
    call = finding.first_divergence.call if finding.first_divergence is not None else ""
    return " ".join(filter(None, (finding.kind, finding.rule, call)))


def search(
    broken: Callable[[Schedule], str | None],
    seeds: int,
    preemptions: int | None,
    runs: int,
    *,
    quiet: bool,
) -> tuple[Found | None, int, bool]:
    """What was found, how many runs it took, and whether all of the space was seen."""
    from hicache.sim.explore import by_preemptions, by_seeds

    with counter("exploring", quiet=quiet) as tick:
        count = 0

        def counted(number: int) -> None:
            nonlocal count
            count = number
            tick(number)

        if preemptions is None:
            return by_seeds(broken, range(1, seeds + 1), tick=counted), count or seeds, False
        found, is_all = by_preemptions(broken, bound=preemptions, runs_max=runs, tick=counted)
        return found, count, is_all


def shrunk_of(broken: Callable[[Schedule], str | None], found: Found, *, quiet: bool) -> Found:
    from hicache.sim.explore import shrink

    with counter("shrinking", quiet=quiet) as tick:
        return shrink(broken, found, runs_max=SHRINK_RUNS_MAX, tick=tick)


@contextmanager
def counter(what: str, *, quiet: bool) -> Iterator[Tick]:
    """A count of runs on stderr, where somebody sees it."""
    import sys

    from cli.theme import console

    if quiet or not sys.stderr.isatty():
        yield lambda _number: None
        return
    with console(sys.stderr).status(what) as status:
        yield lambda number: status.update(f"{what}: run {number:,}")


def _schedule(found: Found) -> Schedule:
    from hicache.schedule import Schedule

    return Schedule(answers=found.answers)


def write_test(path: Path, what: Explored, found: Found, verdict: Verdict) -> None:
    """A test that makes the same run, and fails until its ranks stay together."""
    from cli.output import writing
    from hicache.schedule import sparse_text

    uses_zoo = what.code.startswith("SCENARIOS")
    source = "from hicache.zoo import SCENARIOS" if uses_zoo else "from hicache.job import PlanSpec"
    lines = [
        f'"""Found by hicache explore in {what.name}: {found.how}."""',
        "",
        "from dataclasses import replace",
        "from pathlib import Path",
        "",
        "from consensus_checker.check import check",
        *sorted([source, "from hicache.schedule import Schedule", "from hicache.sim.world import simulate"]),
        "from tracer.log import find_logs",
        "",
        f"# {len([answer for answer in found.answers if answer])} choices are not the dull one.",
        f'SCHEDULE = "{sparse_text(found.answers)}"',
        "",
        "",
        "def test_the_ranks_stay_together(tmp_path: Path) -> None:",
        f"    plan = {what.code}",
        "    simulate(replace(plan, schedule=Schedule.parse(SCHEDULE)), out=tmp_path)",
        "    verdict = check(find_logs(tmp_path))",
        '    assert verdict.kind == "consistent", verdict.finding.summary',
        "",
    ]
    with writing(path) as file:
        file.write("\n".join(lines).encode())


def show_found(
    what: Explored,
    found: Found,
    shrunk: Found | None,
    verdict: Verdict,
    test: Path | None,
    *,
    is_json: bool,
    quiet: bool,
) -> None:
    from cli.commands.check import sentence
    from cli.screens.table import counted
    from cli.screens.verdict import coloured
    from cli.theme import COMMAND, headline, paragraph, show, show_json
    from hicache.schedule import sparse_text

    last = shrunk or found
    loud = len([answer for answer in last.answers if answer])
    text = sparse_text(last.answers)
    if is_json:
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "spec": what.name,
            "broken": last.how,
            "runs": found.runs,
            "shrink_runs": shrunk.runs - found.runs if shrunk is not None else 0,
            "choices": loud,
            "schedule": text,
            "test": None if test is None else str(test),
            "verdict": verdict.to_json(),
        }
        show_json(document)
        return
    if quiet:
        lines = sentence(verdict)
    else:
        word = verdict.kind.upper().replace("_", " ")
        told = [line.plain for line in headline(word, verdict.finding.summary, "")]
        lines = coloured(told, verdict.kind)
        lines += paragraph("found", f"in run {found.runs:,} of {what.name}")
        if shrunk is not None:
            was = len([answer for answer in found.answers if answer])
            more = counted(shrunk.runs - found.runs, "run")
            lines += paragraph(
                "shrunk", f"from {counted(was, 'choice')} that differ from the dull ones to {loud:,} ({more})"
            )
        lines += paragraph("again", f"--schedule {text}", COMMAND)
        if test is not None:
            lines += paragraph("test", str(test))
    show(lines)


def show_nothing(what: Explored, tried: int, *, is_all: bool, is_json: bool) -> None:
    from cli.theme import GOOD, headline, show, show_json

    if is_json:
        show_json({"schema": SCHEMA, "spec": what.name, "broken": None, "runs": tried, "is_all": is_all})
        return
    whole = ", which is every one within the bound" if is_all else ""
    show(headline("CONSISTENT", f"in all {tried:,} runs of {what.name}{whole}", GOOD))
