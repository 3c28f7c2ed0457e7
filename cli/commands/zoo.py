"""`hicache zoo`: the ways in which ranks have come apart, and one run of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.folder import refuse_used
from cli.options import Json, OutDir, Overwrite, Plugins, Quiet

if TYPE_CHECKING:
    from rich.text import Text

    from hicache.zoo.scenario import Scenario

app = typer.Typer(
    rich_markup_mode=None, help="Scenarios: bugs that were found in production, each with a healthy twin."
)


@app.command("list", short_help="What happens, where it was reported, the fact behind it.")
def list_scenarios(json: Json = False) -> int:
    """List the scenarios: what happens, where it was reported, the fact behind it."""
    from cli.theme import show, show_json
    from hicache.zoo import SCENARIOS

    scenarios = [SCENARIOS[name] for name in sorted(SCENARIOS)]
    if json:
        show_json(
            [
                {
                    "name": each.name,
                    "story": each.story,
                    "resembles": each.resembles,
                    "source": each.source,
                    "bug": each.bug,
                    "fact": each.fact,
                }
                for each in scenarios
            ]
        )
        return 0
    lines: list[Text] = [line for each in scenarios for line in entry(each)]
    show([*lines, *_run_one(scenarios[0])])
    return 0


@app.command("run", short_help="Run one, or its healthy twin; one log a rank.")
def run_scenario(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As zoo list has it.", show_default=False)],
    out: OutDir,
    seed: Annotated[
        int, typer.Option(min=0, metavar="S", help="Moves the conversations, the schedule and the fault.")
    ] = 1,
    twin: Annotated[bool, typer.Option("--twin", help="The same world without the bug.")] = False,
    plugin: Plugins = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Run one scenario, or its healthy twin; one log a rank."""
    from cli.commands.run import execute, with_plugins
    from hicache.zoo import find_scenario

    plan = find_scenario(name).plan(seed, twin=twin)
    refuse_used(out, overwrite=overwrite)
    return execute(with_plugins(plan, plugin or ()), out, overwrite=overwrite, json=json, quiet=quiet)


def entry(scenario: Scenario) -> list[Text]:
    """One scenario on a few lines."""
    from rich.text import Text

    from cli.theme import LABEL, paragraph

    return [
        Text(scenario.name, style="bold"),
        *paragraph("story", scenario.story, LABEL),
        *paragraph("like", f"{scenario.resembles}, {scenario.source}", LABEL),
        *paragraph("fact", scenario.fact, LABEL),
        Text(""),
    ]


def _run_one(scenario: Scenario) -> list[Text]:
    from cli.theme import COMMAND, command_line, paragraph

    example = command_line("zoo", "run", scenario.name, "--seed", 5, "--out", "runs/zoo")
    return paragraph("try", example, COMMAND)
