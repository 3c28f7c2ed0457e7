"""`hicache collect`: what many hosts have left of a job, as one bundle that every other command reads."""

from __future__ import annotations

import importlib
import json as json_format
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from cli.errors import OK, UNREADABLE, CliError
from cli.options import Json, Quiet, a_path

if TYPE_CHECKING:
    from rich.text import Text

    from tracer.anonymise import Names
    from tracer.bundle import Source, Survey, Target

PACKED = (".tar.gz", ".tgz")
# Formats whose files are evidence of a process and no log of it, by the module that reads them.
EVIDENCE = (
    *("flight_recorder", "stacks_faulthandler", "stacks_pyspy", "stacks_pyspy_json", "stacks_pystack"),
    *("process_state", "scheduler_status", "ras"),
)
SNAPSHOT_FILES = ("snapshot.json",)
THREAD_NAMES = ".threads.json"
HEAD_BYTES = 1 << 16
NAMED_MAX = 5


def collect(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="HOST_DIR_OR_ARCHIVE...",
            help="One for each host; folders below are looked into.",
            show_default=False,
            parser=a_path,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="BUNDLE",
            help="An archive if it ends in .tar.gz, else a folder.",
            show_default=False,
            parser=a_path,
        ),
    ],
    anonymise: Annotated[
        bool, typer.Option("--anonymise", help="Without names of requests, hosts, paths, processes.")
    ] = False,
    mapping: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="With --anonymise: write there what each name stands for.",
            show_default=False,
            parser=a_path,
        ),
    ] = None,
    with_logs: Annotated[
        bool, typer.Option("--with-logs", help="Server logs too; they may hold prompts.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Join the logs of many hosts into one bundle, and say which ranks are in it and which are not.

    The originals are only read. check, diagnose, query, hits and export read the bundle as it is.
    """
    if mapping is not None and not anonymise:
        raise CliError("--mapping says what names stand for", expected="--anonymise as well")
    if with_logs and anonymise:
        raise CliError(
            "--anonymise can't take names out of server logs", expected="--anonymise or --with-logs"
        )
    refuse(paths, out, mapping)
    from cli.sigterm import ending_on_sigterm
    from cli.theme import show, show_json, spinner
    from tracer.bundle import survey, write_bundle

    with ending_on_sigterm(), ExitStack() as stack:
        with spinner("reading", paths[0], quiet=quiet):
            sources = [
                stack.enter_context(source_at(path, host))
                for path, host in zip(paths, hosts(paths), strict=True)
            ]
            found = survey([source for source, _notes in sources])
        found.notes += [note for _source, notes in sources for note in notes]
        evidence = sorted_out(found, with_logs=with_logs)
        if not found.runs and not evidence:
            raise CliError(
                f"no logs and no other evidence in {', '.join(map(str, paths[:NAMED_MAX]))}",
                code=UNREADABLE,
                expected="folders that HICACHE_TRACE_DIR named, or archives of them",
            )
        with spinner("collecting", paths[0], quiet=quiet):
            names = learned_names(found) if anonymise else None
            with bundled(out) as target:
                manifest = write_bundle(
                    found, target, tool_version=version(), evidence=evidence, rewriting=names
                )
        if names is not None and mapping is not None:
            write_mapping(names, mapping)
    if json:
        show_json(manifest | {"bundle": str(out)})
    else:
        show(told(manifest, out, mapping, is_quiet=quiet))
    return OK


def version() -> str:
    from importlib.metadata import version as installed

    return installed("hicache-toolkit")


def hosts(paths: Sequence[Path]) -> list[str]:
    """A name for each place, for files that don't say whose they are: its own, made different."""
    found: list[str] = []
    for path in paths:
        name = path.resolve().name or "host"
        for end in (*PACKED, ".tar", ".zip", ".tar.bz2", ".tar.xz"):
            name = name.removesuffix(end)
        own, number = name, 1
        while own in found:
            number += 1
            own = f"{name}-{number}"
        found.append(own)
    return found


@contextmanager
def source_at(path: Path, host: str) -> Iterator[tuple[Source, tuple[str, ...]]]:
    """One host's folder, unpacked where it is an archive, and what is to be noted of that."""
    from tracer.archives import is_archive, opened
    from tracer.bundle import Source
    from tracer.errors import LogError

    if path.is_dir():
        yield Source(path, host), ()
    elif is_archive(path):
        with opened(path) as inside:
            yield Source(inside.folder, host, inside.names), inside.notes
    elif path.exists():
        raise LogError(f"{path} is neither a folder nor an archive", expected="what one host has left")
    else:
        raise LogError(f"no such file or folder: {path}")


def refuse(paths: Sequence[Path], out: Path, mapping: Path | None) -> None:
    """Say no before any work is done: nothing that is there is replaced, and no source is written to.

    Raises:
        CliError: names the path.
    """
    from cli.output import refuse_unwritable

    try:
        if out.exists() and (not out.is_dir() or is_packed(out) or any(out.iterdir())):
            raise CliError(f"--out {out} is there already", hint="another --out")
        if not out.absolute().parent.is_dir():
            raise CliError(
                f"--out {out}: no folder {out.parent}", expected="a bundle in a folder that is there"
            )
        target = Path(os.path.realpath(out))
        for path in paths:
            if path.is_dir() and target.is_relative_to(os.path.realpath(path)):
                raise CliError(f"--out {out} is in {path}, which is only read", hint="another --out")
    except (OSError, ValueError) as error:
        raise CliError(f"--out {out}: {getattr(error, 'strerror', None) or error}") from None
    if mapping is not None:
        refuse_unwritable(mapping)
        if Path(os.path.realpath(mapping)).is_relative_to(target):
            raise CliError(f"--mapping {mapping} is in the bundle", expected="a file outside of it")


def is_packed(out: Path) -> bool:
    return out.name.endswith(PACKED)


@contextmanager
def bundled(out: Path) -> Iterator[Target]:
    """Where the bundle is written; it is there under its name once it is whole, or not at all."""
    from cli.out_folder import filling
    from cli.output import writing
    from tracer.bundle_files import FolderTarget, packed

    if is_packed(out):
        with writing(out) as stream:
            keep_private(stream)
            with packed(stream) as target:
                yield target
        return
    with filling(out, overwrite=out.is_dir()) as part:
        yield FolderTarget(part)


def keep_private(stream: BinaryIO) -> None:
    """What comes from logs is no more for others than the logs were; a pipe has no such mode."""
    with suppress(OSError):
        os.fchmod(stream.fileno(), 0o600)


def sorted_out(found: Survey, *, with_logs: bool) -> list[tuple[Source, Path]]:
    """Of the files that are not ours, those that are evidence; the others are noted as left out."""
    evidence = []
    for source, path in found.others:
        why = "" if with_logs else reason(path)
        if why:
            found.left_out[source.shown(path)] = why
        else:
            evidence.append((source, path))
    return evidence


def reason(path: Path) -> str:
    """Why a file of another program is left out, or nothing."""
    from tracer.archives import is_archive

    if path.name in SNAPSHOT_FILES or is_beside_stacks(path):
        return ""
    if is_archive(path):
        return "an archive; give it by itself"
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        return f"can't be read: {error.strerror}"
    known = any(importlib.import_module(f"tracer.importers.{name}").votes(head) for name in EVIDENCE)
    return "" if known else "a server's log or unknown; --with-logs takes it"


def is_beside_stacks(path: Path) -> bool:
    """Whether it has the names of the threads whose stacks are in the file beside it."""
    if not path.name.endswith(THREAD_NAMES):
        return False
    own = path.name.removesuffix(THREAD_NAMES)
    beside = (path.with_name(name) for name in (own, f"{own}.txt"))
    return any(each.is_file() and not reason(each) for each in beside)


def learned_names(found: Survey) -> Names:
    from tracer.anonymise import learned

    ranked = [each for run in found.runs for each in run.ranks.values()]
    files = [path for each in ranked for path in each.files.values()]
    return learned(files, sorted({each.host for each in ranked}))


def write_mapping(names: Names, mapping: Path) -> None:
    from cli.output import writing

    with writing(mapping) as stream:
        keep_private(stream)
        stream.write(json_format.dumps(names.mapping(), indent=1, ensure_ascii=False).encode() + b"\n")


def told(manifest: dict[str, Any], out: Path, mapping: Path | None, *, is_quiet: bool) -> list[Text]:
    """What is in the bundle, the newest run first, in at most some twenty lines."""
    from rich.text import Text

    from cli.screens.table import printable
    from cli.theme import GOOD, headline, next_step, paragraph
    from tracer.bundle import ranks_text

    runs = list(reversed(manifest["runs"]))
    files, size_bytes = len(manifest["files"]), sum(file["bytes"] for file in manifest["files"])
    what = f"{out}: {files:,} files, {size_bytes / 1e6:,.1f} MB"
    if runs:
        what += f"; {coverage(runs[0])}"
    lines = headline("BUNDLED", printable(what), GOOD)
    if is_quiet:
        return lines
    for run in runs[:NAMED_MAX]:
        copies = f", copy {run['copy']}" if run["copy"] > 1 else ""
        each = f"run {run['run_id']}, attempt {run['attempt']}{copies}: {coverage(run)}"
        lines += paragraph(run["folder"], printable(each + (" (the newest)" if run["is_newest"] else "")))
    if len(runs) > NAMED_MAX:
        lines += paragraph("", f"and {len(runs) - NAMED_MAX} older runs")
    if runs:
        named = [f"{host['host']}: {ranks_text(host['ranks'])}" for host in runs[0]["hosts"][:NAMED_MAX]]
        more = len(runs[0]["hosts"]) - NAMED_MAX
        lines += paragraph("hosts", printable("; ".join(named) + (f"; and {more} more" if more > 0 else "")))
    for label, entries in (("left", manifest["left_out"]), ("note", manifest["notes"])):
        said = [f"{each['name']}: {each['why']}" if isinstance(each, dict) else each for each in entries]
        for sentence in said[:2]:
            lines += paragraph(label, printable(sentence))
        if len(said) > 2:
            lines += paragraph("", f"and {len(said) - 2} more, all in bundle.json")
    if manifest["anonymised"] and mapping is not None:
        lines += paragraph("names", f"{mapping} says what stands for what; keep it to yourself")
    if runs:
        lines += [Text(""), *next_step("check", out)]
    return lines


def coverage(run: dict[str, Any]) -> str:
    """Who is there, and who is not; nobody is blamed for that."""
    from tracer.bundle import ranks_text

    present, expected = len(run["ranks_present"]), run["ranks_expected"]
    missing = run["ranks_missing"]
    whole = f"{present} of {expected} ranks present"
    return f"{whole}: {ranks_text(missing)} {'is' if len(missing) == 1 else 'are'} not" if missing else whole
