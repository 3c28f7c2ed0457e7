"""The logs of one job from many places: which ranks of which run there are, and one bundle of them.

Owns the rule of what belongs together: lanes with one run id and attempt, each rank once. A rank that is
there twice with other bytes begins a copy of that run, for nobody can say which of the two is the run's.

    HOST_DIR/rank0000...               run-1/rank0000... rank0001... rank0002...
    HOST_DIR/<run id>/rank0000...  ->  run-2/rank0000...
    host-b.tar.gz!rank0002...          evidence/host-a/...        other programs' files
                                       bundle.json                who is there, who is not, what was left out

The originals are only read. Nothing is judged here: a rank that is not there is missing, and no more.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any, Protocol

from tracer.errors import LogError, TracerError
from tracer.freeze import FOLDER_BEGIN
from tracer.log import LaneLog, find_logs
from tracer.places import SEGMENT
from tracer.sinks import SUMMARY_NAME, meta_name

SCHEMA = "hicache.bundle.v1"
MANIFEST = "bundle.json"
EVIDENCE = "evidence"
RANK_PREFIX_CHARS = 4
# Folders below a given one that are looked into, and files that are looked at.
DEPTH_MAX = 6
FILES_MAX = 100_000
# A side file is small; what is larger under such a name is something else.
META_BYTES_MAX = 1 << 16

RunKey = tuple[str, int]


class BundleError(TracerError):
    """What was given holds nothing to bundle, or no run of that name."""


@dataclass(frozen=True, slots=True)
class Source:
    """A folder that holds what one host has left.

    Attributes:
        host: what the host is called where its files don't say.
        names: file -> what to call it, where that is not its path.
    """

    place: Path
    host: str
    names: Mapping[Path, str] = field(default_factory=dict)

    def shown(self, path: Path) -> str:
        return self.names.get(path, str(path))


@dataclass(frozen=True, slots=True)
class RankLogs:
    """All files of one rank in one run.

    Attributes:
        files: name in the run's folder -> file: its segments, what lies beside them, and copies of them that
            were kept when somebody asked for it.
        started_ns: wall clock of its host when it began, or None.
    """

    rank: int
    host: str
    source: Source
    folder: Path
    files: dict[str, Path]
    started_ns: int | None


@dataclass(slots=True)
class FoundRun:
    """The logs of one attempt of one run.

    Attributes:
        copy: 1, or more where ranks of this run and attempt are there again with other bytes.
        summaries: files `run.json` that lay beside its logs.
    """

    run_id: str
    attempt: int
    copy: int
    world_size: int
    ranks: dict[int, RankLogs] = field(default_factory=dict)
    summaries: list[tuple[Source, Path]] = field(default_factory=list)

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank not in self.ranks)

    @property
    def started_ns(self) -> int | None:
        """The median of its hosts' clocks, since one may be minutes off."""
        known = [found.started_ns for found in self.ranks.values() if found.started_ns is not None]
        return median_low(known) if known else None


