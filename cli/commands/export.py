"""`hicache export`: a run for other tools. What is written appears whole or not at all."""

from __future__ import annotations

import gzip
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, cast

import typer

from cli.errors import INTERRUPTED, OK, TERMINATED, UNREADABLE, USAGE, CliError, asked_by, tell
from cli.options import Json, Logs, Quiet, a_path, one_of

if TYPE_CHECKING:
    from threading import Event

    from tracer.log import Run
    from tracer.otel_live import LiveCount
    from tracer.perfetto import Mark
    from tracer.spans import ExportCount

SCHEMA = "hicache.export.v1"
# One stream each, then one folder each.
STREAMS, FOLDERS = ("perfetto", "otlp", "prometheus"), ("parquet", "fr-json")
FORMATS = ("perfetto", "otlp", "parquet", "fr-json", "prometheus")
STDOUT = Path("-")
TIMEOUT_S = 10.0
GZIP_LEVEL = 6

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written where.

    Attributes:
        missing: what of the run is not in its logs, and so not in the export, each as a sentence.
    """

    format: str
    out: str
    records: int
    events: int
    size_bytes: int
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The document of schema `hicache.export.v1`; the last key only when there is something to say."""
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "format": self.format,
            "out": self.out,
            "records": self.records,
            "events": self.events,
            "bytes": self.size_bytes,
        }
        return document | ({"missing": list(self.missing)} if self.missing else {})


