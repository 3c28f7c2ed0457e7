"""Stores of all kinds behind one mailbox; none of them blocks it for what is not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from consensus_checker.live_store import LocalStore, Mailbox, StoreLostError


class Plain:
    """What every store has, with texts as some give them back."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> Any:
        assert key in self.values, f"a get of {key}, which is not there, blocks"
        return self.values[key]


class FileStore(Plain):
    pass


class PrefixStore(Plain):
    def __init__(self, store: Plain) -> None:
        super().__init__()
        self.underlying_store = store


@pytest.mark.parametrize("store", [Plain(), LocalStore()])
def test_what_is_there_is_had_and_what_is_not_is_left_out(store: Any) -> None:
    mailbox = Mailbox(store, "run/")
    mailbox.open()
    assert mailbox.get(["post/0"]) == {}
    mailbox.put("post/0", b"zero")
    mailbox.put("post/2", b"two")
    assert mailbox.get(["post/0", "post/1", "post/2"]) == {"post/0": b"zero", "post/2": b"two"}
    assert store.check(["run/post/0"])


def test_a_text_is_taken_as_its_bytes() -> None:
    store = Plain()
    store.values["run/a"] = "text"
    assert Mailbox(store, "run/").get(["a"]) == {"a": b"text"}


def test_whatever_a_store_raises_is_one_error_with_its_first_line() -> None:
    class Broken(Plain):
        def set(self, key: str, value: Any) -> None:
            raise RuntimeError("wait timeout after 1000ms\nException raised from doWait")

    with pytest.raises(StoreLostError, match=r"^wait timeout after 1000ms$"):
        Mailbox(Broken(), "").put("a", b"")


def test_a_connection_of_its_own_has_a_timeout_of_its_own() -> None:
    class Cloned(Plain):
        timeout_s = 300.0

        def clone(self) -> Cloned:
            other = Cloned()
            other.values = self.values
            return other

        def set_timeout(self, timeout: Any) -> None:
            self.timeout_s = timeout.total_seconds()

    store = Cloned()
    mailbox = Mailbox(store, "")
    mailbox.open()
    assert store.timeout_s == 300.0
    assert mailbox._store.timeout_s == 1.0


def test_a_store_in_a_file_is_known_behind_prefixes() -> None:
    assert Mailbox(PrefixStore(PrefixStore(FileStore())), "").is_growing
    assert not Mailbox(PrefixStore(Plain()), "").is_growing


@pytest.mark.parametrize("is_raising", [True, False])
def test_a_store_that_can_t_be_asked_first_says_what_it_has_not(is_raising: bool) -> None:
    class Dictionary:
        def __init__(self) -> None:
            self.values: dict[str, bytes] = {}

        def set(self, key: str, value: bytes) -> None:
            self.values[key] = value

        def get(self, key: str) -> bytes | None:
            return self.values[key] if is_raising else self.values.get(key)

    mailbox = Mailbox(Dictionary(), "run/")
    mailbox.put("a", b"1")
    assert mailbox.get(["a", "b"]) == {"a": b"1"}
