"""How an error looks on a terminal that is narrower than it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

from cli.errors import fitted


def test_a_line_that_fits_is_left_as_it_is() -> None:
    line = "  try       hicache run --help"
    assert fitted(line, 80) == line


def test_what_is_behind_a_label_goes_on_below_it() -> None:
    assert fitted("  expected  write, load, prefetch or backup", 30) == (
        "  expected  write, load,\n            prefetch or backup"
    )


def test_a_path_is_never_cut() -> None:
    path = "/a-very/long-path/that-goes-on/and-on"
    assert fitted(f"error: no such file or folder: {path}", 30) == (
        f"error: no such file or folder:\n  {path}"
    )


def said_on_a_terminal(columns: int) -> list[str]:
    own, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.app", "run", "--tp", "x"],
        stderr=terminal,
        env={**os.environ, "COLUMNS": str(columns)},
    )
    os.close(terminal)
    assert process.wait(timeout=30) == 2
    text = os.read(own, 1 << 16).decode()
    os.close(own)
    return text.splitlines()


def test_an_error_of_an_option_is_cut_between_words_on_a_terminal() -> None:
    assert said_on_a_terminal(60) == [
        "error: invalid value for '--tp': Input should be a valid",
        "  integer, unable to parse string as an integer",
        "  try       hicache run --help",
    ]
