"""`hicache diff-tree`: the trees of two ranks at one step, made again from their logs, side by side."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from cli.errors import OK, CliError
from cli.options import ExitZero, Json, Logs, RunId

if TYPE_CHECKING:
    from tracer.log import Run

SCHEMA = "hicache.diff_tree.v1"
DIVERGED, INCOMPLETE = 10, 4


def diff_tree(
    path: Logs,
    at: Annotated[
        int, typer.Option("--at", metavar="STEP", help="At the end of this step.", min=0, show_default=False)
    ],
    rank: Annotated[
        list[int] | None,
        typer.Option(
            "--rank",
            metavar="RANK",
            help="The two ranks, of one replica; its first two if not given.",
            show_default=False,
        ),
    ] = None,
    run_id: RunId = None,
    json: Json = False,
    exit_zero: ExitZero = False,
) -> int:
    """Compare two ranks' trees at a step: nodes, tiers, locks.

    Exits 10 where they differ, 4 where one of them can't be made again that far.
    """
    from cli.commands.replay import chosen_run, demand_reached
    from cli.places import logs_at
    from cli.screens.state import diff_lines, differing
    from cli.theme import show, show_json, width
    from hicache.sim.reenact_state import states_at

    with logs_at(path, run=run_id) as place:
        run = chosen_run(place, run_id if place == path else None)
        ranks = two_ranks(run, rank)
        first, second = states_at(run.lanes, ranks, at)
        demand_reached([first, second], at)
    has_both = not (first.done.limits or second.done.limits)
    pairs = differing(first, second) if has_both else []
    if json:
        document = {
            "schema": SCHEMA,
            "step": at,
            "ranks": ranks,
            "nodes": [len(first.nodes), len(second.nodes)],
            "differing": [
                {"node": number, "by_rank": [asdict(each) if each else None for each in (one, other)]}
                for number, one, other in pairs
            ],
            "undetermined": [each.undetermined for each in (first, second) if each.undetermined],
        }
        show_json(document)
    else:
        show(diff_lines(first, second, width()))
    if exit_zero:
        return OK
    is_short = first.undetermined or second.undetermined
    return DIVERGED if pairs else INCOMPLETE if is_short else OK


def two_ranks(run: Run, asked: list[int] | None) -> list[int]:
    """The ranks to compare: those that were asked for, else the first two that have one tree.

    Raises:
        CliError: they are not two, one has no log, or they are of two replicas.
    """
    from cli.commands.replay import demand_ranks
    from hicache.sim.reenact_state import replicas

    replica = replicas(run.lanes)
    demand_ranks(run, asked)
    if asked:
        ranks = list(dict.fromkeys(asked))
    else:
        by_replica: dict[int, list[int]] = {}
        for each in run.ranks:
            by_replica.setdefault(replica[each], []).append(each)
        ranks = max((members[:2] for members in by_replica.values()), key=len, default=[])
    if len(ranks) != 2:
        raise CliError(f"diff-tree compares two ranks, not {len(ranks)}", expected="--rank 0 --rank 3")
    first, second = ranks
    if replica[first] != replica[second]:
        raise CliError(
            f"--rank: ranks {first} and {second} are of two replicas, which have a tree each",
            expected="two ranks of one replica",
        )
    return ranks
