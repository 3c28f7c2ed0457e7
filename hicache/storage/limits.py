"""How much of a disk a rank's pages may take, and which of them goes when it is too much."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from threading import Lock
from typing import Any

from hicache.errors import ConfigError
from hicache.storage.folder import Folder, OwnFile

BYTES_MAX = 1 << 60
UNIT_BYTES = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate("KMGT", 1)},
    **{f"{unit}i": 1024**power for power, unit in enumerate("KMGT", 1)},
}
SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,6})?)([KMGT]i?)?B?")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one rank's pages on disk.

    Attributes:
        max_size_bytes: what its files may take together; 0 is no limit.
        eviction_ratio: when a file does not fit, older ones go until all take this share of the limit.
        min_free_bytes: what must stay free on the file system after a write, whoever took the rest.
    """

    max_size_bytes: int = 0
    eviction_ratio: float = 0.9
    min_free_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("max_size_bytes", "min_free_bytes"):
            if not 0 <= getattr(self, name) <= BYTES_MAX:
                raise ConfigError(f"{name} {getattr(self, name)}: expected 0 (no limit) to {BYTES_MAX} bytes")
        if not 0 < self.eviction_ratio <= 1:
            raise ConfigError(f"eviction_ratio {self.eviction_ratio}: expected above 0, at most 1")

    @property
    def is_set(self) -> bool:
        return self.max_size_bytes > 0 or self.min_free_bytes > 0


def parse_size(value: Any, *, name: str) -> int:
    """Bytes of `1048576`, `200G` (1000s) or `1.5Gi` (1024s).

    Raises:
        ConfigError: it is none of these. A limit that can't be read must not become no limit.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size_bytes = value
    elif isinstance(value, str) and (parts := SIZE.fullmatch(value.strip())):
        number, unit = parts[1], parts[2] or ""
        whole, _, fraction = number.partition(".")
        size_bytes = int(whole) * UNIT_BYTES[unit] + int(fraction or 0) * UNIT_BYTES[unit] // 10 ** len(
            fraction
        )
    else:
        raise ConfigError(f"{name} {value!r}: expected bytes, as a whole number or like 200G or 1.5Gi")
    if not 0 <= size_bytes <= BYTES_MAX:
        raise ConfigError(f"{name} {value!r}: expected 0 to {BYTES_MAX} bytes")
    return size_bytes


class Room:
    """Grants room for files within `Limits`, and evicts the least recently used for it.

    Recency is the file's date, so it survives a restart and is common to all processes. What is on disk is
    counted anew whenever it seems too much and after every tenth of the limit, which also finds what others
    wrote and removed meanwhile. Each further writer under the same names (a replica) may exceed the limit
    by a tenth of it.
    """

    def __init__(self, folder: Folder, limits: Limits) -> None:
        self.limits = limits
        self.pages_evicted = 0
        self._folder = folder
        self._used_bytes = 0
        # Granted since the last count.
        self._granted_bytes = 0
        self._lock = Lock()

    def measure(self) -> None:
        """Count what is there. Before the first `reserve`."""
        if self.limits.is_set:
            with self._lock:
                self._count()

    def reserve(self, size_bytes: int, *, keep: Collection[str]) -> bool:
        """Whether a file of this size may be written now; older ones have gone for it if need be.

        What is then not written counts as written until the next look at the folder.

        Args:
            keep: stems that may not go: a batch must not push out its own beginning.
        """
        limits = self.limits
        if not limits.is_set:
            return True
        with self._lock:
            if limits.max_size_bytes and self._granted_bytes + size_bytes > limits.max_size_bytes // 10:
                self._count()
            if self._excess(size_bytes) > 0 and self._can_fit(size_bytes):
                self._evict(size_bytes, keep)
            if self._excess(size_bytes) > 0:
                return False
            self._used_bytes += size_bytes
            self._granted_bytes += size_bytes
            return True

    def _count(self) -> list[OwnFile]:
        """Look at what is there; the least recently used first."""
        files = sorted(self._folder.own_files(), key=lambda file: (file.seen.mtime_ns, file.stem))
        self._used_bytes = sum(file.seen.size_bytes for file in files)
        self._granted_bytes = 0
        return files

    def _excess(self, size_bytes: int) -> int:
        """Bytes that have to go before a file of this size fits; 0 or less when it does."""
        limits = self.limits
        over = self._used_bytes + size_bytes - limits.max_size_bytes if limits.max_size_bytes else 0
        if limits.min_free_bytes:
            over = max(over, limits.min_free_bytes + size_bytes - self._folder.bytes_free())
        return over

    def _can_fit(self, size_bytes: int) -> bool:
        """Whether it might fit if all of ours went: a look at the folder is not cheap, and often in vain."""
        limits = self.limits
        if limits.max_size_bytes and size_bytes > limits.max_size_bytes:
            return False
        return not limits.min_free_bytes or (
            self._folder.bytes_free() + self._used_bytes >= limits.min_free_bytes + size_bytes
        )

    def _evict(self, size_bytes: int, keep: Collection[str]) -> None:
        files = [file for file in self._count() if file.stem not in keep]
        if not 0 < self._excess(size_bytes) <= sum(file.seen.size_bytes for file in files):
            # It fits already, or never: pages are not given up in vain when others have filled the disk.
            return
        to_free = self._bytes_to_free(size_bytes)
        for file in files:
            if to_free <= 0:
                return
            if self._folder.remove(file):
                self._used_bytes -= file.seen.size_bytes
                to_free -= file.seen.size_bytes
                self.pages_evicted += 1

    def _bytes_to_free(self, size_bytes: int) -> int:
        """More than needed, so that not every write has to look through the folder."""
        limits = self.limits
        goal = 0
        if limits.max_size_bytes:
            goal = self._used_bytes + size_bytes - int(limits.max_size_bytes * limits.eviction_ratio)
        if limits.min_free_bytes:
            spare = int(limits.min_free_bytes * (1 - limits.eviction_ratio))
            goal = max(goal, limits.min_free_bytes + spare + size_bytes - self._folder.bytes_free())
        return goal
