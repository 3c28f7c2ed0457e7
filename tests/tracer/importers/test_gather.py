"""Places in, evidence out: which file is whose, which rank a row is of, and which look it was seen in."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.logs import write_run
from tracer.errors import LogError
from tracer.importers.evidence import LINES, WHOLE
from tracer.importers.gather import Gathered, gathered, natural
from tracer.importers.seating import rank_of_name

DECISION = {"kind": "write_backup", "node": 17, "pages": 1, "tokens": 64, "host_pages_free": 5}
STACK = """\
Thread 0x00007f4ef1efb6c0 (most recent call first):
  File "/srv/cache.py", line {line} in drain
"""
PYSPY = """\
Process {pid}: python -m server
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
    wait (threading.py:327)
    drain (cache.py:88)
"""
WATCHDOG = (
    "[rank1]:[E203 04:10:08.000000001 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=5120, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, "
    "Timeout(ms)=600000) ran for 600042 milliseconds before timing out.\n"
)
DIVERGENCE = (
    "[2031-02-03 04:10:08 TP{rank}] Found rank divergence for 1 events(s)! local hash: {digest}, "
    "events = ['check returns result={rank}']\n"
)


def dump(seq: int = 41) -> bytes:
    """A flight recorder's JSON of one group of two ranks."""
    entry = {
        "record_id": seq,
        "pg_id": 1,
        "process_group": ["1", "tp"],
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4]],
        "output_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        "retired": False,
        "is_p2p": False,
        "time_created_ns": 1,
        "timeout_ms": 600000,
    }
    status = {
        "last_enqueued_collective": str(seq),
        "last_started_collective": str(seq - 1),
        "last_completed_collective": str(seq - 1),
    }
    document: dict[str, Any] = {
        "version": "2.10",
        "comm_lib_version": "2.27.3",
        "nccl_comm_state": {},
        "pg_config": {"1": {"name": "1", "desc": "tp", "ranks": "[0, 1]"}},
        "pg_status": {"1": status},
        "entries": [entry],
    }
    return json.dumps(document).encode()


@contextmanager
def read(*paths: Path) -> Iterator[Gathered]:
    with gathered(paths, whole=WHOLE, lines=LINES) as found:
        yield found


def put(folder: Path, files: dict[str, bytes | str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def formats(found: Gathered) -> dict[str, str | None]:
    return {file.name: file.format for file in found.dossier.files}


def test_a_folder_with_our_logs_is_a_run_and_none_of_its_files_a_stranger(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: [DECISION], 1: [DECISION]})
    put(folder, {"run.json": "{}", "rank0000.meta.json": '{"host": "a", "pid": 310}', "freeze": ""})
    with read(tmp_path) as found:
        assert (found.runs, found.dossier.files) == ([folder], [])
        assert found.processes == {("a", 310): 0}


def test_logs_given_one_by_one_are_their_folder_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: [DECISION], 1: [DECISION]})
    with read(*sorted(folder.iterdir())) as found:
        assert found.runs == [folder]


def test_a_log_of_ours_under_another_name_is_known_by_its_content(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: [DECISION]})
    renamed = (folder / "rank0000.scheduler.000.jsonl").rename(tmp_path / "saved.txt")
    with read(renamed) as found:
        assert (found.runs, found.dossier.files) == ([renamed], [])


def test_files_are_known_by_their_content_and_never_by_their_name(tmp_path: Path) -> None:
    files = {"notes.txt": dump(), "dump_7.json": STACK.format(line=88), "a.pickle": WATCHDOG}
    with read(put(tmp_path, files)) as found:
        assert formats(found) == {
            "a.pickle": "torch_log",
            "dump_7.json": "faulthandler",
            "notes.txt": "flight_recorder",
        }


def test_a_file_that_nobody_knows_is_listed_and_is_no_error(tmp_path: Path) -> None:
    with read(put(tmp_path, {"a_0": dump(), "readme.md": "# About\n", "core": b"\x7fELF\0\0"})) as found:
        assert formats(found) == {"a_0": "flight_recorder", "core": None, "readme.md": None}
        assert not found.is_nothing


def test_nothing_but_strangers_is_nothing(tmp_path: Path) -> None:
    with read(put(tmp_path, {"readme.md": "# About\n"})) as found:
        assert found.is_nothing


def test_a_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no such file or folder"), read(tmp_path / "nowhere"):
        pass


