"""One run at a time in a folder, and a lock that blocks nobody once its process is gone."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.errors import CliError
from cli.folder import LOCK_NAME, prepared, refuse_used
from tests.cli.commands.test_run import SMALL
from tests.cli.conftest import Hicache

HOLD = "import sys; from pathlib import Path; from cli.folder import prepared\n"
HOLD += (
    "with prepared(Path(sys.argv[1]), overwrite=False):\n    print('held', flush=True); sys.stdin.read()\n"
)


def test_a_second_run_in_a_folder_is_refused_while_the_first_goes_on(
    tmp_path: Path, hicache: Hicache
) -> None:
    out = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        for more in ((), ("--overwrite",)):
            said = hicache("run", *SMALL, "--out", out, *more)
            assert (said.code, said.out) == (2, "")
            assert said.err.startswith(f"error: {out}: another process is making a run there right now\n")
        assert [file.name for file in out.iterdir()] == [LOCK_NAME]
        # Whatever kills the first, the folder is free again.
        first.kill()
    assert hicache("run", *SMALL, "--out", out).code == 0
    assert LOCK_NAME not in {file.name for file in out.iterdir()}


def test_a_run_that_came_between_look_and_lock_is_not_removed(tmp_path: Path) -> None:
    refuse_used(tmp_path, overwrite=False)
    (tmp_path / "rank0000.meta.json").write_text("{}")
    with pytest.raises(CliError, match="holds a run already"), prepared(tmp_path, overwrite=False):
        raise AssertionError("not reached")
    assert [file.name for file in tmp_path.iterdir()] == ["rank0000.meta.json"]


def test_a_lock_whose_file_was_removed_is_not_shared(tmp_path: Path) -> None:
    """Between opening the file and locking it, the run before removes it: the lock would be on nothing."""
    calls = []

    def flock(fd: int, how: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            (tmp_path / LOCK_NAME).unlink()
        real(fd, how)

    real, fcntl.flock = fcntl.flock, flock
    try:
        with prepared(tmp_path, overwrite=False):
            assert len(calls) == 2
            assert os.path.samestat(os.fstat(calls[1]), (tmp_path / LOCK_NAME).stat())
    finally:
        fcntl.flock = real
    assert list(tmp_path.iterdir()) == []


def test_the_lock_is_no_run_and_no_link_is_followed_for_it(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOCK_NAME).touch()
    refuse_used(tmp_path / "out", overwrite=False)
    (tmp_path / "out" / LOCK_NAME).unlink()
    (tmp_path / "out" / LOCK_NAME).symlink_to(tmp_path / "mine")
    with pytest.raises(CliError), prepared(tmp_path / "out", overwrite=False):
        raise AssertionError("not reached")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "loop", "loop/below"])
def test_a_folder_that_cannot_be_made_is_a_usage_error(name: str, tmp_path: Path, hicache: Hicache) -> None:
    (tmp_path / "loop").symlink_to("loop")
    said = hicache("run", *SMALL, "--out", tmp_path / name)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: ")
    assert "--out" in said.err
    assert "internal" not in said.err
    assert "Value error" not in said.err


def test_a_working_folder_that_was_removed_is_a_usage_error(
    tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    said = hicache("run", *SMALL, "--out", "out")
    assert (said.code, said.err.startswith("error: --out out: ")) == (2, True)
    for command in (["check", "."], ["hits", "here"], ["query", ".", "SELECT 1"]):
        assert hicache(*command).code == 3
