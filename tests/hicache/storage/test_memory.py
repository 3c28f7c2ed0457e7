from __future__ import annotations

from hicache.core import SIDE_POOLS
from hicache.ports import Found
from hicache.storage.backend import Backend
from hicache.storage.memory import MemoryBackend
from hicache.storage.names import Contents, names_of
from hicache.topology import Topology


def backends(*, is_replicated: bool = False) -> tuple[Backend, Backend, dict[str, bytes]]:
    store: dict[str, bytes] = {}
    contents = Contents("m", is_replicated=is_replicated)
    first, second = (MemoryBackend(store, names_of(Topology(tp=2), rank, contents)) for rank in (0, 1))
    return first, second, store


def test_what_was_set_is_got() -> None:
    first, _, store = backends()
    assert first.batch_set("kv", ["a", "b"], [b"page a", b"page b"], prefix=()) == [True, True]
    assert first.batch_get("kv", ["b", "c", "a"], prefix=()) == [b"page b", None, b"page a"]
    assert first.batch_exists(["a", "b", "c"], prefix=()) == 2
    assert sorted(store) == ["a_m_0_2", "b_m_0_2"]


def test_single_calls_are_batches_of_one() -> None:
    first, _, _ = backends()
    assert (first.exists("a"), first.get("kv", "a"), first.set("kv", "a", b"x")) == (False, None, True)
    assert (first.exists("a"), first.get("kv", "a")) == (True, b"x")


def test_ranks_do_not_see_each_others_shards() -> None:
    first, second, _ = backends()
    first.set("kv", "a", b"left half")
    second.set("kv", "a", b"right half")
    assert (first.get("kv", "a"), second.get("kv", "a")) == (b"left half", b"right half")


def test_replicated_kv_is_one_page_for_all() -> None:
    first, second, _ = backends(is_replicated=True)
    first.set("kv", "a", b"page")
    first.set("mamba", "a", b"state")
    assert (second.get("kv", "a"), second.get("mamba", "a")) == (b"page", None)


def test_a_page_that_is_there_stays_unless_its_length_is_another() -> None:
    first, _, store = backends()
    for page in (b"one", b"two", b"three"):
        assert first.set("kv", "a", page)
    assert store == {"a_m_0_2": b"three"}
    first.set("kv", "a", b"third")
    assert store == {"a_m_0_2": b"three"}
    assert first.get_stats()["pages_kept"] == 2


def test_an_empty_page_is_a_page() -> None:
    first, _, _ = backends()
    assert first.set("kv", "a", b"")
    assert first.get("kv", "a") == b""


def test_side_pools_are_surveyed_under_their_own_names() -> None:
    first, _, _ = backends()
    first.batch_set("kv", ["a", "b"], [b"", b""], prefix=())
    first.set("mamba", "b", b"state")
    assert first.batch_exists_v2(["a", "b"], [SIDE_POOLS["mamba"]], prefix=()) == Found(2, {"mamba": 2}, [2])


def test_clear_takes_a_ranks_own_pages_only() -> None:
    first, second, store = backends()
    store["somebody else's"] = b""
    for backend in (first, second):
        backend.batch_set("kv", ["a", "b"], [b"", b""], prefix=())
        backend.set("mamba", "a", b"")
    assert first.clear() == 3
    assert sorted(store) == ["a.mamba_m_1_2", "a_m_1_2", "b_m_1_2", "somebody else's"]


def test_pages_outlive_a_detach() -> None:
    first, _, _ = backends()
    first.open()
    first.set("kv", "a", b"x")
    first.close()
    first.open()
    assert first.get("kv", "a") == b"x"


def test_calls_are_counted() -> None:
    first, _, _ = backends()
    first.batch_set("kv", ["a", "b"], [b"12", b"345"], prefix=())
    first.batch_get("kv", ["a", "c"], prefix=())
    assert first.get_stats() == {
        "pages_read": 1,
        "pages_absent": 1,
        "pages_written": 2,
        "pages_kept": 0,
        "bytes_read": 2,
        "bytes_written": 5,
    }
