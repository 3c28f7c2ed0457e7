"""A kept store, a DuckDB file or a folder of Parquet: how it is recognised, and what it says of itself.

Owns the facts that either form carries, their version, and the layout of an export. Whoever opens one has
it from somebody, so that nothing in it is believed before it has been looked at.

    export/hicache.parquet.json                            facts, one entry a run
    export/records/run_id=a/rank=3/records.parquet         rows in order of lane and seq
    export/lanes/run_id=a/lanes.parquet                    and so `kinds` and `hits`
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import msgspec

from tracer.errors import StoreError
from tracer.places import quoted
from tracer.plausible import Count

STORE_FORMAT, EXPORT_FORMAT = "hicache.store", "hicache.parquet"
# A reader takes every minor version of its own major version: tables and columns may be added.
STORE_VERSION = (1, 0)
# The one table of a kept database that is not for queries: one row, one column of JSON.
FACTS_TABLE = "hicache_store"
META_NAME = "hicache.parquet.json"
META_BYTES_MAX = 16 * 1024 * 1024
RECORDS, HITS = "records", "hits"
TABLES = ("lanes", "kinds", HITS)
RANK = re.compile(r"rank=(\d{1,9})")
# What the fifth to twelfth byte of a DuckDB file hold, behind a checksum.
MAGIC, MAGIC_AT = b"DUCK", 8
DATABASE_SUFFIX = ".duckdb"
# Names of folders may have 255 bytes.
RUN_ID_BYTES_MAX = 240
RUNS_NAMED_MAX = 8


class Facts(msgspec.Struct, frozen=True):
    """What a store says of the run that it holds.

    Attributes:
        fields: those that some record has, for `own_fields`.
        notes: what of the logs was not as it should be.
        page_size_tokens: 0 where no header says.
        hits_notes: what limits the numbers of `hits`.
        hits_problem: why there are none, or "".
    """

    run_id: str
    world_size: Count
    records: Count
    fields: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tool_version: str = ""
    page_size_tokens: Count = 0
    hits_notes: tuple[str, ...] = ()
    hits_problem: str = ""


class Document(msgspec.Struct, frozen=True):
    """The whole of what a kept store says of itself."""

    format: str
    version: Annotated[tuple[int, ...], msgspec.Meta(min_length=2, max_length=2)]
    runs: Annotated[tuple[Facts, ...], msgspec.Meta(min_length=1)]


class _Stamp(msgspec.Struct, frozen=True):
    """What has to be known before the rest can be read: a newer version may have changed that."""

    format: str
    version: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Export:
    """One run of an export: its facts, and the files of each table."""

    facts: Facts
    files: Mapping[str, Sequence[Path]]


def document(form: str, runs: Sequence[Facts]) -> bytes:
    """The facts as they are kept, one run a line for people."""
    head = json.dumps({"format": form, "version": STORE_VERSION})[:-1]
    entries = ",\n  ".join(msgspec.json.encode(facts).decode() for facts in runs)
    return f'{head}, "runs": [\n  {entries}\n]}}\n'.encode()


def read_document(text: bytes | str, form: str, where: str) -> Document:
    """What was kept.

    Raises:
        StoreError: it is something else, damaged, or of a newer version.
    """
    try:
        stamp = msgspec.json.decode(text, type=_Stamp)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        stamp = _Stamp("", ())
    if stamp.format != form or len(stamp.version) != len(STORE_VERSION):
        raise StoreError("not kept by this tool, or damaged", where=where, expected=f"format {form}")
    if stamp.version[0] != STORE_VERSION[0]:
        raise StoreError(
            f"version {stamp.version[0]}.{stamp.version[1]} of {form}, this tool knows {STORE_VERSION[0]}.x",
            where=where,
            hint="the hicache-toolkit that has kept it, or the logs themselves",
        )
    try:
        return msgspec.json.decode(text, type=Document)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise StoreError(f"its facts are damaged: {error}", where=where, hint="the logs themselves") from None


def is_database(path: Path) -> bool:
    """Whether a file is a DuckDB database, whoever has written it; by its content."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            return file.read(MAGIC_AT + len(MAGIC))[MAGIC_AT:] == MAGIC
    except (OSError, ValueError):
        return False


def is_export(path: Path) -> bool:
    """Whether a folder holds a Parquet export, whole or not."""
    try:
        return stat.S_ISREG((path / META_NAME).stat().st_mode)
    except (OSError, ValueError):
        return False


