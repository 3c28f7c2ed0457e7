"""The command `hicache`: which commands there are, and what becomes of their errors.

Composition only. A command returns its exit code; it imports what it needs when it runs, so that
`hicache --help` costs next to nothing.
"""

from __future__ import annotations

import sys

try:
    import io
    import os
    from collections.abc import Sequence
    from typing import Annotated

    import typer

    from cli.commands.check import check
    from cli.commands.collect import collect
    from cli.commands.demo import demo
    from cli.commands.diagnose import diagnose
    from cli.commands.diff_tree import diff_tree
    from cli.commands.doctor import doctor
    from cli.commands.explain import explain
    from cli.commands.explore import explore
    from cli.commands.export import export
    from cli.commands.hits import hits
    from cli.commands.query import query
    from cli.commands.replay import replay
    from cli.commands.run import run
    from cli.commands.snapshot import snapshot
    from cli.commands.watch import watch
    from cli.commands.zoo import app as zoo
    from cli.errors import INTERRUPTED, OK, USAGE, report, tell
    from cli.options import GroupedCommand
except KeyboardInterrupt:
    # Ctrl-C while the command is being loaded: nobody is there yet who could say so.
    sys.exit(130)

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(short_help="A bug from production, its verdict and its twin, in one go.")(demo)
app.command(cls=GroupedCommand, short_help="Run the runtime, simulated or in real processes.")(run)
app.command(short_help="Which rank took the wrong turn, where and why.")(check)
app.command(short_help="Any evidence of a job in, one verdict out.")(diagnose)
app.command(short_help="What a rule or a class of bugs means.")(explain)
app.command(short_help="The same while the run goes on, and who is silent.")(watch)
app.command(short_help="Evidence of stuck processes, before a restart.")(snapshot)
app.command(short_help="What many hosts have left of a job, as one bundle.")(collect)
app.command(short_help="Which tier served the prompts, and why not more.")(hits)
app.command(short_help="Ask the logs in SQL.")(query)
app.command(short_help="Transfer queues step by step; other agreements.")(replay)
app.command("diff-tree", short_help="Two ranks' trees at a step, side by side.")(diff_tree)
app.command(short_help="Many schedules of one run, to find one that breaks it.")(explore)
app.command(short_help="The logs for Perfetto, OpenTelemetry, Parquet and others.")(export)
app.command(short_help="What is installed, what is armed, what is lacking.")(doctor)
app.add_typer(zoo, name="zoo", short_help="Scenarios of ranks that come apart.")


def show_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        print(f"hicache {version('hicache-toolkit')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def hicache(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Find which rank of a distributed LLM server with a hierarchical KV cache took the wrong turn."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code and never raises for what a user can cause."""
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        mend_streams()
        code = app(words, prog_name="hicache", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        tell("interrupted")
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, USAGE_ERRORS):
            return tell_usage(error)
        return report(error)
    return code if isinstance(code, int) else OK


def mend_streams() -> None:
    """A closed stdout or stderr is nobody's problem, nor is a terminal that lacks some letter."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


# The class that stands above every mistake in the arguments; typer does not export it by name.
USAGE_ERRORS = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")


def tell_usage(error: BaseException) -> int:
    """A mistake in the arguments, in the form of every other error."""
    context = getattr(error, "ctx", None)
    said = error.format_message() if hasattr(error, "format_message") else str(error)
    # The library's own word for what a type said; the sentence behind it is complete without.
    said = said.replace("Value error, ", "")
    first, *rest = [line.strip() for line in said.splitlines() if line.strip()] or ["usage"]
    tell(f"error: {' '.join([first[:1].lower() + first[1:], *rest]).rstrip('.')}")
    tell(f"  try       {context.command_path if context is not None else 'hicache'} --help")
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
