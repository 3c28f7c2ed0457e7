from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.foreign_lines import events, only, read, timed_out, told, watchdog
from tracer.importers import torch_lines
from tracer.importers.dossier import Dossier, Who

GLOG = "[E203 04:10:08.000000001 ProcessGroupNCCL.cpp:616] "
COUNTERS = "last enqueued NCCL work: 5123, last completed NCCL work: 5119."
EXCEPTION = f"Exception (either an error or timeout) detected by watchdog at work: 5120, {COUNTERS}"
FAILURE = (
    "failure detected by watchdog at work sequence id: 5120 PG status: last enqueued work: 5123, "
    "last completed work: 5119"
)


def lines(folder: Path, text: str) -> Dossier:
    return read(torch_lines, folder, text)


def test_a_watchdog_names_the_work_that_ran_too_long(tmp_path: Path) -> None:
    assert told(lines(tmp_path, timed_out(1, 5120))) == [
        (
            1,
            "watchdog_timeout",
            {
                **{"seq": 5120, "op": "ALLREDUCE", "numel_in": 4096, "numel_out": 4096},
                **{"timeout_ms": 600_000, "ran_ms": 600_042},
                **{"group": "7", "description": "tp", "group_rank": 1},
            },
        )
    ]


def test_an_older_watchdog_says_no_sizes(tmp_path: Path) -> None:
    text = (
        "[E ProcessGroupNCCL.cpp:474] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=12, OpType=BROADCAST, Timeout(ms)=1800000) ran for 1802211 milliseconds before "
        "timing out."
    )
    fields = only(lines(tmp_path, text), "watchdog_timeout").fields
    assert (fields["seq"], fields["op"], fields["numel_in"]) == (12, "BROADCAST", None)


@pytest.mark.parametrize(
    ("text", "event", "group", "description"),
    [
        (f"[Rank 1] {EXCEPTION}", "watchdog_exception", "", ""),
        (f"[PG 0 Rank 1] {EXCEPTION}", "watchdog_exception", "0", ""),
        (f"[PG 4 (tp) Rank 1] {EXCEPTION}", "watchdog_exception", "4", "tp"),
        (f"[PG ID 2 PG GUID 7(tp) Rank 1] {EXCEPTION}", "watchdog_exception", "7", "tp"),
        (f"[PG ID 0 PG GUID 0(default_pg) Rank 1]  {FAILURE}", "watchdog_exception", "0", "default_pg"),
        (
            f"[PG ID 0 PG GUID 0(default_pg) Rank 1] Timeout at NCCL work: 5120, {COUNTERS}",
            *("watchdog_abort", "0", "default_pg"),
        ),
    ],
)
def test_a_groups_counters_in_every_wording(
    tmp_path: Path, text: str, event: str, group: str, description: str
) -> None:
    line = only(lines(tmp_path, f"[rank1]:{GLOG}{text}\n"), event)
    counters = {"work": 5120, "enqueued": 5123, "completed": 5119}
    assert (1, counters | {"group": group, "description": description, "group_rank": 1}) == (
        line.who.rank,
        line.fields,
    )


def test_a_dump_signal_names_who_reported_first(tmp_path: Path) -> None:
    text = (
        f"[rank2]:{GLOG}[PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal due to a collective "
        "timeout from  rank 3 and we will try our best to dump the debug info. Last enqueued NCCL work: "
        "5122, last completed NCCL work: 5121.\n"
    )
    fields = only(lines(tmp_path, text), "remote_dump").fields
    assert (fields["reporter"], fields["enqueued"], fields["completed"]) == (3, 5122, 5121)


def test_counters_that_were_never_set_are_no_counters(tmp_path: Path) -> None:
    fields = only(lines(tmp_path, watchdog(1, 94_527_319_283_712, -1)), "watchdog_exception").fields
    assert (fields["enqueued"], fields["completed"]) == (None, -1)


def test_the_rank_in_a_groups_brackets_is_no_global_one(tmp_path: Path) -> None:
    tensor = f"[PG ID 2 PG GUID 7(tp) Rank 1] Timeout at NCCL work: 1, {COUNTERS}\n"
    default = f"[PG ID 0 PG GUID 0(default_pg) Rank 1] Timeout at NCCL work: 1, {COUNTERS}\n"
    assert [
        rank for rank, _event, _fields in told(lines(tmp_path, tensor + "[rank5]:" + tensor + default))
    ] == [None, 5, 1]


def test_a_line_that_says_two_ranks_is_nobodys(tmp_path: Path) -> None:
    assert [
        rank for rank, _e, _f in told(lines(tmp_path, watchdog(1, 9, 8).replace("[rank1]", "[rank2]")))
    ] == [None]


