"""What every test may ask for, and one line for each reason why some could not run."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from cli import watched
from hicache import launch
from hicache.control import patience
from hicache.forks import Forks
from tests.support.processes import rank_environment

# Objects made before the youngest are looked through. With the usual 700, a tenth of the suite's processor
# time goes into looking at what was collected and stays.
GARBAGE_THRESHOLD = 10_000


def pytest_collection_finish() -> None:
    """Modules and tests are there until the end: nobody need look whether they are garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD, *gc.get_threshold()[1:])


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """From which ranks are forked: torch is imported once, by the first test that needs it."""
    ahead = ("tests.support.live", *watched.AHEAD)
    with Forks(rank_environment(), watched.MODULE, ahead=ahead) as made:
        yield made


@pytest.fixture
def forked(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of processes have theirs from the same server as the tests, and not one each."""
    monkeypatch.setattr(launch, "Forks", lambda *_, **__: nullcontext(forks))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks say after fewer steps without progress that they are stuck: what is seen then is the same."""
    monkeypatch.setattr(patience, "IDLE_STEPS_MAX", 500)
    monkeypatch.setattr(patience, "STORAGE_IDLE_STEPS_MAX", 500)


@pytest.fixture
def public_data() -> Path:
    """The folder of public traces, named by HICACHE_DATA; see the README for where to get them."""
    folder = os.environ.get("HICACHE_DATA", "")
    if not folder or not (Path(folder) / "traces").is_dir():
        # Public traces are not part of the project; `.ci/run` refuses to go without them.
        pytest.skip("no public traces: HICACHE_DATA names no folder with traces/ (README, section Data)")
    return Path(folder)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Nothing is skipped silently. Pytest's own `-rs` has a line for each place, not for each reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} did not run: {reason}", yellow=True)
