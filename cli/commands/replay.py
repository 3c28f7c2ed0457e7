"""`hicache replay`: what every transfer queue held at any step; what another agreement would have done."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.errors import OK, CliError
from cli.options import ExitZero, Json, Logs, Quiet, RunId, a_path, one_of

if TYPE_CHECKING:
    from hicache.sim.reenact_state import State
    from tracer.log import Run
    from tracer.transfers import Replay

SCHEMA = "hicache.replay.v1"
DIVERGED, INCOMPLETE = 10, 4


def replay(
    path: Logs,
    queue: Annotated[
        str | None,
        typer.Option(metavar="write|load|prefetch|backup", help="One queue.", show_default=False),
    ] = None,
    rank: Annotated[
        list[int] | None,
        typer.Option("--rank", metavar="RANK", help="Only this rank. Repeatable.", show_default=False),
    ] = None,
    until: Annotated[
        int | None,
        typer.Option(metavar="STEP", help="The queue at the end of this step.", min=0, show_default=False),
    ] = None,
    step: Annotated[
        bool,
        typer.Option(
            "--step", help="Step by step: by keys in a terminal, else every step that moves up to --until."
        ),
    ] = False,
    at: Annotated[
        int | None,
        typer.Option(
            "--at",
            metavar="STEP",
            help="Tree, pools, locks and queues at the end of this step.",
            min=0,
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="pp-sync|local|min",
            help="What if counts were agreed on so: where ranks would have come apart.",
            show_default=False,
        ),
    ] = None,
    reenact: Annotated[
        bool,
        typer.Option(
            "--reenact", help="Take every decision again on the inputs in the log: the first that differs."
        ),
    ] = False,
    scale: Annotated[
        list[str] | None,
        typer.Option(
            "--scale",
            metavar="TIER=SPEED",
            help="What bounds each request and the run, and what if a tier were so many times as fast: d2h, "
            "h2d, storage_read, storage_write, l3 (both), forward; as d2h=0.5. Repeatable, or with commas.",
            show_default=False,
        ),
    ] = None,
    test: Annotated[
        Path | None,
        typer.Option(
            "--test",
            metavar="FILE.py",
            help="From a real SGLang's logs: a test that drives its cache into the same first difference.",
            show_default=False,
            parser=a_path,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --test.")] = False,
    run_id: RunId = None,
    json: Json = False,
    quiet: Quiet = False,
    exit_zero: ExitZero = False,
) -> int:
    """Rebuild the transfer queues of every rank from its log, and look at them step by step.

    Without --queue all four in short. Exits 10 where --policy would have brought ranks apart, or where
    --reenact finds a decision that does not follow from what its rank was given.
    """
    from cli.theme import spinner
    from tracer.transfers import QUEUES
    from tracer.transfers import replay as replayed
    from tracer.what_if import POLICIES

    names = QUEUES if queue is None else (one_of("--queue", queue, QUEUES),)
    if policy is not None:
        one_of("--policy", policy, POLICIES)
        if until is not None or step:
            raise CliError("--policy looks at the whole run", expected="no --until, no --step")
    if (reenact or at is not None) and (queue is not None or until is not None or step or policy is not None):
        name = "--reenact" if reenact else "--at"
        raise CliError(f"{name} looks at whole ranks", expected="no other option but --rank and --run")
    if reenact and at is not None:
        raise CliError("--reenact looks at whole ranks, --at at one step", expected="one of them")
    if scale is not None and (
        reenact or step or any(each is not None for each in (queue, until, at, policy))
    ):
        raise CliError("--scale looks at the whole run", expected="no other option but --rank and --run")
    others = (queue, until, at, policy, scale)
    if test is not None and (step or reenact or any(other is not None for other in others)):
        raise CliError("--test looks at two ranks", expected="no other option but --rank and --run")
    if overwrite and test is None:
        raise CliError("--overwrite replaces the file of --test", expected="--test FILE.py with it")
    speeds = speeds_of(scale) if scale is not None else {}
    if queue is None and (until is not None or step or policy is not None):
        raise CliError("which queue?", expected=f"--queue {' or --queue '.join(QUEUES)}")
    from cli.places import logs_at

    with logs_at(path, run=run_id, quiet=quiet) as place:
        run = chosen_run(place, run_id if place == path else None)
        wanted = demand_ranks(run, rank)
        if test is not None:
            from cli.commands.replay_test import write_server_test

            ranks = list(dict.fromkeys(rank)) if rank else None
            code = write_server_test(run, ranks, path, test, overwrite=overwrite, is_json=json, quiet=quiet)
            return OK if exit_zero else code
        if at is not None:
            code = show_states(run, wanted or [run.ranks[0]], at, is_json=json)
            return OK if exit_zero else code
        if speeds:
            code = show_scaled(run, wanted, speeds, path, is_json=json, quiet=quiet)
            return OK if exit_zero else code
        if reenact:
            code = show_reenacted(run, wanted or list(run.ranks), path, is_json=json, quiet=quiet)
            return OK if exit_zero else code
        with spinner("reading", place, quiet=quiet):
            found = [replayed(run, name, ranks=wanted) for name in names]
        if policy is not None:
            code = show_policy(found[0], policy, is_json=json, quiet=quiet)
            return OK if exit_zero else code
        if step:
            show_steps(found[0], until, is_json=json, quiet=quiet)
        elif until is not None:
            show_step(found[0], until, is_json=json)
        else:
            show_overview(found, path, is_json=json)
    return OK


def show_reenacted(run: Run, ranks: list[int], path: Path, *, is_json: bool, quiet: bool) -> int:
    """Every rank's decisions taken again; 10 where one differs, 4 where some could not be taken again."""
    from cli.screens.reenact import reenacted_json, reenacted_lines
    from cli.screens.replay import on_one_line
    from cli.theme import show, show_json, spinner
    from hicache.sim.reenact import reenact

    with spinner("taking decisions again", path, quiet=quiet):
        found = [reenact(run.lanes, rank) for rank in ranks]
    if is_json:
        show_json({"schema": SCHEMA, "reenact": [reenacted_json(each) for each in found]})
    else:
        lines = reenacted_lines(found, path)
        show(on_one_line(lines) if quiet else lines)
    if any(each.difference is not None for each in found):
        return DIVERGED
    return INCOMPLETE if any(each.limits or each.cut for each in found) else OK


