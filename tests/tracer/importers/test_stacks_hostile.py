from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.mutate import mutations, truncations
from tests.tracer.importers import (
    test_stacks_faulthandler,
    test_stacks_pyspy,
    test_stacks_pyspy_json,
    test_stacks_pystack,
)
from tracer.importers import stacks_faulthandler, stacks_pyspy, stacks_pyspy_json, stacks_pystack
from tracer.importers.dossier import Dossier
from tracer.importers.sniff import File

MUTANTS = int(os.environ.get("HICACHE_MUTATIONS", "200"))
JSON = json.dumps([test_stacks_pyspy_json.HELPER, test_stacks_pyspy_json.THREAD], indent=1)
# Small ones, since they are read once for each of their bytes.
SHORT = {
    "py_spy": 'Process 7: x\nPython v3.11.7 (p)\n\nThread 7 (idle): "MainThread"\n    f (a.py:1)\n'
    "Thread 0x8 (active+gil)\n    g (b.so)\n        Locals:\n            n: 1\n"
    "[2031-01-01 00:00:00 TP1] Pyspy failed\n",
    "py_spy_json": json.dumps([{**test_stacks_pyspy_json.THREAD, "process_info": None}]),
    "pystack": test_stacks_pystack.DUMP[-370:],
    "faulthandler": test_stacks_faulthandler.DUMP[-440:],
}
SAMPLES = {
    "py_spy": (stacks_pyspy, test_stacks_pyspy.SERVER + test_stacks_pyspy.DUMP),
    "py_spy_json": (stacks_pyspy_json, JSON),
    "pystack": (stacks_pystack, test_stacks_pystack.DUMP),
    "faulthandler": (stacks_faulthandler, test_stacks_faulthandler.DUMP),
}


def read(importer: Any, path: Path, data: bytes) -> Dossier:
    path.write_bytes(data)
    importer.votes(data[: 1 << 16])
    into = Dossier()
    importer.read(File(path, "dump"), into.begin("dump"), into)
    return into


def counted(found: Dossier) -> None:
    told = found.files[0]
    assert 0 <= told.unparsed <= told.records
    assert (told.format is not None) or not found.stacks
    for stack in found.stacks:
        assert 0 <= stack.thread_id < 1 << 64
        assert all(0 <= frame.line < 1 << 31 and frame.func.isprintable() for frame in stack.frames)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_dump_that_is_cut_before_any_of_its_bytes_is_read_up_to_there(tmp_path: Path, name: str) -> None:
    importer, sample = SAMPLES[name][0], SHORT[name]
    whole = len(read(importer, tmp_path / "dump", sample.encode()).stacks)
    counts = []
    for cut in truncations(sample.encode()):
        found = read(importer, tmp_path / "dump", cut)
        counted(found)
        counts.append(len(found.stacks))
    # No list of JSON is one before its end.
    assert ({0} if name == "py_spy_json" else set(range(whole + 1))) == set(counts)


@pytest.mark.parametrize("name", SAMPLES)
def test_damaged_dumps_never_raise(tmp_path: Path, name: str) -> None:
    importer, sample = SAMPLES[name]
    for mutant in mutations(sample.encode(), MUTANTS, seed=7):
        counted(read(importer, tmp_path / "dump", mutant))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_dump_is_claimed_by_its_own_importer_first(name: str) -> None:
    head = SAMPLES[name][1].encode()
    votes = {other: importer.votes(head) for other, (importer, _) in SAMPLES.items()}
    assert name == max(votes, key=lambda other: votes[other])
