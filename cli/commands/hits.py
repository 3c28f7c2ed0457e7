"""`hicache hits`: which tier served every prompt token, and why the rest was computed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.errors import CliError, asked_by, tell
from cli.options import Json, Logs, Quiet, one_of

if TYPE_CHECKING:
    from tracer.hits import Hits
    from tracer.log import Run

SCHEMA_WHY = "hicache.why.v1"


GROUPINGS = ("request", "tier", "conversation", "prefix", "reason", "time")


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
    full: Annotated[bool, typer.Option("--full", help="Every row; 1,000 are shown otherwise.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Say which tier served what, and why the first computed page was not a hit.

    Device, host, storage and computed tokens of a request, and those without a place, add up to its prompt.
    PATH may also be an export, or a file or folder that SGLang, vLLM or a Tair KVCache manager has written.
    """
    one_of("--by", by or GROUPINGS[0], GROUPINGS)
    refuse_contradictions(why, {"--by": by, "--rid": rid, "--since": since, "--until": until})
    if rid is not None and by == "prefix":
        raise CliError("--rid and --by prefix exclude each other", expected="a prefix is shared by several")
    from cli.places import logs_at
    from cli.screens.hits import in_one_line, tables
    from cli.sigterm import ending_on_sigterm
    from cli.theme import show, show_parts, spinner, width
    from tracer.hits import document_parts

    if why is not None:
        with ending_on_sigterm(), logs_at(path, quiet=quiet) as place:
            return tell_story(place, why, is_json=json, is_quiet=quiet)
    with ending_on_sigterm(), ExitStack() as opened:
        path = opened.enter_context(logs_at(path, quiet=quiet))
        with spinner("reading", path, quiet=quiet):
            found = count(path, by, since, until, opened)
            if rid is not None:
                found = only(found, rid, path)
            lines = [] if json else in_one_line(found) if quiet else tables(found, width(), is_full=full)
        if json:
            show_parts(lambda write: [write(part) for part in document_parts(found)])
        else:
            show(lines)
    return 0


def count(path: Path, by: str | None, since: int | None, until: int | None, opened: ExitStack) -> Hits:
    """The hits at a path, whoever has written what is there.

    Args:
        opened: closes what rows are still read from.
    Raises:
        CliError: the source can't be grouped by that, or has no steps.
        TracerError: it can't be read.
    """
    from tracer.hits import hits as count_hits
    from tracer.importers.foreign import find_foreign, foreign_hits, holds_own_logs, unknown
    from tracer.kept import is_kept
    from tracer.places import demand_there

    with asked_by("hicache hits {}"):
        demand_there(path)
        if is_kept(path):
            return of_store(path, by, since, until, opened)
        foreign = None if holds_own_logs(path) else find_foreign(path)
        if foreign is None:
            if path.is_file() and not holds_own_logs(path):
                raise unknown(path)
            run = logs_or_nothing(path)
            return count_hits(run, by=by or GROUPINGS[0], since=since, until=until)
    reader, files, notes = foreign
    if since is not None or until is not None:
        option = "--since" if since is not None else "--until"
        raise CliError(f"{option} counts scheduler steps, and {reader.FORMAT} has none")
    imported = reader.read(files)
    if by is not None and by not in imported.groupings:
        raise CliError(
            f"--by {by}: {reader.FORMAT} does not tell that", expected=" or ".join(imported.groupings)
        )
    return foreign_hits(imported, by=by, notes=notes)


def logs_or_nothing(path: Path) -> Run:
    """The logs at a path; where there are none, neither here nor below, other files are what is wrong.

    Not in a run's own folder: its summary says best why its logs are not there.

    Raises:
        TracerError: there are none.
    """
    from tracer.errors import ElsewhereError, LogError
    from tracer.importers.foreign import holds_own_logs, unknown
    from tracer.importers.sniff import files_at
    from tracer.log import find_logs
    from tracer.sinks import SUMMARY_NAME

    try:
        return find_logs(path)
    except ElsewhereError:
        raise
    except LogError:
        is_run = (path / SUMMARY_NAME).is_file()
        if path.is_dir() and not is_run and not holds_own_logs(path) and files_at(path):
            raise unknown(path) from None
        raise


def of_store(path: Path, by: str | None, since: int | None, until: int | None, opened: ExitStack) -> Hits:
    """The hits that were counted when an export or a database was made.

    Raises:
        CliError: they have no prefixes, which are not counted then.
    """
    from tracer.stored_hits import stored_hits

    if by == "prefix":
        raise CliError(f"--by prefix needs a run's logs, and {path} is an export or a database of them")
    found, store = stored_hits(path, by=by or GROUPINGS[0], since=since, until=until)
    opened.callback(store.close)
    return found


def tell_story(path: Path, rid: str, *, is_json: bool, is_quiet: bool) -> int:
    """One request across the tiers, from a run's logs."""
    from cli.screens.hits import story, story_in_one_line
    from cli.theme import show, show_json, spinner
    from tracer.hits import hits as count_hits
    from tracer.importers.foreign import find_foreign, holds_own_logs
    from tracer.kept import is_kept
    from tracer.log import find_logs
    from tracer.places import demand_there
    from tracer.story import why as tell_why

    with asked_by("hicache hits {}"):
        demand_there(path)
        if is_kept(path):
            raise CliError(f"--why needs a run's logs, and {path} is an export or a database of them")
        if not holds_own_logs(path) and (foreign := find_foreign(path)) is not None:
            raise CliError(
                f"--why needs a run's logs: {foreign[0].FORMAT} does not tell what happened to a request",
                hint=f"hicache hits {path} --rid {rid}",
            )
        run = find_logs(path)
    with spinner("reading", path, quiet=is_quiet):
        rows = only(count_hits(run), rid, path).rows
        row = rows[0]
        lines = tell_why(run, rid)
    if len(rows) > 1 and not is_quiet:
        tell(f"note: {len(rows):,} requests have had this id; told is the first")
    if is_json:
        moments = [
            {"step": line.step, "time_ns": line.time_ns, "kind": line.kind, "text": line.text}
            for line in lines
        ]
        show_json({"schema": SCHEMA_WHY, "request": row, "story": moments})
    elif is_quiet:
        show(story_in_one_line(row))
    else:
        show(story(row, lines))
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


def only(found: Hits, rid: str, path: Path) -> Hits:
    """The same hits, of one request.

    Raises:
        CliError: it is not among them.
    """
    from cli.screens.table import printable
    from cli.theme import command_line

    narrowed = found.narrowed(rid)
    if not narrowed.requests:
        examples = printable(", ".join(found.first_rids(3)))
        raise CliError(
            f"no request {rid} among the {found.request_count} counted in {path}",
            expected=f"{examples}, ..." if examples else "",
            hint=command_line("hits", path),
        )
    return narrowed
