"""`hicache hits`: which tier served every prompt token, and why the rest was computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from cli.errors import CliError, asked_by
from cli.options import Json, Logs, Quiet, one_of

if TYPE_CHECKING:
    from tracer.hits import Hits
    from tracer.log import Run

SCHEMA_WHY = "hicache.why.v1"


GROUPINGS = ("request", "tier", "conversation", "reason", "time")
GROUPINGS_LATER = ("prefix",)


def hits(
    path: Logs,
    by: Annotated[
        str | None,
        typer.Option(metavar="|".join(GROUPINGS), help="What one row is; a request.", show_default=False),
    ] = None,
    why: Annotated[
        str | None, typer.Option(metavar="RID", help="The story of one request instead.", show_default=False)
    ] = None,
    rid: Annotated[
        str | None, typer.Option(metavar="RID", help="Count this request only.", show_default=False)
    ] = None,
    since: Annotated[
        int | None,
        typer.Option(metavar="STEP", help="Count arrivals from this step on.", show_default=False, min=0),
    ] = None,
    until: Annotated[
        int | None,
        typer.Option(metavar="STEP", help="Count arrivals up to this step.", show_default=False, min=0),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Say which tier served what, and why the first computed page was not a hit.

    Device, host, storage and computed tokens of a request add up to its prompt.
    """
    one_of("--by", by or GROUPINGS[0], GROUPINGS, later=GROUPINGS_LATER)
    refuse_contradictions(why, {"--by": by, "--rid": rid, "--since": since, "--until": until})
    from cli.screens.hits import in_one_line, story, story_in_one_line, tables
    from cli.theme import show, show_json, spinner, width
    from tracer.hits import hits as count_hits
    from tracer.log import find_logs
    from tracer.story import why as tell_why

    with asked_by("hicache hits {}"):
        run = find_logs(path)
    if why is not None:
        with spinner("reading", path, quiet=quiet):
            row = only(count_hits(run), why, run).rows[0]
            lines = tell_why(run, why)
        if json:
            moments = [
                {"step": line.step, "time_ns": line.time_ns, "kind": line.kind, "text": line.text}
                for line in lines
            ]
            show_json({"schema": SCHEMA_WHY, "request": row, "story": moments})
        elif quiet:
            show(story_in_one_line(row))
        else:
            show(story(row, lines))
        return 0
    with spinner("reading", path, quiet=quiet):
        found = count_hits(run, by=by or GROUPINGS[0], since=since, until=until)
    if rid is not None:
        found = only(found, rid, run)
    if json:
        show_json(found.to_json())
    elif quiet:
        show(in_one_line(found))
    else:
        show(tables(found, width()))
    return 0


def refuse_contradictions(why: str | None, counted: Mapping[str, str | int | None]) -> None:
    """Options of the counts do not apply to one request's story, and steps must be a range.

    Raises:
        CliError: names both.
    """
    given = [option for option, value in counted.items() if value is not None]
    if why is not None and given:
        raise CliError(
            f"--why and {given[0]} exclude each other", expected="one request's story, or counts of requests"
        )
    since, until = counted["--since"], counted["--until"]
    if isinstance(since, int) and isinstance(until, int) and since > until:
        raise CliError(f"--since {since} is behind --until {until}", expected="--since at most --until")


def only(found: Hits, rid: str, run: Run) -> Hits:
    """The same hits, of one request.

    Raises:
        CliError: it is not among them.
    """
    from cli.theme import command_line
    from tracer.hits import ROWS

    requests = tuple(request for request in found.requests if request.rid == rid)
    if not requests:
        examples = ", ".join(request.rid for request in found.requests[:3])
        raise CliError(
            f"no request {rid} among the {len(found.requests)} counted in {run.path}",
            expected=f"{examples}, ..." if examples else "",
            hint=command_line("hits", run.path),
        )
    return replace(found, requests=requests, rows=tuple(ROWS[found.by](requests)))
