"""`hicache doctor`: what is installed here, what arms the recorder, and what a command would lack."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Literal

from cli.errors import OK
from cli.options import Json, Quiet

if TYPE_CHECKING:
    from rich.text import Text

SCHEMA = "hicache.doctor.v1"
State = Literal["ok", "off", "lacking"]
DISTRIBUTION = "hicache-toolkit"
PLUGIN_GROUP = "sglang.srt.plugins"
# Distribution, module, and what is not there without it. The recorder needs the first alone.
PACKAGES = (
    ("msgspec", "msgspec", "everything", True),
    ("typer", "typer", "every command", True),
    ("rich", "rich", "every screen", True),
    ("duckdb", "duckdb", "query, and Parquet", True),
    ("xxhash", "xxhash", "faster digests", False),
    ("opentelemetry-sdk", "opentelemetry.sdk", "export --to otlp --endpoint", False),
    ("torch", "torch", "run --mode gloo", False),
    ("sglang", "sglang", "the plugin", False),
)
# Names whose value is shown; of the others only whether they are set.
SWITCHES = (
    ("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", "arms the recorder"),
    ("HICACHE_TRACE", "ring or full arm it too; off beats all"),
    ("HICACHE_TRACE_DIR", "where logs go"),
    ("HICACHE_TRACE_LIMIT", "bytes of a rank's ring"),
    ("HICACHE_CHECKER_POLICY", "what is done when ranks differ"),
    ("HICACHE_CHECKER_COMMAND", "the command of that policy"),
    ("HICACHE_RUN_ID", "names the run"),
    ("HICACHE_ATTEMPT", "counts its restarts"),
    ("TORCH_FR_BUFFER_SIZE", "calls that PyTorch keeps"),
    ("TORCH_NCCL_TRACE_BUFFER_SIZE", "the same, by its older name"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "dumps them when NCCL times out"),
    ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "where those go"),
    ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "asks a process for one"),
)
SECRETS = (("HICACHE_DIGEST_KEY", "of digests, without a store"),)
VALUE_CHARS_MAX = 60
MARKS: dict[State, str] = {"ok": " ", "off": "-", "lacking": "!"}
OPEN_FILES_MIN = 4096
TEMPORARY_BYTES_MIN = 1 << 30
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
STATUS = Path("/proc/self/status")
CAP_SYS_PTRACE = 19
SCOPES = {
    "0": "processes of the same user",
    "1": "its own children only, without CAP_SYS_PTRACE",
    "2": "nobody without CAP_SYS_PTRACE",
    "3": "nobody",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        part: heading that it stands under.
        meaning: what it is needed for, or what follows from what was found.
    """

    part: str
    name: str
    state: State
    found: str
    meaning: str


def doctor(json: Json = False, quiet: Quiet = False) -> int:
    """Say what is installed, what is missing for which command, and what the environment arms.

    Nothing is changed, no server is asked, and no key is shown. Exits 0 whatever it finds.
    """
    from cli.theme import show, show_json

    checks = [*packages(), *switches(), *recording(), *limits()]
    if json:
        lacking = [check.name for check in checks if check.state == "lacking"]
        show_json({"schema": SCHEMA, "lacking": lacking, "checks": [asdict(check) for check in checks]})
    else:
        show(lines(checks, is_quiet=quiet))
    return OK


def packages() -> Iterator[Check]:
    yield Check("versions", DISTRIBUTION, "ok", _version(DISTRIBUTION), "this tool")
    yield Check("versions", "python", "ok", platform.python_version(), sys.executable)
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Check("versions", "system", "ok", system, f"{os.cpu_count()} processors")
    for distribution, module, meaning, is_needed in PACKAGES:
        is_there = _is_importable(module)
        state: State = "ok" if is_there else "lacking" if is_needed else "off"
        found = _version(distribution) if is_there else "not installed"
        yield Check("packages", distribution, state, found, meaning if is_there else f"needed for {meaning}")
    is_there = shutil.which("py-spy") is not None
    found = "on the path" if is_there else "not installed"
    yield Check("packages", "py-spy", "ok" if is_there else "off", found, "stacks of processes not ours")


def switches() -> Iterator[Check]:
    for name, meaning in SWITCHES:
        text = os.environ.get(name, "")
        shown = text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}..."
        yield Check("environment", name, "ok" if text else "off", shown or "not set", meaning)
    for name, meaning in SECRETS:
        is_set = bool(os.environ.get(name))
        yield Check("environment", name, "ok" if is_set else "off", "set" if is_set else "not set", meaning)
    found = [
        point.value for point in entry_points(group=PLUGIN_GROUP) if point.value.startswith("consensus_")
    ]
    text = found[0] if found else "not registered"
    meaning = "what SGLang loads" if found else "SGLang will not load it: install the distribution"
    yield Check("environment", "plugin", "ok" if found else "lacking", text, meaning)


