"""Folders that a command writes for somebody: whole or not at all, and never in the place of something else.

Only what an export of the same format has made is ever replaced, and only when that was asked for.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cli.errors import CliError

DUMP = re.compile(r"comm_lib_trace_rank_\d+")


@contextmanager
def filling(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder beside `out`, not made yet, that takes its place once the block has ended without an error."""
    from tracer.errors import StoreError

    target = Path(os.path.realpath(out))
    part, old = (target.with_name(f".hicache-{os.getpid()}.{end}") for end in ("part", "old"))
    try:
        yield part
        if overwrite and target.is_dir():
            target.rename(old)
        part.rename(target)
    except BaseException as error:
        with suppress(OSError):
            if old.is_dir() and not target.exists():
                old.rename(target)
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError):
            raise CliError(f"{out} was not written: {error.strerror or error}") from None
        if isinstance(error, StoreError) and str(part) in str(error):
            # Of a place that nobody has asked for.
            raise CliError(str(error).replace(str(part), str(out))) from None
        raise
    shutil.rmtree(old, ignore_errors=True)


def refuse_folder(out: Path, to: str, *, overwrite: bool) -> None:
    """Only what an export of this format has made may be replaced, and only when asked for."""
    try:
        if out.suffix == ".gz":
            raise CliError(f"--to {to} writes a folder, which can't be packed", hint="--out without .gz")
        if out.exists() and not out.is_dir():
            raise CliError(f"--out {out} is a file", expected="a folder, new or empty")
        if not out.parent.is_dir():
            raise CliError(
                f"--out {out}: no folder {out.parent}", expected="a folder in a folder that is there"
            )
        names = sorted(entry.name for entry in out.iterdir()) if out.is_dir() else []
        if names and not overwrite:
            raise CliError(
                f"--out {out} is there already ({names[0]} in it)",
                hint="another --out, or --overwrite to replace it",
            )
        if names and (foreign := others(out, to)):
            raise CliError(
                f"--out {out} holds {foreign}, which is no export of format {to}", expected="an older export"
            )
    except (OSError, ValueError) as error:
        raise CliError(f"--out {out}: {getattr(error, 'strerror', None) or error}") from None


def others(out: Path, to: str) -> str:
    """What is in a folder and is not of an export, or nothing."""
    if to == "fr-json":
        return next((e.name for e in sorted(out.iterdir()) if not DUMP.fullmatch(e.name) or e.is_dir()), "")
    from tracer.kept import is_export

    if not is_export(out):
        return sorted(entry.name for entry in out.iterdir())[0]
    files = (path for path in sorted(out.rglob("*")) if not path.is_dir())
    return next((p.name for p in files if p.suffix != ".parquet" and not p.name.startswith("hicache.")), "")
