"""The post office of a watch: keys of a store that others use too, and that may be gone at any time.

Owns what is asked of a store and how its troubles are told. A key that is not there may block whoever gets it
for minutes, so that it is checked first; whatever a store raises is one error here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from typing import Any

# A key that was deleted between the check and the get must not hold the watch for long.
GET_TIMEOUT = timedelta(seconds=1)
# Its file grows with each set.
GROWING = "FileStore"


class StoreLostError(Exception):
    """The store did not do what it was asked; the text is its own reason."""


class LocalStore:
    """A store for the threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = Lock()

    def set(self, key: str, value: str | bytes) -> None:
        with self._lock:
            self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._lock:
            return [self._values[key] for key in keys]

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self._values.pop(key, None) is not None

    def keys(self) -> list[str]:
        with self._lock:
            return sorted(self._values)


class Mailbox:
    """Names below a prefix of a store.

    Attributes:
        is_growing: each put makes a file longer, so that one puts less often.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self.is_growing = _is_growing(store)

    def open(self) -> None:
        """Have a connection of its own where the store can give one: the engine's may be in a long wait."""
        with suppress(Exception):
            own = self._store.clone()
            # Its own timeout, for a clone has its own; a get that still blocks ends soon.
            own.set_timeout(GET_TIMEOUT)
            self._store = own

    def put(self, name: str, data: bytes) -> None:
        try:
            self._store.set(self._prefix + name, data)
        except Exception as error:
            raise StoreLostError(_reason(error)) from None

    def get(self, names: Sequence[str]) -> dict[str, bytes]:
        """What is there of `names`."""
        try:
            present = self._present(names)
            values = self._values([self._prefix + name for name in present])
        except Exception as error:
            raise StoreLostError(_reason(error)) from None
        return {
            name: value.encode() if isinstance(value, str) else bytes(value)
            for name, value in zip(present, values, strict=True)
            if value is not None
        }

    def _present(self, names: Sequence[str]) -> list[str]:
        check = getattr(self._store, "check", None)
        if check is None:
            return list(names)
        if check([self._prefix + name for name in names]):
            return list(names)
        if len(names) == 1:
            return []
        return [name for name in names if check([self._prefix + name])]

    def _values(self, keys: Sequence[str]) -> list[Any]:
        many = getattr(self._store, "multi_get", None)
        if many is None or len(keys) < 2:
            return [self._value(key) for key in keys]
        return list(many(list(keys)))

    def _value(self, key: str) -> Any:
        """A store that can't be asked whether it has a key says so when it is asked for its value."""
        try:
            return self._store.get(key)
        except KeyError:
            return None


def _is_growing(store: Any) -> bool:
    """Whether it, or one that it puts a prefix before, is kept in a file."""
    for _ in range(8):
        if type(store).__name__ == GROWING:
            return True
        inner = getattr(store, "underlying_store", None)
        if inner is None:
            return False
        store = inner
    return False


def _reason(error: Exception) -> str:
    """The first line of what a store says, for its others are addresses of its own code."""
    first = str(error).strip().splitlines()[:1]
    return (first[0] if first else type(error).__name__)[:160]
