from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.tracer.importers.canaries import TOKEN, removed, stored, write
from tracer.errors import HitsError
from tracer.importers import kv_events
from tracer.importers.foreign import foreign_hits
from tracer.importers.sniff import Imported, files_at

pack = msgspec.msgpack.encode
CLEARED = {"type": "AllBlocksCleared"}


def read(folder: Path, *rows: Any) -> Imported:
    return kv_events.read(files_at(write(folder / "events.jsonl", *rows)))


def read_packed(folder: Path, data: bytes) -> Imported:
    path = folder / "events.msgpack"
    path.write_bytes(data)
    return kv_events.read(files_at(path))


def frames(seq: int, *events: Any, topic: bytes = b"kv", rank: int | None = 0) -> bytes:
    """The three frames of a message, as one object of msgpack."""
    return pack([topic, struct.pack(">q", seq), pack([1.5, list(events), rank])])


def told(found: Imported, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row[column] for column in columns) for row in found.tables["tier"]]


def test_what_enters_and_leaves_each_tier_is_counted(tmp_path: Path) -> None:
    batches = [
        [1.0, [stored(1, 2)], 0],
        [2.0, [stored(1, medium="CPU_PINNED"), removed(1)], 0],
        # It comes back: computed once more, or loaded.
        [3.0, [stored(1)], 0],
    ]
    found = read(tmp_path, *(msgspec.json.encode(batch) for batch in batches))
    columns = ("tier", "stored_tokens", "stored_again_tokens", "removed_tokens", "held_tokens")
    assert told(found, *columns) == [("device", 48, 16, 16, 32), ("host", 16, 0, 0, 16)]
    assert told(found, "held_tokens_max") == [(32,), (16,)]


def test_there_is_no_hit_rate_in_events(tmp_path: Path) -> None:
    document = foreign_hits(read(tmp_path, msgspec.json.encode([1.0, [stored(1)], 0]))).to_json()
    assert (document["hit_rate"], document["requests"], document["input_tokens"]) == (None, None, None)
    assert document["cached_tokens"] == {"device": None, "host": None, "storage": None, "total": None}
    assert any("hit rate, is not in them" in note for note in document["notes"])


@pytest.mark.parametrize(
    "batch",
    [
        [1.0, [stored(1, 2)], None],
        [1.0, [stored(1, 2)]],
        {"ts": 1.0, "events": [stored(1, 2)], "data_parallel_rank": 0},
        {"ts": 1.0, "events": [stored(b"h1", b"h2", group_idx=0, kv_cache_spec_kind="full")]},  # type: ignore[arg-type]
        [1.0, [["BlockStored", [1, 2], None, [TOKEN] * 32, 16, None, "GPU"]]],
    ],
)
def test_arrays_and_maps_of_both_servers_are_read(batch: Any, tmp_path: Path) -> None:
    found = read_packed(tmp_path, pack(batch))
    assert told(found, "tier", "stored_tokens", "stored_blocks") == [("device", 32, 2)]
    assert (found.source.unparsed, found.source.unknown_keys) == ((0,), {})


def test_events_of_a_server_without_tiers_have_none(tmp_path: Path) -> None:
    found = read_packed(tmp_path, pack([1.0, [stored(1, medium=None), ["BlockRemoved", [1]]]]))
    assert told(found, "tier", "medium", "stored_tokens", "removed_tokens") == [(None, None, 16, 16)]


def test_batches_that_are_missing_are_told(tmp_path: Path) -> None:
    data = frames(5, stored(1)) + frames(6, stored(2)) + frames(9, stored(3)) + frames(10, removed(8))
    assert read_packed(tmp_path, data).source.notes[1:] == (
        "2 batches are missing in 1 gap of the sequence: what they held is not counted",
        "1 removed blocks had not been stored in this recording: they are older",
    )


def test_publishers_count_each_for_themselves(tmp_path: Path) -> None:
    data = frames(0, stored(1)) + frames(0, stored(1), rank=1) + frames(1, stored(2)) + frames(1, rank=1)
    found = read_packed(tmp_path, data)
    assert (len(found.source.notes), told(found, "held_tokens")) == (1, [(48,)])


def test_a_publisher_that_begins_anew_has_an_empty_cache(tmp_path: Path) -> None:
    found = read_packed(tmp_path, frames(7, stored(1, 2)) + frames(0, stored(3)))
    assert told(found, "held_tokens") == [(16,)]
    assert "the sequence began anew 1 times: a publisher was restarted" in found.source.notes


def test_a_clear_empties_every_tier(tmp_path: Path) -> None:
    rows = [[1.0, [stored(1), stored(2, medium="DISK")]], [2.0, [CLEARED]]]
    found = read_packed(tmp_path, b"".join(map(pack, rows)))
    assert told(found, "tier", "held_tokens", "removed_tokens") == [("device", 0, 16), ("storage", 0, 16)]


def test_lines_may_carry_their_sequence(tmp_path: Path) -> None:
    rows = [{"seq": seq, "ts": 1.0, "events": [stored(seq)]} for seq in (1, 4)]
    assert "2 batches are missing in 1 gap" in read(tmp_path, *rows).source.notes[1]


def test_a_recording_that_was_cut_counts_up_to_there(tmp_path: Path) -> None:
    whole = frames(0, stored(1)) + frames(1, stored(2))
    found = read_packed(tmp_path, whole[:-9])
    assert (told(found, "stored_blocks"), found.source.lines, found.source.unparsed) == ([(1,)], (2,), (1,))


@pytest.mark.parametrize(
    "data",
    [b"\x93\xdd\xff\xff\xff\xff", b"\x91\xc1", b"\x91" * 5000, b"\x93\xc6\xff\xff\xff\xff", pack([1, [{}]])],
)
def test_bytes_that_are_no_recording_are_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(HitsError, match="no event in the recording"):
        read_packed(tmp_path, data)


@pytest.mark.parametrize(
    "event",
    [
        7,
        {},
        {"type": "BlockStored"},
        {"type": "BlockStored", "block_hashes": [[]]},
        {"type": ["x"], "block_hashes": [1]},
        [],
        [["BlockStored"]],
    ],
)
def test_an_event_that_is_not_understood_is_counted(event: Any, tmp_path: Path) -> None:
    found = read_packed(tmp_path, pack([1.0, [event, stored(1)]]))
    assert (told(found, "stored_blocks"), found.source.notes[-1]) == (
        [(1,)],
        "1 events were not understood",
    )


def test_a_block_that_is_stored_twice_is_held_once(tmp_path: Path) -> None:
    found = read_packed(tmp_path, pack([1.0, [stored(1), stored(1), removed(1)]]))
    assert told(found, "stored_blocks", "stored_again_blocks", "held_tokens") == [(2, 0, 0)]
