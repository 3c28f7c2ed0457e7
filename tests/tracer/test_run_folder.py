"""What a path stands for: a run's folder, a bundle, or an archive of hosts' folders."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.tracer.test_bundle import host
from tracer.bundle import BundleError, survey, write_bundle
from tracer.bundle_files import FolderTarget
from tracer.errors import LogError
from tracer.log import find_logs
from tracer.run_folder import run_folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Two runs, the second with two of four ranks."""
    sources = [
        host(tmp_path / "a", (0, 1), started_ns=1000),
        host(tmp_path / "b", (0, 1), started_ns=2000, run_id="run-b"),
    ]
    write_bundle(survey(sources), FolderTarget(tmp_path / "bundle"), tool_version="test")
    return tmp_path / "bundle"


def test_a_runs_folder_stands_for_itself(tmp_path: Path) -> None:
    source = host(tmp_path / "a", (0,))
    with run_folder(source.place) as placed:
        assert (source.place, ()) == (placed.folder, placed.notes)


def test_of_a_bundle_the_newest_run_is_taken_and_that_is_told(bundle: Path) -> None:
    with run_folder(bundle) as placed:
        assert bundle / "run-2" == placed.folder
        expected = (
            "read is run-2 (run run-b, attempt 0); there are run-1 too",
            "2 of 4 ranks are in it: ranks 2-3 are not",
        )
        assert expected == placed.notes


@pytest.mark.parametrize("name", ["run-1", "run-a"])
def test_a_run_can_be_asked_for_by_its_folder_or_its_id(bundle: Path, name: str) -> None:
    with run_folder(bundle, run=name) as placed:
        assert find_logs(placed.folder).run_id == "run-a"


def test_a_run_that_is_not_there_is_one_error(bundle: Path) -> None:
    with pytest.raises(BundleError, match="no run 'x' in"), run_folder(bundle, run="x"):
        pass


def test_an_archive_of_two_hosts_folders_is_one_run(tmp_path: Path) -> None:
    host(tmp_path / "a", (0, 1))
    host(tmp_path / "b", (2, 3))
    with tarfile.open(tmp_path / "hosts.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "a", "a")
        tar.add(tmp_path / "b", "b")
    with run_folder(tmp_path / "hosts.tar.gz") as placed:
        folder = placed.folder
        assert find_logs(folder).ranks == (0, 1, 2, 3)
    assert not folder.exists()


def test_errors_name_the_archive_and_not_a_folder_that_is_gone_soon(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("nothing of ours")
    with tarfile.open(tmp_path / "other.tar", "w") as tar:
        tar.add(tmp_path / "other.txt", "other.txt")
    with pytest.raises(LogError) as caught, run_folder(tmp_path / "other.tar") as placed:
        find_logs(placed.folder)
    assert str(caught.value).startswith(f"no logs in {tmp_path}/other.tar\n")
