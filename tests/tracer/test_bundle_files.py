"""Where bundles are written: equal bytes, sparse where they were, nobody else's to read."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from tracer import bundle_files
from tracer.bundle_files import FolderTarget, packed

LOG = b'{"kind":"header"}\n' + bytes(1 << 20)


def test_a_folder_keeps_the_unwritten_end_of_a_log_without_room_for_it(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(LOG)
    found = FolderTarget(tmp_path / "out").add("run-1/log", tmp_path / "log")
    copy = tmp_path / "out" / "run-1" / "log"
    assert found == (len(LOG), hashlib.sha256(LOG).hexdigest())
    assert copy.read_bytes() == LOG
    # A piece is written whole, so that up to one of zeros is there.
    assert copy.stat().st_blocks * 512 <= 2 * bundle_files.CHUNK_BYTES
    assert [path.stat().st_mode & 0o777 for path in (copy, copy.parent)] == [0o600, 0o700]


@pytest.mark.parametrize("memory_bytes_max", [0, 1 << 26])
def test_a_tar_has_the_same_bytes_whether_a_file_fits_into_memory_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes_max: int
) -> None:
    monkeypatch.setattr(bundle_files, "MEMORY_BYTES_MAX", memory_bytes_max)
    (tmp_path / "log").write_bytes(LOG)
    stream = io.BytesIO()
    with packed(stream) as target:
        found = target.add("run-1/log", tmp_path / "log")
    assert found == (len(LOG), hashlib.sha256(LOG).hexdigest())
    stream.seek(0)
    with tarfile.open(fileobj=stream) as tar:
        member = tar.getmember("run-1/log")
        content = tar.extractfile(member)
        assert content is not None
        assert content.read() == LOG
        assert (member.mode, member.mtime, member.uid, member.uname) == (0o600, 0, 0, "")
