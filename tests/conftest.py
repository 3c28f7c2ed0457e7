"""What every test may ask for, and one line for each reason why some could not run."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest


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
