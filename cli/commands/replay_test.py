"""`hicache replay --test`: from two ranks' logs of a real server to a test file that parts them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cli.errors import OK, UNREADABLE, CliError

if TYPE_CHECKING:
    from consensus_checker.sglang_case.parting import Parting
    from tracer.log import LaneLog, Run

INCOMPLETE = 4
# Of a log's header: which server's it is.
SERVER = "sglang"
STORE = "hicache_storage_backend"


def write_server_test(
    run: Run, ranks: list[int] | None, path: Path, file: Path, *, overwrite: bool, is_json: bool, quiet: bool
) -> int:
    """Write it; 0, or 4 where no log says what went otherwise on the rank that parted.

    Args:
        ranks: the one that is right and the odd one; None: as the verdict on the run has them.

    Raises:
        CliError: no server's logs, no ranks that part, or steps that no test can take again.
    """
    from cli.output import refuse_unwritable, writing
    from cli.theme import spinner
    from consensus_checker.sglang_case.write import Lanes, file_text, server_of

    demand_file(file, overwrite=overwrite)
    refuse_unwritable(file)
    if run.config.get("server") != SERVER:
        raise CliError(
            "--test writes tests for a real SGLang: these logs are of another runtime",
            expected="logs of its plugin",
            hint="hicache explore PLAN --test FILE.py",
        )
    with spinner("looking for where they part", path, quiet=quiet):
        left, right = ranks_of(run, ranks)
        lanes = {(lane.rank, lane.lane): lane for lane in run.lanes}
        queries = lanes.get((left, "prefetch"))
        asked = list(queries.records(is_lenient=True)) if queries is not None else []
        with of_their_kinds():
            found, main = parting_of(lanes, left, right, has_storage=bool(run.config.get(STORE)))
            own = Lanes(run.run_id, run.config, main, asked)
            server = server_of(own)
    if isinstance(server, str):
        raise CliError(f"no test can be made: {server}", code=INCOMPLETE)
    if found is None:
        raise CliError(
            f"ranks {left} and {right} decide alike: there is nothing to make a test of",
            expected="logs of ranks that part on their schedulers",
        )
    if found.stop:
        raise CliError(f"no test can be made: before they part, {found.stop}", code=INCOMPLETE)
    with of_their_kinds():
        text = file_text(found, own, server, file.name)
    with writing(file) as stream:
        stream.write(text.encode())
    show_written(found, file, is_json=is_json, quiet=quiet)
    return OK if found.cause else INCOMPLETE


@contextmanager
def of_their_kinds() -> Iterator[None]:
    """A record without a field of its kind, or with something else in it, no server wrote: say so."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"no test can be made: a record does not have what its kind has ({str(error)[:80]})"
        raise CliError(what, code=INCOMPLETE) from None


def demand_file(file: Path, *, overwrite: bool) -> None:
    """Raises:
    CliError: there is one already, or no folder for it, or it is no file: the result goes to stdout.
    """
    if file.exists() and not file.is_file():
        raise CliError(f"--test {file} is no regular file", expected="a file that pytest can be given")
    if file.exists() and not overwrite:
        raise CliError(f"{file} is there already", hint="another --test, or --overwrite")
    if not file.parent.is_dir():
        raise CliError(f"--test {file}: no folder {file.parent}", expected="a file in a folder that is there")


def ranks_of(run: Run, ranks: list[int] | None) -> tuple[int, int]:
    """A rank that is right, and one that is odd; in a tie the lower one is held for right."""
    from consensus_checker.check import check

    if ranks is not None:
        if len(ranks) != 2:
            raise CliError("--test compares two ranks", expected="--rank RIGHT --rank ODD, or none")
        return ranks[0], ranks[1]
    finding = check(run).finding
    first = finding.first_divergence
    if first is None:
        raise CliError(f"nothing to make a test of: {finding.summary}", expected="logs of ranks that part")
    members = [rank for rank in run.ranks if rank in first.by_rank] or list(run.ranks)
    others = [rank for rank in members if rank not in finding.culprit] or members
    odd = next(iter(finding.culprit or [rank for rank in members if rank != others[0]]), None)
    if odd is None or odd == others[0]:
        raise CliError("which two ranks?", expected="--rank RIGHT --rank ODD")
    return others[0], odd


def parting_of(
    lanes: dict[tuple[int, str], LaneLog], left: int, right: int, *, has_storage: bool
) -> tuple[Parting | None, list[dict[str, object]]]:
    """Where they part, and the records of the one that is right."""
    from consensus_checker.sglang_case.parting import parting
    from tracer.record import MAIN_LANE

    if lacking := [rank for rank in (left, right) if (rank, MAIN_LANE) not in lanes]:
        raise CliError(f"rank {lacking[0]} left no log of its scheduler", code=UNREADABLE)
    both = [(rank, list(lanes[rank, MAIN_LANE].records(is_lenient=True))) for rank in (left, right)]
    kinds = lanes[left, MAIN_LANE].header["kinds"]
    compared = {name: about["compared"] for name, about in kinds.items() if about.get("agree")}
    return parting(both[0], both[1], compared, has_storage=has_storage), both[0][1]


def show_written(found: Parting, file: Path, *, is_json: bool, quiet: bool) -> None:
    from cli.screens.replay import on_one_line
    from cli.screens.table import counted
    from cli.theme import BAD, COMMAND, headline, paragraph, show, show_json

    rids = {step["rid"] for step in found.steps if "rid" in step}
    left, right = found.reference.rank, found.odd.rank
    if is_json:
        show_json(
            {
                "schema": "hicache.replay.v1",
                "test": str(file),
                "ranks": [left, right],
                "calls": list(found.call),
                "cause": found.cause or None,
                "requests": len(rids),
                "steps": len(found.steps),
            }
        )
        return
    calls = " / ".join(dict.fromkeys(call or "no further call" for call in found.call))
    lines = headline("TEST", f"of ranks {left} and {right}, which part at {calls}", BAD)
    cause = found.cause or (
        "no log says what went otherwise: the test fails only if the code itself parts them"
    )
    lines += paragraph("cause", cause)
    lines += paragraph("holds", f"{counted(len(rids), 'request')}, {counted(len(found.steps), 'step')}")
    lines += paragraph("run", f"pytest {file}", COMMAND)
    lines += paragraph("smaller", f"python {file} --shrink", COMMAND)
    show(on_one_line(lines) if quiet else lines)
