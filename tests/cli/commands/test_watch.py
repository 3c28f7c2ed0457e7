"""`hicache watch`: over a run that has ended, and over one that goes on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from cli.screens.watch import Plain, heading, lines
from consensus_checker.live_tail import LaneState
from tests.cli.conftest import Hicache

KEEP = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read()); "
KEEP += (
    "assert pathlib.Path(os.environ['HICACHE_VERDICT']).read_text() == pathlib.Path(sys.argv[1]).read_text()"
)


def state(rank: int, *, lane: str = "scheduler", behind: int = 0, still_s: float = 0.0) -> LaneState:
    word = "waits in tp0/main #9" if still_s else "running"
    return LaneState(rank, lane, 40 + rank, 900, "forward", word, still_s, behind)


def test_of_a_run_that_has_ended_it_says_what_check_says(hicache: Hicache, inside: Path) -> None:
    said = hicache("watch", "hung", "--period", "0.1")
    assert said.code == 0
    screen = hicache("check", "hung").out
    assert screen in said.out
    assert said.out.startswith("hung: 4 ranks at step ")
    assert hicache("watch", "twin", "--quiet").out.startswith("CONSISTENT  no rank diverged")


def test_json_has_looks_and_alarms_a_line_each(hicache: Hicache, inside: Path) -> None:
    said = hicache("watch", "hung", "--json")
    events = [json.loads(line) for line in said.out.splitlines()]
    assert {event["schema"] for event in events} == {"hicache.watch.v1"}
    assert [event["event"] for event in events] == ["lanes", "alarm"]
    assert {lane["rank"] for lane in events[0]["lanes"]} == {0, 1, 2, 3}
    assert events[1]["verdict"]["ranks"]["culprit"] == [3]
    end = json.loads(hicache("watch", "twin", "--json").out.splitlines()[-1])
    assert (end["event"], end["verdict"]["verdict"]["kind"]) == ("end", "consistent")


def test_a_command_hears_of_an_alarm_and_of_nothing_else(
    hicache: Hicache, inside: Path, tmp_path: Path
) -> None:
    heard = tmp_path / "heard it.json"
    command = f"{sys.executable} -c \"{KEEP}\" '{heard}'"
    assert hicache("watch", "twin", "--quiet", "--on-alarm", command).code == 0
    assert not heard.exists()
    said = hicache("watch", "hung", "--quiet", "--on-alarm", command)
    assert (said.code, said.err) == (0, "")
    assert json.loads(heard.read_text())["ranks"]["culprit"] == [3]


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("false", "false ended with 1"),
        ("/nowhere/at/all", "No such file"),
        ("sh -c 'exit 3'", "ended with 3"),
    ],
)
def test_a_command_that_fails_is_a_warning(hicache: Hicache, inside: Path, command: str, word: str) -> None:
    said = hicache("watch", "hung", "--quiet", "--on-alarm", command)
    assert said.code == 0
    assert word in said.err and "DIVERGENCE" in said.out


def test_nothing_of_a_command_is_a_shells(hicache: Hicache, inside: Path, tmp_path: Path) -> None:
    hicache(
        "watch", "hung", "--quiet", "--on-alarm", f"echo x > {tmp_path / 'made'}; touch {tmp_path / 'made'}"
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "code", "word"),
    [
        (["nowhere"], 3, "nowhere"),
        (["hung", "--on-alarm", ""], 2, "--on-alarm is empty"),
        (["hung", "--on-alarm", "'open"], 2, "no closing quotation"),
        (["hung", "--silence", "0"], 2, "--silence"),
        (["hung", "--period", "-1"], 2, "--period"),
    ],
)
def test_what_cant_be_watched_is_one_error(
    hicache: Hicache, inside: Path, words: list[str], code: int, word: str
) -> None:
    said = hicache("watch", *words)
    assert said.code == code
    assert said.err.startswith("error: ") and word in said.err and "Traceback" not in said.err


def test_a_rank_that_stands_still_behind_the_others_is_in_the_heading() -> None:
    states = [state(0), state(1, behind=120, still_s=2.4), state(2, behind=7)]
    # Rank 2 moves: it was read before the others, that is all.
    assert heading(Path("x"), states) == "x: 3 ranks at steps 40 to 42; rank 1 is 120 calls behind"


def test_of_a_run_that_has_yet_to_begin_a_pipe_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    show = Plain(Path("x"), quiet=False)
    show(([], []))
    show(([], []))
    show(([state(0)], []))
    show(([state(0)], []))
    assert capsys.readouterr().out == "x: no lane yet\nx: 1 rank at step 40\n"


def test_of_many_lanes_those_are_shown_that_stand() -> None:
    states = [state(rank) for rank in range(60)] + [state(60, behind=3, still_s=9.0)]
    shown = [line.plain for line in lines(Path("x"), states, 12.0)]
    assert shown[0] == "x: 61 ranks at steps 40 to 100; rank 60 is 3 calls behind, watched for 12 s"
    assert any(line.lstrip().startswith("60 ") and "waits in tp0/main" in line for line in shown)
    assert shown[-1] == "(37 more lanes, none further behind)"
    assert max(map(len, shown)) <= 80
