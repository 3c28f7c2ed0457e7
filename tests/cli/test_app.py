"""Help, version, and what becomes of errors; most in this process, a few as the shell sees them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Hicache

# SystemExit passes every `except Exception`: an import that somebody swallows is seen all the same.
FORBIDDEN = "raise SystemExit('{name} was imported')\n"


def run_alone(*words: object, without: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, in which importing one of `without` ends it."""
    for name in without:
        (folder / f"{name}.py").write_text(FORBIDDEN.format(name=name))
    return subprocess.run(
        [sys.executable, "-m", "cli.app", *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path.cwd())])},
        # Where the package's own folder is the working one, it would be found before what stands in for it.
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_help_imports_neither_the_runtime_nor_torch_nor_the_database(tmp_path: Path) -> None:
    done = run_alone(
        "--help",
        without=("torch", "duckdb", "hicache", "tracer", "consensus_checker", "rich"),
        folder=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Commands:" in done.stdout


@pytest.mark.parametrize("words", [("check",), ("hits",), ("query", "SELECT 1")], ids=lambda words: words[0])
def test_analysis_never_imports_torch_or_the_runtime(
    words: tuple[str, ...], runs: Path, tmp_path: Path
) -> None:
    command, *rest = words
    done = run_alone(command, runs / "twin", *rest, without=("torch", "hicache"), folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_version_is_that_of_the_distribution(hicache: Hicache) -> None:
    from importlib.metadata import version

    assert f"hicache {version('hicache-toolkit')}\n" == hicache("--version").out


def test_no_command_shows_the_help(hicache: Hicache) -> None:
    said = hicache()
    assert (said.code, said.err) == (0, "")
    assert "Commands:" in said.out


@pytest.mark.parametrize("command", ["demo", "run", "check", "hits", "query", "zoo list", "zoo run"])
def test_every_command_has_help_that_fits_the_screen(command: str, hicache: Hicache) -> None:
    said = hicache(*command.split(), "--help")
    assert said.code == 0
    assert [line for line in said.out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope"], "error: no such command 'nope'\n  try       hicache --help\n"),
        (["check"], "error: missing argument 'PATH...'\n  try       hicache check --help\n"),
        (["zoo", "run", "x"], "error: missing option '--out'\n  try       hicache zoo run --help\n"),
        (["check", "--nope", "x"], "error: no such option: --nope\n  try       hicache check --help\n"),
    ],
)
def test_a_usage_error_is_one_message_and_code_2(words: list[str], message: str, hicache: Hicache) -> None:
    said = hicache(*words)
    assert (2, "", message) == (said.code, said.out, said.err)


@pytest.mark.parametrize("command", ["check", "hits", "query"])
def test_logs_that_are_not_there_are_code_3(command: str, tmp_path: Path, hicache: Hicache) -> None:
    said = hicache(command, tmp_path, *(["SELECT 1"] if command == "query" else []))
    assert (said.code, said.out) == (3, "")
    assert said.err == (
        f"error: no logs in {tmp_path}\n"
        "  expected  rank0000.scheduler.000.jsonl, ...\n"
        f"  try       hicache zoo run local_host_room_decides_backup --out {tmp_path}\n"
    )


@pytest.mark.parametrize(
    "words",
    [["check"], ["hits"], ["query", "FROM lanes"], ["run", "--workload"], ["zoo run nope --plugin"]],
    ids=lambda words: words[0],
)
def test_a_path_of_a_name_that_is_too_long_is_one_message(
    words: list[str], tmp_path: Path, hicache: Hicache
) -> None:
    command, *rest = words
    last = ["--out", tmp_path / "out"] if "run" in command else []
    path = tmp_path / ("x" * 300)
    given = [*command.split(), *rest, path] if last else [command, path, *rest]
    said = hicache(*given, *last)
    assert said.code == (3 if "zoo" not in command else 2)
    assert said.err.startswith("error: ")
    assert "internal" not in said.err
    assert not (tmp_path / "out").exists()


def test_an_input_that_may_not_be_read_is_the_readers_to_say(
    runs: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would call it a mistake in the arguments (2); it is an unreadable input (3), or none."""
    monkeypatch.setattr(os, "access", lambda *given, **more: False)
    for words in (["check", runs / "twin"], ["hits", runs / "twin"], ["query", runs / "twin", "FROM lanes"]):
        assert hicache(*words).code == 0


def test_an_error_under_json_is_plain_text_on_stderr(tmp_path: Path, hicache: Hicache) -> None:
    said = hicache("check", tmp_path, "--json")
    assert (said.code, said.out) == (3, "")
    assert said.err.startswith("error: no logs in")


def test_an_internal_error_is_one_line_and_a_hint(
    tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "def broken():\n    raise ValueError('boo\\nhoo')\n"
        "def wire(parts):\n    parts.reservations = broken\n"
    )
    said = hicache("run", "--plugin", plugin, "--out", tmp_path / "out")
    expected = "error: internal: ValueError: boo hoo\n  try       HICACHE_DEBUG=1 for the traceback\n"
    assert (1, "", expected) == (said.code, said.out, said.err)
    monkeypatch.setenv("HICACHE_DEBUG", "1")
    said = hicache("run", "--plugin", plugin, "--out", tmp_path / "out", "--overwrite")
    assert said.code == 1
    assert said.err.startswith("Traceback")


def test_a_reader_that_goes_away_changes_neither_the_code_nor_stderr(runs: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "cli.app", "check", str(runs / "hung")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 10


def test_forced_colour_never_reaches_a_pipe(runs: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cli.app", "check", str(runs / "hung")],
        env={**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 10
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize(("no_color", "is_coloured"), [("", True), ("1", False)])
def test_a_terminal_gets_colour_unless_it_asked_for_none(
    no_color: str, is_coloured: bool, runs: Path
) -> None:
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "cli.app", "check", str(runs / "twin")],
        env={**os.environ, "NO_COLOR": no_color, "TERM": "xterm-256color"},
        stdout=theirs,
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0
    assert is_coloured == ("\x1b[" in shown)
    assert "CONSISTENT" in shown


INTERRUPTING = "raise KeyboardInterrupt\n"


@pytest.mark.parametrize("module", ["typer", "tracer", "consensus_checker"])
def test_ctrl_c_while_the_command_is_loaded_is_quiet(module: str, runs: Path, tmp_path: Path) -> None:
    """A module that raises it when it is imported stands for a hand that is quick."""
    (tmp_path / f"{module}.py").write_text(INTERRUPTING)
    done = subprocess.run(
        [sys.executable, "-m", "cli.app", "check", str(runs / "twin")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path.cwd())])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr


def test_a_shortage_of_memory_is_one_clear_error(
    runs: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(path: Path, *, every_line: bool) -> None:
        raise MemoryError

    monkeypatch.setattr("cli.commands.check.judge", judge)
    said = hicache("check", runs / "twin")
    assert (said.code, said.err.splitlines()[0]) == (1, "error: out of memory")


def test_large_logs_are_read_under_a_sign_of_life_on_a_terminal(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pty = pytest.importorskip("pty")
    script = "import sys, cli.theme; cli.theme.LARGE_BYTES = 1; from cli.app import main; sys.exit(main())"
    for words in (["check"], ["hits"], ["query", "FROM lanes"]):
        command, *rest = words
        ours, theirs = pty.openpty()
        done = subprocess.run(
            [sys.executable, "-c", script, command, str(runs / "twin"), *rest],
            env={**os.environ, "TERM": "xterm-256color"},
            stdout=subprocess.PIPE,
            stderr=theirs,
        )
        os.close(theirs)
        shown = os.read(ours, 1 << 16).decode()
        os.close(ours)
        assert done.returncode == 0
        assert "MB of logs" in shown
        assert b"MB of logs" not in done.stdout
