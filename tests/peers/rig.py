"""Runs of the rig: SGLang's own cache and methods of its scheduler in a few gloo processes, and this project.

`HICACHE_PEERS` names a virtual environment with SGLang, `HICACHE_RIG` the folder of the kit that runs it.
Nothing but the installed distribution is added to the server.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from consensus_checker.check import check
from consensus_checker.verdict import Verdict
from tracer.log import find_logs

ROOT = Path(__file__).resolve().parents[2]
PEERS, KIT = os.environ.get("HICACHE_PEERS", ""), os.environ.get("HICACHE_RIG", "")
LACKING = "HICACHE_PEERS and HICACHE_RIG name no environment with SGLang and no kit that runs it"
# A loaded machine takes a minute to import the server.
LIMIT_S = 150
# What a watcher told, with the line behind it, for one may be broken; and a thread that has died.
TOLD = re.compile(
    r"hicache: ((?:DIVERGED|STALLED|UNDETERMINED|MISMATCH|DEAD|FROZEN|BROKEN|thread \w+ of rank).*(?:\n .*)?)"
)


def has_rig() -> bool:
    return bool(PEERS and KIT) and (Path(KIT) / "rig" / "rig.py").is_file()


def installed(folder: Path) -> Path:
    """This distribution as a server's environment has it."""
    site = folder / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(site), str(ROOT)], check=True, cwd=folder)
    return site


def with_faults(site: Path) -> str:
    """The same environment with a second plugin ahead of ours, which makes faults when it is told to."""
    faults = site.parent / "faults"
    about = faults / "test_faults-0.1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("fault_plugin.py"), faults)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: test-faults\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[sglang.srt.plugins]\na_fault = fault_plugin:entry\n")
    return f"{faults}:{site}"


@dataclass(frozen=True, slots=True)
class Ran:
    """One run.

    Attributes:
        report: what the rig says of it.
        told: first lines of what the ranks' watchers told while it ran, each once.
        traces: folder of the logs.
    """

    report: str
    told: tuple[str, ...]
    traces: Path

    @property
    def is_healthy(self) -> bool:
        return "HEALTHY: all ranks equal, all bytes right" in self.report

    @property
    def outcome(self) -> tuple[str, ...]:
        """What the ranks have done, in the rig's own words: counts of its driver, and the cache's state."""
        return tuple(re.findall(r"^rank\d+ (?:\w+ stats|state) .*$", self.report, re.MULTILINE))

    def verdict(self) -> Verdict:
        return check(find_logs(self.traces))


def run(
    site: Path | str | None,
    out: Path,
    options: Sequence[str],
    *,
    trace: str = "full",
    environment: Mapping[str, str] | None = None,
) -> Ran:
    """Run the rig once.

    Args:
        site: a folder with the installed distribution; None for SGLang alone.
        trace: of HICACHE_TRACE; "" leaves it unset.
    """
    traces = out / "traces"
    shutil.rmtree(out, ignore_errors=True)
    traces.mkdir(parents=True)
    own = {
        **os.environ,
        "RIG_PY": str(Path(PEERS) / "bin" / "python"),
        "RIG_PLUGIN_SITE": str(site or ""),
        "OMP_NUM_THREADS": "1",
        "HICACHE_TRACE_DIR": str(traces),
        **({"HICACHE_TRACE": trace} if trace else {}),
        **(environment or {}),
    }
    done = subprocess.run(
        ["bash", str(Path(KIT) / "rig" / "run.sh"), str(out), "--limit", str(LIMIT_S), *options],
        env=own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S + 60,
        check=False,
    )
    logs = [path.read_text(errors="replace") for path in sorted(out.glob("rank*.log"))]
    told = dict.fromkeys(text for log in logs for text in TOLD.findall(log))
    return Ran(done.stdout, tuple(told), traces)
