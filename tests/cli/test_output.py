"""A file is written whole or not at all, and nothing that is not a file of ours to write is replaced."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from cli.errors import CliError
from cli.output import refuse_unwritable, writing
from tests.cli.conftest import Hicache

SHAPES = ("table", "json", "csv", "parquet")
ASK = "SELECT rank FROM lanes"


def write(out: Path, data: bytes = b"new") -> None:
    with writing(out) as stream:
        stream.write(data)


def test_a_new_file_has_the_rights_of_any_new_file_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "old").touch(mode=0o640)
    write(tmp_path / "old")
    assert stat.S_IMODE((tmp_path / "old").stat().st_mode) == 0o640
    assert {"plain", "new", "old"} == {file.name for file in tmp_path.iterdir()}


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "dangling").symlink_to("made")
    for name, target in (("link", "target"), ("dangling", "made")):
        write(tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / target).read_bytes() == b"new"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_was_there_survives_a_write_that_fails(error: BaseException, tmp_path: Path) -> None:
    out = tmp_path / "rows"
    out.write_bytes(b"old")

    def fail() -> None:
        with writing(out) as stream:
            stream.write(b"half")
            raise error

    with pytest.raises((CliError, KeyboardInterrupt)):
        fail()
    assert out.read_bytes() == b"old"
    assert [out] == list(tmp_path.iterdir())


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write(pipe)
    reader.join()
    assert (read, stat.S_ISFIFO(pipe.stat().st_mode)) == ([b"new"], True)


@pytest.mark.parametrize(
    "name", ["rank0000.scheduler.000.jsonl", "rank0003.meta.json", "run.json", ".hicache.lock"]
)
def test_a_file_of_a_run_is_refused_under_any_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("a log")
    (tmp_path / "link").symlink_to(name)
    for out in (tmp_path / name, tmp_path / "link"):
        with pytest.raises(CliError, match="has the name of a run's own file"):
            refuse_unwritable(out)
        with pytest.raises(CliError):
            write(out)
    assert (tmp_path / name).read_text() == "a log"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["", ".", "folder", "nowhere/rows", "file/rows", "x" * 300, "loop", "a\0b"])
def test_a_place_that_is_no_file_is_a_usage_error(
    name: str, shape: str, inside: Path, tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    said = hicache("query", inside / "hung", ASK, "--format", shape, "--out", name)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: ")
    assert "--out" in said.err
    assert "Value error" not in said.err
    assert {"folder", "file", "loop"} == {file.name for file in tmp_path.iterdir()}


@pytest.mark.parametrize("shape", SHAPES)
def test_no_format_overwrites_a_log_of_the_run(
    shape: str, inside: Path, tmp_path: Path, hicache: Hicache
) -> None:
    log = inside / "hung" / "rank0000.scheduler.000.jsonl"
    before = log.read_bytes()
    (tmp_path / "link").symlink_to(log)
    for out in (log, tmp_path / "link"):
        assert hicache("query", "hung", ASK, "--format", shape, "--out", out).code == 2
    assert log.read_bytes() == before
    assert not log.is_symlink()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_format_goes_through_a_link_and_keeps_a_query_that_fails_out(
    shape: str, inside: Path, tmp_path: Path, hicache: Hicache
) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    words = ("--format", shape, "--out", tmp_path / "link")
    assert hicache("query", "hung", "SELECT error('boo') FROM lanes", *words).code == 2
    assert (tmp_path / "target").read_text() == "old"
    assert hicache("query", "hung", ASK, *words).code == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() != b"old"
    assert {"link", "target"} == {file.name for file in tmp_path.iterdir()}
