"""Dumps are read by `Recorder`, which holds them to the format of the recorder, and by PyTorch itself."""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache.sim.world import simulate
from hicache.zoo import find_scenario
from tests.support.logs import DECIDE, Fields, write_lane, write_run
from tracer.fr_json import write_flight_recorder
from tracer.log import find_logs
from tracer.record import Kind

MEETING = Kind("meeting", "meeting", info=("op", "purpose", "reduce", "numel", "group", "group_seq", "peer"))
KINDS = (DECIDE, MEETING)
GROUPS = {"tp0/events": [0, 1], "tp0/main": [0, 1]}

INTEGERS = (
    "record_id",
    "pg_id",
    "collective_seq_id",
    "p2p_seq_id",
    "op_id",
    "timeout_ms",
    "time_created_ns",
    "time_discovered_started_ns",
    "time_discovered_completed_ns",
)
TEXTS = ("profiling_name", "state", "thread_id", "thread_name")
OPERATION = re.compile(r"gloo:(all_reduce|broadcast|send (\d+)->(\d+)|recv (\d+)<-(\d+))")


class Recorder:
    """One dump in the JSON form of version 2.10; nothing may be missing or of another type."""

    def __init__(self, path: Path) -> None:
        self.rank = int(re.search(r"\d+$", path.name).group())  # type: ignore[union-attr]
        document = json.loads(path.read_bytes())
        assert document["version"] == "2.10"
        assert document["comm_lib_version"] == ""
        assert document["nccl_comm_state"] == {}
        self.members: dict[str, list[int]] = {}
        for name, config in document["pg_config"].items():
            assert config["name"] == name
            assert type(config["desc"]) is str
            assert re.fullmatch(r"\[(\d+(, \d+)*)?\]", config["ranks"])
            self.members[name] = [int(rank) for rank in re.findall(r"\d+", config["ranks"])]
        self.status: dict[str, tuple[int, int, int]] = {}
        self.entries: list[dict[str, Any]] = document.get("entries", [])
        self.about = document["hicache"]
        assert self.entries or "entries" not in document
        name_of = {}
        for number, entry in enumerate(self.entries):
            self._check(entry)
            assert entry["record_id"] == number
            name_of[entry["pg_id"]] = entry["process_group"][0]
        for pg_id, counts in document["pg_status"].items():
            assert all(type(count) is str for count in counts.values())
            numbers = [
                int(counts[f"last_{what}_collective"]) for what in ("enqueued", "started", "completed")
            ]
            self.status[name_of.get(int(pg_id), pg_id)] = (numbers[0], numbers[1], numbers[2])

    def _check(self, entry: dict[str, Any]) -> None:
        assert all(type(entry[name]) is int for name in INTEGERS)
        assert all(type(entry[name]) is str for name in TEXTS)
        assert entry["state"] in ("scheduled", "completed")
        assert entry["retired"] is (entry["state"] == "completed")
        name, desc = entry["process_group"]
        assert name in self.members
        assert type(desc) is str
        for side in ("input", "output"):
            assert all(type(size) is int for sizes in entry[f"{side}_sizes"] for size in sizes)
            assert all(type(dtype) is str for dtype in entry[f"{side}_dtypes"])
        operation = OPERATION.fullmatch(entry["profiling_name"])
        assert operation, entry["profiling_name"]
        assert entry["is_p2p"] is any(operation.groups()[1:])
        for position in filter(None, operation.groups()[1:]):
            assert int(position) < len(self.members[name])

    def states(self) -> list[tuple[str, int, str]]:
        return [(e["process_group"][0], e["collective_seq_id"], e["state"]) for e in self.entries]


def dumps(path: Path, folder: Path) -> dict[int, Recorder]:
    count = write_flight_recorder(find_logs(path), folder)
    read = {dump.rank: dump for dump in map(Recorder, sorted(folder.iterdir()))}
    assert count.events == sum(len(dump.entries) for dump in read.values())
    return read


def meet(phase: str, group_seq: int, group: str = "tp0/events", **fields: Any) -> dict[str, Any]:
    call = {"op": "all_reduce", "purpose": "round", "reduce": "min", "numel": 5, "peer": None}
    return {"kind": "meeting", "phase": phase, "group": group, "group_seq": group_seq, **call, **fields}


