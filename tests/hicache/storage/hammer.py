"""A process that uses one folder of pages as hard as it can, for tests with several of them.

`python -m tests.hicache.storage.hammer FOLDER SEED OPERATIONS` prints what it saw as JSON; an exception, or
a page with wrong bytes, ends it with 1.
"""

from __future__ import annotations

import json
import random
import sys

from hicache.storage.file import FileBackend
from hicache.storage.limits import Limits
from hicache.storage.names import Names

HASHES = [f"{index:064x}" for index in range(40)]
IDENTITY = b"0123456789abcdef"


def page_of(page_hash: str) -> bytes:
    """Pages of 1 byte to 40 KB, each other bytes."""
    number = int(page_hash, 16)
    return page_hash.encode() * (16 * number + 1)


def backend_at(folder: str, *, pages_max: int = 0) -> FileBackend:
    """Of one rank, always the same: all processes write under the same names."""
    limits = Limits(pages_max * 20_000)
    return FileBackend(folder, Names("_m_0_1", "_m_0_1", writes_kv=True), IDENTITY, limits=limits)


def hammer(folder: str, seed: int, operations: int) -> dict[str, int]:
    chance = random.Random(seed)
    backend = backend_at(folder, pages_max=30)
    backend.open()
    for _ in range(operations):
        hashes = chance.sample(HASHES, chance.randint(1, 8))
        match chance.choices(["set", "get", "exists", "clear", "open"], [40, 40, 17, 1, 2])[0]:
            case "set":
                backend.batch_set("kv", hashes, [page_of(each) for each in hashes], prefix=())
            case "get":
                for page_hash, page in zip(hashes, backend.batch_get("kv", hashes, prefix=()), strict=True):
                    assert page is None or page == page_of(page_hash), f"wrong bytes in {page_hash}"
            case "exists":
                backend.batch_exists(hashes, prefix=())
            case "clear":
                backend.clear()
            case "open":
                backend.open()
    return backend.get_stats()


if __name__ == "__main__":
    print(json.dumps(hammer(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
