"""Archives from anywhere: what comes out of them, what never does, and what is said of it."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tracer.archives import ArchiveError, Limits, is_archive, opened


def tarred(path: Path, members: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def read(path: Path, limits: Limits = Limits()) -> tuple[dict[str, bytes], tuple[str, ...]]:  # noqa: B008
    """Name inside -> bytes, and the notes."""
    with opened(path, limits=limits) as found:
        return {name: file.read_bytes() for file, name in found.names.items()}, found.notes


FILES = {"host-a/rank0000.scheduler.000.jsonl": b"one\n", "./host-b/notes.txt": b"two\n"}


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("b.tar", lambda path: tarred(path, FILES, "w:")),
        ("b.tar.gz", lambda path: tarred(path, FILES, "w:gz")),
        ("b.tar.bz2", lambda path: tarred(path, FILES, "w:bz2")),
        ("b.tar.xz", lambda path: tarred(path, FILES, "w:xz")),
        ("b.zip", lambda path: zipped(path, FILES)),
    ],
)
def test_each_kind_of_archive_gives_its_files_by_name(
    tmp_path: Path, name: str, make: Callable[[Path], Path]
) -> None:
    expected = {
        f"{name}!host-a/rank0000.scheduler.000.jsonl": b"one\n",
        f"{name}!./host-b/notes.txt": b"two\n",
    }
    assert (expected, ()) == read(make(tmp_path / name))


def test_the_folder_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    with opened(tarred(tmp_path / "b.tar.gz", FILES)) as found:
        folder = found.folder
        modes = {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
        assert {0o700, 0o600} == modes
    assert not folder.exists()


def test_the_folder_is_gone_after_an_interrupt(tmp_path: Path) -> None:
    path = tarred(tmp_path / "b.tar.gz", FILES)
    folders = []

    def interrupted() -> None:
        with opened(path) as found:
            folders.append(found.folder)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [folder.exists() for folder in folders] == [False]


def test_what_is_no_regular_file_or_leads_elsewhere_is_left_out_and_told(tmp_path: Path) -> None:
    path = tmp_path / "b.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in (
            ("link", tarfile.SYMTYPE),
            ("hard", tarfile.LNKTYPE),
            ("pipe", tarfile.FIFOTYPE),
            ("disk", tarfile.BLKTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name in ("/absolute", "a/../../out", "good"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    expected = (
        "b.tar!link and 1 more: a link: left out",
        "b.tar!pipe and 1 more: no regular file: left out",
        "b.tar!/absolute: an absolute name: left out",
        "b.tar!a/../../out: a name that leads outside: left out",
    )
    assert ({"b.tar!good": b"abc"}, expected) == read(path)


def test_links_in_a_zip_are_left_out(tmp_path: Path) -> None:
    path = zipped(tmp_path / "b.zip", {"good": b"abc"})
    with zipfile.ZipFile(path, "a") as archive:
        info = zipfile.ZipInfo("link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    assert read(path) == ({"b.zip!good": b"abc"}, ("b.zip!link: a link: left out",))


def test_files_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "b.tar"
    with tarfile.open(path, "w") as tar:
        for data in (b"first", b"other"):
            info = tarfile.TarInfo("host/log")
            info.size = 5
            tar.addfile(info, io.BytesIO(data))
    expected = {"b.tar!host/log": b"first", "b.tar!host/log (the 2. of that name)": b"other"}
    assert (expected, ()) == read(path)


def test_a_file_where_another_needs_a_folder_is_kept_apart(tmp_path: Path) -> None:
    path = tarred(tmp_path / "b.tar", {"a": b"file", "a/b": b"below"}, "w:")
    assert {b"file", b"below"} == set(read(path)[0].values())


def test_an_archive_in_an_archive_is_unpacked_and_one_in_that_is_not(tmp_path: Path) -> None:
    deepest = tarred(tmp_path / "deepest.tar", {"x": b"x"}, "w:").read_bytes()
    inner = zipped(tmp_path / "i.zip", {"log": b"log", "deepest.tar": deepest}).read_bytes()
    files, notes = read(tarred(tmp_path / "b.tar.gz", {"hosts/i.zip": inner}))
    assert {"b.tar.gz!hosts/i.zip!log", "b.tar.gz!hosts/i.zip!deepest.tar"} == set(files)
    expected = ("b.tar.gz!hosts/i.zip!deepest.tar: an archive in an archive in an archive is not unpacked",)
    assert expected == notes


def test_a_compressed_log_is_no_archive(tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "rank0000.scheduler.000.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"kind":"header"}\n' * 100))
    assert not is_archive(path)
    with pytest.raises(ArchiveError, match="is no archive"), opened(path):
        pass


def test_what_is_not_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="No such file"), opened(tmp_path / "gone.zip"):
        pass


def test_a_bomb_is_stopped_and_what_came_before_it_stays(tmp_path: Path) -> None:
    path = tarred(tmp_path / "b.tar.gz", {"good": b"abc", "bomb": b"a" * (40 << 20), "behind": b"x"})
    expected = ("b.tar.gz: it unpacks to more than 200 times its size: what comes behind is not read",)
    assert ({"b.tar.gz!good": b"abc"}, expected) == read(path)


def test_a_bomb_in_an_archive_in_the_archive_is_stopped(tmp_path: Path) -> None:
    bomb = zipped(tmp_path / "bomb.zip", {"zeros": bytes(30 << 20)}).read_bytes()
    files, notes = read(zipped(tmp_path / "b.zip", {"good": b"abc", "bomb.zip": bomb}))
    assert {"b.zip!good"} == set(files)
    assert (notes) == (
        "b.zip!bomb.zip: it unpacks to more than 200 times its size: what comes behind is not read",
    )


def test_the_unwritten_ends_of_many_logs_are_no_bomb_and_take_no_room(tmp_path: Path) -> None:
    log = b'{"kind":"header"}\n' + bytes(4 << 20)
    path = tarred(tmp_path / "b.tar.gz", {f"rank{rank:04d}.io.000.jsonl": log for rank in range(8)})
    with opened(path) as found:
        sizes = {(file.stat().st_size, file.stat().st_blocks * 512 <= 64 << 10) for file in found.names}
        assert ({(len(log), True)}, ()) == (sizes, found.notes)


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (Limits(members_max=1), "b.tar.gz: it holds more than 1 files: what comes behind is not read"),
        (Limits(bytes_max=5), "b.tar.gz: it unpacks to more than 5 bytes: what comes behind is not read"),
    ],
)
def test_more_than_the_limits_is_not_read(tmp_path: Path, limits: Limits, told: str) -> None:
    path = tarred(tmp_path / "b.tar.gz", {"one": b"1111", "two": b"2222"})
    assert ({"b.tar.gz!one": b"1111"}, (told,)) == read(path, limits)


def test_too_long_a_name_is_left_out(tmp_path: Path) -> None:
    path = tarred(tmp_path / "b.tar", {"good": b"abc", "n" * 256: b"x", "d/" * 600 + "f": b"x"}, "w:")
    files, (note,) = read(path)
    assert {"b.tar!good"} == set(files)
    assert note.endswith("and 1 more: too long a name: left out")


def test_a_header_of_gigabytes_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "b.tar"
    info = tarfile.TarInfo("long")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 8 << 20
    with tarfile.open(path, "w") as tar:
        good = tarfile.TarInfo("good")
        good.size = 3
        tar.addfile(good, io.BytesIO(b"abc"))
        tar.addfile(info, io.BytesIO(b"n" * (8 << 20)))
    files, notes = read(path)
    assert {"b.tar!good"} == set(files)
    assert notes == ("b.tar: a header in it is longer than anything honest: what comes behind is not read",)


@pytest.mark.parametrize("mode", ["w:", "w:gz", "w:bz2", "w:xz"])
def test_a_tar_that_was_cut_gives_what_stands_before_the_cut(tmp_path: Path, mode: str) -> None:
    path = tarred(tmp_path / "b.tar", {"first": os.urandom(200_000), "second": os.urandom(1_200_000)}, mode)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size * 3 // 4)
    files, (note,) = read(path)
    assert len(files["b.tar!first"]) == 200_000
    assert note.startswith("b.tar is damaged, and read as far as it goes: ")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_zip_that_was_cut_is_read_from_the_front(tmp_path: Path, is_streamed: bool) -> None:
    class Unseekable(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def seek(self, *_: object) -> int:
            raise io.UnsupportedOperation

        def tell(self) -> int:
            raise io.UnsupportedOperation

    stream = Unseekable() if is_streamed else io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("first", "second", "third"):
            archive.writestr(name, name.encode() * 1000 + os.urandom(5000))
    path = tmp_path / "b.zip"
    path.write_bytes(stream.getvalue()[:12_000])
    files, notes = read(path)
    assert sorted(files) == ["b.zip!first", "b.zip!second", "b.zip!third"]
    assert len(files["b.zip!first"]) == 10_000
    assert len(files["b.zip!second"]) == 11_000
    assert all("is damaged, and read as far as it goes" in note for note in notes)


def test_a_member_whose_checksum_differs_is_told_and_the_next_is_read(tmp_path: Path) -> None:
    path = tmp_path / "b.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("bad", bytes(1 << 14) + b"spoilt")
        archive.writestr("good", b"abc")
    path.write_bytes(path.read_bytes().replace(b"spoilt", b"SPOILT", 1))
    files, (note,) = read(path)
    assert {"b.zip!bad": bytes(1 << 14), "b.zip!good": b"abc"} == files
    assert note.startswith("b.zip!bad is damaged")


def test_an_encrypted_member_is_left_out(tmp_path: Path) -> None:
    data = bytearray(zipped(tmp_path / "b.zip", {"secret": b"abc", "good": b"abc"}).read_bytes())
    # The flag of the first member, in front of it and in the table of contents.
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "b.zip").write_bytes(data)
    assert read(tmp_path / "b.zip") == ({"b.zip!good": b"abc"}, ("b.zip!secret: encrypted: left out",))


def test_where_nothing_can_be_taken_the_reason_is_told(tmp_path: Path) -> None:
    path = tarred(tmp_path / "b.tar", {"/absolute": b"x"}, "w:")
    with pytest.raises(ArchiveError, match=r"nothing in .*\n.*an absolute name"), opened(path):
        pass


def test_a_full_disk_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    import tracer.archives as archives

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(archives, "_write", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ArchiveError, match=r"No space left on device\n.*\n  try       TMPDIR"):
        read(tarred(tmp_path / "b.tar.gz", FILES))
    assert [path.name for path in tmp_path.iterdir()] == ["b.tar.gz"]


def test_names_that_can_not_be_shown_are_made_so(tmp_path: Path) -> None:
    path = tarred(tmp_path / "b.tar", {"a\x1b[31m\nb": b"x"}, "w:")
    assert read(path) == ({"b.tar!a_[31m_b": b"x"}, ())
