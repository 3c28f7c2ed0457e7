"""Dumps that are cut anywhere, or damaged at random: no exception, no rank that did nothing.

HICACHE_MUTATIONS=5000 makes as many damaged copies of each sample instead of 200.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.flight_recorder import as_torch_pickles
from consensus_checker.rules import call_mismatch, frontier
from tests.support.mutate import mutations, truncations
from tests.tracer.importers.test_flight_recorder import call, nccl
from tracer.importers import flight_recorder
from tracer.importers.dossier import Dossier, Who
from tracer.importers.sniff import File

COUNT = int(os.environ.get("HICACHE_MUTATIONS", "200"))
MEMBERS = {"7": {"name": "7", "desc": "tp", "ranks": "[0, 1, 2]"}}


def dump(called: int, ended: int) -> dict[str, Any]:
    """As small as a dump can be that has everything in it."""
    unused = ("thread_id", "timeout_ms", "record_id", "op_id", "time_created_ns", "output_dtypes")
    calls = [call(seq, state="completed" if seq <= ended else "scheduled") for seq in range(8, called + 1)]
    calls = [{key: value for key, value in own.items() if key not in unused} for own in calls]
    status = {"4": {"last_enqueued_collective": called, "last_completed_collective": ended}}
    return nccl(*calls, pg_config=MEMBERS, pg_status=status)


WAITS, AWAY = dump(9, 8), dump(8, 8)


def sample(form: str) -> bytes:
    if form == "pickle":
        return as_torch_pickles(WAITS)
    if form == "json":
        return json.dumps(WAITS).encode()
    return "\n".join(json.dumps({"rank": 0, "dump": WAITS}) for _ in range(2)).encode()


def read(data: bytes, name: str, into: Dossier, folder: Path) -> None:
    path = folder / "dump"
    path.write_bytes(data)
    flight_recorder.votes(data[: 1 << 16])
    flight_recorder.read(File(path, name), into.begin(name), into)


@pytest.fixture
def others(tmp_path: Path) -> Dossier:
    """Rank 1 waits in #9 of the group, and rank 2 did not join."""
    into = Dossier()
    for rank, own in ((1, WAITS), (2, AWAY)):
        read(json.dumps({"rank": rank, "dump": own}).encode(), f"lines_{rank}", into, tmp_path)
    return into


def beside(others: Dossier, data: bytes, folder: Path) -> Dossier:
    """The others, and `data` as the dump of rank 0."""
    into = Dossier(files=list(others.files), dumps=list(others.dumps))
    read(data, "dump_0", into, folder)
    own = into.dumps[2:]
    into.dumps[2:] = [replace(one, who=Who(rank=0)) if one.who.rank is None else one for one in own]
    return into


def accused(dossier: Dossier) -> set[int]:
    claims = [*call_mismatch.find(dossier), *frontier.find(dossier)]
    return {rank for claim in claims for rank in claim.finding.culprit}


@pytest.mark.parametrize("form", ["pickle", "json", "lines"])
def test_a_dump_that_is_cut_at_any_byte_accuses_nobody_else(
    form: str, others: Dossier, tmp_path: Path
) -> None:
    whole = sample(form)
    assert accused(others) <= {2}
    assert accused(beside(others, whole, tmp_path)) == {2}
    for data in truncations(whole):
        if form == "lines" and len(data) < len(whole) // 2:
            # Cut in its first line it is cut as the others are.
            continue
        dossier = beside(others, data, tmp_path)
        # Where it was refused there are the others alone.
        assert (dossier.files[2].refused is None) == (len(dossier.dumps) > 2)
        assert len(dossier.dumps) == 2 or accused(dossier) <= {2}, data[-40:]


@pytest.mark.parametrize("form", ["pickle", "json", "lines"])
def test_a_dump_that_is_damaged_anyhow_is_read_or_refused(form: str, others: Dossier, tmp_path: Path) -> None:
    for number, data in enumerate(mutations(sample(form), COUNT, seed=7)):
        try:
            dossier = beside(others, data, tmp_path)
            accused(dossier)
        except Exception as error:
            raise AssertionError(f"mutation {number} of {form}, seed 7: {data!r}") from error
        refused = dossier.files[2].refused
        assert refused is None or (refused.isprintable() and len(refused) < 500), number
