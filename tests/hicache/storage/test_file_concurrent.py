"""One folder, several processes: what they do to each other, also when one is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.hicache.storage.hammer import HASHES, backend_at, hammer, page_of


def start(folder: Path, seed: int, operations: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.hicache.storage.hammer", str(folder), str(seed), str(operations)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def assert_only_whole_pages(folder: Path) -> None:
    backend = backend_at(str(folder))
    backend.open()
    assert [path.name for path in folder.iterdir() if not path.name.endswith("_m_0_1.bin")] == []
    pages = backend.batch_get("kv", HASHES, prefix=())
    assert [
        page for page, page_hash in zip(pages, HASHES, strict=True) if page not in (None, page_of(page_hash))
    ] == []
    assert backend.get_stats()["pages_damaged"] == backend.get_stats()["pages_unknown"] == 0


def test_processes_that_share_every_name_never_see_half_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "by" / "whoever" / "is" / "first"
    processes = [start(folder, seed, 600) for seed in (1, 2)]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        stats = json.loads(out)
        assert stats["pages_damaged"] == stats["pages_unknown"] == 0
        assert min(stats["pages_read"], stats["pages_written"], stats["pages_evicted"]) > 0, stats
    assert_only_whole_pages(folder)


def test_a_process_that_is_killed_leaves_nothing_that_its_successor_does_not_clean_up(tmp_path: Path) -> None:
    for seed in range(4):
        process = start(tmp_path, seed, 1_000_000)
        try:
            deadline = time.monotonic() + 100
            while len(list(tmp_path.iterdir())) < 10:
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < deadline, "it writes nothing"
                time.sleep(0.001)
            time.sleep(0.003 * seed)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert_only_whole_pages(tmp_path)


def test_threads_of_a_process_may_share_a_backend(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            hammer(str(tmp_path), seed, 150)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert_only_whole_pages(tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_start_at_once_all_get_the_folder(seed: int, tmp_path: Path) -> None:
    """Each makes the folders on the way; whoever comes second finds them made."""
    folder = tmp_path / os.path.join(*"abcdefgh")
    go = threading.Barrier(8)
    failed: list[BaseException] = []

    def open_one() -> None:
        try:
            go.wait(10)
            backend_at(str(folder)).open()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=open_one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert failed == []
    assert folder.is_dir()
