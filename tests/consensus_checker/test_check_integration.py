"""The checker on files: what a killed rank leaves, and the rules page held to its word."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from consensus_checker.check import check
from consensus_checker.pages import page
from tests.support.history import KINDS, history, lanes
from tests.support.logs import write_lane
from tracer.log import find_logs

ROOT = Path(__file__).parents[2]
# What `check` can say of logs; the rest needs hearts, clocks or other files.
OWN = (ROOT / "docs" / "rules.md").read_text().split("## Our logs")[1].split("By `diagnose` alone")[0]
DIVERGENT = """
    0  match:r1=64  backup:17=64{host_pages_free=5}  |  round?  events!  #hung
    1  match:r1=64  backup:17=64{host_pages_free=5}  |  round?  events!  #hung
    2  match:r1=64  backup:17=64{host_pages_free=5}  |  round?  events!  #hung
    3  match:r1=64  backup:17=0{host_pages_free=0}   |  main!  #hung
"""


def write(folder: Path, text: str) -> list[Path]:
    return [
        write_lane(
            folder,
            lane.entries,
            rank=lane.rank,
            sizes=lane.header["sizes"],
            kinds=KINDS,
            outcome=str(lane.trailer["outcome"]) if lane.trailer else None,
            groups=lane.header["groups"],
        )
        for lane in lanes(text)
    ]


def test_files_give_the_verdict_that_memory_gives(tmp_path: Path) -> None:
    write(tmp_path, DIVERGENT)
    assert check(find_logs(tmp_path)).to_text() == check(history(DIVERGENT)).to_text()


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_killed_at_any_byte_never_accuses_another(tmp_path: Path, rank: int) -> None:
    path = write(tmp_path, DIVERGENT)[rank]
    whole = path.read_bytes()
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        verdict = check(find_logs(tmp_path))
        assert verdict.finding.culprit in ((), (3,)), (size, verdict.finding)
        assert rank in (*verdict.coverage.missing, *verdict.coverage.truncated)


def test_a_killed_process_is_told_from_a_log_that_was_merely_cut(tmp_path: Path) -> None:
    text = "0 match:r1=64 events! #stopped\n1 match:r1=64 events! #stopped\n2 match:r1=64 #cut"
    path = write(tmp_path, text)[2]
    assert check(find_logs(tmp_path)).code == 4
    path.write_bytes(path.read_bytes() + bytes(5000))
    finding = check(find_logs(tmp_path)).finding
    assert (finding.code, finding.culprit, finding.victims) == (14, (2,), (0, 1))


def test_evidence_points_at_lines_that_say_so(tmp_path: Path) -> None:
    write(tmp_path, DIVERGENT)
    for entry in check(find_logs(tmp_path)).finding.evidence:
        assert entry.file is not None
        assert entry.record is not None
        line = (tmp_path / entry.file).read_text().splitlines()[entry.record]
        assert f'"seq":{entry.record},' in line


@pytest.mark.parametrize("rule", re.findall(r"^\| \[([a-z_]+)\]", OWN, re.MULTILINE))
def test_the_smallest_log_on_a_rules_page_breaks_its_rule(rule: str) -> None:
    found = page(rule)
    assert found is not None
    drawn = found.sections["Smallest evidence"].split("```\n")[1].split("```")[0]
    finding = check(history(drawn, pp=2 if "send" in drawn else 1)).finding
    assert finding.rule == rule


def test_the_checker_needs_no_torch_and_no_runtime() -> None:
    loaded = (
        "import sys, consensus_checker.check, consensus_checker.screen, consensus_checker.explain\n"
        "print([name for name in ('torch', 'hicache', 'rich', 'duckdb', 'cli') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