def recording() -> Iterator[Check]:
    """Where a server that is started from here would record, and whether it could."""
    from consensus_checker.consensus_recorder import (
        FOLDER_VARIABLE,
        LIMIT_VARIABLE,
        limit_bytes_asked,
        trace_asked,
        trace_folder,
    )

    said: list[str] = []
    trace, limit_bytes = trace_asked(said.append), limit_bytes_asked(said.append)
    yield Check("recording", "trace", "off" if trace == "off" else "ok", trace, "what would be recorded")
    yield Check(
        "recording", "ring", "ok", f"{limit_bytes / (1 << 20):,.0f} MiB a rank", f"by {LIMIT_VARIABLE}"
    )
    for sentence in said:
        yield Check("recording", "settings", "lacking", sentence, "that setting has no effect")
    folder = trace_folder()
    if folder is None:
        meaning = "a private folder is made, and removed unless it holds evidence"
        yield Check("recording", "folder", "off", f"{FOLDER_VARIABLE} is not set", meaning)
        return
    yield _writable("recording", "folder", folder, limit_bytes, "where logs go")


def limits() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    is_enough = soft in (resource.RLIM_INFINITY, -1) or max(soft, hard) >= OPEN_FILES_MIN
    meaning = "two for each rank's lane when many ranks are judged"
    yield Check("limits", "open files", "ok" if is_enough else "lacking", count, meaning)
    temporary = Path(tempfile.gettempdir())
    yield _writable("limits", "temporary", temporary, TEMPORARY_BYTES_MIN, "where archives are unpacked")
    yield _ptrace()
    is_needed = "a process that has armed itself writes its own stacks"
    yield Check("limits", "signals", "ok", "to processes of the same user", is_needed)


def _ptrace() -> Check:
    status = {}
    with suppress(OSError):
        status = dict(line.split(":\t", 1) for line in STATUS.read_text().splitlines() if ":\t" in line)
    has_capability = bool(int(status.get("CapEff", "0").strip(), 16) >> CAP_SYS_PTRACE & 1)
    scope = ""
    with suppress(OSError):
        scope = PTRACE_SCOPE.read_text().strip()
    # A kernel without Yama asks for the same user only.
    is_allowed = has_capability or scope in ("", "0")
    found = "CAP_SYS_PTRACE" if has_capability else f"ptrace_scope {scope or 'absent'}"
    who = "any process" if has_capability else SCOPES.get(scope or "0", "unknown")
    meaning = f"py-spy may look at: {who}"
    return Check("limits", "ptrace", "ok" if is_allowed else "off", found, meaning)


def _writable(part: str, name: str, folder: Path, bytes_min: int, meaning: str) -> Check:
    """Whether a folder can be written to, or made, and has room."""
    place = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return Check(part, name, "lacking", f"{folder}: can't be written to", meaning)
    try:
        free_bytes = shutil.disk_usage(place).free
    except OSError as error:
        return Check(part, name, "lacking", f"{folder}: {error.strerror}", meaning)
    state: State = "ok" if free_bytes >= bytes_min else "lacking"
    is_new = "" if place == folder else ", made when needed"
    return Check(part, name, state, f"{folder}: {free_bytes / 1e9:,.1f} GB free{is_new}", meaning)


def _is_importable(module: str) -> bool:
    # Looked for and not imported: torch takes seconds, and what it does then is not ours to begin.
    with suppress(ImportError, ValueError):
        return find_spec(module) is not None
    return False


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown version"


def lines(checks: list[Check], *, is_quiet: bool) -> list[Text]:
    """What is lacking first, in one line, then all of it under headings."""
    from rich.text import Text

    from cli.screens.table import printable
    from cli.theme import DOUBT, GOOD, HEADING, WIDTH, headline

    lacking = [check.name for check in checks if check.state == "lacking"]
    found = headline("READY", "nothing is lacking", GOOD)
    if lacking:
        found = headline("LACKING", ", ".join(lacking), DOUBT)
    parts: dict[str, list[Check]] = {}
    for check in () if is_quiet else checks:
        parts.setdefault(check.part, []).append(check)
    for part, each in parts.items():
        found += [Text(""), Text(part, HEADING)]
        indent = max(len(check.name) for check in each) + 4
        for check in each:
            begin = f"{MARKS[check.state]} {check.name}".ljust(indent)
            line = f"{begin}{printable(check.found)}"
            joined = f"{line}  ({check.meaning})"
            if len(joined) <= WIDTH:
                found.append(Text(joined))
                continue
            # What something is for is told below it only where something has to be done.
            text = f"{check.found}: {check.meaning}" if check.state == "lacking" else check.found
            told = wrap(printable(text), WIDTH - indent, break_long_words=False) or [""]
            found += [Text((begin if not row else " " * indent) + line) for row, line in enumerate(told)]
    return found