def speeds_of(texts: list[str]) -> dict[str, float]:
    """Tier -> how many times as fast, as `d2h=0.5,l3=2` says it.

    Raises:
        CliError: no tier, no number, one that nothing can be as fast as, or a tier twice.
    """
    from tracer.path_moments import TIERS
    from tracer.what_if_speed import SPEED_MAX, SPEED_MIN, TOGETHER

    speeds: dict[str, float] = {}
    for part in [part.strip() for text in texts for part in text.split(",")]:
        tier, _, number = part.partition("=")
        tiers = TOGETHER.get(tier, (tier,))
        if not set(tiers) <= set(TIERS):
            known = ", ".join([*TIERS, *TOGETHER])
            raise CliError(f"--scale {part[:60]}: no tier {tier[:40]!r}", expected=f"{known}; as d2h=0.5")
        try:
            speed = float(number) if number.isascii() else 0.0
        except ValueError:
            speed = 0.0
        # Written this way round, NaN does not pass.
        if not SPEED_MIN <= speed <= SPEED_MAX:
            expected = f"a speed from {SPEED_MIN:g} to {SPEED_MAX:g}; 0.5 is half as fast"
            raise CliError(f"--scale {part[:60]}: no speed {number[:40]!r}", expected=expected)
        if twice := [name for name in tiers if name in speeds]:
            raise CliError(f"--scale names {twice[0]} twice", expected="each tier once")
        speeds |= dict.fromkeys(tiers, speed)
    return speeds


def show_scaled(
    run: Run, wanted: list[int] | None, speeds: Mapping[str, float], path: Path, *, is_json: bool, quiet: bool
) -> int:
    """What bounds the run and its requests, as it was and at these speeds; 4 where none can be followed."""
    from cli.screens.critical_path import path_in_short, path_json, path_lines
    from cli.theme import show, show_json, spinner, width
    from tracer.critical_path import critical_path, leading
    from tracer.what_if_speed import what_if_speed

    found = []
    with spinner("reading", path, quiet=quiet):
        for rank in wanted or run.ranks:
            own = critical_path(run, rank)
            found.append((own, what_if_speed(own, speeds)))
            own.forget()
    first = [own.rank for own in leading(own for own, _answer in found)]
    if is_json:
        show_json({"schema": SCHEMA, "scale": path_json(found, first, run.missing_ranks)})
    else:
        shown = found if wanted else [pair for pair in found if pair[0].rank in first]
        others = [] if wanted else [own for own, _answer in found if own.rank not in first]
        show(path_in_short(shown) if quiet else path_lines(shown, others, run.missing_ranks, width()))
    return OK if any(own.requests for own, _answer in found) else INCOMPLETE


def show_states(run: Run, ranks: list[int], step: int, *, is_json: bool) -> int:
    """What these ranks held at the end of a step; 4 where that can't be made again."""
    from cli.screens.state import state_lines
    from cli.theme import show, show_json, width
    from hicache.sim.reenact_state import state_at

    states = [state_at(run.lanes, rank, step) for rank in ranks]
    demand_reached(states, step)
    if is_json:
        show_json({"schema": SCHEMA, "states": [state.to_json() for state in states]})
    else:
        for number, state in enumerate(states):
            show([*([""] if number else []), *state_lines(state, width())])
    return INCOMPLETE if any(state.undetermined for state in states) else OK


