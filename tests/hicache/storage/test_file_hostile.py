"""Real file systems that are full, read-only or forbidden, each in a process that may have one of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import sys
from hicache.errors import StorageError
from tests.hicache.storage.hammer import HASHES, backend_at, page_of
folder = sys.argv[1]
backend = backend_at(folder)
pages = [page_of(each) for each in HASHES]
"""


def run(script: str, folder: Path, *, before: str = "") -> str:
    """What `script` prints, run behind `before` in a mount namespace of its own."""
    if shutil.which("unshare") is None:
        pytest.fail("this test mounts a small tmpfs and needs unshare, of Debian's util-linux")
    words = f'{before} exec "{sys.executable}" -c "$SCRIPT" "{folder}"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", words],
        capture_output=True,
        text=True,
        env={**os.environ, "SCRIPT": PRELUDE + script},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_full_disk_refuses_pages_and_keeps_those_it_has(tmp_path: Path) -> None:
    script = """
backend.open()
done = backend.batch_set("kv", HASHES, pages, prefix=())
kept = backend.batch_get("kv", HASHES, prefix=())
assert [page if is_done else None for page, is_done in zip(pages, done)] == kept
import os
assert len(os.listdir(folder)) == sum(done)
print(0 < sum(done) < len(done))
backend.clear()
print(backend.batch_set("kv", HASHES[:5], pages[:5], prefix=()))
"""
    out = run(script, tmp_path, before=f"mount -t tmpfs -o size=200k none {tmp_path} &&")
    assert out.splitlines() == ["True", str([True] * 5)]


def test_a_read_only_disk_serves_what_it_has(tmp_path: Path) -> None:
    script = """
import subprocess
backend.open()
backend.batch_set("kv", HASHES[:3], pages[:3], prefix=())
path = f"{folder}/{HASHES[1]}_m_0_1.bin"
with open(path, "r+b") as file:
    file.write(b"x")
with open(f"{folder}/.hicache-0.tmp", "wb"):
    pass
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
backend.open()
print([page == pages[0] for page in backend.batch_get("kv", HASHES[:1], prefix=())])
print(backend.batch_get("kv", HASHES[1:2], prefix=()))
print(backend.batch_set("kv", HASHES[:4], pages[:4], prefix=()))
print(backend.clear(), backend.get_stats()["left_overs_removed"])
"""
    out = run(script, tmp_path, before=f"mount -t tmpfs -o size=1m none {tmp_path} &&")
    assert out.splitlines() == ["[True]", "[None]", "[True, False, True, False]", "0 0"]


def test_a_folder_that_may_not_be_read_is_refused_at_open_and_costs_no_exception_later(
    tmp_path: Path,
) -> None:
    script = """
import os
os.makedirs(folder, exist_ok=True)
os.chmod(folder, 0)
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
try:
    backend.open()
except StorageError as error:
    print(error)
print(backend.exists("a"), backend.get("kv", "a"), backend.set("kv", "a", b"page"), backend.clear())
"""
    # In the real world's processes: a namespace of one user has nobody else to be.
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, str(tmp_path / "kv")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"storage folder {tmp_path}/kv: {REASON[os.geteuid() == 0]}; name another folder",
        "False None False 0",
    ]


# Root's temporary folders are closed to others already, so the way to it is; else it is the folder itself.
REASON = {True: "Permission denied", False: "no permission to read it"}