def test_several_programs_write_one_log_and_what_is_left_was_nobodys(tmp_path: Path) -> None:
    log = WATCHDOG + "something else\n" + PYSPY.format(pid=310) + "\n"
    with read(put(tmp_path, {"server.log": log})) as found:
        (file,) = found.dossier.files
        assert file.format == "torch_log+py_spy"
        assert [line.event for line in found.dossier.lines if line.event != "log_end"] == ["watchdog_timeout"]
        assert [stack.thread for stack in found.dossier.stacks] == ["MainThread"]


def test_a_log_says_at_its_end_whose_it_is(tmp_path: Path) -> None:
    with read(put(tmp_path, {"server.log": "INFO starting up\n" * 50_000 + WATCHDOG})) as found:
        assert "watchdog_timeout" in {line.event for line in found.dossier.lines}


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("comm_lib_trace_rank_12", 12),
        ("nccl_trace_rank_3.json", 3),
        ("rank0007.stacks.txt", 7),
        ("look2/rank5/stacks.txt", 5),
        ("bundle.zip!host-a/rank_4.log", 4),
        ("tp_rank_3.log", None),
        ("node_rank3.log", None),
        ("local_rank_0.log", None),
        ("franks_2.log", None),
        ("dump_9", None),
    ],
)
def test_a_name_says_the_global_rank_and_no_other(name: str, rank: int | None) -> None:
    assert rank_of_name(name) == rank


def test_of_a_dump_the_number_at_the_end_of_its_name_is_enough(tmp_path: Path) -> None:
    assert rank_of_name("_dump_12.json.gz", is_number_enough=True) == 12
    with read(put(tmp_path, {"_dump_0": dump(), "_dump_1": dump()})) as found:
        assert [one.who.rank for one in found.dossier.dumps] == [0, 1]


def test_where_content_and_name_disagree_a_row_has_no_rank_and_that_is_told(tmp_path: Path) -> None:
    with read(put(tmp_path, {"rank_3.log": WATCHDOG})) as found:
        assert {line.who.rank for line in found.dossier.lines} == {None}
        assert [note for note in found.dossier.files[0].notes if "rank 3" in note] == [
            f"its content says rank 1, its name rank 3: {len(found.dossier.lines)} rows have no rank"
        ]


def test_a_file_with_the_lines_of_several_ranks_has_a_name_of_its_own(tmp_path: Path) -> None:
    both = WATCHDOG + WATCHDOG.replace("rank1", "rank2").replace("Rank 1", "Rank 2")
    with read(put(tmp_path, {"rank_3.log": both})) as found:
        ranks = {line.who.rank for line in found.dossier.lines if line.event == "watchdog_timeout"}
        assert ranks == {1, 2}


def test_a_process_is_the_rank_that_our_side_file_says(tmp_path: Path) -> None:
    files = {"rank0005.meta.json": '{"host": "a", "pid": 310}', "stacks.txt": PYSPY.format(pid=310)}
    with read(put(tmp_path, files)) as found:
        assert [stack.who.rank for stack in found.dossier.stacks] == [5]


def test_two_processes_of_one_number_on_two_hosts_are_nobodys(tmp_path: Path) -> None:
    files = {
        "rank0005.meta.json": '{"host": "a", "pid": 310}',
        "rank0006.meta.json": '{"host": "b", "pid": 310}',
        "stacks.txt": PYSPY.format(pid=310),
    }
    with read(put(tmp_path, files)) as found:
        assert [stack.who.rank for stack in found.dossier.stacks] == [None]


def test_places_are_numbered_through_the_last_axis_fastest(tmp_path: Path) -> None:
    line = "[2031-02-03 04:10:08 {place}] Scheduler watchdog timeout (self.watchdog_timeout=300, "
    line += "self.soft=False)\n"
    places = [f"PP{pp} TP{tp}" for pp in (0, 1) for tp in (0, 1)]
    with read(put(tmp_path, {"server.log": "".join(line.format(place=place) for place in places)})) as found:
        seen = [one.who.rank for one in found.dossier.lines if one.event == "scheduler_watchdog"]
        assert seen == [0, 1, 2, 3]


def test_looks_are_counted_in_the_order_of_their_names_numbers_as_numbers(tmp_path: Path) -> None:
    assert sorted(["look10", "look9", "look1"], key=natural) == ["look1", "look9", "look10"]
    files: dict[str, bytes | str] = {f"look{at}/trace_rank_0": dump(seq=at) for at in (2, 10, 9)}
    with read(put(tmp_path, files)) as found:
        looks = [(one.sample, one.groups[0].enqueued) for one in found.dossier.dumps]
        assert looks == [(0, 2), (1, 9), (2, 10)]


def test_two_tools_that_look_at_one_process_do_not_see_two_looks(tmp_path: Path) -> None:
    files = {"rank_0.txt": STACK.format(line=88), "rank_0.pyspy.txt": PYSPY.format(pid=310)}
    with read(put(tmp_path, files)) as found:
        assert {stack.sample for stack in found.dossier.stacks} == {0}