def decide(tokens: int) -> dict[str, Any]:
    return {"kind": "write_backup", "node": 1, "pages": 1, "tokens": tokens, "host_pages_free": tokens}


def one(tmp_path: Path, records: Sequence[Fields], **options: Any) -> Recorder:
    write_lane(tmp_path / "run", records, **{"kinds": KINDS, "groups": GROUPS, "sizes": {"tp": 2}, **options})
    (dump,) = dumps(tmp_path / "run", tmp_path / "dumps").values()
    return dump


def test_a_call_that_was_left_is_completed_and_one_that_was_not_is_scheduled(tmp_path: Path) -> None:
    records = [meet("enter", 0, time_ns=10), meet("leave", 0, time_ns=14), meet("enter", 1, time_ns=20)]
    dump = one(tmp_path, records, outcome="hung")
    assert dump.states() == [("tp0/events", 1, "completed"), ("tp0/events", 2, "scheduled")]
    assert [(e["time_created_ns"], e["time_discovered_completed_ns"]) for e in dump.entries] == [
        (10, 14),
        (20, 0),
    ]
    assert dump.status["tp0/events"] == (2, -1, 1)


def test_a_group_that_never_met_has_members_and_no_counts(tmp_path: Path) -> None:
    dump = one(tmp_path, [meet("enter", 0)])
    assert dump.members == GROUPS
    assert dump.status["2"] == (-1, -1, -1)


def test_a_rank_that_met_nobody_has_no_entries(tmp_path: Path) -> None:
    assert one(tmp_path, [decide(64)]).entries == []


def test_members_are_sorted(tmp_path: Path) -> None:
    assert one(tmp_path, [], groups={"tp0/main": [1, 0]}).members == {"tp0/main": [0, 1]}


def test_two_stages_number_their_sends_alike(tmp_path: Path) -> None:
    sent: dict[str, Any] = {"group": "pp1/main:0", "op": "send", "peer": 3}
    received: dict[str, Any] = {"group": "pp1/main:0", "op": "recv", "peer": 1}
    write_run(
        tmp_path / "run",
        {1: [meet("enter", 4, **sent), meet("leave", 4, **sent)], 3: [meet("enter", 4, **received)]},
        kinds=KINDS,
    )
    read = dumps(tmp_path / "run", tmp_path / "dumps")
    assert [read[rank].entries[0]["profiling_name"] for rank in (1, 3)] == [
        "gloo:send 0->1",
        "gloo:recv 1<-0",
    ]
    assert [read[rank].entries[0]["p2p_seq_id"] for rank in (1, 3)] == [5, 5]
    assert read[3].members == {"pp1/main:0": [1, 3]}


