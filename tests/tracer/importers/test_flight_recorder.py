"""Dumps of PyTorch's flight recorder, whole and odd: what becomes of them as rows."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from tracer.importers import flight_recorder
from tracer.importers.dossier import Dossier, Dump, Progress
from tracer.importers.sniff import File

ENTRY: dict[str, Any] = {
    "record_id": 300,
    "pg_id": 1,
    "process_group": ("1", "hicache_tp"),
    "collective_seq_id": 301,
    "p2p_seq_id": 0,
    "op_id": 301,
    "profiling_name": "gloo:all_reduce",
    "input_sizes": [[4]],
    "input_dtypes": ["Float"],
    "output_sizes": [[4]],
    "output_dtypes": ["Float"],
    "state": "scheduled",
    "retired": False,
    "is_p2p": False,
    "timeout_ms": 1_800_000,
    "thread_id": "14003",
    "thread_name": "python",
    "time_created_ns": 1_795_963_933_883_506_232,
    "time_discovered_started_ns": None,
    "time_discovered_completed_ns": None,
}
GLOO: dict[str, Any] = {
    "version": "2.10",
    "comm_lib_version": "",
    "pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}},
    "pg_status": {
        "1": {
            "last_enqueued_collective": 301,
            "last_started_collective": -1,
            "last_completed_collective": 299,
        }
    },
    "entries": [{**ENTRY, "collective_seq_id": 300, "retired": True}, ENTRY],
}


def nccl(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A dump of rank 3, which is in the groups 7 (tp) and 12 (dp)."""
    return {
        "version": "2.9",
        "nccl_version": "2.27.3",
        "pg_config": {
            "7": {"name": "7", "desc": "tp", "ranks": "[2, 3]"},
            "12": {"name": "12", "desc": "dp", "ranks": "[1, 3]"},
        },
        "pg_status": {
            "4": {"last_enqueued_collective": 9, "last_completed_collective": 8},
            "5": {"last_enqueued_collective": 20, "last_completed_collective": 20},
        },
        "entries": list(entries),
        **more,
    }


def call(seq: Any, **more: Any) -> dict[str, Any]:
    own = {"collective_seq_id": seq, "process_group": ("7", "tp"), "pg_id": 4}
    return {**ENTRY, "profiling_name": "nccl:all_reduce", **own, **more}


def read(path: Path, data: bytes) -> Dossier:
    path.write_bytes(data)
    into = Dossier()
    flight_recorder.read(File(path, path.name), into.begin(path.name), into)
    return into


def one(path: Path, document: Any) -> Dump:
    into = read(path, pickle.dumps(document, 2))
    assert into.files[0].refused is None
    (dump,) = into.dumps
    return dump


def group(dump: Dump, name: str) -> Progress:
    (found,) = [progress for progress in dump.groups if progress.group.name == name]
    return found


def refusal(path: Path, data: bytes) -> str:
    into = read(path, data)
    assert into.dumps == []
    assert into.files[0].refused is not None
    return into.files[0].refused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace_3"


def test_a_gloo_dump_as_pickle(path: Path) -> None:
    dump = one(path, GLOO)
    assert (dump.version, dump.backend, dump.form, dump.entry_count) == ("2.10", "gloo", "pickle", 2)
    (progress,) = dump.groups
    # The status lags by one; what is retired has ended.
    assert (progress.enqueued, progress.completed, progress.first, progress.last) == (301, 300, 300, 301)
    assert progress.group.members is None
    assert progress.calls[301].shape == "all_reduce 4:Float -> 4:Float"
    assert progress.calls[301].thread == "python (14003)"
    assert progress.calls[301].at == (0, 1)


def test_the_same_as_json_where_lists_stand_for_tuples_and_text_for_numbers(path: Path) -> None:
    status = {"1": {key: str(value) for key, value in GLOO["pg_status"]["1"].items()}}
    text = json.dumps({**GLOO, "pg_status": status, "nccl_comm_state": {}}).encode()
    (dump,) = read(path, text).dumps
    (progress,) = dump.groups
    assert (dump.form, progress.enqueued, progress.completed) == ("json", 301, 300)
    assert dict(progress.calls) == dict(one(path, GLOO).groups[0].calls)


