"""Pages as files: what is stored, what counts as a page, what is healed, what is left alone."""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from pathlib import Path

import pytest

from hicache.core import SIDE_POOLS
from hicache.errors import StorageError
from hicache.ports import Found
from hicache.storage.file import FileBackend
from hicache.storage.folder import Folder, OwnFile
from hicache.storage.limits import Limits
from hicache.storage.names import Contents, Names, names_of
from hicache.topology import Topology

IDENTITY = b"0123456789abcdef"
FOOTER_BYTES = 40


def opened(folder: Path, rank: int = 0, *, identity: bytes = IDENTITY, fsync: bool = False) -> FileBackend:
    names = names_of(Topology(tp=2), rank, Contents("m"))
    backend = FileBackend(str(folder), names, identity, fsync=fsync)
    backend.open()
    return backend


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_set_is_got(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    assert backend.batch_set("kv", ["a", "b"], [b"page a", b""], prefix=()) == [True, True]
    assert backend.batch_get("kv", ["b", "c", "a"], prefix=()) == [b"", None, b"page a"]
    assert backend.batch_exists(["a", "b", "c", "a"], prefix=()) == 2
    assert names(tmp_path) == ["a_m_0_2.bin", "b_m_0_2.bin"]


def test_the_page_comes_first_and_then_what_it_is(tmp_path: Path) -> None:
    """The format, written down a second time: changing it must change VERSION."""
    opened(tmp_path).set("kv", "a", b"page")
    head = struct.pack("<8sIIQ16s", b"HICACHE\n", 1, 0, 4, IDENTITY)
    crc = zlib.crc32(b"a_m_0_2" + head + b"page")
    expected = b"page" + struct.pack("<8sIIQ16s", b"HICACHE\n", 1, crc, 4, IDENTITY)
    assert (tmp_path / "a_m_0_2.bin").read_bytes() == expected


def test_another_process_and_a_later_one_find_the_pages(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.set("kv", "a", b"page")
    first.close()
    assert opened(tmp_path).get("kv", "a") == b"page"


def test_ranks_do_not_see_each_others_shards(tmp_path: Path) -> None:
    opened(tmp_path, 0).set("kv", "a", b"left half")
    assert opened(tmp_path, 1).get("kv", "a") is None


def test_a_page_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    backend.set("kv", "a", b"one")
    inode = (tmp_path / "a_m_0_2.bin").stat().st_ino
    assert backend.set("kv", "a", b"two")
    assert (tmp_path / "a_m_0_2.bin").stat().st_ino == inode
    assert backend.get("kv", "a") == b"one"
    assert (backend.get_stats()["pages_written"], backend.get_stats()["pages_kept"]) == (1, 1)


def test_a_page_of_another_length_makes_room(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    backend.set("kv", "a", b"short")
    assert backend.set("kv", "a", b"longer page")
    assert backend.get("kv", "a") == b"longer page"


def test_side_pools_have_files_of_their_own(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    backend.batch_set("kv", ["a", "b", "c"], [b"1", b"2", b"3"], prefix=())
    backend.batch_set("indexer", ["a", "b"], [b"1", b"2"], prefix=())
    backend.batch_set("mamba", ["b", "c"], [b"2", b"3"], prefix=())
    pools = [SIDE_POOLS["indexer"], SIDE_POOLS["mamba"]]
    assert backend.batch_exists_v2(["a", "b", "c"], pools, prefix=()) == Found(
        3, {"indexer": 2, "mamba": 3}, [2]
    )


@pytest.mark.parametrize("offset", range(4 + FOOTER_BYTES))
def test_a_flipped_byte_anywhere_is_a_miss_and_the_next_set_heals_it(offset: int, tmp_path: Path) -> None:
    backend = opened(tmp_path)
    backend.set("kv", "a", b"page")
    flip(tmp_path / "a_m_0_2.bin", offset)
    assert backend.get("kv", "a") is None
    assert not backend.exists("a")
    assert backend.set("kv", "a", b"page")
    assert backend.get("kv", "a") == b"page"


@pytest.mark.parametrize("offset", range(4 + FOOTER_BYTES))
def test_a_set_right_after_the_damage_heals_it_too(offset: int, tmp_path: Path) -> None:
    backend = opened(tmp_path)
    backend.set("kv", "a", b"page")
    flip(tmp_path / "a_m_0_2.bin", offset)
    assert backend.set("kv", "a", b"page")
    assert backend.get("kv", "a") == b"page"


@pytest.mark.parametrize("length", range(4 + FOOTER_BYTES))
def test_a_short_file_is_a_miss_that_a_query_sees_already(length: int, tmp_path: Path) -> None:
    backend = opened(tmp_path)
    backend.set("kv", "a", b"page")
    os.truncate(tmp_path / "a_m_0_2.bin", length)
    assert (backend.batch_exists(["a"], prefix=()), backend.get("kv", "a")) == (0, None)
    assert backend.set("kv", "a", b"page")
    assert backend.get("kv", "a") == b"page"


def test_a_file_that_has_lost_its_beginning_or_grown_is_a_miss(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    backend.set("kv", "a", b"page")
    path = tmp_path / "a_m_0_2.bin"
    whole = path.read_bytes()
    for content in (whole[1:], b"x" + whole, whole + b"x", whole + whole):
        path.write_bytes(content)
        assert (backend.exists("a"), backend.get("kv", "a")) == (False, None), content


def test_an_empty_page_that_is_damaged_is_written_anew(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    backend.set("kv", "a", b"")
    flip(tmp_path / "a_m_0_2.bin", 12)
    assert backend.set("kv", "a", b"")
    assert backend.get("kv", "a") == b""


def test_damage_that_was_healed_meanwhile_is_not_removed(tmp_path: Path) -> None:
    """Another process writes the page anew between this one's read and its removal."""
    folder = Folder(str(tmp_path), Names("_m", "_m", writes_kv=True), IDENTITY)
    folder.store("a_m", b"page", mtime_ns=None, fsync=False)
    flip(tmp_path / "a_m.bin", 0)
    seen, _ = folder.load("a_m")
    folder.store("a_m", b"page", mtime_ns=None, fsync=False)
    assert (seen.state, folder.remove(OwnFile("a_m", seen))) == ("damaged", False)
    assert folder.load("a_m")[1] == b"page"


def test_a_good_page_under_another_name_is_damage(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    backend.set("kv", "a", b"page")
    (tmp_path / "a_m_0_2.bin").rename(tmp_path / "b_m_0_2.bin")
    assert backend.get("kv", "b") is None


def test_damage_found_once_is_not_promised_again(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    backend.batch_set("kv", ["a", "b"], [b"page a", b"page b"], prefix=())
    flip(tmp_path / "b_m_0_2.bin", 0)
    assert backend.batch_exists(["a", "b"], prefix=()) == 2
    assert backend.batch_get("kv", ["a", "b"], prefix=()) == [b"page a", None]
    assert backend.batch_exists(["a", "b"], prefix=()) == 1
    assert backend.get_stats()["pages_damaged"] == 1


def test_a_page_of_another_configuration_is_a_miss_and_stays(tmp_path: Path) -> None:
    opened(tmp_path, identity=b"another identity").set("kv", "a", b"page")
    backend = opened(tmp_path)
    assert (backend.exists("a"), backend.get("kv", "a"), backend.clear()) == (False, None, 0)
    assert opened(tmp_path, identity=b"another identity").get("kv", "a") == b"page"


def test_writing_over_another_configurations_page_makes_it_ours(tmp_path: Path) -> None:
    other = opened(tmp_path, identity=b"another identity")
    other.set("kv", "a", b"page")
    backend = opened(tmp_path)
    assert backend.set("kv", "a", b"mine")
    assert (backend.get("kv", "a"), other.get("kv", "a")) == (b"mine", None)


def test_a_raw_file_of_a_server_without_footers_is_a_miss(tmp_path: Path) -> None:
    (tmp_path / "a_m_0_2.bin").write_bytes(b"\0" * 4096)
    backend = opened(tmp_path)
    assert (backend.exists("a"), backend.get("kv", "a")) == (False, None)


def test_a_page_that_vanishes_between_query_and_read_is_a_miss(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    backend.set("kv", "a", b"page")
    assert backend.exists("a")
    (tmp_path / "a_m_0_2.bin").unlink()
    assert backend.get("kv", "a") is None
    assert backend.get_stats()["pages_absent"] == 1


def test_a_folder_in_a_pages_place_is_a_miss_and_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "a_m_0_2.bin").mkdir()
    backend = opened(tmp_path)
    assert (backend.exists("a"), backend.get("kv", "a")) == (False, None)
    assert backend.batch_set("kv", ["a", "b"], [b"page a", b"page b"], prefix=()) == [False, True]
    assert names(tmp_path) == ["a_m_0_2.bin", "b_m_0_2.bin"]
    assert backend.get_stats()["pages_failed"] == 1


def test_a_link_is_never_followed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    opened(outside).set("kv", "a", b"secret")
    backend = opened(inside)
    (inside / "a_m_0_2.bin").symlink_to(outside / "a_m_0_2.bin")
    assert (backend.exists("a"), backend.get("kv", "a"), backend.clear()) == (False, None, 0)
    assert backend.set("kv", "a", b"page")
    assert (backend.get("kv", "a"), opened(outside).get("kv", "a")) == (b"page", b"secret")


def test_a_link_that_leads_nowhere_creates_nothing(tmp_path: Path) -> None:
    backend = opened(tmp_path / "inside")
    (tmp_path / "inside" / "a_m_0_2.bin").symlink_to(tmp_path / "target")
    assert backend.get("kv", "a") is None
    assert backend.set("kv", "a", b"page")
    assert not (tmp_path / "target").exists()


def test_a_pipe_in_a_pages_place_blocks_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a_m_0_2.bin")
    backend = opened(tmp_path)
    assert (backend.exists("a"), backend.get("kv", "a")) == (False, None)
    assert backend.set("kv", "a", b"page")
    assert backend.get("kv", "a") == b"page"


def test_a_name_that_is_too_long_is_not_written_and_not_there(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    page_hash = "a" * 300
    assert (backend.set("kv", page_hash, b"page"), backend.get("kv", page_hash)) == (False, None)
    assert not backend.exists(page_hash)
    assert names(tmp_path) == []


def test_a_folder_that_is_removed_while_in_use_is_made_again(tmp_path: Path) -> None:
    backend = opened(tmp_path / "kv")
    (tmp_path / "kv").rmdir()
    assert (backend.get("kv", "a"), backend.exists("a"), backend.clear()) == (None, False, 0)
    assert backend.set("kv", "a", b"page")
    assert backend.get("kv", "a") == b"page"


def test_a_folder_that_becomes_a_file_costs_the_pages_only(tmp_path: Path) -> None:
    backend = opened(tmp_path / "kv")
    (tmp_path / "kv").rmdir()
    (tmp_path / "kv").write_text("")
    assert (backend.set("kv", "a", b"page"), backend.get("kv", "a"), backend.clear()) == (False, None, 0)


@pytest.mark.parametrize("path", ["file/kv", "file", "x" * 300, "a\0b"])
def test_a_folder_that_can_not_be_made_is_refused_at_open(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"storage folder .*; name another folder"):
        opened(tmp_path / path)


def test_a_model_whose_name_leaves_no_room_for_a_hash_is_refused_at_open(tmp_path: Path) -> None:
    backend = FileBackend(str(tmp_path), Names("_" + "m" * 200, "_m_0_1", writes_kv=True), IDENTITY)
    with pytest.raises(StorageError, match="takes 269 bytes, its file system allows 255; serve the model"):
        backend.open()


def test_making_a_folder_that_another_rank_makes_at_the_same_time_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The race of two pipeline stages: not there when looked for, there when made."""
    real, folder = os.mkdir, tmp_path / "kv"

    def late(path: str, mode: int = 0o777) -> None:
        real(path, mode)
        raise FileExistsError(17, "File exists", path)

    monkeypatch.setattr(os, "mkdir", late)
    assert opened(folder).set("kv", "a", b"page")


def test_left_over_temp_files_are_removed_at_open(tmp_path: Path) -> None:
    (tmp_path / ".hicache-0123.tmp").write_bytes(b"half a pa")
    backend = opened(tmp_path)
    assert names(tmp_path) == []
    assert backend.get_stats()["left_overs_removed"] == 1


def test_a_temp_file_whose_writer_lives_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / ".hicache-0123.tmp").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        opened(tmp_path)
        assert names(tmp_path) == [".hicache-0123.tmp"]
    opened(tmp_path)
    assert names(tmp_path) == []


def test_a_page_being_written_is_locked_against_ranks_that_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path)
    removed: list[int] = []
    real = os.replace

    def start_another_then_replace(source: str, target: str) -> None:
        removed.append(opened(tmp_path, 1).get_stats()["left_overs_removed"])
        real(source, target)

    monkeypatch.setattr(os, "replace", start_another_then_replace)
    assert backend.set("kv", "a", b"page")
    assert removed == [0]


def test_other_peoples_temp_files_links_and_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".0123.tmp").write_bytes(b"")
    (tmp_path / ".hicache-folder.tmp").mkdir()
    (tmp_path / ".hicache-link.tmp").symlink_to(tmp_path / ".0123.tmp")
    opened(tmp_path)
    assert names(tmp_path) == [".0123.tmp", ".hicache-folder.tmp", ".hicache-link.tmp"]


def test_a_temp_file_that_is_taken_for_a_left_over_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is just starting comes between making a temp file and locking it."""
    backend = opened(tmp_path)
    real = os.open
    swept: list[str] = []

    def open_then_sweep(path: str, flags: int, mode: int = 0o777) -> int:
        fd = real(path, flags, mode)
        if path.endswith(".tmp") and not swept:
            swept.append(path)
            os.unlink(path)
        return fd

    monkeypatch.setattr(os, "open", open_then_sweep)
    assert backend.set("kv", "a", b"page")
    assert len(swept) == 1
    assert backend.get("kv", "a") == b"page"


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(tmp_path)
    real = os.write

    def short(fd: int, data: memoryview) -> int:
        if len(data) <= 2:
            raise OSError(28, "No space left on device")
        return real(fd, data[:2])

    monkeypatch.setattr(os, "write", short)
    assert not backend.set("kv", "a", b"page")
    assert names(tmp_path) == []


def test_a_disk_that_takes_a_part_at_a_time_is_written_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write, real_read = os.write, os.read
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:3]))
    monkeypatch.setattr(os, "read", lambda fd, count: real_read(fd, min(count, 3)))
    backend = opened(tmp_path)
    assert backend.set("kv", "a", b"a longer page")
    assert backend.get("kv", "a") == b"a longer page"


@pytest.mark.parametrize("call", ["read", "pread"])
def test_a_disk_error_is_a_miss(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(tmp_path)
    backend.set("kv", "a", b"page")

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    assert backend.get("kv", "a") is None
    assert backend.get_stats()["pages_unknown"] == 1


def test_clear_removes_a_ranks_own_pages_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("not a page")
    (tmp_path / "b_m_0_2.bin").write_bytes(b"raw page of a server without footers")
    (tmp_path / ".0123.tmp").write_bytes(b"")
    (tmp_path / "sub").mkdir()
    opened(tmp_path, 1).set("kv", "a", b"another rank's")
    opened(tmp_path, identity=b"another identity").set("kv", "c", b"another run's")
    backend = opened(tmp_path)
    backend.set("kv", "a", b"page")
    backend.set("mamba", "a", b"state")
    assert backend.clear() == 2
    assert names(tmp_path) == [".0123.tmp", "README", "a_m_1_2.bin", "b_m_0_2.bin", "c_m_0_2.bin", "sub"]


def test_clear_removes_what_a_damaged_page_has_left(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    backend.set("kv", "a", b"page")
    path = tmp_path / "a_m_0_2.bin"
    path.write_bytes(path.read_bytes()[2:])
    assert (backend.clear(), names(tmp_path)) == (1, [])


def test_clear_counts_what_it_could_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(tmp_path)
    backend.set("kv", "a", b"page")

    def fail(path: str) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "unlink", fail)
    assert backend.clear() == 0


def test_fsync_puts_the_page_on_disk_before_its_name_and_the_names_once_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path, fsync=True)
    calls: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(fd: int) -> None:
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "page")
        real_fsync(fd)

    def replace(source: str, target: str) -> None:
        calls.append("name")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    assert backend.batch_set("kv", ["a", "b"], [b"a", b"b"], prefix=()) == [True, True]
    assert calls == ["page", "name", "page", "name", "folder"]
    backend.batch_set("kv", ["a", "b"], [b"a", b"b"], prefix=())
    assert calls[5:] == []


def test_pages_whose_names_are_not_on_disk_do_not_count_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path, fsync=True)
    backend.set("kv", "a", b"a")
    real = os.fsync

    def fail_on_folders(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(5, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fail_on_folders)
    assert backend.batch_set("kv", ["a", "b"], [b"a", b"b"], prefix=()) == [True, False]


def test_without_limits_dates_are_left_alone(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    backend.set("kv", "a", b"page")
    os.utime(tmp_path / "a_m_0_2.bin", ns=(7, 7))
    backend.get("kv", "a")
    backend.set("kv", "a", b"page")
    assert (tmp_path / "a_m_0_2.bin").stat().st_mtime_ns == 7


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    backend = opened(tmp_path, fsync=True)
    (tmp_path / "b_m_0_2.bin").mkdir()
    os.mkfifo(tmp_path / "c_m_0_2.bin")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        backend.batch_set("kv", ["a", "b", "c", "d" * 300], [b"1", b"2", b"3", b"4"], prefix=())
        backend.batch_get("kv", ["a", "b", "c", "d" * 300], prefix=())
        backend.batch_exists_v2(["a", "b"], [SIDE_POOLS["mamba"]], prefix=())
        backend.clear()
        backend.open()
    assert len(os.listdir("/proc/self/fd")) == before


def test_calls_are_counted(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    backend.batch_set("kv", ["a", "b"], [b"12", b"345"], prefix=())
    backend.batch_get("kv", ["a", "c"], prefix=())
    assert backend.get_stats() == {
        "pages_read": 1,
        "pages_absent": 1,
        "pages_unknown": 0,
        "pages_damaged": 0,
        "pages_written": 2,
        "pages_kept": 0,
        "pages_refused": 0,
        "pages_failed": 0,
        "bytes_read": 2,
        "bytes_written": 5,
        "left_overs_removed": 0,
        "pages_evicted": 0,
    }


def test_a_path_is_absolute_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    backend = FileBackend("kv", Names("_m", "_m", writes_kv=True), IDENTITY, limits=Limits())
    monkeypatch.chdir("/")
    backend.open()
    assert names(tmp_path) == ["kv"]
