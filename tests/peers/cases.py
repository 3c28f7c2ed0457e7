"""From each fault's logs to a test that fails in SGLang's own code, and to the smallest that still does.

    HICACHE_PEERS=VENV HICACHE_RIG=KIT python -m tests.peers.cases [--fault NAME]

For each handed fault and each of ours that is a decision: the rig runs with it, `hicache replay --test`
makes a file of its logs, and that file runs with the server's Python, by pytest, as it is and made smaller.
It must fail both times in the call in which the logs part. Keeps the table in docs/sglang.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.peers.matrix import FAULTS, STALLED, Fault
from tests.peers.pages import kept
from tests.peers.rig import KIT, LACKING, PEERS, ROOT, has_rig, installed, run, with_faults

# What differs in no decision is no test of decisions.
NO_DECISION = (STALLED, "hung_read", "dead_sync_thread")
LIMIT_S = 400
PARTS = re.compile(r"part at call (\d+)")
CALL = re.compile(r"^(?:E +)?  rank (\d+): (.+?)(?:  |$)", re.MULTILINE)
SHRUNK = re.compile(r"shrunk from (\d+) requests and (\d+) steps to (\d+) and (\d+)")


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a test file.

    Attributes:
        calls: of the two ranks, in which they part; none where they do not.
    """

    has_failed: bool
    calls: tuple[str, ...]
    text: str
    seconds: float


def server_python(words: Sequence[str], folder: Path, site: Path) -> Case:
    """Run the server's own Python, with pytest beside it, and without this project."""
    begin = time.monotonic()
    own = {
        **os.environ,
        "PYTHONPATH": f"{site}:{Path(KIT) / 'stubs'}",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [str(Path(PEERS) / "bin" / "python"), *words],
        cwd=folder,
        env=own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    last = done.stdout[-3000:]
    where = done.stdout.rfind("part at call")
    calls = tuple(name for _, name in CALL.findall(done.stdout[where:]))[:2] if where >= 0 else ()
    return Case(done.returncode == 1, calls, last, time.monotonic() - begin)


def pytest_beside(folder: Path) -> Path:
    """The server's environment has no pytest of its own."""
    site = folder / "pytest"
    pip = [str(Path(PEERS) / "bin" / "python"), "-m", "pip", "install", "-q", "--target", str(site), "pytest"]
    # It also tells what the server's environment lacks, which is none of ours.
    subprocess.run(pip, check=True, cwd=folder, stderr=subprocess.DEVNULL)
    return site


def case_row(fault: Fault, folder: Path, site: Path, pytest: Path) -> tuple[list[str], bool]:
    """A row of the table, and whether the test failed where the logs part, both times."""
    out = folder / "run"
    given = str(site) if not fault.is_own else with_faults(site)
    run(given, out, fault.options, environment=fault.environment)
    file = folder / f"test_{fault.name}.py"
    hicache = [sys.executable, "-m", "cli.app", "replay", str(out / "traces"), "--test", str(file)]
    made = subprocess.run(
        [*hicache, "--overwrite", "--json"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    head = [f"`{fault.name}`", fault.topology]
    if made.returncode or not file.exists():
        why = (made.stderr or made.stdout).strip().splitlines()[:1]
        told = json.loads(made.stdout) if made.returncode == 4 and made.stdout else {}
        parts = " / ".join(dict.fromkeys(told.get("calls", ())))
        return [
            *head,
            parts or "-",
            "no log says what went otherwise" if told else " ".join(why),
            "-",
            "-",
        ], False
    told = json.loads(made.stdout)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", file.name]
    whole = server_python(words, folder, pytest)
    smaller = server_python([file.name, "--shrink"], folder, pytest)
    again = server_python(words, folder, pytest)
    sizes = SHRUNK.search(smaller.text)
    requests = f"{told['requests']} -> {sizes[3]}" if sizes else f"{told['requests']}"
    steps = f"{told['steps']} -> {sizes[4]}" if sizes else f"{told['steps']}"
    want = tuple(told["calls"])
    is_good = whole.has_failed and whole.calls == want and again.has_failed and again.calls == want
    for each in (whole, again):
        if not (each.has_failed and each.calls == want):
            print(each.text, file=sys.stderr)
    found = " / ".join(dict.fromkeys(again.calls)) or "nowhere"
    return [*head, " / ".join(dict.fromkeys(want)), found, requests, steps], is_good


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", help="only this one")
    given = parser.parse_args(arguments)
    if not has_rig():
        print(f"error: {LACKING}", file=sys.stderr)
        return 3
    own = {fault.name: fault for fault in reversed(FAULTS) if fault.name not in NO_DECISION}
    rows = []
    bad = 0
    with tempfile.TemporaryDirectory(prefix="hicache-cases-") as name:
        folder = Path(name)
        site, pytest = installed(folder), pytest_beside(folder)
        for fault in reversed(own.values()):
            if given.fault in (None, fault.name):
                row, is_good = case_row(fault, folder, site, pytest)
                rows.append(row)
                bad += not is_good
                print("ok " if is_good else "BAD", *row, sep=" | ", flush=True)
    if given.fault is None:
        head = ["fault", "topology", "logs part at", "the test fails at", "requests", "steps"]
        kept("cases", head, rows, f"{len(rows) - bad} of {len(rows)} tests fail where the logs part.")
    # What no log tells, no test can do again; that is told, and is no error of the tool.
    return int(bad > len(rows) // 4)


if __name__ == "__main__":
    sys.exit(main())