def test_json_over_several_lines(path: Path) -> None:
    (dump,) = read(path, json.dumps(GLOO, indent=1).encode()).dumps
    assert dump.groups[0].enqueued == 301


def test_lines_with_a_rank_and_a_dump_each(path: Path) -> None:
    lines = [json.dumps({"rank": rank, "dump": GLOO}) for rank in (0, 5)]
    into = read(path, "\n".join(["", lines[0], "no JSON", lines[1], ""]).encode())
    assert [(dump.who.rank, dump.at.record, dump.form) for dump in into.dumps] == [
        (0, 2, "lines"),
        (5, 4, "lines"),
    ]
    assert (into.files[0].records, into.files[0].unparsed) == (5, 1)
    assert into.dumps[1].groups[0].calls[301].at == (0, 4)


def test_a_list_of_dumps(path: Path) -> None:
    into = read(path, json.dumps([{"rank": rank, "dump": GLOO} for rank in (0, 5)]).encode())
    assert [dump.who.rank for dump in into.dumps] == [0, 5]


def test_a_compressed_dump(path: Path) -> None:
    (dump,) = read(path, gzip.compress(pickle.dumps(GLOO, 2))).dumps
    assert dump.groups[0].enqueued == 301


def test_the_head_of_a_dump_has_votes_and_other_files_have_none() -> None:
    assert flight_recorder.votes(pickle.dumps(GLOO, 2)) > 1
    assert flight_recorder.votes(json.dumps(GLOO).encode()) > 1
    assert flight_recorder.votes(b'{"traceEvents": []}') == 0
    assert flight_recorder.votes(b"[2031-01-01] process_group and profiling_name in a log") == 0
    # Nobody else reads or refuses a pickle.
    assert flight_recorder.votes(pickle.dumps([1], 4)) == 1


def test_groups_without_a_call_get_their_states_by_order(path: Path) -> None:
    dump = one(path, nccl(call(9)))
    assert (group(dump, "7").enqueued, group(dump, "7").completed) == (9, 8)
    assert (group(dump, "12").enqueued, group(dump, "12").completed) == (20, 20)
    assert dump.notes == ("groups without a call in the ring: their states are told by the groups' order",)


def test_states_are_not_linked_by_an_order_that_a_call_contradicts(path: Path) -> None:
    dump = one(path, nccl(call(9, pg_id=5)))
    assert (group(dump, "12").enqueued, dump.notes) == (-1, ())


def test_states_are_not_linked_where_names_are_no_numbers(path: Path) -> None:
    config = {"7": {"name": "7", "desc": "tp", "ranks": "[2, 3]"}, "x9f": {"name": "x9f", "ranks": "[1, 3]"}}
    assert group(one(path, nccl(call(9), pg_config=config)), "x9f").enqueued == -1


def test_a_group_with_sends_is_not_told_by_its_state(path: Path) -> None:
    send = call(0, is_p2p=True, p2p_seq_id=9, profiling_name="nccl:send 0->1")
    progress = group(one(path, nccl(send)), "7")
    assert (progress.enqueued, progress.completed) == (-1, -1)
    assert [(own.seq, own.op, own.is_p2p) for own in progress.p2p] == [(9, "send 0->1", True)]


def test_of_many_sends_the_open_and_the_newest_are_kept(path: Path) -> None:
    sends = [
        call(0, is_p2p=True, p2p_seq_id=seq, state="scheduled" if seq == 1 else "completed")
        for seq in range(200)
    ]
    kept = [own.seq for own in group(one(path, nccl(*sends)), "7").p2p]
    assert len(kept) < 50
    assert (kept[0], kept[-1]) == (1, 199)


def test_what_nccl_retired_without_an_end_has_timed_out(path: Path) -> None:
    progress = group(one(path, nccl(call(9, retired=True))), "7")
    assert (progress.completed, progress.calls[9].is_retired, progress.calls[9].state) == (
        8,
        True,
        "scheduled",
    )


def test_a_state_of_minus_one_gives_way_to_the_calls(path: Path) -> None:
    status = {"4": {"last_enqueued_collective": -1, "last_completed_collective": -1}}
    progress = group(one(path, nccl(call(8, state="completed"), call(9), pg_status=status)), "7")
    assert (progress.enqueued, progress.completed) == (9, 8)


