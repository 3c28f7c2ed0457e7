from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tracer.importers.canaries import lookup, write, write_finished, write_started
from tracer.errors import HitsError
from tracer.importers import tair_events
from tracer.importers.foreign import foreign_hits
from tracer.importers.sniff import Imported, files_at


def read(folder: Path, *rows: Any) -> Imported:
    return tair_events.read(files_at(write(folder / "events.jsonl", *rows)))


def test_a_lookup_is_a_row_in_blocks(tmp_path: Path) -> None:
    document = foreign_hits(read(tmp_path, lookup("l1", [1, -2, 3], 2))).to_json()
    assert document["rows"] == [
        {
            **{"rid": "l1", "input_blocks": 3, "device": None, "host": None, "storage": None},
            **{"untiered": 2, "computed": None, "uncached": 1, "reason": None},
            **{"file": "events.jsonl", "line": 1},
        }
    ]
    assert (document["requests"], document["input_tokens"], document["cached_tokens"]["total"]) == (None,) * 3
    assert (document["input_blocks"], document["cached_blocks"], document["hit_rate"]) == (3, 2, 0.666667)


def test_more_than_the_writes_before_is_a_cache_that_was_warm(tmp_path: Path) -> None:
    keys = [5, 6, 7]
    found = read(tmp_path, lookup("a", keys, 1), write_started("s", keys), lookup("b", keys, 3))
    assert found.source.notes[1] == (
        "1 of 2 lookups found more than the writes before them explain: the cache was warm before the first "
        "event"
    )
    assert found.source.notes[2] == "1 of 1 writes never finish"


def test_less_than_was_written_is_lost(tmp_path: Path) -> None:
    rows = [write_started("s", [5, 6]), write_finished("s"), lookup("a", [5, 6], 1)]
    assert read(tmp_path, *rows).source.notes[1:] == (
        "1 of 1 lookups found less than was written before: blocks were lost",
    )


def test_a_mask_may_be_a_list(tmp_path: Path) -> None:
    found = read(tmp_path, lookup("a", [5, 6, 7], 0) | {"block_mask": [True, False, True]})
    assert [row.cached for row in found.requests] == [1]


@pytest.mark.parametrize(
    "change", [{"block_mask": 9}, {"block_mask": None}, {"keys": ["x"]}, {"type": "Other"}]
)
def test_an_event_that_can_not_be_is_not_parsed(change: dict[str, Any], tmp_path: Path) -> None:
    found = read(tmp_path, lookup("a", [1], 0) | change, lookup("b", [1], 1))
    assert ([row.rid for row in found.requests], found.source.unparsed) == (["b"], (1,))


def test_bytes_that_are_no_text_where_nobody_looks_break_nothing(tmp_path: Path) -> None:
    text = json.dumps(lookup("a", [1], 1)).encode().replace(b"cache_manager", b"cache\xffmanager")
    assert [row.rid for row in read(tmp_path, text).requests] == ["a"]


def test_keys_of_64_bits_stay_whole_in_prefixes(tmp_path: Path) -> None:
    key = -9_223_372_036_854_775_807
    found = read(tmp_path, lookup("a", [key, 1], 0), lookup("b", [key, 2], 1))
    (row,) = foreign_hits(found, by="prefix").rows
    assert (row["prefix"], row["blocks"], row["lookups"], row["untiered"]) == (str(key), 1, 2, 1)


def test_a_file_without_a_lookup_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HitsError, match="no GetCacheLocation"):
        read(tmp_path, write_started("s", [1]))


def test_the_public_events_say_what_is_known_of_them(public_data: Path) -> None:
    path = public_data / "kvcm_events" / "tair_event_publisher_1-180.jsonl"
    found = tair_events.read(files_at(path))
    events = [json.loads(line) for line in path.read_text().splitlines()]
    masks = [event["block_mask"] for event in events if event["type"] == "GetCacheLocation"]
    assert [row.cached for row in found.requests] == masks
    assert len(masks) == 61
    assert (found.source.lines, found.source.unparsed, found.source.unknown_keys) == ((180,), (0,), {})
    # 12 of 61 higher than a replay from empty gives, never lower; 3 of 61 writes never finish.
    assert found.source.notes[1:] == (
        "12 of 61 lookups found more than the writes before them explain: the cache was warm before the "
        "first event",
        "3 of 61 writes never finish",
    )
