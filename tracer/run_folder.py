"""The folder with one run's logs that a path stands for: itself, or what a bundle or an archive holds.

Owns the rule of which run is meant where there are several: the newest, unless one was asked for. Files of an
archive are there for the block's time; nothing else of this tool needs to know that there was one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tracer.archives import Opened, is_archive, opened
from tracer.bundle import BundleError, FoundRun, Source, manifest_of, ranks_text, survey
from tracer.errors import TracerError

NAMED_MAX = 4


@dataclass(frozen=True, slots=True)
class Placed:
    """Where to read.

    Attributes:
        folder: `path` itself, where it is no bundle and no archive.
        notes: what was left out of an archive, and which run was taken.
    """

    folder: Path
    notes: tuple[str, ...] = ()


@contextmanager
def run_folder(path: Path, *, run: str | None = None) -> Iterator[Placed]:
    """Where one run's logs are that `path` stands for.

    Args:
        run: a run's id or its folder in the bundle; without it the newest is taken.

    Raises:
        TracerError: an archive or a bundle can't be read, or has no such run.
    """
    with ExitStack() as stack:
        inside: Opened | None = None
        if is_archive(path):
            inside = stack.enter_context(opened(path))
        folder = path if inside is None else inside.folder
        with _called(folder, path):
            placed = _placed(path, folder, inside, run, stack)
            yield placed


def _placed(path: Path, folder: Path, inside: Opened | None, run: str | None, stack: ExitStack) -> Placed:
    notes = () if inside is None else inside.notes
    if inside is None and not _is_bundle(folder):
        return Placed(folder)
    manifest = manifest_of(folder)
    if manifest is not None:
        runs = [(each["folder"], each["run_id"], each["attempt"]) for each in manifest["runs"]]
        newest = next((each["folder"] for each in manifest["runs"] if each["is_newest"]), None)
        wanted = newest if run is None else _chosen(path, run, runs)
        if wanted is not None:
            missing = next(each["ranks_missing"] for each in manifest["runs"] if each["folder"] == wanted)
            told = [*_which(wanted, runs), *_who(missing, manifest, wanted)]
            return Placed(folder / wanted, (*notes, *told))
        return Placed(folder, notes)
    found = survey([Source(folder, path.name, inside.names if inside is not None else {})])
    notes = (*notes, *found.notes)
    if not found.runs:
        return Placed(folder, notes)
    named = [(f"run-{number}", each.run_id, each.attempt) for number, each in enumerate(found.runs, start=1)]
    wanted = named[-1][0] if run is None else _chosen(path, run, named)
    index = next(number for number, each in enumerate(named) if each[0] == wanted)
    return Placed(_gathered(found.runs[index], stack), (*notes, *_which(wanted, named)))


def _is_bundle(folder: Path) -> bool:
    try:
        return folder.is_dir() and manifest_of(folder) is not None
    except BundleError:
        raise
    except (OSError, ValueError):
        return False


def _chosen(path: Path, run: str, runs: list[tuple[str, str, int]]) -> str:
    """The folder of the newest run of that name.

    Raises:
        BundleError: none has it.
    """
    fitting = [folder for folder, run_id, _attempt in runs if run in (folder, run_id)]
    if not fitting:
        known = ", ".join(f"{folder} ({run_id})" for folder, run_id, _attempt in runs[-NAMED_MAX:])
        raise BundleError(f"no run {run!r:.80} in {path}", expected=known or "logs of a run")
    return fitting[-1]


def _which(folder: str, runs: list[tuple[str, str, int]]) -> list[str]:
    if len(runs) < 2:
        return []
    others = [each for each, _run_id, _attempt in runs if each != folder]
    more = f" and {len(others) - NAMED_MAX} more" if len(others) > NAMED_MAX else ""
    run_id, attempt = next((run_id, attempt) for each, run_id, attempt in runs if each == folder)
    return [
        f"read is {folder} (run {run_id}, attempt {attempt}); "
        f"there are {', '.join(others[:NAMED_MAX])}{more} too"
    ]


def _who(missing: list[int], manifest: dict[str, object], folder: str) -> list[str]:
    if not missing:
        return []
    runs = manifest["runs"]
    assert isinstance(runs, list), "a manifest that was read has a list of runs"
    own = next(each for each in runs if each["folder"] == folder)
    present = len(own["ranks_present"])
    verb = "is" if len(missing) == 1 else "are"
    return [f"{present} of {own['ranks_expected']} ranks are in it: {ranks_text(missing)} {verb} not"]


def _gathered(run: FoundRun, stack: ExitStack) -> Path:
    """The folder that has all of a run's files; one of links, where they lie in several."""
    folders = {ranked.folder for ranked in run.ranks.values()}
    if len(folders) == 1:
        return folders.pop()
    place = Path(tempfile.mkdtemp(prefix="hicache-"))
    stack.callback(shutil.rmtree, place, ignore_errors=True)
    for ranked in run.ranks.values():
        for name, path in ranked.files.items():
            if "/" not in name:
                (place / name).symlink_to(path)
    return place


@contextmanager
def _called(folder: Path, path: Path) -> Iterator[None]:
    """What is said of the unpacked files is said of the archive, for that is what somebody has."""
    try:
        yield
    except TracerError as error:
        if folder != path:
            error.args = tuple(str(text).replace(str(folder), str(path)) for text in error.args)
        raise