def test_one_dump_in_a_file_of_its_own_and_among_those_of_all_ranks_is_one_look(tmp_path: Path) -> None:
    together = b"".join(b'{"rank": %d, "dump": %s}\n' % (rank, dump()) for rank in (0, 1))
    with read(put(tmp_path, {"_dump_0": dump(), "_dump_1": dump(), "dumps.jsonl": together})) as found:
        assert [(one.who.rank, one.sample) for one in found.dossier.dumps] == [(0, 0), (1, 0), (0, 0), (1, 0)]


def test_what_is_given_twice_counts_once(tmp_path: Path) -> None:
    folder = put(tmp_path / "job", {"trace_rank_0": dump()})
    with tarfile.open(tmp_path / "job.tar.gz", "w:gz") as archive:
        archive.add(folder / "trace_rank_0", "trace_rank_0")
    (folder / "z_link_rank_0").symlink_to(folder / "trace_rank_0")
    with read(folder, folder, tmp_path / "job.tar.gz") as found:
        assert len(found.dossier.dumps) == 1
        assert found.notes == [
            "job.tar.gz!trace_rank_0: the same bytes under the same name were given, counted once"
        ]


def test_files_in_an_archive_are_called_by_the_archive(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {0: [DECISION]})
    with tarfile.open(tmp_path / "bundle.tar.gz", "w:gz") as archive:
        archive.add(run, "host-a")
        archive.add(put(tmp_path / "dumps", {"trace_rank_0": dump()}), "dumps")
    with read(tmp_path / "bundle.tar.gz") as found:
        assert formats(found) == {"bundle.tar.gz!dumps/trace_rank_0": "flight_recorder"}
        assert [found.names[place] for place in found.runs] == [tmp_path / "bundle.tar.gz"]
        assert found.runs[0].is_dir()
        inside = found.runs[0]
    assert not inside.exists()


def test_a_compressed_file_is_unwrapped_once(tmp_path: Path) -> None:
    twice = gzip.compress(gzip.compress(WATCHDOG.encode()))
    with read(put(tmp_path, {"server.log.gz": gzip.compress(WATCHDOG.encode()), "twice.gz": twice})) as found:
        assert formats(found) == {"server.log.gz": "torch_log", "twice.gz": None}


def test_a_bomb_is_refused_and_the_rest_is_read(tmp_path: Path) -> None:
    bomb = gzip.compress(b"[rank0]: NCCL " * 3_000_000)
    with read(put(tmp_path, {"bomb.gz": bomb, "trace_rank_0": dump()})) as found:
        refused = {file.name: file.refused for file in found.dossier.files if file.refused}
        assert list(refused) == ["bomb.gz"]
        assert "200 times its size" in str(refused["bomb.gz"])
        assert len(found.dossier.dumps) == 1


def test_pipes_and_links_that_lead_nowhere_are_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "round").symlink_to(tmp_path)
    with read(put(tmp_path, {"trace_rank_0": dump()})) as found:
        assert formats(found) == {"trace_rank_0": "flight_recorder"}


def test_a_kept_database_is_told_and_not_read(tmp_path: Path) -> None:
    with read(put(tmp_path, {"last.duckdb": b"\0" * 8 + b"DUCK" + b"\0" * 500})) as found:
        assert (found.stored, found.dossier.files) == (["last.duckdb is a database of DuckDB"], [])


def test_copies_that_were_kept_of_a_ring_are_not_another_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path, {0: [DECISION]})
    write_run(folder / "frozen-2031", {0: [DECISION]})
    with read(folder) as found:
        assert found.runs == [folder]
        assert found.notes == ["frozen-2031: copies that were kept of the run's files, not read"]


def test_lines_of_sglangs_own_checker_are_found_wherever_they_are(tmp_path: Path) -> None:
    line = DIVERGENCE.format(rank=0, digest="0" * 40)
    log = "INFO up\n" * 50_000 + line + "INFO on\n" * 50_000
    with read(put(tmp_path, {"server.log": log})) as found:
        assert [file.name for file in found.divergences] == ["server.log"]


def test_a_file_that_tells_of_cache_hits_says_who_reads_it(tmp_path: Path) -> None:
    trace = '{"timestamp": 0, "input_length": 512, "output_length": 4, "hash_ids": [1]}\n'
    with read(put(tmp_path, {"trace.jsonl": trace})) as found:
        assert found.dossier.files[0].notes == [
            "block_trace: it tells of cache hits (hicache hits), not of a stall"
        ]
