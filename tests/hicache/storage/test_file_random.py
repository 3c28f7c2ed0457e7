"""The file backend beside a plain dict, while files are damaged and replaced behind its back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import pytest

from hicache.core import SIDE_POOLS
from hicache.ports import Found
from hicache.storage.backend import survey
from hicache.storage.file import FileBackend
from hicache.storage.names import Names

OPERATIONS = 3000
HASHES = [f"{index:02x}" * 32 for index in range(12)]
POOLS = ("kv", "indexer", "mamba")
# looks_good: size and footer are right and the page is not, which a query can't know.
Truth = Literal["good", "looks_good", "not_there"]


class World:
    """A backend, its folder, and what is true of every page in it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.names = Names("_m_0_2", "_m_0_2", writes_kv=True)
        self.backend = FileBackend(str(folder), self.names, b"0123456789abcdef")
        self.backend.open()
        self.truth: dict[tuple[str, str], Truth] = {}

    def is_there(self, pool: str, page_hash: str) -> bool:
        return self.truth.get((pool, page_hash), "not_there") != "not_there"

    def page(self, pool: str, page_hash: str) -> bytes:
        return f"{pool} {page_hash}".encode() * (int(page_hash[:2], 16) + 1)

    def path(self, pool: str, page_hash: str) -> Path:
        return self.folder / f"{self.names.stem(pool, page_hash)}.bin"

    def some(self) -> tuple[str, list[str]]:
        return self.chance.choice(POOLS), self.chance.sample(HASHES, self.chance.randint(1, 6))

    def set(self) -> None:
        pool, hashes = self.some()
        done = self.backend.batch_set(pool, hashes, [self.page(pool, each) for each in hashes], prefix=())
        assert done == [not self.path(pool, each).is_dir() for each in hashes]
        for page_hash, is_done in zip(hashes, done, strict=True):
            self.truth[pool, page_hash] = "good" if is_done else "not_there"

    def get(self) -> None:
        pool, hashes = self.some()
        pages = self.backend.batch_get(pool, hashes, prefix=())
        for page_hash, page in zip(hashes, pages, strict=True):
            is_good = self.truth.get((pool, page_hash)) == "good"
            assert page == (self.page(pool, page_hash) if is_good else None)
            if not is_good:
                self.truth[pool, page_hash] = "not_there"

    def query(self) -> None:
        hashes = self.some()[1]
        pools = [SIDE_POOLS["indexer"], SIDE_POOLS["mamba"]]
        found = self.backend.batch_exists_v2(hashes, pools, prefix=())
        assert found == survey(hashes, pools, self.is_there)
        assert isinstance(found, Found)
        assert self.backend.batch_exists(hashes, prefix=()) == found.kv_pages

    def clear(self) -> None:
        seen = [key for key, truth in self.truth.items() if truth != "not_there"]
        assert self.backend.clear() == len(seen)
        self.truth = dict.fromkeys(self.truth, "not_there")

    def restart(self) -> None:
        self.backend.close()
        self.backend = FileBackend(str(self.folder), self.names, b"0123456789abcdef")
        self.backend.open()
        assert not [path for path in self.folder.iterdir() if path.name.endswith(".tmp")]

    def damage(self) -> None:
        """Something happens to one place, whatever is there now."""
        pool, (page_hash, *_) = self.some()
        path = self.path(pool, page_hash)
        if path.is_dir():
            path.rmdir()
            return
        kind = self.chance.choice(["flip", "cut", "grow", "remove", "folder", "link", "empty", "temp"])
        if kind == "temp":
            (self.folder / f".hicache-{self.chance.getrandbits(64):x}.tmp").write_bytes(b"half a page")
            return
        truth = self.truth.get((pool, page_hash), "not_there")
        self.truth[pool, page_hash] = "not_there"
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        path.unlink(missing_ok=True)
        match kind:
            case "flip" if truth == "good":
                at = self.chance.randrange(len(data) - 40)
                path.write_bytes(data[:at] + bytes([data[at] ^ 0x80]) + data[at + 1 :])
                self.truth[pool, page_hash] = "looks_good"
            case "cut" if data:
                path.write_bytes(data[: self.chance.randrange(len(data))])
            case "grow":
                path.write_bytes(data + b"x")
            case "folder":
                path.mkdir()
            case "link":
                path.symlink_to("/etc/hostname")
            case "empty":
                path.touch()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_a_page_is_right_or_not_there_whatever_happens_to_the_files(seed: int, tmp_path: Path) -> None:
    world = World(tmp_path / "kv", seed)
    for step in range(OPERATIONS):
        name = world.chance.choices(
            ["set", "get", "query", "damage", "clear", "restart"], [30, 30, 20, 18, 1, 1]
        )[0]
        try:
            getattr(world, name)()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {step}: {name}") from error
