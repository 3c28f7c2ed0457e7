from __future__ import annotations

from pathlib import Path

import pytest

from hicache.config import Config, StorageConfig
from hicache.errors import ConfigError
from hicache.storage.file import FileBackend
from hicache.storage.limits import Limits
from hicache.storage.make import make_backend
from hicache.storage.memory import MemoryBackend
from hicache.storage.names import Contents
from hicache.topology import Topology


def config(folder: Path, **fields: int) -> Config:
    storage = StorageConfig(backend="file", directory=str(folder / "kv"))
    return Config(topology=Topology(tp=2), storage=storage, **fields)  # type: ignore[arg-type]


def test_memory_backends_of_a_process_share_their_pages() -> None:
    shared: dict[str, bytes] = {}
    memory = Config(topology=Topology(dp=2), storage=StorageConfig(backend="memory"))
    first, second = (make_backend(memory, rank, shared=shared) for rank in (0, 1))
    assert isinstance(first, MemoryBackend)
    first.set("kv", "a", b"page")
    assert second.get("kv", "a") == b"page"


def test_nothing_is_touched_before_open(tmp_path: Path) -> None:
    backend = make_backend(config(tmp_path), 1, shared={}, contents=Contents("m"), environ={})
    assert list(tmp_path.iterdir()) == []
    backend.open()
    backend.set("kv", "a", b"page")
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["a_m_1_2.bin"]


def test_the_folder_of_the_environment_wins(tmp_path: Path) -> None:
    environ = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "else")}
    backend = make_backend(config(tmp_path), 0, shared={}, environ=environ)
    assert isinstance(backend, FileBackend)
    assert backend.path == str(tmp_path / "else")


def test_limits_that_are_given_win_over_the_environments(tmp_path: Path) -> None:
    environ = {"SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE": "10"}
    bound = make_backend(config(tmp_path), 0, shared={}, environ=environ)
    free = make_backend(config(tmp_path), 0, shared={}, environ=environ, limits=Limits())
    for backend in (bound, free):
        backend.open()
    assert (bound.set("kv", "a", b"page"), free.set("kv", "a", b"page")) == (False, True)


@pytest.mark.parametrize(
    "other",
    [Contents("org-m"), Contents("org/m", dtype="float8_e4m3fn"), Contents("org/m", weights="2")],
)
def test_another_configuration_never_reads_a_page_of_the_same_name(other: Contents, tmp_path: Path) -> None:
    mine = make_backend(config(tmp_path), 0, shared={}, contents=Contents("org/m"), environ={})
    others = make_backend(config(tmp_path), 0, shared={}, contents=other, environ={})
    mine.open()
    mine.set("kv", "a", b"page")
    assert (others.batch_exists(["a"], prefix=()), others.get("kv", "a")) == (0, None)


def test_another_page_size_is_another_configuration(tmp_path: Path) -> None:
    mine = make_backend(config(tmp_path), 0, shared={}, environ={})
    others = make_backend(config(tmp_path, page_size_tokens=32), 0, shared={}, environ={})
    mine.open()
    mine.set("kv", "a", b"page")
    assert others.get("kv", "a") is None


def test_an_unreadable_limit_of_the_environment_is_refused_and_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MAX_SIZE 'big'"):
        make_backend(config(tmp_path), 0, shared={}, environ={"SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE": "big"})