def test_lanes_are_threads_and_entries_are_in_the_order_of_their_calls(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kinds": KINDS, "groups": GROUPS, "sizes": {"tp": 2}}
    write_lane(tmp_path / "run", [meet("enter", 0, "tp0/main", time_ns=2)], **options)
    late = [meet("enter", 0, time_ns=1), meet("leave", 0, time_ns=9)]
    write_lane(tmp_path / "run", late, lane="sync", **options)
    (dump,) = dumps(tmp_path / "run", tmp_path / "dumps").values()
    assert [(e["thread_name"], e["state"]) for e in dump.entries] == [
        ("sync", "completed"),
        ("scheduler", "scheduled"),
    ]


def test_ranks_that_decided_alike_have_one_digest_until_they_part(tmp_path: Path) -> None:
    """Local facts may differ; the second decision does not agree."""
    ranks = {
        rank: [
            meet("enter", 0),
            decide(64) | {"host_pages_free": rank},
            meet("enter", 1),
            decide(last),
            meet("enter", 2),
        ]
        for rank, last in ((0, 64), (1, 0))
    }
    write_run(tmp_path / "run", ranks, kinds=KINDS, groups=GROUPS)
    read = dumps(tmp_path / "run", tmp_path / "dumps")
    first, second = ([entry["hicache"] for entry in read[rank].entries] for rank in (0, 1))
    assert [each["decisions"] for each in first] == [0, 1, 2]
    assert [a["digest"] == b["digest"] for a, b in zip(first, second, strict=True)] == [True, True, False]


def test_a_lane_whose_beginning_is_gone_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    head = {"seq": 7, "step": 0, "time_ns": 0, "kind": "header"}
    path = write_lane(tmp_path / "run", [], kinds=KINDS, sizes={"tp": 2}, groups=GROUPS)
    header = json.loads(path.read_bytes().splitlines()[0]) | head
    record = {"seq": 7, "step": 3, "time_ns": 5, **meet("enter", 4)}
    path.write_text("".join(json.dumps(each) + "\n" for each in (header, record)))
    (dump,) = dumps(tmp_path / "run", tmp_path / "dumps").values()
    assert dump.entries[0]["hicache"] == {"seq": 7, "step": 3, "purpose": "round", "reduce": "min"}
    assert len(dump.about["missing"]) == 2


def test_a_cut_log_says_so(tmp_path: Path) -> None:
    about = one(tmp_path, [meet("enter", 0)], outcome=None).about
    assert about["outcomes"] == {"scheduler": None}
    assert about["missing"] == ["rank0000.scheduler.000.jsonl: cut behind record 1, without a trailer"]


@pytest.mark.parametrize("value", [None, [], {}, "x", 3.5, -1, True])
def test_fields_of_any_type_are_written(tmp_path: Path, value: Any) -> None:
    names = ("op", "purpose", "reduce", "numel", "group", "group_seq", "peer")
    records = [
        {"kind": "meeting", "phase": phase, name: value} for phase in ("enter", "leave") for name in names
    ]
    whole = [meet(phase, 0) | {name: value} for phase in ("enter", "leave") for name in names]
    write_lane(tmp_path / "run", [*records, *whole], kinds=KINDS)
    write_flight_recorder(find_logs(tmp_path / "run"), tmp_path / "dumps")
    (path,) = (tmp_path / "dumps").iterdir()
    assert json.loads(path.read_bytes())["entries"]


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in which rank 2 skips a reduction that the others are in; not to be changed."""
    folder = tmp_path_factory.mktemp("hung")
    simulate(find_scenario("skip_collective_when_empty").plan(1), out=folder)
    return folder


def test_the_frontier_of_a_hang_names_who_did_not_join(hung: Path, tmp_path: Path) -> None:
    """The rule that readers of such dumps follow: whoever has enqueued less than the most is missing."""
    read = dumps(hung, tmp_path)
    enqueued = {rank: dump.status["tp0/events"][0] for rank, dump in read.items()}
    assert [rank for rank, count in enqueued.items() if count < max(enqueued.values())] == [2]
    digests: dict[int, set[str]] = defaultdict(set)
    for dump in read.values():
        for entry in dump.entries:
            if entry["process_group"][0] == "tp0/events":
                digests[entry["collective_seq_id"]].add(entry["hicache"]["digest"])
    assert len(digests[1]) == 1


def test_behind_a_gap_there_is_no_digest(hung: Path, tmp_path: Path) -> None:
    shutil.copytree(hung, tmp_path / "run")
    path = tmp_path / "run" / "rank0001.scheduler.001.jsonl"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    read = dumps(tmp_path / "run", tmp_path / "dumps")
    has_digest = {rank: ["digest" in each["hicache"] for each in dump.entries] for rank, dump in read.items()}
    assert all(has_digest[0])
    assert (has_digest[1][0], has_digest[1][-1]) == (True, False)
    assert has_digest[1] == sorted(has_digest[1], reverse=True)


def test_two_exports_of_one_run_are_equal(hung: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_flight_recorder(find_logs(hung), tmp_path / name)
    first, second = (
        [path.read_bytes() for path in sorted((tmp_path / name).iterdir())] for name in ("a", "b")
    )
    assert first == second


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch: its reader is not there")
def test_the_reader_that_comes_with_pytorch_names_the_rank(hung: Path, tmp_path: Path) -> None:
    """It reads the pickled form only; the content is one."""
    write_flight_recorder(find_logs(hung), tmp_path / "json")
    (tmp_path / "pickled").mkdir()
    for path in (tmp_path / "json").iterdir():
        (tmp_path / "pickled" / path.name).write_bytes(
            pickle.dumps(json.loads(path.read_bytes()), protocol=2)
        )
    reader = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path / "pickled")]
    said = subprocess.run(reader, capture_output=True, text=True, timeout=100)
    assert said.returncode == 0, said.stderr
    told = said.stdout + said.stderr
    assert re.search(r"group info: tp0/events:events\n.*\nmissing ranks: \{2\}", told), told
