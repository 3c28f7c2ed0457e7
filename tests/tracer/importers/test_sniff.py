from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.tracer.importers import canaries as sample
from tests.tracer.importers.canaries import write
from tracer.errors import HitsError
from tracer.importers import sniff
from tracer.importers.foreign import find_foreign, foreign_hits
from tracer.importers.sniff import File, is_too_deep

BLOCKS = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}


def name_of(path: Path) -> str | None:
    found = find_foreign(path)
    return None if found is None else found[0].FORMAT


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        ([sample.metrics("r1", 10)], "sglang_request_metrics"),
        ([sample.finished("r1", 10, 0)], "sglang_request_log"),
        ([sample.received("r1"), *[sample.prefill(1, 2)] * 5], "sglang_request_log"),
        ([sample.prefill(1, 2)], "sglang_prefill_batches"),
        (["INFO: loading"] * 5000 + [sample.prefill(1, 2)], "sglang_prefill_batches"),
        ([sample.benchmark()], "sglang_bench_serving"),
        ([{"ts": 1.0, "events": [sample.stored(1)]}], "kv_cache_events"),
        ([msgspec.json.encode([1.0, [sample.stored(1)], 0])], "kv_cache_events"),
        ([sample.lookup("a", [1], 0)], "tair_kvcm_events"),
        ([BLOCKS], "block_trace"),
        (["hello", "{}", "[1]"], None),
        ([], None),
    ],
)
def test_a_format_is_known_by_its_content(rows: list[Any], name: str | None, tmp_path: Path) -> None:
    assert name_of(write(tmp_path / "misleading.rank0000.txt", *rows)) == name


def test_msgpack_is_known_by_its_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(msgspec.msgpack.encode([1.0, [sample.stored(1)], 0]))
    assert name_of(path) == "kv_cache_events"


def test_gzip_is_unwrapped_once(tmp_path: Path) -> None:
    plain = write(tmp_path / "m.log", sample.metrics("r1", 10)).read_bytes()
    once, twice = tmp_path / "a", tmp_path / "b"
    once.write_bytes(gzip.compress(plain))
    twice.write_bytes(gzip.compress(gzip.compress(plain)))
    assert name_of(once) == "sglang_request_metrics"
    with pytest.raises(HitsError, match="b is compressed twice"):
        name_of(twice)


def test_gzip_that_is_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    whole = gzip.compress(b"x" * 100_000)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(HitsError, match="a: what it is compressed in is damaged"):
        name_of(path)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python reads zstd")
def test_zstd_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "m.log.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd rest")
    with pytest.raises(HitsError, match="compressed with zstd") as told:
        name_of(path)
    assert told.value.hint == "zstd -d m.log.zst, and the result instead"


def test_a_bomb_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sniff, "RATIO_FREE_BYTES", 1 << 20)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"\n" * (8 << 20)))
    with pytest.raises(HitsError, match=r"bomb\.gz unwraps to more than 200 times its size"):
        name_of(path)


def test_files_and_lines_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.log", "x" * 3_000_000)
    monkeypatch.setattr(sniff, "LINE_BYTES_MAX", 1 << 20)
    with pytest.raises(HitsError, match="a line of more than 1 MiB"):
        name_of(path)
    monkeypatch.setattr(sniff, "FILE_BYTES_MAX", 1 << 20)
    with pytest.raises(HitsError, match="holds more than 0 GiB"):
        name_of(path)


def test_nesting_is_counted_outside_of_strings() -> None:
    assert is_too_deep(b"[" * 65 + b"]" * 65)
    assert not is_too_deep(b"[" * 64 + b"]" * 64)
    assert not is_too_deep(b'{"text": "' + b"[{" * 100 + b'\\"["}')
    assert not is_too_deep(b"[" + b"[],{}," * 100 + b"[]]")


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.log", "a.log", ".hidden", "notes.txt"):
        row = "hello" if name == "notes.txt" else sample.metrics(name, 10)
        write(tmp_path / name, row)
    (tmp_path / "folder.log").mkdir()
    found = find_foreign(tmp_path)
    assert found is not None
    reader, files, notes = found
    assert [row.rid for row in reader.read(files).requests] == ["a.log", "b.log"]
    assert notes == ("not recognised, and left out: notes.txt",)


def test_a_folder_of_several_formats_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", sample.metrics("r", 10))
    write(tmp_path / "b", sample.prefill(1, 2))
    with pytest.raises(HitsError, match="holds files of 2 formats") as told:
        find_foreign(tmp_path)
    assert told.value.where == "b: sglang_prefill_batches; a: sglang_request_metrics"


def test_a_block_trace_has_no_hits_and_says_where_they_are(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", BLOCKS)
    found = find_foreign(path)
    assert found is not None
    with pytest.raises(HitsError, match="is a block trace") as told:
        found[0].read(found[1])
    assert f"hicache run --workload {path}" in told.value.hint


def test_what_a_source_does_not_tell_is_refused_as_a_grouping(tmp_path: Path) -> None:
    found = find_foreign(write(tmp_path / "m.log", sample.metrics("r", 10)))
    assert found is not None
    with pytest.raises(HitsError, match="can't be grouped by reason"):
        foreign_hits(found[0].read(found[1]), by="reason")


def test_lines_are_numbered_from_one_over_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sniff, "BLOCK_BYTES", 16)
    path = write(tmp_path / "x", *(f"line {number}" for number in range(1, 40)), "")
    assert list(File(path, "x").lines()) == [(at, f"line {at}".encode()) for at in range(1, 40)]
