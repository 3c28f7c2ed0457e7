from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path

import pytest

from hicache.agentic import Agentic, AgenticSpec
from hicache.core import Request
from hicache.errors import ConfigError, WorkloadError
from hicache.workload import FrontDoor, TraceFile, Workload


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def row(input_length: int, ids: list[int], **more: object) -> dict[str, object]:
    return {"timestamp": 0, "input_length": input_length, "output_length": 2, "hash_ids": ids, **more}


def read_all(workload: Workload) -> list[Request]:
    found = []
    while (request := workload.next()) is not None:
        found.append(request)
        workload.finished(request.rid)
    return found


def page(request: Request, index: int, size: int = 4) -> bytes:
    return request.tokens[index * size * 4 : (index + 1) * size * 4]


def test_equal_ids_give_equal_pages_and_others_do_not(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", row(8, [7, 8]), row(12, [7, 9, 10]))
    first, second = read_all(TraceFile(path, 4))
    assert page(first, 0) == page(second, 0)
    assert page(first, 1) != page(second, 1)
    assert [first.rid, second.rid] == ["r0", "r1"]


def test_a_prompt_has_exactly_its_tokens_with_or_without_an_id_for_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", row(10, [7, 8, 9]), row(10, [7, 8]))
    assert [request.input_tokens for request in read_all(TraceFile(path, 4))] == [10, 10]


def test_ids_of_64_bits_and_negative_ids_stay_apart(tmp_path: Path) -> None:
    ids = [2**63, 2**32, -1, 2**31, 5]
    path = write(tmp_path / "t.jsonl", row(20, ids), row(20, ids))
    first, second = read_all(TraceFile(path, 4))
    assert len({page(first, index) for index in range(5)}) == 5
    assert first.tokens == second.tokens


def test_a_gzip_file_is_recognised_by_its_bytes(tmp_path: Path) -> None:
    plain = write(tmp_path / "t.jsonl", row(8, [7, 8]))
    packed = tmp_path / "packed.jsonl"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_all(TraceFile(packed, 4)) == read_all(TraceFile(plain, 4))


def test_a_limit_stops_before_what_is_behind_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", row(8, [7, 8]), "not an object")
    assert len(read_all(TraceFile(path, 4, limit=1))) == 1


def test_replicas_share_the_lines_between_them(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *[row(4, [index]) for index in range(5)])
    rids = [[r.rid for r in read_all(TraceFile(path, 4, replica=dp, replicas=2))] for dp in (0, 1)]
    assert rids == [["r0", "r2", "r4"], ["r1", "r3"]]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("[1, 2]", "expected a JSON object"),
        ("{", "not a JSON object"),
        ("\udcff", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        (json.dumps(row(8, ["a", "b"])), "hash_ids is not a list of whole numbers"),  # type: ignore[list-item]
        (json.dumps(row(8, [True, False])), "hash_ids is not a list of whole numbers"),
        (json.dumps(row(0, [])), "input_length is 0"),
        (json.dumps({**row(8, [1, 2]), "input_length": "8"}), "input_length is '8'"),
        (json.dumps({**row(8, [1, 2]), "input_length": 1e3}), "input_length is 1000.0"),
        (json.dumps({**row(8, [1, 2]), "output_length": -1}), "output_length is -1"),
        (json.dumps({**row(8, [1, 2]), "timestamp": "now"}), "timestamp is 'now'"),
        (json.dumps({**row(8, [1, 2]), "session_id": [1]}), "session_id is"),
        (json.dumps({"hash_ids": [1]}), "input_length is missing"),
        (json.dumps(row(8, [1])), "1 hash ids for 8 tokens do not fit --page-size 4"),
        (json.dumps(row(8, [1, 2, 3])), "3 hash ids for 8 tokens do not fit --page-size 4"),
        (json.dumps(row(8, [1, 2], block_tokens=[3, 5])), "varying length"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(line: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    good = json.dumps(row(8, [7, 8]))
    path.write_bytes(f"{good}\n{line}\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(WorkloadError) as error:
        read_all(TraceFile(path, 4))
    assert "line 2" in str(error.value)
    assert complaint in str(error.value)


def test_a_gzip_cut_in_half_is_an_error_and_what_came_before_is_read(tmp_path: Path) -> None:
    chance = random.Random(1)
    plain = b"".join(json.dumps(row(4, [chance.getrandbits(31)])).encode() + b"\n" for _ in range(20_000))
    packed = gzip.compress(plain)
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(packed[: len(packed) // 2])
    workload = TraceFile(path, 4)
    with pytest.raises(WorkloadError, match="cut or damaged after line"):
        read_all(workload)


def test_a_missing_file_and_an_empty_one_are_errors_at_once(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="No such file"):
        TraceFile(tmp_path / "none.jsonl", 4)
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(WorkloadError, match="no request in it"):
        TraceFile(tmp_path / "empty.jsonl", 4)
    with pytest.raises(WorkloadError, match="directory"):
        TraceFile(tmp_path, 4)


def test_a_conversation_grows_by_equal_steps_and_repeats_itself() -> None:
    spec = AgenticSpec(conversations=1, rounds=4, max_context=420, output=10, shared_prefix=20)
    requests = read_all(Agentic(spec))
    assert [request.input_tokens for request in requests] == [120, 220, 320, 420]
    for earlier, later in itertools.pairwise(requests):
        assert later.tokens.startswith(earlier.tokens + earlier.output)


def test_conversations_share_their_prefix_and_nothing_more() -> None:
    spec = AgenticSpec(conversations=2, rounds=1, max_context=100, output=10, shared_prefix=20)
    first, second = read_all(Agentic(spec))
    assert first.tokens[:80] == second.tokens[:80]
    assert first.tokens[80:84] != second.tokens[80:84]


def test_a_conversation_waits_for_its_answer() -> None:
    workload = Agentic(AgenticSpec(conversations=1, rounds=2, max_context=200, output=10, shared_prefix=0))
    first = workload.next()
    assert first is not None
    assert workload.next() is None
    assert not workload.is_exhausted
    workload.finished(first.rid)
    assert workload.next() is not None


def test_a_seed_gives_the_same_conversations_whoever_answers_faster() -> None:
    spec = AgenticSpec(conversations=3, rounds=3)
    one_by_one = {request.rid: request for request in read_all(Agentic(spec))}
    workload = Agentic(spec)
    together: dict[str, Request] = {}
    while not workload.is_exhausted:
        batch = list(iter(workload.next, None))
        for request in reversed(batch):
            together[request.rid] = request
            workload.finished(request.rid)
    assert together == one_by_one


def test_a_specification_is_read_by_its_keys() -> None:
    spec = AgenticSpec.parse("conversations=32,rounds=86,max-context=160000,output=20,aborts=0,think=0")
    assert (spec.conversations, spec.rounds, spec.max_context, spec.output) == (32, 86, 160_000, 20)


@pytest.mark.parametrize(
    "text",
    [
        "conversations=0",
        "rounds=x",
        "colour=3",
        "rounds=8,max-context=8",
        "output=4096",
        "shared-prefix=5000",
        "aborts=3",
        "conversations",
        "rounds=99999999999",
    ],
)
def test_a_specification_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--agentic"):
        AgenticSpec.parse(text)


def test_the_front_door_lets_in_as_many_as_are_allowed_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *[row(4, [index]) for index in range(5)])
    door = FrontDoor(TraceFile(path, 4), 2)
    assert [request.rid for request in door.poll()] == ["r0", "r1"]
    assert door.poll() == []
    door.finished("r1", is_served=True)
    assert [request.rid for request in door.poll()] == ["r2"]
