"""Logs of many places: what belongs together, who is missing; the originals stay as they are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.logs import write_lane
from tracer.bundle import BundleError, Source, manifest_of, ranks_text, survey, write_bundle
from tracer.bundle_files import FolderTarget

SIZES = {"dp": 1, "pp": 1, "cp": 1, "tp": 4}


def host(folder: Path, ranks: Sequence[int], *, started_ns: int | None = None, **header: Any) -> Source:
    """A host's folder with logs of some of four ranks."""
    for rank in ranks:
        write_lane(folder, [{"kind": "note", "text": str(rank)}], rank=rank, sizes=SIZES, **header)
        facts = {"host": folder.name, "pid": 7, "wall_clock_ns": started_ns, "monotonic_ns": 1}
        (folder / f"rank{rank:04d}.meta.json").write_text(json.dumps(facts))
    return Source(folder, folder.name)


def test_ranks_of_one_run_are_joined_and_the_missing_one_is_known(tmp_path: Path) -> None:
    found = survey([host(tmp_path / "a", (0, 1)), host(tmp_path / "b", (3,))])
    (run,) = found.runs
    assert (tuple(sorted(run.ranks)), run.missing, run.run_id) == ((0, 1, 3), (2,), "run-a")
    assert {rank: ranked.host for rank, ranked in run.ranks.items()} == {0: "a", 1: "a", 3: "b"}


def test_a_restart_in_a_folder_below_is_a_run_of_its_own_and_the_newest(tmp_path: Path) -> None:
    source = host(tmp_path / "a", (0,), started_ns=10**18)
    host(tmp_path / "a" / "run-b", (0,), started_ns=2 * 10**18, run_id="run-b")
    assert [run.run_id for run in survey([source]).runs] == ["run-a", "run-b"]


def test_attempts_of_one_run_are_kept_apart(tmp_path: Path) -> None:
    sources = [host(tmp_path / "a", (0, 1), attempt=1), host(tmp_path / "b", (0, 1), attempt=0)]
    assert [(run.run_id, run.attempt) for run in survey(sources).runs] == [("run-a", 0), ("run-a", 1)]


def test_one_host_whose_clock_is_minutes_ahead_does_not_make_an_old_run_the_newest(tmp_path: Path) -> None:
    minute = 60 * 10**9
    sources = [
        host(tmp_path / "old-a", (0,), started_ns=9 * minute),
        host(tmp_path / "old-b", (1, 2), started_ns=1 * minute),
        host(tmp_path / "new", (0, 1, 2), started_ns=3 * minute, run_id="run-b"),
    ]
    assert [run.run_id for run in survey(sources).runs] == ["run-a", "run-b"]


def test_a_rank_that_is_there_twice_with_other_bytes_is_kept_apart(tmp_path: Path) -> None:
    sources = [host(tmp_path / "a", (0, 1)), host(tmp_path / "b", (1,), tool_version="other")]
    found = survey(sources)
    assert [(run.copy, sorted(run.ranks)) for run in found.runs] == [(1, [0, 1]), (2, [1])]
    assert found.notes == ["rank 1 of run run-a: there again with other bytes, so kept apart"]


def test_a_copy_counts_once_and_is_told(tmp_path: Path) -> None:
    source = host(tmp_path / "a", (0, 1))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    found = survey([source, Source(tmp_path / "b", "b")])
    assert [sorted(run.ranks) for run in found.runs] == [[0, 1]]
    assert list(found.left_out.values()) == ["the same bytes as in another place"] * 2


def test_what_was_frozen_beside_a_ring_goes_with_its_rank(tmp_path: Path) -> None:
    source = host(tmp_path / "a", (0,))
    host(tmp_path / "a" / "frozen-17", (0,), tool_version="before")
    (run,) = survey([source]).runs
    assert "frozen-17/rank0000.scheduler.000.jsonl" in run.ranks[0].files


def test_links_are_not_followed(tmp_path: Path) -> None:
    source = host(tmp_path / "a", (0,))
    host(tmp_path / "elsewhere", (1,))
    (tmp_path / "a" / "more").symlink_to(tmp_path / "elsewhere")
    found = survey([source])
    assert [sorted(run.ranks) for run in found.runs] == [[0]]
    assert {str(tmp_path / "a" / "more"): "a link"} == found.left_out


def test_a_file_without_a_readable_header_goes_with_its_rank(tmp_path: Path) -> None:
    source = host(tmp_path / "a", (0,))
    (tmp_path / "a" / "rank0000.io.000.jsonl").write_bytes(b"{ damaged")
    (run,) = survey([source]).runs
    assert "rank0000.io.000.jsonl" in run.ranks[0].files


def test_a_bundle_has_the_same_bytes_and_says_who_is_there(tmp_path: Path) -> None:
    source = host(tmp_path / "a", (0, 1))
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in source.place.rglob("*")}
    write_bundle(survey([source]), FolderTarget(tmp_path / "out"), tool_version="test")
    manifest = manifest_of(tmp_path / "out")
    assert manifest is not None
    (run,) = manifest["runs"]
    assert (
        run["ranks_expected"],
        run["ranks_present"],
        run["ranks_missing"],
        run["is_newest"],
    ) == (4, [0, 1], [2, 3], True)
    assert run["hosts"] == [{"host": "a", "ranks": [0, 1]}]
    for path, (data, mtime_ns) in before.items():
        assert data == (tmp_path / "out" / "run-1" / path.name).read_bytes()
        assert (data, mtime_ns) == (path.read_bytes(), path.stat().st_mtime_ns)
    assert {0o600} == {path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*.*")}


def test_a_file_that_the_ring_dropped_in_between_is_noted(tmp_path: Path) -> None:
    source = host(tmp_path / "a", (0, 1))
    found = survey([source])
    os.unlink(tmp_path / "a" / "rank0001.scheduler.000.jsonl")
    manifest = write_bundle(found, FolderTarget(tmp_path / "out"), tool_version="test")
    expected = [{"name": f"{tmp_path}/a/rank0001.scheduler.000.jsonl", "why": "gone while it was read"}]
    assert expected == manifest["left_out"]


@pytest.mark.parametrize("text", ["{", '{"schema":"hicache.bundle.v2","runs":[]}', '{"schema":1}'])
def test_a_manifest_that_can_not_be_read_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "bundle.json").write_text(text)
    with pytest.raises(BundleError):
        manifest_of(tmp_path)


def test_a_manifest_never_leads_out_of_its_bundle(tmp_path: Path) -> None:
    run = {"folder": "../elsewhere", "run_id": "x", "is_newest": True}
    (tmp_path / "bundle.json").write_text(json.dumps({"schema": "hicache.bundle.v1", "runs": [run]}))
    with pytest.raises(BundleError, match="outside of the bundle"):
        manifest_of(tmp_path)


def test_many_ranks_are_told_in_short() -> None:
    told = ranks_text([3]), ranks_text([1, 2, 5]), ranks_text(range(0, 64, 2), named_max=2)
    assert told == ("rank 3", "ranks 1-2, 5", "ranks 0, 2 and 30 more")
