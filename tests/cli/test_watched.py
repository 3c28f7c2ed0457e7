"""Runs with a watcher beside each rank: switched by the environment, told once, else silent."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cli.app import main
from tests.cli.conftest import Said

SWITCH = "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"
WORLD = ["--tp", "3", "--agentic", "conversations=8,rounds=4,max-context=8192,output=16"]
WORLD += ["--device-pages", "300", "--host-pages", "600"]
BUG = ["--bug", "local_host_room_decides_backup", "--fault", "alloc_fail:rank=2,pool=host,nth=5"]

Run = Callable[..., Said]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`hicache run` into a folder with the switch on, and what it said: a watcher writes to stderr itself."""

    def call(out: Path, *words: str, switch: str = "1") -> Said:
        monkeypatch.setenv(SWITCH, switch)
        capfd.readouterr()
        code = main(["run", "--out", str(out), *words])
        return Said(code, *capfd.readouterr())

    return call


def verdict(out: Path, capfd: pytest.CaptureFixture[str]) -> dict[str, object]:
    capfd.readouterr()
    main(["check", str(out), "--json"])
    document: dict[str, object] = json.loads(capfd.readouterr().out)
    return document


def calls(text: str) -> Sequence[str]:
    return [line for line in text.splitlines() if line.startswith(">")]


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("mode", ["threads", "gloo"])
@pytest.mark.usefixtures("forked")
def test_a_divergence_is_told_once_while_the_run_goes_on(
    run: Run, tmp_path: Path, mode: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said = run(tmp_path / "r", "--mode", mode, *WORLD, *BUG)
    assert said.code == 0
    assert said.out.startswith("COMPLETED")
    assert said.err.count("DIVERGED  scope dp0: rank 2 left the majority (2 of 3)") == 1, said.err
    # The same call that the whole logs name, with its fact.
    first = verdict(tmp_path / "r", capfd)["first_divergence"]
    assert isinstance(first, dict)
    (marked,) = calls(said.err)
    assert marked.startswith(f"> {first['index']} ")
    assert "host_pages_free was 0 on rank 2" in said.err


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("mode", ["threads", "gloo"])
@pytest.mark.usefixtures("forked")
def test_a_healthy_run_is_watched_without_a_word(run: Run, tmp_path: Path, mode: str) -> None:
    said = run(tmp_path / "r", "--mode", mode, *WORLD, "--hicache-storage-backend", "memory")
    assert (said.code, said.err) == (0, "")


def test_without_the_switch_nothing_is_watched(run: Run, tmp_path: Path) -> None:
    said = run(tmp_path / "r", "--mode", "threads", *WORLD, *BUG, switch="0")
    assert (said.code, said.err) == (0, "")


def test_the_simulator_is_not_watched_and_a_run_without_logs_says_so(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path / "sim", *WORLD, *BUG).err == ""
    said = run(tmp_path / "off", "--mode", "threads", "--trace", "off", *WORLD)
    assert said.err == "nothing is watched with --trace off: --trace ring costs least\n"


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_the_policy_abort_ends_the_ranks(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHE_CHECKER_POLICY", "abort")
    said = run(tmp_path / "r", "--mode", "gloo", *WORLD, *BUG)
    assert said.out.startswith("CRASHED")
    assert "exit code 1" in said.out
    assert said.err.count("DIVERGED") == 1
    assert verdict(tmp_path / "r", capfd)["ranks"]["culprit"] == [2]  # type: ignore[index]