def export(
    path: Logs,
    to: Annotated[str, typer.Option("--to", metavar="|".join(FORMATS), help="For what.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="OUT",
            help="File, packed if it ends in .gz, or - for stdout; for parquet and fr-json a folder.",
            show_default=False,
            parser=a_path,
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="With --to otlp: send the spans to a collector.", show_default=False
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="With --endpoint: go on while the run is written.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help=f"With --endpoint: wait for it no longer; {TIMEOUT_S:g}.",
            show_default=False,
            min=0,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file, or an older export's folder.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Write a run for other tools: a timeline, spans, tables, dumps, metrics.

    perfetto opens in ui.perfetto.dev; otlp is OTLP/JSON, a line a batch; fr-json is what PyTorch's flight
    recorder dumps, a file a rank.
    """
    one_of("--to", to, FORMATS)
    if endpoint is not None:
        if to != "otlp" or out is not None:
            raise CliError("--endpoint sends spans", expected="--to otlp, and no --out")
        wait_s = TIMEOUT_S if timeout is None else timeout
        if not math.isfinite(wait_s):
            raise CliError(f"--timeout {wait_s} is no number of seconds", expected=f"--timeout {TIMEOUT_S:g}")
        return send(path, endpoint, follow=follow, timeout_s=wait_s, json=json, quiet=quiet)
    if follow or timeout is not None:
        raise CliError("--follow and --timeout are for --endpoint", expected="--endpoint URL")
    if out is None:
        raise CliError("export needs a place to write to", hint=f"--out {example(to)}")
    refuse(out, to, overwrite=overwrite, json=json)
    from cli.places import logs_at
    from cli.screens.export import reading, result
    from cli.sigterm import ending_on_sigterm
    from cli.theme import show_json
    from tracer.log import find_logs

    with ending_on_sigterm(), logs_at(path, quiet=quiet) as place:
        with asked_by(again("--to", to, "--out", out)):
            refuse_kept(place)
            run = find_logs(place)
        if len(run.run_ids) > 1:
            what = f"{path} holds {len(run.run_ids)} runs: {', '.join(run.run_ids)}"
            raise CliError(what, code=UNREADABLE, hint="one folder a run")
        try:
            with reading("exporting", quiet=quiet) as progress:
                found = write(run, to, out, overwrite=overwrite, progress=progress)
        except BrokenPipeError:
            # Whoever read stdout has seen enough; what is left of it in our buffers goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return OK
    if not quiet:
        for sentence in found.missing:
            tell(f"warning: {sentence}")
    if json:
        show_json(found.to_json())
    else:
        tell(result(found))
    return OK


def refuse_kept(path: Path) -> None:
    """What was kept of a run has no log in it any more.

    Raises:
        CliError: it is a kept database or an export.
    """
    from tracer.kept import is_kept

    if is_kept(path):
        raise CliError(f"export needs a run's logs, and {path} is an export or a database of them")


def again(*words: object) -> str:
    """The same command for another folder, for `asked_by`, which puts that in the place of `{}`."""
    return f"hicache export {{}} {shlex.join(map(str, words)).replace('{', '{{').replace('}', '}}')}"


def example(to: str) -> str:
    """A name that fits the format."""
    names = {"perfetto": "trace.json.gz", "otlp": "spans.jsonl.gz", "prometheus": "run.prom"}
    return names.get(to, to.replace("-json", ""))


def refuse(out: Path, to: str, *, overwrite: bool, json: bool) -> None:
    """Say no before any work is done.

    Raises:
        CliError: `out` is not what the format needs, is there already, or can't be written.
    """
    from cli.out_folder import refuse_folder
    from cli.output import refuse_unwritable

    if out == STDOUT:
        if to in FOLDERS:
            raise CliError(f"--to {to} writes a folder", hint=f"--out {example(to)}")
        if json:
            raise CliError("--out - and --json both are for stdout", expected="one of them")
        return
    if to in FOLDERS:
        refuse_folder(out, to, overwrite=overwrite)
        return
    refuse_unwritable(out)
    if out.is_file() and not overwrite:
        raise CliError(f"--out {out} is there already", hint="another --out, or --overwrite to replace it")


def write(run: Run, to: str, out: Path, *, overwrite: bool, progress: Progress | None) -> Exported:
    """Write one export.

    Raises:
        CliError: `out` can't be written.
        BrokenPipeError: `out` is stdout, and its reader has gone.
        TracerError: the logs can't be read on.
    """
    if to in FOLDERS:
        from cli.out_folder import filling

        with filling(out, overwrite=overwrite) as folder:
            count = write_folder(run, to, folder, progress)
            size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    else:
        with stream_to(out) as stream:
            counted = Counted(stream)
            with packed(counted, is_wanted=out.suffix == ".gz") as target:
                count = write_stream(run, to, target, progress)
            size_bytes = counted.size_bytes
    from tracer.timeline import limits

    return Exported(to, str(out), count.records, count.events, size_bytes, tuple(limits(run)))


def write_stream(run: Run, to: str, stream: BinaryIO, progress: Progress | None) -> ExportCount:
    if to == "perfetto":
        from tracer.perfetto import write_perfetto

        marks, about = verdict_on(run)
        return write_perfetto(run, stream, marks=marks, about=about, progress=progress)
    if to == "otlp":
        from tracer.otel import write_otlp

        return write_otlp(run, stream, progress=progress)
    from tracer.metrics import prometheus_text
    from tracer.spans import ExportCount
    from tracer.timeline import limits

    text = prometheus_text(run)
    stream.write(text.encode())
    # It may have read some lanes only, and what is missing is told of all.
    limits(run)
    samples = sum(bool(line) and not line.startswith("#") for line in text.splitlines())
    return ExportCount(sum(lane.count for lane in run.lanes), samples)


def verdict_on(run: Run) -> tuple[list[Mark], dict[str, Any]]:
    """What the checker says of the run, and the records that it says it by, to be found in the timeline."""
    from consensus_checker.check import check
    from consensus_checker.history import History
    from tracer.log import find_logs
    from tracer.perfetto import Mark

    # Lanes of its own: what it reads of them, and how, is not the export's.
    document = check(History.of(find_logs(run.path))).to_json()
    verdict = document["verdict"]
    lane_of = {file.name: lane for lane in run.lanes for file in lane.files}
    marks = []
    for each in document["evidence"] or ():
        lane = lane_of.get(each["file"])
        if lane is not None:
            role = each["supports"].rpartition(" ")[0] or each["supports"]
            is_culprit = role == "culprit"
            name = f"verdict: {role}"
            marks.append(Mark(lane.rank, lane.lane, each["record"], name, verdict["summary"], is_culprit))
    return marks, {"verdict": {"kind": verdict["kind"], "summary": verdict["summary"]}}


def write_folder(run: Run, to: str, folder: Path, progress: Progress | None) -> ExportCount:
    if to == "fr-json":
        from tracer.fr_json import write_flight_recorder

        return write_flight_recorder(run, folder, progress=progress)
    from tracer.parquet import export_parquet

    return export_parquet(run, folder, progress=progress)


class Counted:
    """A stream that knows how much went through it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.size_bytes = 0

    def write(self, chunk: bytes) -> int:
        self.size_bytes += len(chunk)
        return self._stream.write(chunk)

    def flush(self) -> None:
        self._stream.flush()


@contextmanager
def stream_to(out: Path) -> Iterator[BinaryIO]:
    """The file, or stdout."""
    if out == STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    from cli.output import writing

    with writing(out) as stream:
        yield stream


@contextmanager
def packed(stream: Counted, *, is_wanted: bool) -> Iterator[BinaryIO]:
    """The stream, compressed if that is wanted; without name and time: equal runs have equal bytes."""
    target = cast(BinaryIO, stream)
    if not is_wanted:
        yield target
        return
    with gzip.GzipFile("", "wb", GZIP_LEVEL, target, mtime=0) as zipped:
        yield cast(BinaryIO, zipped)


def send(path: Path, endpoint: str, *, follow: bool, timeout_s: float, json: bool, quiet: bool) -> int:
    """Send the spans to a collector; not all that they should have been is a failure."""
    from threading import Event

    from cli.screens.export import reading, sent
    from cli.theme import show_json
    from tracer.errors import LogError, TracerError
    from tracer.otel_live import export_live, without_secret

    stop, shown = Event(), without_secret(endpoint)
    heard: list[int] = []
    # A run that is followed may have no end: then Ctrl-C or SIGTERM is how one stops, and what was read is
    # still sent.
    try:
        with (
            asked_by(again("--to", "otlp", "--endpoint", endpoint)),
            reading("sending", quiet=quiet) as progress,
            signals_set(stop, heard) if follow else nullcontext(),
        ):
            refuse_kept(path)
            found = export_live(
                path, endpoint, follow=follow, timeout_s=timeout_s, stop=stop, progress=progress
            )
    except TracerError as error:
        if isinstance(error, LogError):
            raise
        # The endpoint, or a package that is missing.
        raise CliError(str(error)) from None
    if not quiet:
        for sentence in found.notes:
            tell(f"warning: {sentence}")
    if json:
        show_json(live_document(shown, found))
    else:
        tell(sent(shown, found))
    if heard:
        return TERMINATED if heard[0] == signal.SIGTERM else INTERRUPTED
    return USAGE if found.dropped else OK


def live_document(endpoint: str, found: LiveCount) -> dict[str, Any]:
    """`hicache.export.v1` where spans were sent and not written."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "format": "otlp",
        "endpoint": endpoint,
        "sent": found.sent,
        "dropped": found.dropped,
        "failed": found.failed,
    }
    return document | ({"missing": list(found.notes)} if found.notes else {})


@contextmanager
def signals_set(stop: Event, heard: list[int]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks to stop, the second one stops; `heard` has which came first."""

    def interrupt(number: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        heard.append(number)
        stop.set()

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