def test_the_failed_calls_stack_is_kept(tmp_path: Path) -> None:
    text = (
        f"[rank1]:{GLOG}Stack trace of the failed collective: \n"
        "#0 all_reduce from /usr/lib/torch/distributed/distributed_c10d.py:2696\n"
        "#1 writing_check from /srv/cache.py:700\n"
        "[rank1]:[E203 04:10:08.1 f.cpp:1] next\n"
    )
    assert only(lines(tmp_path, text), "failed_stack").fields["frames"] == (
        "all_reduce (/usr/lib/torch/distributed/distributed_c10d.py:2696)",
        "writing_check (/srv/cache.py:700)",
    )


def test_a_desync_report_is_taken_apart(tmp_path: Path) -> None:
    text = (
        f"[rank0]:{GLOG}[Rank 0]\n"
        "\t - [0] Timeout at collective: ALLREDUCE, #12\n"
        "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:\n"
        "\t   - [1, 3] joined but didn't finish collective #11 (count from 1)\n"
        "\t     [2] finished collective #11, but didn't join collective #12 (count from 1)\n"
    )
    found = lines(tmp_path, text)
    assert [(line.event, line.fields) for line in found.lines] == [
        ("desync_timeout", {"reporter": 0, "op": "ALLREDUCE", "seq": 12}),
        ("desync_joined", {"ranks": (1, 3), "seq": 11}),
        ("desync_finished", {"ranks": (2,), "seq": 11}),
    ]


def test_a_barrier_names_whom_it_waited_for(tmp_path: Path) -> None:
    text = "RuntimeError: [Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 3000 ms\n"
    assert told(lines(tmp_path, text)) == [
        (0, "monitored_barrier", {"missing": (1, 2), "timeout_ms": 3000, "reporter": 0})
    ]


def test_debug_mode_tells_both_calls(tmp_path: Path) -> None:
    text = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=41, OpType=ALLREDUCE, TensorShape=[512], TensorDtypes=Float, "
        "TensorDeviceTypes=TensorOptions(dtype=float)), but Rank 1 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=41, OpType=BROADCAST, TensorShape=[1024], TensorDtypes=Float, "
        "TensorDeviceTypes=TensorOptions(dtype=float)).Collectives differ in the following aspects: \t Op\n"
    )
    fields = only(lines(tmp_path, text), "debug_mismatch").fields
    assert [fields["one"], fields["other"]] == [
        {"rank": 0, "seq": 41, "op": "ALLREDUCE", "shape": "[512]", "dtype": "Float"},
        {"rank": 1, "seq": 41, "op": "BROADCAST", "shape": "[1024]", "dtype": "Float"},
    ]


def test_a_launchers_report_names_the_rank_and_its_signal(tmp_path: Path) -> None:
    text = (
        "E0203 04:10:08.1 77 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: -9) "
        "local_rank: 1 (pid: 4242) of binary: /usr/bin/python\n"
        "Root Cause (first observed failure):\n[0]:\n  time      : 2031-02-03_04:10:08\n  host      : a\n"
        "  rank      : 5 (local_rank: 1)\n  exitcode  : -9 (pid: 4242)\n  error_file: <N/A>\n"
    )
    found = lines(tmp_path, text)
    died = {"exit_code": -9, "signal": 9, "local_rank": 1}
    assert [(Who(None, 4242), died), (Who(5, 4242), died)] == [
        (line.who, line.fields) for line in found.lines
    ]


def test_a_process_that_was_told_to_end_is_not_one_that_died(tmp_path: Path) -> None:
    text = "W0203 04:10:08.1 77 api.py:900] Sending process 4243 closing signal SIGTERM\n"
    assert [(Who(None, 4243), "shutdown")] == [(line.who, line.event) for line in lines(tmp_path, text).lines]


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("IndexError: pop from empty list", {"type": "IndexError", "is_communication": False}),
        (
            "torch.distributed.DistBackendError: NCCL error",
            {"type": "DistBackendError", "is_communication": True},
        ),
        (
            "RuntimeError: [x/gloo/y.cc:1] Timed out waiting 3ms",
            {"type": "RuntimeError", "is_communication": True},
        ),
    ],
)
def test_an_exception_is_its_type_and_whether_it_is_about_others(
    tmp_path: Path, last: str, expected: dict[str, object]
) -> None:
    text = (
        "[2031-02-03 04:10:08 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        f'  File "a.py", line 1, in f\n    work.wait()\n{last}\n'
    )
    line = only(lines(tmp_path, text), "exception")
    assert ({"tp": 1}, expected) == (line.who.places, line.fields)


def test_no_text_of_an_exception_is_kept(tmp_path: Path) -> None:
    text = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: CANARY-PROMPT\n'
    assert "CANARY" not in repr(lines(tmp_path, text))


def test_a_file_with_nothing_of_it_is_nobodys(tmp_path: Path) -> None:
    found = lines(tmp_path, "all is well\n")
    assert (events(found), found.files[0].format, found.files[0].records, found.files[0].unparsed) == (
        [],
        None,
        1,
        1,
    )
