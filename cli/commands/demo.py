"""`hicache demo`: the main job in one go, as the commands that a person would type.

    run a bug -> where ranks stand -> which rank left, and why -> the healthy twin -> cache hits

It succeeds only when the verdicts are right: the disturbed rank named on the one, silence on the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.errors import INTERNAL, INTERRUPTED, OK, CliError
from cli.folder import refuse_used
from cli.options import Json, Overwrite, a_path

if TYPE_CHECKING:
    from cli.screens.demo import Scene

SCENARIO = "local_host_room_decides_backup"
# A seed whose run hangs; with another one the ranks may come to the end, each with its own tree.
SEED = 19
DEFAULT_OUT = Path("runs/demo")


def demo(
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="DIR", help="Folder of the run; its twin's is DIR-twin.", parser=a_path
        ),
    ] = DEFAULT_OUT,
    overwrite: Overwrite = False,
    json: Json = False,
) -> int:
    """Run four ranks with one historical bug, then find the rank, the call and the fact behind it.

    Replaces an earlier demo in runs/demo. Exits 0 when the expected verdicts came.
    """
    from cli.screens.demo import document, expected, scenes
    from cli.theme import show, show_json

    if not out.name:
        raise CliError(f"--out {out}: its twin's folder has no name", expected="a folder with a name")
    twin_out = out.with_name(f"{out.name}-twin")
    for folder in (out, twin_out):
        # The default folder is the demo's own; any other may hold somebody's run.
        refuse_used(folder, overwrite=overwrite or out == DEFAULT_OUT)
    made = stage(out, twin_out, overwrite=overwrite or out == DEFAULT_OUT)
    if made is None:
        return INTERRUPTED
    is_right = made.is_right
    if json:
        show_json(document(made))
    else:
        for lines in scenes(made):
            show(lines)
        show(expected(made))
    return OK if is_right else INTERNAL


def stage(out: Path, twin_out: Path, *, overwrite: bool) -> Scene | None:
    """Make both runs and read them again; None when interrupted."""
    from cli.commands.check import judge
    from cli.commands.run import record
    from cli.screens.demo import Scene
    from hicache.sim.faults import Fault
    from hicache.zoo import find_scenario

    scenario = find_scenario(SCENARIO)
    plan, twin_plan = scenario.plan(SEED), scenario.plan(SEED, twin=True)
    result = record(plan, out, overwrite=overwrite)
    twin_result = record(twin_plan, twin_out, overwrite=overwrite) if result is not None else None
    if result is None or twin_result is None:
        return None
    verdict, history = judge(out)
    twin_verdict, twin_history = judge(twin_out)
    return Scene(
        scenario=scenario,
        seed=SEED,
        out=out,
        twin_out=twin_out,
        plan=plan,
        result=result,
        twin_plan=twin_plan,
        twin_result=twin_result,
        disturbed=tuple(sorted({Fault.parse(text, plan.config.topology).rank for text in faults_of(out)})),
        verdict=verdict,
        history=history,
        twin_verdict=twin_verdict,
        twin_history=twin_history,
    )


def faults_of(out: Path) -> list[str]:
    """What the run was disturbed by, as run.json has it; the checker never opens that file."""
    import json

    faults: list[str] = json.loads((out / "run.json").read_text(encoding="utf-8"))["faults"]
    return faults