def test_the_rank_is_the_one_that_all_groups_have_in_common(path: Path) -> None:
    assert one(path, nccl(call(9))).who.rank == 3


def test_a_line_that_gives_a_dump_to_a_rank_outside_of_its_groups_counts_for_nobody(path: Path) -> None:
    into = read(path, json.dumps({"rank": 6, "dump": nccl(call(9))}).encode())
    assert into.dumps[0].who.rank is None
    assert into.files[0].notes == [
        "a dump of rank 6 has calls of group 7, whose members don't include it: it counts for no rank"
    ]


def test_entries_that_were_left_out_are_not_those_of_an_idle_rank(path: Path) -> None:
    whole = nccl()
    idle = one(path, whole)
    assert (idle.has_entries, idle.are_calls_left_out) == (False, False)
    del whole["entries"]
    left_out = one(path, whole)
    assert (left_out.are_calls_left_out, left_out.notes[0]) == (True, "calls were left out of this dump")
    (as_json,) = read(path, json.dumps(whole).encode()).dumps
    assert as_json.are_calls_left_out is False


def test_frames_outside_of_torch_are_the_callers(path: Path) -> None:
    frames = [
        {"name": "all_reduce", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 3245},
        {"name": "writing_check", "filename": "/srv/sglang/srt/managers/hiradix.py", "line": 17},
        {"name": "<module>", "filename": "main.py", "line": 1},
    ]
    progress = group(one(path, nccl(call(9, frames=frames))), "7")
    assert progress.calls[9].stack == ("managers/hiradix.py:17 writing_check", "main.py:1 <module>")


def test_parts_of_a_coalesced_call_are_one_call_that_is_as_far_as_the_least(path: Path) -> None:
    parts = [call(9, state="completed", retired=True), call(9, input_sizes=[[2]])]
    progress = group(one(path, nccl(call(8, state="completed"), *parts)), "7")
    assert list(progress.calls) == [8, 9]
    assert progress.calls[9].shape == "all_reduce 4:Float -> 4:Float + all_reduce 2:Float -> 4:Float"
    assert (progress.calls[9].state, progress.calls[9].is_retired) == ("scheduled", False)


def test_entries_out_of_order_are_put_in_order(path: Path) -> None:
    progress = group(one(path, nccl(call(9), call(7, state="completed"), call(8, state="completed"))), "7")
    assert (list(progress.calls), progress.completed) == ([7, 8, 9], 8)
    assert 6 not in progress.calls


def test_what_older_versions_do_not_have(path: Path) -> None:
    new = {"retired", "is_p2p", "input_dtypes", "output_dtypes", "thread_id", "thread_name", "op_id"}
    old = {key: value for key, value in call(9).items() if key not in new}
    progress = group(one(path, nccl(old, version="2.0")), "7")
    assert (progress.calls[9].shape, progress.calls[9].thread) == ("all_reduce 4:? -> 4:?", "")


@pytest.mark.parametrize(
    ("ranks", "members"),
    [
        ("[0, 1]", (0, 1)),
        (" 4,2 ", (4, 2)),
        ([1, "2"], (1, 2)),
        ("[]", None),
        ("[0, 0]", None),
        ("[-1, 2]", None),
        ("__import__('os')", None),
        ("[" * 500, None),
        ("9" * 5000, None),
        (7, None),
        ({"a": 1}, None),
        ([[1]], None),
    ],
)
def test_members_are_digits_or_nothing(path: Path, ranks: Any, members: tuple[int, ...] | None) -> None:
    config = {"7": {"name": "7", "desc": "tp", "ranks": ranks}}
    assert group(one(path, nccl(call(9), pg_config=config)), "7").group.members == members


@pytest.mark.parametrize(
    "wrong",
    [
        {"collective_seq_id": -5},
        {"collective_seq_id": 1 << 70},
        {"collective_seq_id": 1.5},
        {"collective_seq_id": None},
        {"collective_seq_id": True},
        {"process_group": "7"},
        {"process_group": ("7",)},
        {"process_group": (["7"], {})},
        {"profiling_name": None},
        {"profiling_name": ["nccl:x"]},
        {"input_sizes": 4},
        {"input_sizes": [4]},
        {"input_sizes": [[[4]]]},
        {"input_sizes": [[1 << 30_000]]},
        {"input_sizes": [list(range(1000))]},
        {"input_dtypes": [{}]},
        {"state": ["scheduled"]},
        {"is_p2p": True, "p2p_seq_id": "x"},
    ],
)
def test_an_entry_that_says_nothing_is_counted_and_the_others_are_read(
    path: Path, wrong: dict[str, Any]
) -> None:
    into = read(path, pickle.dumps(nccl(call(8), {**call(9), **wrong}, call(10)), 2))
    assert (into.files[0].records, into.files[0].unparsed) == (3, 1)
    assert list(group(into.dumps[0], "7").calls) == [8, 10]


