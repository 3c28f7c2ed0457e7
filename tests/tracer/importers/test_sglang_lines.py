from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.foreign_lines import only, read
from tracer.importers import sglang_lines
from tracer.importers.dossier import Dossier, Who

AT = "[2031-02-03 04:05:06 TP0] "
PREFILL = (
    "Prefill batch, #new-seq: {}, #new-token: {}, #cached-token: {}, token usage: 0.31, #running-req: 5, "
    "#queue-req: 3, cuda graph: False, input throughput (token/s): 812.55\n"
)


def lines(folder: Path, text: str) -> Dossier:
    return read(sglang_lines, folder, text)


def test_prefill_batches_are_columns_of_one_row_a_writer(tmp_path: Path) -> None:
    text = "".join(f"[2031-02-03 04:05:06 PP{n % 2} TP0] {PREFILL.format(n, 10 * n, 100)}" for n in range(4))
    found = lines(tmp_path, text)
    columns = ("records", "new_seqs", "new_tokens", "cached_tokens")
    assert [(line.who.places, [list(line.fields[name]) for name in columns]) for line in found.lines] == [
        ({"pp": 0, "tp": 0}, [[1, 3], [0, 2], [0, 20], [100, 100]]),
        ({"pp": 1, "tp": 0}, [[2, 4], [1, 3], [10, 30], [100, 100]]),
    ]
    assert found.files[0].unparsed == 0


def test_an_older_prefill_line_is_read_too(tmp_path: Path) -> None:
    text = f"{AT}Prefill batch [77]. #new-seq: 1, #new-token: 5, #cached-token: 0, token usage: 0.01\n"
    assert list(only(lines(tmp_path, text), "prefill_batches").fields["new_tokens"]) == [5]


def test_of_decode_batches_the_newest_counts(tmp_path: Path) -> None:
    text = "".join(
        f"{AT}Decode batch, #running-req: {n}, token usage: 0.11, something new: yes, #queue-req: 0\n"
        for n in (1, 2)
    )
    line = only(lines(tmp_path, text), "decode_batch")
    assert (line.fields["lines"], line.at.record) == (2, 2)
    assert {"#running-req": 2, "token usage": 0.11, "something new": "yes"}.items() <= line.fields.items()


@pytest.mark.parametrize(
    ("text", "event", "fields"),
    [
        (
            "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
            "scheduler_watchdog",
            {"name": "Scheduler", "timeout_s": 300, "is_soft": False},
        ),
        (
            "Watchdog timeout (self.watchdog_timeout=300)",
            "scheduler_watchdog",
            {"name": "Scheduler", "timeout_s": 300, "is_soft": False},
        ),
        (
            "[full] total=40960, available=512, evictable=39168, protected=1280",
            "pool",
            {"pool": "full", "total": 40960, "available": 512, "evictable": 39168, "protected": 1280},
        ),
        (
            "pool memory leak detected! available=640, evictable=20480, protected=0, total=20480",
            "leak_check",
            {"available": 640, "evictable": 20480, "protected": 0, "total": 20480},
        ),
        (
            "HiCache prefetch success req=r7 completed=3 matched=1 loaded=2 occupied=9",
            "hicache_prefetch_success",
            {"request": "r7", "completed": 3, "matched": 1, "loaded": 2, "occupied": 9},
        ),
        (
            "HiCache prefetch transfer failed for request r7",
            "hicache_prefetch_transfer_failed",
            {"request": "r7"},
        ),
        (
            "HiCache prefetch declined req=r7 reason=unservable_prefix device_prefix=64 hit=128",
            "hicache_prefetch_declined",
            {"request": "r7", "reason": "unservable_prefix", "device_prefix": 64, "hit": 128},
        ),
        (
            "HiCache load_back failed for rid=r7: device_indices=0, expected decode_prefix_len=64 (l3=64)",
            "load_back_failed",
            {"request": "r7", "device_indices": 0, "decode_prefix_len": 64, "l3": 64},
        ),
        ("PP HiCache ticket processing failed.", "hicache_ticket_processing_failed", {}),
        ("Write page to storage: 4 pages failed.", "storage_write_failed", {"pages": 4}),
        (
            "Revoking prefetch for request r7 due to insufficient hits (0).",
            "prefetch_revoked",
            {"request": "r7", "hits": 0},
        ),
    ],
)
def test_what_a_scheduler_says(tmp_path: Path, text: str, event: str, fields: dict[str, object]) -> None:
    line = only(lines(tmp_path, f"{AT}{text}\n"), event)
    assert ({"tp": 0}, fields) == (line.who.places, line.fields)


@pytest.mark.parametrize(
    ("text", "who", "signal"),
    [
        ("Subprocess scheduler_1 (pid=4242) crashed with exit code -9. Triggering", Who(None, 4242), 9),
        ("Scheduler or DataParallelController 4242 terminated with -6", Who(None, 4242), 6),
        ("Rank 3 scheduler died during initialization (exit code: -9). If", Who(3, None), 9),
    ],
)
def test_a_process_that_is_gone(tmp_path: Path, text: str, who: Who, signal: int) -> None:
    line = only(lines(tmp_path, f"[2031-02-03 04:05:06] {text}\n"), "process_died")
    assert (who, signal) == (line.who, line.fields["signal"])


def test_a_process_that_ended_well_did_not_die(tmp_path: Path) -> None:
    assert lines(tmp_path, "Scheduler or DataParallelController 4242 terminated with 0\n").lines == []


def test_no_text_of_a_request_is_kept(tmp_path: Path) -> None:
    text = f"{AT}HiCache prefetch dropped req=r1 text='CANARY-PROMPT with words' matched=1\n"
    assert "CANARY" not in repr(lines(tmp_path, text))
