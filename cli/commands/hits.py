"""`hicache hits`: which tier served every prompt token, and why the rest was computed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from cli.errors import CliError
from cli.options import Json, Logs, one_of

if TYPE_CHECKING:
    from tracer.hits import Hits
    from tracer.log import Run

SCHEMA_WHY = "hicache.why.v1"


GROUPINGS = ("request", "tier", "conversation", "reason", "time")
GROUPINGS_LATER = ("prefix",)


def hits(
    path: Logs,
    by: Annotated[str, typer.Option(metavar="|".join(GROUPINGS), help="What one row is.")] = "request",
    why: Annotated[
        str | None, typer.Option(metavar="RID", help="The story of one request instead.", show_default=False)
    ] = None,
    rid: Annotated[
        str | None, typer.Option(metavar="RID", help="Count this request only.", show_default=False)
    ] = None,
    since: Annotated[
        int | None, typer.Option(metavar="STEP", help="Count arrivals from this step on.", show_default=False)
    ] = None,
    until: Annotated[
        int | None, typer.Option(metavar="STEP", help="Count arrivals up to this step.", show_default=False)
    ] = None,
    json: Json = False,
) -> int:
    """Say which tier served what, and why the first computed page was not a hit.

    Device, host, storage and computed tokens of a request add up to its prompt.
    """
    one_of("--by", by, GROUPINGS, later=GROUPINGS_LATER)
    from cli.screens.hits import story, tables
    from cli.theme import show, show_json, spinner, width
    from tracer.hits import hits as count_hits
    from tracer.log import find_logs
    from tracer.story import why as tell_why

    run = find_logs(path)
    if why is not None:
        with spinner("reading", path):
            row = only(count_hits(run), why, run).rows[0]
            lines = tell_why(run, why)
        if json:
            moments = [
                {"step": line.step, "time_ns": line.time_ns, "kind": line.kind, "text": line.text}
                for line in lines
            ]
            show_json({"schema": SCHEMA_WHY, "request": row, "story": moments})
        else:
            show(story(row, lines))
        return 0
    with spinner("reading", path):
        found = count_hits(run, by=by, since=since, until=until)
    if rid is not None:
        found = only(found, rid, run)
    if json:
        show_json(found.to_json())
    else:
        show(tables(found, width()))
    return 0


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
