"""Room on disk: what is evicted for a new page, and what is not. Every file takes 60 bytes here."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache.errors import ConfigError
from hicache.storage.file import FileBackend
from hicache.storage.limits import Limits, parse_size
from hicache.storage.names import Names

PAGE = b"twenty bytes of page"
FILE_BYTES = 60


def opened(folder: Path, pages_max: int, *, suffix: str = "_m", min_free_bytes: int = 0) -> FileBackend:
    ticks = count(1000, 1000)
    limits = Limits(pages_max * FILE_BYTES, min_free_bytes=min_free_bytes)
    names = Names(suffix, suffix, writes_kv=True)
    backend = FileBackend(str(folder), names, b"i" * 16, limits=limits, now_ns=lambda: next(ticks))
    backend.open()
    return backend


def fill(backend: FileBackend, *hashes: str) -> list[bool]:
    return [backend.set("kv", page_hash, PAGE) for page_hash in hashes]


def stored(folder: Path) -> str:
    return "".join(sorted(path.name.partition("_")[0] for path in folder.iterdir()))


def free(monkeypatch: pytest.MonkeyPatch, folder: Path, capacity_bytes: int, taken: list[int]) -> None:
    """A file system of that size on which others take `taken[0]` bytes."""

    def statvfs(path: str) -> SimpleNamespace:
        used = sum(file.stat().st_size for file in folder.iterdir()) + taken[0]
        return SimpleNamespace(f_bavail=max(0, capacity_bytes - used), f_frsize=1)

    monkeypatch.setattr(os, "statvfs", statvfs)


def test_the_least_recently_used_go_until_nine_tenths_are_taken(tmp_path: Path) -> None:
    backend = opened(tmp_path, 20)
    fill(backend, *"abcdefghijklmnopqrst")
    assert stored(tmp_path) == "abcdefghijklmnopqrst"
    assert fill(backend, "u") == [True]
    assert stored(tmp_path) == "defghijklmnopqrstu"
    assert backend.get_stats()["pages_evicted"] == 3


def test_a_read_makes_a_page_young(tmp_path: Path) -> None:
    backend = opened(tmp_path, 4)
    fill(backend, *"abcd")
    backend.get("kv", "a")
    fill(backend, "e")
    assert stored(tmp_path) == "ade"


def test_a_set_of_a_page_that_is_there_makes_it_young(tmp_path: Path) -> None:
    backend = opened(tmp_path, 4)
    fill(backend, *"abcda", "e")
    assert stored(tmp_path) == "ade"


def test_a_query_does_not_make_a_page_young(tmp_path: Path) -> None:
    backend = opened(tmp_path, 4)
    fill(backend, *"abcd")
    backend.batch_exists(["a"], prefix=())
    fill(backend, "e")
    assert stored(tmp_path) == "cde"


def test_a_chain_is_evicted_from_its_end(tmp_path: Path) -> None:
    backend = opened(tmp_path, 4)
    backend.batch_set("kv", ["d", "c", "b", "a"], [PAGE] * 4, prefix=())
    fill(backend, "e")
    assert stored(tmp_path) == "cde"


def test_recency_survives_a_restart(tmp_path: Path) -> None:
    first = opened(tmp_path, 4)
    fill(first, *"abcd")
    first.get("kv", "a")
    second = opened(tmp_path, 4)
    fill(second, "e")
    assert stored(tmp_path) == "ade"


def test_what_lies_there_from_earlier_counts(tmp_path: Path) -> None:
    fill(opened(tmp_path, 100), *"abcdefgh")
    backend = opened(tmp_path, 4)
    fill(backend, "i")
    assert stored(tmp_path) == "ghi"


def test_a_batch_does_not_push_out_its_own_beginning(tmp_path: Path) -> None:
    backend = opened(tmp_path, 3)
    fill(backend, *"xy")
    done = backend.batch_set("kv", list("abcde"), [PAGE] * 5, prefix=())
    assert done == [True, True, True, False, False]
    assert stored(tmp_path) == "abc"
    assert backend.get_stats()["pages_refused"] == 2


def test_a_page_of_the_batch_that_is_there_already_stays(tmp_path: Path) -> None:
    backend = opened(tmp_path, 3)
    fill(backend, *"cxy")
    assert backend.batch_set("kv", list("abc"), [PAGE] * 3, prefix=()) == [True, True, True]
    assert stored(tmp_path) == "abc"


def test_a_page_that_could_never_fit_evicts_nobody(tmp_path: Path) -> None:
    backend = opened(tmp_path, 3)
    fill(backend, *"abc")
    assert not backend.set("kv", "d", b"x" * 400)
    assert stored(tmp_path) == "abc"


def test_files_of_others_are_neither_counted_nor_evicted(tmp_path: Path) -> None:
    fill(opened(tmp_path, 100, suffix="_other"), *"stuvwxyz")
    (tmp_path / "k_m.bin").write_bytes(b"raw page of a server without footers, under our name")
    backend = opened(tmp_path, 3)
    fill(backend, *"abcd")
    assert stored(tmp_path) == "cdkstuvwxyz"


def test_what_another_process_has_removed_is_noticed(tmp_path: Path) -> None:
    backend = opened(tmp_path, 3)
    fill(backend, *"abc")
    (tmp_path / "c_m.bin").unlink()
    fill(backend, "d")
    assert stored(tmp_path) == "abd"


def test_two_writers_of_the_same_names_exceed_the_limit_by_little(tmp_path: Path) -> None:
    first, second = opened(tmp_path, 20), opened(tmp_path, 20)
    for index in range(100):
        fill(first, f"a{index}")
        fill(second, f"b{index}")
        assert len(list(tmp_path.iterdir())) <= 20 + 2


def test_a_write_that_fails_takes_no_room_for_long(tmp_path: Path) -> None:
    backend = opened(tmp_path, 3)
    fill(backend, *"ab")
    (tmp_path / "x_m.bin").mkdir()
    assert fill(backend, *"xxx") == [False] * 3
    fill(backend, "c")
    assert stored(tmp_path) == "abcx"


def test_a_page_that_can_not_be_removed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path, 3)
    fill(backend, *"abc")
    real = os.unlink

    def refuse_a(path: str) -> None:
        if path.endswith("/a_m.bin"):
            raise PermissionError(1, "Operation not permitted", path)
        real(path)

    monkeypatch.setattr(os, "unlink", refuse_a)
    assert fill(backend, "d") == [True]
    assert stored(tmp_path) == "ad"


def test_space_is_left_free_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [0]
    free(monkeypatch, tmp_path, 1000, taken)
    backend = opened(tmp_path, 0, min_free_bytes=400)
    assert fill(backend, *"abcdefghij") == [True] * 10
    taken[0] = 200
    assert fill(backend, "k") == [True]
    assert stored(tmp_path) == "fghijk"


def test_pages_are_not_given_up_for_space_that_would_still_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = [0]
    free(monkeypatch, tmp_path, 1000, taken)
    backend = opened(tmp_path, 0, min_free_bytes=400)
    fill(backend, *"abc")
    taken[0] = 600
    assert fill(backend, *"de") == [False, False]
    assert stored(tmp_path) == "abc"


def test_pages_that_others_have_removed_are_no_reason_to_give_up_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = [0]
    free(monkeypatch, tmp_path, 1000, taken)
    backend = opened(tmp_path, 0, min_free_bytes=400)
    fill(backend, *"abcde")
    for gone in "bcde":
        (tmp_path / f"{gone}_m.bin").unlink()
    taken[0] = 560
    assert fill(backend, "f") == [False]
    assert stored(tmp_path) == "a"


def test_a_hopeless_page_does_not_cost_a_look_at_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = [0]
    free(monkeypatch, tmp_path, 1000, taken)
    backend = opened(tmp_path, 0, min_free_bytes=400)
    fill(backend, "a")
    taken[0] = 700
    monkeypatch.setattr(os, "scandir", lambda path: pytest.fail(f"{path} was looked at"))
    assert fill(backend, *"bcd") == [False] * 3


def test_a_file_system_that_does_not_tell_bounds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> None:
        raise OSError(38, "Function not implemented")

    backend = opened(tmp_path, 0, min_free_bytes=400)
    monkeypatch.setattr(os, "statvfs", fail)
    assert fill(backend, "a") == [True]


def test_clear_makes_room(tmp_path: Path) -> None:
    backend = opened(tmp_path, 3)
    fill(backend, *"abc")
    assert backend.clear() == 3
    fill(backend, *"def")
    assert stored(tmp_path) == "def"


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("0", 0),
        ("1048576", 1_048_576),
        ("4Ki", 4096),
        ("1Gi", 1 << 30),
        ("1GiB", 1 << 30),
        ("200G", 200_000_000_000),
        ("1.5M", 1_500_000),
        ("0.25Ti", 1 << 38),
        (" 7K ", 7000),
        ("3B", 3),
    ],
)
def test_sizes_are_bytes_with_units_of_1000_or_1024(value: object, size_bytes: int) -> None:
    assert parse_size(value, name="max_size") == size_bytes


@pytest.mark.parametrize(
    "value", [None, True, 1.5, -1, "", "G", "1 G", "-1", "1e9", "1g", "1.", "٣", "9" * 30]
)
def test_a_size_that_can_not_be_read_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="max_size"):
        parse_size(value, name="max_size")


@pytest.mark.parametrize(
    "limits",
    [{"max_size_bytes": -1}, {"min_free_bytes": -1}, {"eviction_ratio": 0.0}, {"eviction_ratio": 1.1}],
)
def test_limits_out_of_range_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        Limits(**limits)  # type: ignore[arg-type]