def test_entries_that_are_no_entries_are_counted(path: Path) -> None:
    into = read(path, pickle.dumps({**nccl(), "entries": [None, 7, "x", [], {}, call(9)]}, 2))
    assert (into.files[0].records, into.files[0].unparsed) == (6, 5)


@pytest.mark.parametrize("key", ["pg_config", "pg_status", "entries", "comm_lib_version", "hicache"])
@pytest.mark.parametrize("value", [None, 7, "x", [1], {"a": 1}, {"a": {"ranks": {}}}, float("nan")])
def test_any_value_in_the_place_of_any_other_is_no_error(path: Path, key: str, value: Any) -> None:
    assert len(read(path, pickle.dumps({**nccl(call(9)), key: value}, 2)).dumps) == 1
    assert len(read(path, json.dumps({**nccl(call(9)), key: value}).encode()).dumps) == 1


def test_not_a_number_and_numbers_of_any_length_in_json(path: Path) -> None:
    text = json.dumps(nccl(call(9, duration_ms=float("nan"), extra=1)))
    into = read(path, text.replace('"extra": 1', f'"extra": {"9" * 5000}').encode())
    assert group(into.dumps[0], "7").enqueued == 9


def test_strange_characters_are_replaced(path: Path) -> None:
    dump = one(path, nccl(call(9, process_group=("7\x1b[31m", "tp\udc80")), pg_config={}))
    (progress,) = dump.groups
    assert progress.group.name == "7\N{REPLACEMENT CHARACTER}[31m"


def test_a_newer_minor_version_is_read_and_noted(path: Path) -> None:
    into = read(path, pickle.dumps(nccl(call(9), version="2.31"), 2))
    assert len(into.dumps) == 1
    assert into.files[0].notes == ["version 2.31 is newer than 2.10: read as if it were that"]


def test_other_versions_are_refused_with_a_sentence(path: Path) -> None:
    assert refusal(path, pickle.dumps(nccl(version="3.0"), 2)) == (
        "trace_3: version 3.0 of the flight recorder: read are 2.0 to 2.10"
    )
    assert refusal(path, pickle.dumps([ENTRY], 2)) == (
        "trace_3: a flight recorder of version 1, without the groups' states: not read"
    )
    assert refusal(path, pickle.dumps(nccl(version=2), 2)) == "trace_3: a dump without its version: not read"
    assert "is none that we know" in refusal(path, pickle.dumps(nccl(version="2.x\n" * 999), 2))


def test_files_that_are_no_dump_are_refused_with_a_sentence(path: Path) -> None:
    assert refusal(path, b"") == "trace_3: empty"
    assert refusal(path, pickle.dumps([1, 2], 2)) == "trace_3: no dump of a flight recorder"
    assert refusal(path, b'{"a": 1}') == "trace_3: no dump of a flight recorder"
    assert refusal(path, b'{"a": ' * 100).startswith("trace_3: JSON nested deeper than 64")
    assert refusal(path, b'{"version": "2.9", "entries": [').startswith("trace_3: no whole JSON document")
    assert refusal(path.parent / "gone" if path.unlink() else path, b"\x80") != ""


def test_bytes_behind_the_end_of_a_pickle_are_noted(path: Path) -> None:
    into = read(path, pickle.dumps(GLOO, 2) + b"12345")
    assert into.files[0].notes == ["5 bytes behind the end of the pickle are not read"]


def test_a_list_that_holds_itself_ends(path: Path) -> None:
    endless: list[Any] = [{"dump": nccl(call(9))}]
    endless.append(endless)
    endless[0]["dump"]["entries"].append(endless)
    assert len(read(path, pickle.dumps(endless, 2)).dumps) == 1
