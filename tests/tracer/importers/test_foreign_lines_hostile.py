"""Logs that are cut or damaged anywhere: rows or a sentence, never a traceback, and nobody new accused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from consensus_checker.rules import (
    gloo_abort,
    leak_line,
    library_report,
    line_mismatch,
    process_died,
    ras_counts,
    ras_dead,
    scheduler_watchdog,
    silent_rank,
    stage_batches,
    status_lists,
    watchdog_frontier,
)
from tests.support.foreign_lines import (
    GLOO_RESET,
    GLOO_SIZES,
    GLOO_TIMEOUT,
    poll,
    status,
    timed_out,
    watchdog,
)
from tests.support.mutate import mutations, truncations
from tracer.importers import gloo_lines, log_ends, ras, scheduler_status, sglang_lines, torch_lines
from tracer.importers.dossier import Dossier
from tracer.importers.sniff import File

# `make soak` damages each sample more often.
COUNT = int(os.environ.get("HICACHE_MUTATIONS", "200"))
RULES = (
    *(gloo_abort, leak_line, library_report, line_mismatch, process_died, ras_counts, ras_dead),
    *(scheduler_watchdog, silent_rank, stage_batches, status_lists, watchdog_frontier),
)
TRACEBACK = (
    'Traceback (most recent call last):\n  File "a.py", line 1, in f\nIndexError: pop from empty list\n'
)
SAMPLES: dict[str, tuple[Any, str]] = {
    "torch": (
        torch_lines,
        timed_out(0, 41)
        + watchdog(1, 9, 7)
        + "[0] Timeout at collective: ALLREDUCE, #12\n"
        + "[2] finished collective #11, but didn't join collective #12\n"
        + "[rank1]:[E1 04:10:08 f.cpp:1] Stack trace of the failed collective: \n#0 f from a.py:1\n"
        + "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 3000 ms\n"
        + TRACEBACK,
    ),
    "gloo": (gloo_lines, GLOO_TIMEOUT + GLOO_RESET + GLOO_SIZES),
    "sglang": (
        sglang_lines,
        "[2031-02-03 04:05:06 TP0] Prefill batch, #new-seq: 1, #new-token: 5, #cached-token: 9, x: 0.1\n"
        "[2031-02-03 04:05:06 PP1] Decode batch, #running-req: 2, #queue-req: 0\n"
        "[2031-02-03 04:10:08 TP5] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n"
        "pool memory leak detected! available=640, evictable=20480, protected=0, total=20480\n"
        "HiCache prefetch success req=r1 completed=3 matched=1\nWrite page to storage: 4 pages failed.\n",
    ),
    "status": (scheduler_status, status(0, ["r1"], ["r2"]) + status(1, ["r1"], [])),
    "ends": (log_ends, "[2031-02-03 04:05:06 TP0] a\n[rank3]:[E203 04:10:08.1 f.cpp:1] d\n"),
    "ras": (ras, json.dumps(poll("2031-02-03 04:05:06", {0: 5}, {1: {"unresponsive": True}}))),
}


def judged(importer: Any, path: Path, data: bytes) -> Dossier:
    """One file through its importer and all rules."""
    path.write_bytes(data)
    into = Dossier()
    importer.votes(data[: 1 << 16])
    importer.read(File(path, path.name), into.begin(path.name), into)
    for rule in RULES:
        rule.find(into)
    return into


def is_accounted_for(found: Dossier) -> bool:
    """Whether every line of the file is a row's, counted, or in a sentence."""
    (file,) = found.files
    rows = len(found.lines) + len(found.statuses) + len(found.polls)
    return bool(rows or file.unparsed or file.refused or not file.records)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_a_log_may_be_cut_anywhere(tmp_path: Path, name: str) -> None:
    importer, sample = SAMPLES[name]
    for data in truncations(sample.encode()):
        assert is_accounted_for(judged(importer, tmp_path / "server.log", data)), data[-60:]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_log_may_be_damaged_anywhere(tmp_path: Path, name: str) -> None:
    importer, sample = SAMPLES[name]
    for number, data in enumerate(mutations(sample.encode(), COUNT, seed=7)):
        assert is_accounted_for(judged(importer, tmp_path / "server.log", data)), (
            f"mutation {number} of seed 7"
        )


def accused(data: Iterable[bytes], path: Path) -> set[int]:
    named: set[int] = set()
    for one in data:
        path.write_bytes(one)
        into = Dossier()
        torch_lines.read(File(path, path.name), into.begin(path.name), into)
        named.update(rank for rule in RULES for claim in rule.find(into) for rank in claim.finding.culprit)
    return named


def test_a_cut_never_accuses_another_rank(tmp_path: Path) -> None:
    """Ranks 0 to 4 of which 2 is behind: half of the lines, or half of a number, may name nobody else."""
    text = "".join(watchdog(rank, 5120 if rank == 2 else 5123, 5119) for rank in range(5)).encode()
    assert {2} == accused((text[:length] for length in range(0, len(text), 5)), tmp_path / "server.log")
