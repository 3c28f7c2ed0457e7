from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from hicache.agentic import Agentic, AgenticSpec
from hicache.core import Abort, Arrival, Command, Request
from hicache.errors import ConfigError, WorkloadError
from hicache.workload import FrontDoor, TraceFile, Workload, parse_commands


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


def rids(arrived: list[Arrival]) -> list[str]:
    return [arrival.rid for arrival in arrived if isinstance(arrival, Request)]


def one_turn(**more: int) -> Agentic:
    """One conversation of one turn with an answer of 4 tokens."""
    return Agentic(AgenticSpec(conversations=1, rounds=1, max_context=100, output=4, shared_prefix=0, **more))


def test_the_front_door_lets_in_as_many_as_are_allowed_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *[row(4, [index]) for index in range(5)])
    door = FrontDoor(TraceFile(path, 4), 2)
    assert rids(door.poll()) == ["r0", "r1"]
    assert door.poll() == []
    door.finished("r1", is_served=True)
    assert rids(door.poll()) == ["r2"]


def test_an_abort_comes_when_it_is_due_and_its_request_is_counted_by_how_it_ended() -> None:
    door = FrontDoor(one_turn(aborts=100), 1)
    assert rids(door.poll()) == ["c0.t1"]
    due = next(arrived for _ in range(16) if (arrived := door.poll()))
    assert due == [Abort("c0.t1")]
    door.finished("c0.t1", is_served=False)
    assert (door.served, door.refused, door.aborted) == (0, 0, 1)


def test_a_request_that_was_answered_in_spite_of_its_abort_is_served() -> None:
    door = FrontDoor(one_turn(aborts=100), 1)
    while Abort("c0.t1") not in door.poll():
        pass
    door.finished("c0.t1", is_served=True)
    assert (door.served, door.refused, door.aborted) == (1, 0, 0)


def test_an_abort_is_handed_on_also_when_it_comes_too_late() -> None:
    door = FrontDoor(one_turn(aborts=100), 1)
    door.poll()
    door.finished("c0.t1", is_served=False)
    late = [arrival for _ in range(16) for arrival in door.poll()]
    assert late == [Abort("c0.t1")]
    assert (door.served, door.refused, door.aborted) == (0, 1, 0)


def test_commands_come_at_their_polls_before_the_requests() -> None:
    door = FrontDoor(one_turn(), 1, parse_commands("attach@1,flush@3,detach@3"))
    assert door.poll() == [Command("attach")]
    assert rids(door.poll()) == ["c0.t1"]
    assert [door.poll() for _ in range(2)] == [[Command("flush")], [Command("detach")]]


def test_nobody_is_let_in_while_a_command_waits_for_the_replica_to_come_to_rest() -> None:
    door = FrontDoor(one_turn(), 1, parse_commands("flush@1"))
    assert [door.poll(is_idle=False) for _ in range(3)] == [[], [], []]
    assert door.poll(is_idle=True) == [Command("flush")]
    door.carried_out(Command("flush"), "")
    door.carried_out(Command("attach"), "not_idle")
    assert door.carried == ["flush done", "attach refused: not_idle"]
    assert rids(door.poll(is_idle=True)) == ["c0.t1"]


def test_the_front_door_stays_open_for_a_command_and_does_not_wait_for_nothing() -> None:
    door = FrontDoor(one_turn(), 1, parse_commands("flush@1000,attach@1000"))
    door.poll()
    assert door.poll() == []
    door.finished("c0.t1", is_served=True)
    assert not door.is_exhausted
    assert door.poll() == [Command("flush")]
    assert not door.is_exhausted
    assert door.poll() == [Command("attach")]
    assert door.is_exhausted


def test_commands_are_read_in_order_of_their_polls() -> None:
    expected = [(40, Command("attach")), (90, Command("detach")), (120, Command("flush"))]
    assert parse_commands("attach@40,flush@120,detach@90") == expected
    assert parse_commands("") == []


@pytest.mark.parametrize(
    "text",
    ["attach", "attach@", "attach@x", "attach@0", "attach@-1", "reboot@4", "@4", "flush@4@5", "flush@9" * 9],
)
def test_a_command_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="as in attach@40"):
        parse_commands(text)
