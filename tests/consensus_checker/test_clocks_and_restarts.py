"""Clocks that are minutes apart, and jobs that were started again, change no verdict."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import pytest

from cli.commands.check import judge
from hicache.zoo import SCENARIOS
from tests.cli.conftest import Hicache, hicache  # noqa: F401
from tracer.blocks import pieces
from tracer.log import find_logs
from tracer.timeline import clocks

MINUTES_NS = 60 * 10**9
# Seconds that two ranks of a host differ by at most in these runs.
CLOSE_NS = 10**9


def with_clocks(run: Path, out: Path, minutes: dict[int, int]) -> Path:
    """The same run, as hosts whose clocks are off would have written it."""
    out.mkdir()
    for path in sorted(run.glob("rank*.jsonl")):
        shift_ns = minutes[int(path.name[4:8])] * MINUTES_NS
        with (out / path.name).open("wb") as target:
            for piece in pieces(path):
                records = [json.loads(line) for line in piece.data.splitlines()]
                for record in records:
                    record["time_ns"] += shift_ns
                lines = b"".join(
                    json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
                    for record in records
                )
                target.write(lines)
                if piece.is_checked:
                    checksum = zlib.crc32(lines)
                    target.write(b'{"kind":"block","bytes":%d,"crc32":"%08x"}\n' % (len(lines), checksum))
    return out


@pytest.fixture(params=SCENARIOS)
def run(request: pytest.FixtureRequest, tmp_path: Path, hicache: Hicache) -> Path:  # noqa: F811
    hicache("zoo", "run", request.param, "--seed", 1, "--out", tmp_path / "run")
    return tmp_path / "run"


def test_clocks_seven_minutes_off_change_no_verdict(run: Path, tmp_path: Path) -> None:
    minutes = {0: 0, 1: 7, 2: -7, 3: 1}
    found, _ = judge(with_clocks(run, tmp_path / "moved", minutes), shown=run, every_line=True)
    expected, _ = judge(run, every_line=True)
    # How long the hang came after the difference is told by one rank's own clock.
    assert expected.to_json() == found.to_json()


def test_the_timeline_puts_clocks_right_by_the_meetings(run: Path, tmp_path: Path) -> None:
    moved = find_logs(with_clocks(run, tmp_path / "moved", {0: 0, 1: 7, 2: -7, 3: 1}))
    found = clocks(moved)
    off = {
        rank: shift + minutes * MINUTES_NS
        for (rank, shift), minutes in zip(sorted(found.shifts.items()), (0, 7, -7, 1), strict=True)
    }
    assert all(abs(shift) <= max(CLOSE_NS, found.errors[rank]) for rank, shift in off.items())
    assert all(error <= CLOSE_NS for error in found.errors.values())


def test_two_attempts_in_one_folder_are_judged_each_for_itself(
    run: Path,
    tmp_path: Path,
    hicache: Hicache,  # noqa: F811
) -> None:
    """The restarted job wrote into a folder below, as it does where it finds logs."""
    again = tmp_path / "host"
    shutil.copytree(run, again)
    (again / "attempt-1").mkdir()
    for path in run.glob("rank*.jsonl"):
        with (again / "attempt-1" / path.name).open("wb") as target:
            for piece in pieces(path):
                lines = piece.data.replace(b'"attempt":0', b'"attempt":1', 1)
                target.write(lines)
                if piece.is_checked:
                    checksum = zlib.crc32(lines)
                    target.write(b'{"kind":"block","bytes":%d,"crc32":"%08x"}\n' % (len(lines), checksum))
    alone = json.loads(hicache("check", run, "--json").out)
    beside = json.loads(hicache("check", again, "--json").out)
    assert alone["verdict"] == beside["verdict"]
    assert hicache("collect", again, "-o", tmp_path / "bundle").code == 0
    manifest = json.loads((tmp_path / "bundle" / "bundle.json").read_text())
    assert [(each["attempt"], each["is_newest"]) for each in manifest["runs"]] == [(0, False), (1, True)]
    for name in ("run-1", "run-2"):
        bundled = json.loads(hicache("check", tmp_path / "bundle", "--run", name, "--json").out)
        assert (alone["verdict"], alone["ranks"]) == (bundled["verdict"], bundled["ranks"])
