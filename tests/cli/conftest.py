"""The command called in this process, and two runs that the tests only read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import typer.main

from cli.app import main
from cli.commands.demo import SCENARIO, SEED


@dataclass(frozen=True, slots=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str


Hicache = Callable[..., Said]


@pytest.fixture(scope="session", autouse=True)
def built_once() -> Iterator[None]:
    """Every call of `main` builds all commands anew from the same functions: more than many of them take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture
def hicache(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Hicache:
    """Call `hicache` with words; stdout is no terminal here."""
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "HICACHE_DEBUG"):
        monkeypatch.delenv(name, raising=False)

    def call(*words: object) -> Said:
        capsys.readouterr()
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return call


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's run in `hung` and its twin's in `twin`; not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    words = ["zoo", "run", SCENARIO, "--seed", str(SEED), "--quiet", "--out"]
    assert main([*words, str(folder / "hung")]) == 0
    assert main([*words, str(folder / "twin"), "--twin"]) == 0
    return folder


@pytest.fixture
def inside(runs: Path) -> Iterator[Path]:
    """The folder of `runs` as the working directory, so that paths on screens are short and equal."""
    before = Path.cwd()
    os.chdir(runs)
    yield runs
    os.chdir(before)
