"""What every test may ask for, and one line about what could not run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

WITHOUT_DATA = pytest.StashKey[list[str]]()


@pytest.fixture
def public_data(request: pytest.FixtureRequest) -> Path:
    """The folder of public traces, named by HICACHE_DATA; see the README for where to get them."""
    folder = os.environ.get("HICACHE_DATA", "")
    if folder and (Path(folder) / "traces").is_dir():
        return Path(folder)
    request.config.stash.setdefault(WITHOUT_DATA, []).append(request.node.nodeid)
    # Said once for all of them in the summary below.
    pytest.skip("HICACHE_DATA names no folder with traces/")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    missing = config.stash.get(WITHOUT_DATA, [])
    if missing:
        terminalreporter.write_line(
            f"{len(missing)} tests did not run: they need public traces, and HICACHE_DATA names no folder "
            "with traces/ (README, section Data)",
            yellow=True,
        )