def demand_reached(states: Sequence[State], step: int) -> None:
    """Raises:
    CliError: none of these ranks has come that far; one that has parted on the way would have.
    """
    ends = [state.log_end for state in states]
    last = max((end for end in ends if end is not None), default=step)
    if last < step and None not in ends and all(state.done.difference is None for state in states):
        raise CliError(f"--at {step}: the logs end with step {last}")


def chosen_run(path: Path, run_id: str | None) -> Run:
    """The logs at a place, of one run.

    Raises:
        CliError: several runs lie there, or not the one that was asked for.
    """
    from cli.errors import UNREADABLE
    from tracer.log import find_logs

    run = find_logs(path)
    if run_id is None and len(run.run_ids) == 1:
        return run
    for own in run.by_run_id():
        if own.run_id == run_id:
            return own
    what = f"{path} holds {len(run.run_ids)} runs" if run_id is None else f"no run {run_id} in {path}"
    raise CliError(what, code=UNREADABLE, expected=f"--run {' or --run '.join(run.run_ids[:3])}")


def demand_ranks(run: Run, ranks: list[int] | None) -> list[int] | None:
    """Ranks that were asked for and have a log.

    Raises:
        CliError: one has none.
    """
    if not ranks:
        return None
    from consensus_checker.words import ranks_text

    if lacking := sorted(set(ranks) - set(run.ranks)):
        raise CliError(
            f"--rank: {ranks_text(lacking)} left no log in {run.path}", expected=ranks_text(run.ranks)
        )
    return sorted(set(ranks))


def show_overview(found: list[Replay], path: Path, *, is_json: bool) -> None:
    from cli.screens.replay import overview, overview_json
    from cli.theme import next_step, show, show_json, width

    if is_json:
        show_json({"schema": SCHEMA, "queues": overview_json(found)})
        return
    show([*overview(found, width()), "", *next_step("replay", path, *worth_a_look(found))])


def worth_a_look(found: list[Replay]) -> list[object]:
    """Options for where something is to be seen: where ranks came apart, what never ended, or the middle."""
    for each in found:
        if (apart := each.parts_at()) is not None:
            return ["--queue", each.queue, "--until", apart]
    for each in found:
        if any(own.at(own.last_step) for own in each.ranks):
            return ["--queue", each.queue, "--until", each.last_step]
    busiest = max(found, key=lambda each: len(each.steps))
    steps = busiest.steps or (max(0, busiest.last_step),)
    return ["--queue", busiest.queue, "--until", steps[len(steps) // 2]]


def show_step(found: Replay, step: int, *, is_json: bool) -> None:
    from cli.screens.replay import at_step, at_step_json
    from cli.theme import show, show_json, width

    demand_step(found, step)
    if is_json:
        show_json({"schema": SCHEMA, **at_step_json(found, step)})
    else:
        show(at_step(found, step, width()))


def demand_step(found: Replay, step: int) -> None:
    """Raises:
    CliError: the run has not come that far.
    """
    if step > found.last_step:
        raise CliError(f"--until {step}: the logs end with step {max(found.last_step, 0)}")


def show_steps(found: Replay, until: int | None, *, is_json: bool, quiet: bool) -> None:
    """Every step that moves something; in a terminal by keys."""
    from cli.screens.replay import at_step, at_step_json
    from cli.theme import show, show_json, width

    if until is not None:
        demand_step(found, until)
    steps = [each for each in found.steps if until is None or each <= until]
    if is_json:
        show_json({"schema": SCHEMA, "queue": found.queue, "steps": [at_step_json(found, s) for s in steps]})
        return
    if sys.stdin.isatty() and sys.stdout.isatty() and not quiet:
        from cli.screens.stepper import step_through

        step_through(found, until)
        return
    for number, each in enumerate(steps):
        show([*([""] if number else []), *at_step(found, each, width())])


def show_policy(found: Replay, policy: str, *, is_json: bool, quiet: bool) -> int:
    """Whether ranks would have stayed together: 0, or 10; 4 where no log says what they counted."""
    from cli.screens.replay import on_one_line, what_if_json, what_if_lines
    from cli.theme import show, show_json, width
    from tracer.what_if import what_if

    answer = what_if(found, policy)
    if is_json:
        document: dict[str, Any] = {"schema": SCHEMA, **what_if_json(answer, found)}
        show_json(document)
    else:
        lines = what_if_lines(answer, found, width())
        show(on_one_line(lines) if quiet else lines)
    if answer.parting is not None:
        return DIVERGED
    return OK if answer.rounds else INCOMPLETE