def is_kept(path: Path) -> bool:
    """Whether what is there was kept of a run: a database or an export."""
    return is_database(path) or is_export(path)


def find_export(folder: Path, run_id: str | None) -> Export:
    """The files of one run of an export.

    Raises:
        StoreError: there are several and none was chosen, or something of it is missing.
    """
    meta = folder / META_NAME
    try:
        with meta.open("rb") as file:
            text = file.read(META_BYTES_MAX)
        runs = {facts.run_id: facts for facts in read_document(text, EXPORT_FORMAT, str(meta)).runs}
        facts = runs[chosen(folder, sorted(runs), run_id)]
        own = f"run_id={folder_name(facts.run_id)}"
        records = sorted(
            (int(match[1]), path)
            for place in sorted((folder / RECORDS / own).iterdir())
            if (match := RANK.fullmatch(place.name))
            for path in _parquet_files(place)
        )
        files: dict[str, Sequence[Path]] = {name: _parquet_files(folder / name / own) for name in TABLES}
    except OSError as error:
        raise StoreError(f"the export can't be read: {error.strerror}", where=str(folder)) from None
    files[RECORDS] = [path for _rank, path in records]
    missing = [name for name, found in files.items() if not found]
    if missing:
        raise StoreError(
            f"the export has no {' and no '.join(missing)}", where=str(folder), hint="export again"
        )
    return Export(facts, files)


def chosen(place: Path, run_ids: Sequence[str], run_id: str | None) -> str:
    """The run that is meant: the only one there is, or the one that was asked for.

    Raises:
        StoreError: it isn't there, or there are several and nobody has said which.
    """
    shown = ", ".join(run_ids[:RUNS_NAMED_MAX]) + (", ..." if len(run_ids) > RUNS_NAMED_MAX else "")
    if run_id is not None:
        if run_id not in run_ids:
            raise StoreError(f"no run {run_id:.100} in {place}", expected=shown)
        return run_id
    if len(run_ids) > 1:
        raise StoreError(f"{place} holds {len(run_ids)} runs", where=shown, hint="one of them, by --run")
    return run_ids[0]


def folder_name(run_id: str) -> str:
    """A run id as part of a folder's name, whatever is in it.

    Raises:
        StoreError: it is too long for one.
    """
    name = quote(run_id, safe="", errors="surrogatepass")
    if len(name) > RUN_ID_BYTES_MAX:
        raise StoreError(
            f"a run id of {len(run_id):,} characters can't be a folder's name",
            where=f"{run_id:.40}...",
            expected=f"at most {RUN_ID_BYTES_MAX} bytes",
        )
    return name


def _parquet_files(folder: Path) -> list[Path]:
    """The files of a folder that are its own: a link could lead anywhere."""
    with os.scandir(folder) as entries:
        return sorted(
            Path(entry.path)
            for entry in entries
            if entry.name.endswith(".parquet") and entry.is_file(follow_symlinks=False)
        )


@contextmanager
def beside(target: Path, door: Path) -> Iterator[Path]:
    """A hidden folder, gone afterwards, on the file system of `target`, which is made in it.

    Args:
        door: becomes a link to it, for the path of `target` may be one that a database takes for more.

    Raises:
        StoreError: something is there, or nothing can be.
    """
    if os.path.lexists(target):
        raise is_there(target)
    try:
        hidden = Path(tempfile.mkdtemp(prefix=".hicache-", dir=target.parent))
    except OSError as error:
        raise StoreError(f"{target} can't be written: {error.strerror}") from None
    try:
        door.symlink_to(hidden.absolute())
        yield door
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def put(file: Path, target: Path) -> None:
    """Give a finished file its name, in one step, as long as nothing has it."""
    file.chmod(0o600)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    try:
        os.link(file, target)
    except FileExistsError:
        raise is_there(target) from None
    except OSError:
        # A file system without links.
        if os.path.lexists(target):
            raise is_there(target) from None
        file.rename(target)


def is_there(target: Path) -> StoreError:
    return StoreError(
        f"{target} is there already and stays as it is",
        expected="a new file",
        hint=f'hicache query {quoted(target)} "SELECT ...", if it is one',
    )


def linked(path: Path, folder: Path, name: str) -> str:
    """A link under a name of ours; the partition that the path names stays in it."""
    rank = path.parent.name if path.parent.name.startswith("rank=") else ""
    link_path = folder / Path(name).parent / rank / f"{Path(name).name}.parquet"
    link_path.parent.mkdir(parents=True, exist_ok=True)
    link_path.symlink_to(path.absolute())
    return str(link_path)
