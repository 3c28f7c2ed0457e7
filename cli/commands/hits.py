"""`hicache hits`: which tier served every prompt token, and why the rest was computed."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from cli.errors import CliError
from cli.options import Json, Logs

if TYPE_CHECKING:
    from tracer.hits import Hits
    from tracer.log import Run

SCHEMA_WHY = "hicache.why.v1"


class By(StrEnum):
    request = "request"
    tier = "tier"
    conversation = "conversation"
    reason = "reason"
    time = "time"


def hits(
    path: Logs,
    by: Annotated[By, typer.Option(help="What one row is.")] = By.request,
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
    from cli.screens.hits import story, tables
    from cli.theme import show, show_json, width
    from tracer.hits import hits as count_hits
    from tracer.log import find_logs
    from tracer.story import why as tell_why

    run = find_logs(path)
    if why is not None:
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
    found = count_hits(run, by=by.value, since=since, until=until)
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
    from tracer.hits import ROWS

    requests = tuple(request for request in found.requests if request.rid == rid)
    if not requests:
        examples = ", ".join(request.rid for request in found.requests[:3])
        raise CliError(
            f"no request {rid} among the {len(found.requests)} counted in {run.path}",
            expected=f"{examples}, ..." if examples else "",
            hint=f"hicache hits {run.path}",
        )
    return replace(
        found,
        requests=requests,
        rows=tuple(ROWS[found.by](requests)),
        unaccounted=tuple(each for each in found.unaccounted if each.rid == rid),
    )
