"""Logs without names: nothing of what was planted is left, and what was equal stays equal."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from tests.support.logs import line, write_lane
from tracer.anonymise import Names, learned
from tracer.log import find_logs
from tracer.pack import pack

KEY = b"k" * 16


def rewritten(folder: Path, out: Path, *hosts: str) -> Names:
    """All files of a folder without names in `out`."""
    names = learned(sorted(folder.iterdir()), hosts, key=KEY)
    out.mkdir()
    for path in folder.iterdir():
        if (data := names.file(path)) is not None:
            (out / path.name).write_bytes(data)
    return names


def records(folder: Path) -> list[dict[str, Any]]:
    return [record for lane in find_logs(folder).lanes for record in lane.records()]


def test_nothing_that_was_planted_is_left(tmp_path: Path) -> None:
    planted = (
        "tenant-7/chat-9f",
        "node17.example.org",
        "/srv/secret-models",
        "alice",
        "s3://bucket-x",
        "acme",
    )
    folder = tmp_path / "a"
    config = {
        "directory": "/home/alice/cache",
        "model_path": "/srv/secret-models/m",
        "write_policy": "write_through",
        "storage": {"backend": "file", "url": "s3://bucket-x/y", "names": ["acme"]},
        "eviction_policy": "acme corp",
        "version": "0.5.23",
        "page_size_tokens": 64,
    }
    told = [
        {"kind": "note", "rid": "tenant-7/chat-9f", "rids": ["tenant-7/chat-9f", "r"], "tokens": 5},
        {"kind": "note", "error": "can't open /srv/secret-models/x on node17", "others": {"rid": "acme"}},
        {"kind": "note", "reason": "for_alice", "text": "tenant-7/chat-9f", "extra": [["acme", 1]]},
    ]
    write_lane(folder, told, config=config, run_id="acme-nightly", config_digest="acme")
    facts = {"host": "node17.example.org", "pid": 4711, "wall_clock_ns": 1, "user": "alice"}
    (folder / "rank0000.meta.json").write_text(json.dumps(facts))
    (folder / "rank0000.scheduler.checkpoints").write_text("acme")
    rewritten(folder, tmp_path / "out")
    data = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert [word for word in planted if word.encode() in data] == []
    assert {"rank0000.scheduler.000.jsonl", "rank0000.meta.json"} == {
        p.name for p in (tmp_path / "out").iterdir()
    }
    (lane,) = find_logs(tmp_path / "out").lanes
    kept = lane.header["config"]
    assert (
        kept["write_policy"],
        kept["storage"]["backend"],
        kept["page_size_tokens"],
    ) == ("write_through", "file", 64)


def test_one_text_has_one_name_everywhere_and_two_have_two(tmp_path: Path) -> None:
    for rank, rids in enumerate((["x", "y"], ["y", "x"])):
        write_lane(
            tmp_path / "a",
            [{"kind": "note", "rid": rid, "text": rid} for rid in rids],
            rank=rank,
            sizes={"dp": 1, "pp": 1, "cp": 1, "tp": 2},
        )
    rewritten(tmp_path / "a", tmp_path / "out")
    first, second, third, fourth = records(tmp_path / "out")
    assert (first["rid"], second["rid"]) == (fourth["rid"], third["rid"])
    assert {"r1", "r2"} == {first["rid"], second["rid"]}
    assert first["rid"] == first["text"]


def test_words_numbers_and_keyed_digests_stay(tmp_path: Path) -> None:
    told = {
        "kind": "note",
        "op": "all_reduce",
        "group": "tp0/main",
        "purpose": "progress",
        "digest": "0123456789abcdef",
        "digests": ["0123456789abcdef" * 2],
        "tokens": 5,
        "is_late": True,
        "none": None,
        "chains": {"tp,cp": [2048, "0123456789abcdef"]},
    }
    write_lane(tmp_path / "a", [told])
    rewritten(tmp_path / "a", tmp_path / "out")
    (found,) = records(tmp_path / "out")
    assert told == {name: found[name] for name in told}


def test_names_do_not_tell_who_came_first(tmp_path: Path) -> None:
    write_lane(tmp_path / "a", [{"kind": "note", "rid": f"q{number}"} for number in range(40)])
    orders = []
    for key in (b"1" * 16, b"2" * 16):
        names = learned(sorted((tmp_path / "a").iterdir()), (), key=key)
        orders.append([text for _name, text in sorted(names.mapping()["requests"].items())])
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_blocks_get_checksums_that_fit(tmp_path: Path) -> None:
    path = write_lane(tmp_path / "a", [{"kind": "note", "rid": "a-long-request-id"}])
    data = path.read_bytes()
    path.write_bytes(data + b'{"kind":"block","bytes":%d,"crc32":"%08x"}\n' % (len(data), zlib.crc32(data)))
    rewritten(tmp_path / "a", tmp_path / "out")
    *lines, block = (tmp_path / "out" / path.name).read_bytes().splitlines(keepends=True)
    seal = json.loads(block)
    assert (len(b"".join(lines)), f"{zlib.crc32(b''.join(lines)):08x}") == (seal["bytes"], seal["crc32"])


def test_a_compressed_file_stays_compressed(tmp_path: Path) -> None:
    path = write_lane(tmp_path / "a", [{"kind": "note", "rid": "secret"}])
    packed = pack(path)
    path.unlink()
    rewritten(tmp_path / "a", tmp_path / "out")
    found = gzip.decompress((tmp_path / "out" / packed.name).read_bytes())
    assert b'"rid":"r1"' in found
    assert b"secret" not in found


def test_a_spoilt_block_stays_spoilt_and_what_comes_behind_is_there(tmp_path: Path) -> None:
    path = write_lane(tmp_path / "a", [{"kind": "note", "rid": "first"}], outcome=None)
    header_line, first = path.read_bytes().splitlines(keepends=True)
    second = line(2, {"kind": "note", "rid": "second"})
    blocks = [header_line + first, line(2, {"kind": "note", "rid": "spoilt"}), second]
    seals = [b'{"kind":"block","bytes":%d,"crc32":"%08x"}\n' % (len(b), zlib.crc32(b)) for b in blocks]
    path.write_bytes(blocks[0] + seals[0] + blocks[1].replace(b"spoilt", b"SPOILT") + seals[1])
    (before,) = find_logs(tmp_path / "a").lanes
    rewritten(tmp_path / "a", tmp_path / "out")
    (after,) = find_logs(tmp_path / "out").lanes
    assert [record["rid"] for record in after.records()] == ["r1"]
    list(before.records())
    assert before.torn == after.torn
    assert b"SPOILT" not in (tmp_path / "out" / path.name).read_bytes()


def test_a_log_that_was_cut_is_cut_at_the_same_record(tmp_path: Path) -> None:
    path = write_lane(tmp_path / "a", [{"kind": "note", "rid": "first"}], outcome=None)
    path.write_bytes(path.read_bytes() + b'{"seq":2,"rid":"unfinis' + bytes(4096))
    rewritten(tmp_path / "a", tmp_path / "out")
    torn = []
    for folder in ("a", "out"):
        (lane,) = find_logs(tmp_path / folder).lanes
        torn.append((len(list(lane.records())), lane.torn, lane.is_unsealed))
    assert torn[0] == torn[1]