@dataclass(slots=True)
class Survey:
    """What lies in all the places.

    Attributes:
        runs: the newest last.
        others: files that are not ours, with the source that they are of.
        left_out: name -> why.
    """

    runs: list[FoundRun] = field(default_factory=list)
    others: list[tuple[Source, Path]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def survey(sources: Sequence[Source]) -> Survey:
    """Look through folders for logs and other evidence; reads the logs' headers only."""
    found = Survey()
    for source in sources:
        for folder, files in _folders(source, found):
            names = {path.name for path in files}
            if folder.name.startswith(FOLDER_BEGIN) and _take_frozen(source, folder, files, found):
                continue
            if any(map(SEGMENT.fullmatch, names)):
                _take_logs(source, folder, files, found)
            else:
                kept = [path for path in files if path.name not in (MANIFEST, SUMMARY_NAME)]
                found.others += [(source, path) for path in kept]
    latest: dict[str, int] = {}
    for run in found.runs:
        latest[run.run_id] = max(latest.get(run.run_id, 0), run.started_ns or 0)
    # Of one run the number of the attempt says what is newer, of several only their hosts' clocks can.
    found.runs.sort(
        key=lambda run: (latest[run.run_id], run.run_id, run.attempt, run.started_ns or 0, run.copy)
    )
    return found


def _folders(source: Source, found: Survey) -> Iterator[tuple[Path, list[Path]]]:
    """Each folder with its regular files, in order of name; links are not followed."""
    seen = 0

    def unlistable(error: OSError) -> None:
        found.left_out[str(error.filename)] = f"can't be listed: {error.strerror}"

    for folder, folders, names in os.walk(source.place, onerror=unlistable):
        place = Path(folder)
        depth = len(place.relative_to(source.place).parts)
        for name in sorted(folders):
            if (place / name).is_symlink():
                found.left_out[source.shown(place / name)] = "a link"
            elif depth >= DEPTH_MAX:
                found.left_out[source.shown(place / name)] = f"more than {DEPTH_MAX} folders deep"
        folders[:] = (
            [] if depth >= DEPTH_MAX else sorted(name for name in folders if not name.startswith("."))
        )
        files = []
        for name in sorted(names):
            path = place / name
            if name.startswith("."):
                continue
            seen += 1
            if seen > FILES_MAX:
                found.left_out[source.shown(path)] = f"behind the first {FILES_MAX:,} files"
                return
            if not _is_regular(path):
                found.left_out[source.shown(path)] = "a link, or no regular file"
                continue
            files.append(path)
        if files:
            yield place, files


def _is_regular(path: Path) -> bool:
    with suppress(OSError):
        return stat.S_ISREG(path.lstat().st_mode)
    return False


def _take_logs(source: Source, folder: Path, files: Sequence[Path], found: Survey) -> None:
    try:
        run = find_logs(folder)
    except LogError as error:
        for path in files:
            found.left_out[source.shown(path)] = error.what
        return
    found.notes += run.unreadable
    lanes_of: dict[RunKey, dict[int, list[LaneLog]]] = {}
    for lane in run.lanes:
        key = lane.run_id, int(lane.header.get("attempt", 0))
        lanes_of.setdefault(key, {}).setdefault(lane.rank, []).append(lane)
    owners: dict[int, set[RunKey]] = {}
    for key, ranks in lanes_of.items():
        for rank in ranks:
            owners.setdefault(rank, set()).add(key)
    taken: set[Path] = set()
    for key, ranks in lanes_of.items():
        world_size = max(int(lane.header["world_size"]) for lanes in ranks.values() for lane in lanes)
        mine = []
        for rank, lanes in sorted(ranks.items()):
            own = [path for lane in lanes for path in lane.files]
            if len(owners[rank]) == 1:
                # What can't be read of it, and what lies beside it, goes with it.
                own += [path for path in files if path not in own and _rank_of(path) == rank]
            taken.update(own)
            host, started_ns = _meta(folder / meta_name(rank))
            named = {path.name: path for path in own}
            mine.append(RankLogs(rank, host or source.host, source, folder, named, started_ns))
        run_of_it = _joined(found, key, world_size, mine)
        summary = folder / SUMMARY_NAME
        if summary in files:
            run_of_it.summaries.append((source, summary))
            taken.add(summary)
    found.others += [(source, path) for path in files if path not in taken and path.name != MANIFEST]


def _take_frozen(source: Source, folder: Path, files: Sequence[Path], found: Survey) -> bool:
    """Copies of a ring's files, kept beside it: they go with their rank, and are no run of their own."""
    beside = {
        rank: ranked
        for run in found.runs
        for rank, ranked in run.ranks.items()
        if ranked.source is source and ranked.folder == folder.parent
    }
    if not beside:
        return False
    for path in files:
        rank = _rank_of(path)
        if rank in beside:
            beside[rank].files[f"{folder.name}/{path.name}"] = path
        else:
            found.others.append((source, path))
    return True


def _rank_of(path: Path) -> int | None:
    """The rank that a file is named after, as `rank0003.meta.json` is after rank 3."""
    prefix, _dot, rest = path.name.partition(".")
    digits = prefix.removeprefix("rank")
    is_ours = prefix != digits and digits.isdecimal() and len(digits) >= RANK_PREFIX_CHARS and rest
    return int(digits) if is_ours else None


def _meta(path: Path) -> tuple[str, int | None]:
    """Host and wall clock at start, from a rank's side file; nothing where they are not there."""
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        with path.open("rb") as file:
            facts = json.loads(file.read(META_BYTES_MAX))
        host, wall_ns = facts.get("host"), facts.get("wall_clock_ns")
        return (host if isinstance(host, str) else ""), (wall_ns if type(wall_ns) is int else None)
    return "", None


def _joined(found: Survey, key: RunKey, world_size: int, mine: Sequence[RankLogs]) -> FoundRun:
    """Add ranks to the first copy of their run in which none of them is yet, or is the same."""
    copies = [run for run in found.runs if (run.run_id, run.attempt) == key]
    for run in copies:
        twice = [ranked for ranked in mine if ranked.rank in run.ranks]
        if all(_are_same(run.ranks[ranked.rank], ranked) for ranked in twice):
            break
    else:
        run = FoundRun(*key, copy=len(copies) + 1, world_size=world_size)
        found.runs.append(run)
        twice = []
        if copies:
            ranks = ranks_text([ranked.rank for ranked in mine if ranked.rank in copies[0].ranks])
            found.notes.append(f"{ranks} of run {key[0]}: there again with other bytes, so kept apart")
    for ranked in twice:
        found.left_out[f"{ranked.source.shown(ranked.folder)}: rank {ranked.rank} of run {key[0]}"] = (
            "the same bytes as in another place"
        )
    run.world_size = max(run.world_size, world_size)
    for ranked in mine:
        run.ranks.setdefault(ranked.rank, ranked)
    return run


def _are_same(one: RankLogs, two: RankLogs) -> bool:
    """Whether two ranks' segments have the same names and bytes."""
    files = [
        {name: path for name, path in ranked.files.items() if SEGMENT.fullmatch(name)}
        for ranked in (one, two)
    ]
    if files[0].keys() != files[1].keys():
        return False
    with suppress(OSError):
        return all(_digest(path) == _digest(files[1][name]) for name, path in files[0].items())
    return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def ranks_text(ranks: Sequence[int], *, named_max: int = 8) -> str:
    """`rank 3`, `ranks 0-3, 8`; of many spans the first few and how many ranks more."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    named = [str(low) if low == high else f"{low}-{high}" for low, high in spans[:named_max]]
    more = sum(high - low + 1 for low, high in spans[named_max:])
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(named)}" + (f" and {more:,} more" if more else "")


class Target(Protocol):
    """Where a bundle is written: names with `/`, each once."""

    def add(self, name: str, source: Path) -> tuple[int, str]:
        """Copy a file; its size and its SHA-256. Raises: OSError."""

    def add_bytes(self, name: str, data: bytes) -> tuple[int, str]: ...


class Rewriting(Protocol):
    """What hides names; None where a bundle is to show them."""

    def host(self, name: str) -> str: ...

    def run_id(self, run_id: str) -> str: ...

    def file(self, path: Path) -> bytes | None:
        """A rank's file without names; None where that can't be had."""


def write_bundle(
    found: Survey,
    target: Target,
    *,
    tool_version: str,
    evidence: Sequence[tuple[Source, Path]] = (),
    rewriting: Rewriting | None = None,
) -> dict[str, Any]:
    """Write all runs and the evidence; the manifest comes last, and is returned.

    Raises:
        OSError: the target can't be written to.
    """
    files: list[dict[str, Any]] = []
    left_out = dict(found.left_out) if rewriting is None else {}
    hidden = len(found.left_out) if rewriting is not None else 0
    notes = list(found.notes) if rewriting is None else []

    def keep(name: str, source: Source, path: Path) -> None:
        nonlocal hidden
        try:
            if rewriting is None:
                size_bytes, digest = target.add(name, path)
            elif (data := rewriting.file(path)) is not None:
                size_bytes, digest = target.add_bytes(name, data)
            else:
                hidden += 1
                return
        except FileNotFoundError:
            # A ring that is still written has dropped it.
            left_out[source.shown(path) if rewriting is None else name] = "gone while it was read"
            return
        except PermissionError as error:
            left_out[source.shown(path) if rewriting is None else name] = f"can't be read: {error.strerror}"
            return
        entry = {"name": name, "bytes": size_bytes, "sha256": digest}
        files.append(entry | ({"from": source.shown(path)} if rewriting is None else {}))

    runs = []
    for number, run in enumerate(found.runs, start=1):
        folder = f"run-{number}"
        for _rank, ranked in sorted(run.ranks.items()):
            for name, path in ranked.files.items():
                keep(f"{folder}/{name}", ranked.source, path)
        if rewriting is None:
            for position, (source, summary) in enumerate(run.summaries):
                name = SUMMARY_NAME if not position else f"run.{position + 1}.json"
                keep(f"{folder}/{name}", source, summary)
        runs.append(_described(run, folder, is_newest=number == len(found.runs), rewriting=rewriting))
    for source, path in evidence if rewriting is None else ():
        inside = "/".join(path.relative_to(source.place).parts)
        keep(f"{EVIDENCE}/{source.host}/{inside}", source, path)
    hidden += len(evidence) if rewriting is not None else 0
    if hidden:
        notes.append(f"{hidden} files were left out, because names in them can't be replaced")
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "tool_version": tool_version,
        "anonymised": rewriting is not None,
        "runs": runs,
        "files": files,
        "left_out": [{"name": name, "why": why} for name, why in sorted(left_out.items())],
        "notes": notes,
    }
    target.add_bytes(MANIFEST, (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode())
    return manifest


def _described(run: FoundRun, folder: str, *, is_newest: bool, rewriting: Rewriting | None) -> dict[str, Any]:
    hosts: dict[str, list[int]] = {}
    for rank, ranked in sorted(run.ranks.items()):
        hosts.setdefault(ranked.host if rewriting is None else rewriting.host(ranked.host), []).append(rank)
    return {
        "folder": folder,
        "run_id": run.run_id if rewriting is None else rewriting.run_id(run.run_id),
        "attempt": run.attempt,
        "copy": run.copy,
        "is_newest": is_newest,
        "ranks_expected": run.world_size,
        "ranks_present": sorted(run.ranks),
        "ranks_missing": list(run.missing),
        "started_ns": run.started_ns,
        "hosts": [{"host": host, "ranks": ranks} for host, ranks in sorted(hosts.items())],
    }


def manifest_of(folder: Path) -> dict[str, Any] | None:
    """The manifest of the bundle that a folder holds; None where it holds none.

    Raises:
        BundleError: there is one that can't be read, or of another major version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
        schema = found["schema"]
        runs = [(str(run["folder"]), str(run["run_id"]), bool(run["is_newest"])) for run in found["runs"]]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise BundleError(f"{path} can't be read: {error}", expected=f"a manifest of {SCHEMA}") from None
    if schema != SCHEMA:
        raise BundleError(f"{path} is of {schema!r:.60}, this reader knows {SCHEMA}")
    if any(Path(name).name != name or name in ("", "..") for name, _run_id, _is_newest in runs):
        raise BundleError(f"{path} names a folder outside of the bundle")
    manifest: dict[str, Any] = found
    return manifest
