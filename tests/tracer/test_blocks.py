"""What is spoilt is never taken for a record, and costs no more than what stands under its checksum."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import pytest

from tests.support.logs import DECIDE, NOTE, SMALL_KINDS, line, lines, place
from tracer import segments
from tracer.blocks import all_blocks_are_sound, first_line, last_line, pieces
from tracer.log import LaneLog, find_logs
from tracer.pack import pack
from tracer.record import header
from tracer.segments import SegmentSink
from tracer.tracer import Tracer

ROOT = Path(__file__).resolve().parents[2]
HEADER = header(place(), SMALL_KINDS, lane="scheduler", run_id="run-a", tool_version="test")
NAMES = [f"rank0000.scheduler.{index:03d}.jsonl" for index in range(4)]
BLOCK_BYTES = 3000


@dataclass
class Block:
    """Records `first`..`last` of a file under one checksum, and where they and their block line stand."""

    file: str
    start: int
    end: int
    line_end: int
    first: int
    last: int


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Three files of several blocks each, sealed."""
    folder = tmp_path_factory.mktemp("written")
    patch = pytest.MonkeyPatch()
    patch.setattr(segments, "BLOCK_BYTES", BLOCK_BYTES)
    patch.setattr(segments, "SEGMENT_BYTES_MIN", 16_384)
    patch.setattr(segments, "SEGMENT_BYTES_MAX", 16_384)
    tracing = Tracer(SegmentSink(folder, 0, "scheduler"), HEADER, lambda: 7)
    emit = tracing.emitter(DECIDE)
    for node in range(300):
        tracing.step = node
        emit(node, 1, 64, 5)
    tracing.close("completed")
    patch.undo()
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def blocks(written: dict[str, bytes]) -> list[Block]:
    found = []
    for name, data in written.items():
        start = 0
        while start < len(data):
            end = data.index(b'{"kind":"block"', start)
            line_end = data.index(b"\n", end) + 1
            seqs = [
                entry["seq"]
                for entry in map(json.loads, data[start:end].splitlines())
                if entry["kind"] not in ("header", "trailer")
            ]
            found.append(Block(name, start, end, line_end, seqs[0], seqs[-1]))
            start = line_end
    return found


def store(folder: Path, written: dict[str, bytes], changed: dict[str, bytes | None]) -> LaneLog:
    for name, data in {**written, **changed}.items():
        (folder / name).unlink(missing_ok=True)
        if data is not None:
            (folder / name).write_bytes(data)
    (lane,) = find_logs(folder).lanes
    return lane


def seqs(lane: LaneLog, *, is_lenient: bool = False) -> list[int]:
    """The numbers of the records that are read; each must say what was written under that number."""
    found = []
    for record in lane.records(is_lenient=is_lenient):
        seq = record["seq"]
        assert record == {
            "seq": seq,
            "step": seq - 1,
            "time_ns": 7,
            "kind": "write_backup",
            "node": seq - 1,
            "pages": 1,
            "tokens": 64,
            "host_pages_free": 5,
        }
        found.append(seq)
    return found


def lost(lane: LaneLog) -> int:
    """Records that are lost by what the lane says, without those behind which nothing comes."""
    return sum(
        int(words[at - 1].replace(",", ""))
        for sentence in lane.damage
        for words in [sentence.split()]
        for at, word in enumerate(words)
        if word in ("record", "records") and words[at + 1] in ("is", "are") and words[at + 2] == "lost"
    )


def demand_agreement(lane: LaneLog, expected: list[int]) -> None:
    """Every way of reading past damage gives the same records."""
    assert seqs(lane, is_lenient=True) == expected
    damage, count = lane.damage, lane.count
    assert count == len(expected)
    extents = lane.extents()
    assert (lane.damage, lane.count) == (damage, count)
    copied = []
    for index, extent in enumerate(extents):
        target = BytesIO()
        lane.copy_readable(index, target)
        copied += [json.loads(text) for text in target.getvalue().splitlines()]
        if extent.is_plain:
            assert extent.valid_bytes <= extent.file_bytes
            start = extent.path.read_bytes()[: extent.valid_bytes]
            kept = [text for text in start.splitlines() if not text.startswith(b'{"kind":"block"')]
            assert kept == target.getvalue().splitlines()
    records = [entry for entry in copied if entry["kind"] not in ("header", "trailer")]
    assert [record["seq"] for record in records] == expected


def flipped(data: bytes, at: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    return bytes(changed)


def test_the_log_under_test_has_many_blocks_in_several_files(written: dict[str, bytes]) -> None:
    assert list(written) == NAMES[:3]
    assert len(blocks(written)) > 9


@pytest.mark.parametrize("number", range(11))
def test_a_flipped_bit_stops_a_strict_reader_before_its_block_and_costs_a_lenient_one_that_block(
    number: int, written: dict[str, bytes], tmp_path: Path
) -> None:
    known = blocks(written)
    block = known[number]
    data = written[block.file]
    middle = data.index(b"\n", (block.start + block.end) // 2)
    # In a value, in a key, in a brace; the newline of a line; the last byte under the checksum.
    for at in (middle - 3, middle - 20, middle - 1, middle, block.end - 2):
        for bit in (0, 6):
            lane = store(tmp_path, written, {block.file: flipped(data, at, bit)})
            assert seqs(lane) == list(range(1, block.first))
            assert lane.torn is not None and not lane.is_complete
            expected = [seq for seq in range(1, 301) if not block.first <= seq <= block.last]
            demand_agreement(lane, expected)
            assert lane.damage and not lane.is_complete
            if block is not known[-1]:
                assert lost(lane) == block.last - block.first + 1


@pytest.mark.parametrize("number", [0, 1, 4, 7, 10])
def test_a_flipped_bit_in_a_block_line_costs_at_most_what_it_speaks_of_and_the_next_one(
    number: int, written: dict[str, bytes], tmp_path: Path
) -> None:
    known = blocks(written)
    block = known[number]
    data = written[block.file]
    count_at = data.index(b'"bytes":', block.end) + 8
    crc_at = data.index(b'"crc32":"', block.end) + 9
    for at in (
        block.end - 1,
        block.end,
        block.end + 3,
        block.end + 10,
        count_at,
        count_at + 1,
        crc_at,
        crc_at + 7,
        block.line_end - 1,
    ):
        for bit in (0, 1, 6):
            lane = store(tmp_path, written, {block.file: flipped(data, at, bit)})
            strict = seqs(lane)
            assert strict == list(range(1, len(strict) + 1))
            assert not lane.is_complete
            found = seqs(lane, is_lenient=True)
            missing = sorted(set(range(1, 301)) - set(found))
            next_one = known[min(number + 1, len(known) - 1)]
            assert set(missing) <= set(range(block.first, next_one.last + 1))
            demand_agreement(lane, found)


def test_every_bit_of_a_header_under_a_checksum_counts(written: dict[str, bytes], tmp_path: Path) -> None:
    (first, *_) = blocks(written)
    data = written[NAMES[0]]
    # Some of its numbers: it can still be read, but not be believed.
    for at in (data.index(b'"time_ns":7') + 10, data.index(b'"tool_version":"test"') + 17):
        lane = store(tmp_path, written, {NAMES[0]: flipped(data, at, 0)})
        assert (seqs(lane), lane.torn is None) == ([], False)
        demand_agreement(lane, list(range(first.last + 1, 301)))
        assert lost(lane) == first.last


def test_a_later_file_whose_header_cannot_be_read_costs_its_first_block(
    written: dict[str, bytes], tmp_path: Path
) -> None:
    block = next(block for block in blocks(written) if block.file == NAMES[1])
    for at in (0, 5, written[NAMES[1]].index(b"\n")):
        lane = store(tmp_path, written, {NAMES[1]: flipped(written[NAMES[1]], at, 0)})
        assert seqs(lane) == list(range(1, block.first))
        demand_agreement(lane, [seq for seq in range(1, 301) if not block.first <= seq <= block.last])
        assert lost(lane) == block.last - block.first + 1


def test_a_lane_whose_first_files_have_no_header_begins_at_the_first_one_that_has(
    written: dict[str, bytes], tmp_path: Path
) -> None:
    lane = store(tmp_path, written, {name: b"x" + written[name] for name in NAMES[:2]})
    first = next(block.first for block in blocks(written) if block.file == NAMES[2])
    assert seqs(lane) == list(range(first, 301))
    assert (lane.last_dropped_seq, lane.counts_before) == (first - 1, None)


def test_a_spoilt_trailer_is_none(written: dict[str, bytes], tmp_path: Path) -> None:
    last = list(written)[-1]
    at = written[last].index(b'"outcome"') + 3
    lane = store(tmp_path, written, {last: flipped(written[last], at, 1)})
    seqs(lane)
    assert (lane.trailer, lane.is_complete) == (None, False)
    seqs(lane, is_lenient=True)
    assert (lane.trailer, lane.is_complete) == (None, False)
    assert "nothing that can be read comes behind it" in lane.damage[-1]


def test_a_page_of_zeros_costs_the_blocks_that_it_touches(written: dict[str, bytes], tmp_path: Path) -> None:
    data = written[NAMES[1]]
    for start in (4096, 8192):
        lane = store(tmp_path, written, {NAMES[1]: data[:start] + bytes(2048) + data[start + 2048 :]})
        hit = [
            block
            for block in blocks(written)
            if block.file == NAMES[1] and block.start < start + 2048 and start < block.line_end
        ]
        first, last = hit[0].first, hit[-1].last
        assert seqs(lane) == list(range(1, first))
        demand_agreement(lane, [seq for seq in range(1, 301) if not first <= seq <= last])
        assert lost(lane) == last - first + 1


def test_a_page_of_zeros_at_the_end_of_a_file_costs_its_last_blocks_and_no_other_file(
    written: dict[str, bytes], tmp_path: Path
) -> None:
    data = written[NAMES[1]]
    known = [block for block in blocks(written) if block.file == NAMES[1]]
    lane = store(tmp_path, written, {NAMES[1]: data[:-1000] + bytes(1000)})
    found = seqs(lane, is_lenient=True)
    assert set(range(1, 301)) - set(found) <= set(range(known[-1].first, known[-1].last + 1))
    demand_agreement(lane, found)
    assert lost(lane) == 300 - len(found)


def test_a_block_line_that_is_missing_spoils_what_it_spoke_of(
    written: dict[str, bytes], tmp_path: Path
) -> None:
    block = blocks(written)[1]
    data = written[block.file]
    lane = store(tmp_path, written, {block.file: data[: block.end] + data[block.line_end :]})
    assert seqs(lane) == list(range(1, block.first))
    assert "its checksum is gone" in (lane.torn or "")
    demand_agreement(lane, [seq for seq in range(1, 301) if not block.first <= seq <= block.last])


def test_a_block_that_is_missing_with_its_line_is_a_gap(written: dict[str, bytes], tmp_path: Path) -> None:
    block = blocks(written)[1]
    data = written[block.file]
    lane = store(tmp_path, written, {block.file: data[: block.start] + data[block.line_end :]})
    assert seqs(lane) == list(range(1, block.first))
    assert "the log has a gap" in (lane.torn or "")
    found = seqs(lane, is_lenient=True)
    assert set(found) <= set(range(1, 301))
    demand_agreement(lane, found)


def test_a_file_that_is_missing_in_the_middle_is_a_gap_of_so_many_records(
    written: dict[str, bytes], tmp_path: Path
) -> None:
    here = [block for block in blocks(written) if block.file == NAMES[1]]
    lane = store(tmp_path, written, {NAMES[1]: None})
    assert seqs(lane) == list(range(1, here[0].first))
    assert "segment 001, which comes before it, is missing" in (lane.torn or "")
    demand_agreement(lane, [*range(1, here[0].first), *range(here[-1].last + 1, 301)])
    assert lost(lane) == here[-1].last - here[0].first + 1


@pytest.mark.parametrize("back", [1, 40, 700, 5000])
def test_a_file_in_the_middle_that_was_cut_costs_what_was_cut_off(
    back: int, written: dict[str, bytes], tmp_path: Path
) -> None:
    here = [block for block in blocks(written) if block.file == NAMES[1]]
    lane = store(tmp_path, written, {NAMES[1]: written[NAMES[1]][:-back]})
    found = seqs(lane, is_lenient=True)
    missing = set(range(1, 301)) - set(found)
    assert missing <= set(range(here[0].first, here[-1].last + 1))
    assert len(missing) <= back // 80 + 1
    demand_agreement(lane, found)
    assert lost(lane) == len(missing)


def test_two_places_that_are_spoilt_are_two_sentences(written: dict[str, bytes], tmp_path: Path) -> None:
    known = blocks(written)
    one, two = known[1], known[-2]
    changed: dict[str, bytes | None] = {
        block.file: flipped(written[block.file], block.start + 30, 0) for block in (one, two)
    }
    lane = store(tmp_path, written, changed)
    seqs(lane, is_lenient=True)
    assert len(lane.damage) == 2
    assert lost(lane) == one.last - one.first + two.last - two.first + 2
    assert lane.is_complete is False and lane.trailer is not None


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_file_cut_at_any_byte_of_its_last_records_loses_only_what_was_cut(
    is_sealed: bool, written: dict[str, bytes], tmp_path: Path
) -> None:
    whole = written[NAMES[0]]
    if not is_sealed:
        whole = whole[: blocks(written)[3].end - 700]
        whole = whole[: whole.rindex(b"\n") + 1]
    ends = [at + 1 for at in range(len(whole)) if whole[at] == 0x0A]
    records = [
        end
        for start, end in zip([0, *ends], ends, strict=False)
        if b'"write_backup"' in whole[start:end] and b'"header"' not in whole[start:end]
    ]
    path = tmp_path / NAMES[0]
    for cut in range(records[-3] + 1, len(whole) + 1):
        for filling in (b"", bytes(300)):
            path.write_bytes(whole[:cut] + filling)
            (lane,) = find_logs(tmp_path).lanes
            due = sum(end <= cut for end in records)
            assert seqs(lane) == list(range(1, due + 1))
            assert (lane.torn is None) == (cut in ends and not filling)
            assert lane.is_unsealed == bool(filling)


def test_a_byte_that_is_no_text_ends_an_unchecked_block_on_every_way_of_reading(
    written: dict[str, bytes], tmp_path: Path
) -> None:
    whole = written[NAMES[0]][: blocks(written)[3].end - 700]
    whole = whole[: whole.rindex(b"\n") + 1]
    at = whole.rindex(b"host_pages_free") + 3
    lane = store(tmp_path, {NAMES[0]: flipped(whole, at, 7) + bytes(500)}, {})
    found = seqs(lane)
    assert "the line is not a JSON object" in (lane.torn or "")
    demand_agreement(lane, found)


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_log_without_blocks_of_the_first_version_is_still_read(is_packed: bool, tmp_path: Path) -> None:
    records = [{"kind": "note", "text": "x" * 300} for _ in range(1000)]
    path = tmp_path / NAMES[0]
    path.write_bytes(b"".join(lines(records, version=[1, 0])))
    if is_packed:
        pack(path)
        path.unlink()
    (lane,) = find_logs(tmp_path).lanes
    assert (len(list(lane.records())), lane.is_complete) == (1000, True)


def test_a_line_longer_than_a_block_is_one_piece(tmp_path: Path) -> None:
    sink = SegmentSink(tmp_path, 0, "scheduler")
    tracing = Tracer(sink, HEADER, lambda: 7)
    note = tracing.emitter(NOTE)
    texts = ["a" * length for length in (10, 65_536, 200_000, 3_000_000, 1, 70_000)]
    for text in texts:
        note(text)
    tracing.close("completed")
    (lane,) = find_logs(tmp_path).lanes
    assert [record["text"] for record in lane.records()] == texts
    assert lane.is_complete
    for path in list(tmp_path.iterdir()):
        pack(path)
        path.unlink()
    (lane,) = find_logs(tmp_path).lanes
    assert [record["text"] for record in lane.records()] == texts


@pytest.mark.parametrize(
    "line_",
    [
        b'{"kind":"block","bytes":-1,"crc32":"00000000"}\n',
        b'{"kind":"block","bytes":0,"crc32":"00000000"}\n',
        b'{"kind":"block","bytes":99999999999999999999999,"crc32":"00000000"}\n',
        b'{"kind":"block","bytes":"5","crc32":"00000000"}\n',
        b'{"kind":"block","bytes":5}\n',
        b'{"kind":"block","bytes":5,"crc32":5}\n',
        b'{"kind":"block",' + b"[" * 100_000 + b"\n",
        b'{"kind":"block",\xff\n',
    ],
)
def test_a_block_line_that_makes_no_sense_spoils_what_is_before_it(line_: bytes, tmp_path: Path) -> None:
    header_line, *rest = lines([{"kind": "note", "text": "x"}] * 4)
    (tmp_path / NAMES[0]).write_bytes(header_line + rest[0] + line_ + b"".join(rest[1:]))
    (lane,) = find_logs(tmp_path).lanes
    assert list(lane.records()) == []
    assert lane.torn is not None
    assert [record["seq"] for record in lane.records(is_lenient=True)] == [2, 3, 4]
    assert lost(lane) == 1


def test_thousands_of_spoilt_places_are_each_told(tmp_path: Path) -> None:
    data = lines([])[0]
    for seq in range(1, 10_001):
        text = line(seq, {"kind": "note", "text": ""})
        crc32 = zlib.crc32(text) if seq % 2 else 0
        data += text + b'{"kind":"block","bytes":%d,"crc32":"%08x"}\n' % (len(text), crc32)
    (tmp_path / NAMES[0]).write_bytes(data)
    (lane,) = find_logs(tmp_path).lanes
    # The header stands in front of the first block, under no checksum.
    assert [record["seq"] for record in lane.records(is_lenient=True)] == [*range(1, 10_001, 2)]
    assert (len(lane.damage), lost(lane)) == (5001, 4999)


def test_damage_that_is_told_is_the_same_object_until_there_is_more(
    written: dict[str, bytes], tmp_path: Path
) -> None:
    block = blocks(written)[1]
    lane = store(tmp_path, written, {block.file: flipped(written[block.file], block.start + 30, 0)})
    list(lane.records(is_lenient=True))
    assert lane.damage is lane.damage


BOUNDED = """
import resource, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tracer.log import find_logs
path = Path({folder!r})
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
(lane,) = find_logs(path).lanes
print(sum(1 for _ in lane.records(is_lenient={is_lenient})), lane.torn)
"""


@pytest.mark.parametrize("filling", ["zeros", "no newline", "one line"])
def test_a_large_file_without_any_block_line_is_read_in_bounded_memory(filling: str, tmp_path: Path) -> None:
    path = tmp_path / NAMES[0]
    start = b"".join(lines([{"kind": "note", "text": "x"}] * 3, outcome=None))
    with path.open("wb") as file:
        file.write(start)
        if filling == "zeros":
            file.truncate(100_000_000)
        else:
            text = b"x" * 1_000_000
            file.write(
                b'{"seq":4,"step":0,"time_ns":0,"kind":"note","text":"' if filling == "one line" else b""
            )
            for _ in range(100):
                file.write(text)
            file.write(b'"}\n' if filling == "one line" else b"")
    code = BOUNDED.format(root=str(ROOT), folder=str(tmp_path), limit=1 << 28, is_lenient=True)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.startswith("3 rank0000.scheduler.000.jsonl: reading stopped before record 4")


def test_many_records_without_any_block_line_are_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / NAMES[0]
    count = 25_000
    with path.open("wb") as file:
        file.write(lines([])[0])
        for seq in range(1, count + 1):
            file.write(line(seq, {"kind": "note", "text": "x" * 4000}))
    assert path.stat().st_size > 100_000_000
    code = BOUNDED.format(root=str(ROOT), folder=str(tmp_path), limit=1 << 28, is_lenient=False)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{count} None\n", "")


def test_pieces_of_a_file_are_all_of_it(written: dict[str, bytes], tmp_path: Path) -> None:
    for name, data in written.items():
        (tmp_path / name).write_bytes(data)
        found = list(pieces(tmp_path / name))
        assert all(piece.is_checked and not piece.damage for piece in found)
        assert sum(len(piece.data) + piece.more_bytes for piece in found) == len(data)


def test_the_first_and_the_last_line_of_a_file_are_no_block_lines(
    written: dict[str, bytes], tmp_path: Path
) -> None:
    name, data = list(written.items())[-1]
    (tmp_path / name).write_bytes(data)
    assert json.loads(first_line(tmp_path / name))["kind"] == "header"
    assert json.loads(last_line(tmp_path / name, 10_000))["kind"] == "trailer"
    packed = pack(tmp_path / name)
    assert json.loads(first_line(packed))["kind"] == "header"
    assert json.loads(last_line(packed, 10_000))["kind"] == "trailer"


def test_a_file_that_was_packed_says_the_same_and_a_flipped_bit_costs_its_part(
    written: dict[str, bytes], tmp_path: Path
) -> None:
    for name, data in written.items():
        (tmp_path / name).write_bytes(data)
        pack(tmp_path / name)
        os.unlink(tmp_path / name)
    (lane,) = find_logs(tmp_path).lanes
    demand_agreement(lane, list(range(1, 301)))
    assert lane.is_complete
    here = [block for block in blocks(written) if block.file == NAMES[1]]
    path = tmp_path / f"{NAMES[1]}.gz"
    whole = path.read_bytes()
    for at in (0, 3, 13, 16, 17, 30, len(whole) // 2):
        path.write_bytes(flipped(whole, at, 2))
        (lane,) = find_logs(tmp_path).lanes
        assert seqs(lane) == list(range(1, here[0].first))
        # All of it is one member.
        demand_agreement(lane, [*range(1, here[0].first), *range(here[-1].last + 1, 301)])
        assert lost(lane) == here[-1].last - here[0].first + 1


def test_sound_files_are_told_from_others_without_reading_a_line(tmp_path: Path) -> None:
    sink = SegmentSink(tmp_path, 0, "scheduler")
    tracing = Tracer(sink, HEADER, lambda: 7)
    decide = tracing.emitter(DECIDE)
    for node in range(9000):
        decide(node, 1, 64, 5)
    tracing.close("completed")
    (lane,) = find_logs(tmp_path).lanes
    assert all_blocks_are_sound(lane.files)
    for path in lane.files:
        whole = path.read_bytes()
        for at in (0, len(whole) // 3, len(whole) - 70, len(whole) - 50, len(whole) - 5, len(whole) - 1):
            data = bytearray(whole)
            data[at] ^= 1
            path.write_bytes(data)
            assert not all_blocks_are_sound(lane.files)
        path.write_bytes(whole)
    assert all_blocks_are_sound(lane.files)
    assert not all_blocks_are_sound([*lane.files, tmp_path / "none"])


def test_lines_that_nobody_has_checked_are_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "rank0000.io.000.jsonl"
    path.write_bytes(b'{"kind":"header"}\n{"seq":1}\n' + bytes(100))
    assert all_blocks_are_sound([path])
