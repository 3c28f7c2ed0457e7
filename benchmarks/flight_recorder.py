"""Flight recorder dumps of a large job: reading them and naming who did not join, beside torchfrtrace.

    python -m benchmarks.flight_recorder [RANKS...]                   ours, 64 and 256 ranks
    HICACHE_TORCH_PYTHON=PYTHON python -m benchmarks.flight_recorder  and torchfrtrace in that Python

Every figure is of a whole process, imports included: seconds of processor time and the largest memory it had.
Sides alternate; the median of each counts. Dumps are as torch writes them, its pickler's habits included:
2,000 entries a rank in three groups, no frames, one rank that stops three calls before its peers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ENTRIES = 2000
TP = 8
# Of twenty calls: inner groups are used more often.
PATTERN = ("tp", "tp", "dp", "tp", "world") * 4
CALLS_EARLIER = 3
RUNS = 3
# ranks -> seconds and MB that a quarter of torchfrtrace's is held against, as once measured elsewhere.
TORCH = {64: (4.5, 429), 256: (16.7, 1093)}
SHARE_MAX = 0.25


def generate(folder: Path, rank_count: int, *, odd: int, entry_count: int = ENTRIES) -> None:
    """A dump a rank; rank `odd` has called less than the others, who wait for it."""
    for rank in range(rank_count):
        dump = dump_of(rank, rank_count, odd=odd, entry_count=entry_count)
        (folder / f"comm_lib_trace_rank_{rank}").write_bytes(as_torch_pickles(dump))


def dump_of(rank: int, rank_count: int, *, odd: int, entry_count: int = ENTRIES) -> dict[str, Any]:
    """What rank `rank` has recorded."""
    tp, dp = rank // TP, rank % TP
    # name, description, members
    members = {
        "world": ("0", "default_pg", list(range(rank_count))),
        "tp": (str(1 + tp), "tp", list(range(tp * TP, min(rank_count, (tp + 1) * TP)))),
        "dp": (str(10_000 + dp), "dp", list(range(dp, rank_count, TP))),
    }
    numbers = {kind: at for at, kind in enumerate(members)}
    calls = dict.fromkeys(members, 0)
    entries = []
    for record in range(entry_count):
        kind = PATTERN[record % len(PATTERN)]
        name, description, _ = members[kind]
        calls[kind] += 1
        entries.append(
            {
                "record_id": record,
                "pg_id": numbers[kind],
                "process_group": (name, description),
                "thread_name": "python",
                "thread_id": "140447047560064",
                "collective_seq_id": calls[kind],
                "p2p_seq_id": 0,
                "op_id": calls[kind],
                "profiling_name": "nccl:all_reduce",
                "time_created_ns": 1_796_017_079_668_613_311 + record * 1_000_003,
                "input_sizes": [[4096, 1, 5120]],
                "input_dtypes": ["BFloat16"],
                "output_sizes": [[4096, 1, 5120]],
                "output_dtypes": ["BFloat16"],
                "state": "completed",
                "time_discovered_started_ns": 1_796_017_079_668_713_311 + record * 1_000_003,
                "time_discovered_completed_ns": 1_796_017_079_668_813_311 + record * 1_000_003,
                "retired": True,
                "timeout_ms": 600_000,
                "is_p2p": False,
            }
        )
    # Everybody waits in the last call of the inner group, to which the odd rank has not come.
    stop = max(at for at in range(entry_count) if PATTERN[at % len(PATTERN)] == "tp")
    entries = entries[: stop + 1]
    if rank == odd:
        entries = entries[:-CALLS_EARLIER]
    elif rank // TP == odd // TP:
        for entry in entries[-CALLS_EARLIER:]:
            entry.update(state="scheduled", retired=False, time_discovered_completed_ns=None)
            entry.update(time_discovered_started_ns=None)
    done = {kind: [e for e in entries if e["pg_id"] == number] for kind, number in numbers.items()}
    return {
        "version": "2.9",
        "nccl_version": "2.27.3",
        "pg_config": {
            name: {"name": name, "desc": description, "ranks": str(ranks)}
            for name, description, ranks in members.values()
        },
        "pg_status": {
            str(numbers[kind]): {
                "last_enqueued_collective": len(own),
                "last_started_collective": -1,
                "last_completed_collective": sum(entry["state"] == "completed" for entry in own),
            }
            for kind, own in done.items()
        },
        "entries": entries,
    }


def as_torch_pickles(value: Any) -> bytes:
    """Protocol 2 as torch's own pickler writes it: strings once, containers never by reference."""
    memo: dict[str, int] = {}
    return b"\x80\x02" + b"".join(_pickled(value, memo)) + b"."


def _pickled(value: Any, memo: dict[str, int]) -> Iterator[bytes]:
    if value is None:
        yield b"N"
    elif isinstance(value, bool):
        yield b"\x88" if value else b"\x89"
    elif isinstance(value, int):
        yield _integer(value)
    elif isinstance(value, str):
        known = memo.get(value)
        if known is None:
            known = memo[value] = len(memo)
            text = value.encode()
            yield b"X" + len(text).to_bytes(4, "little") + text
            yield b"q" + bytes([known]) if known < 256 else b"r" + known.to_bytes(4, "little")
        else:
            yield b"h" + bytes([known]) if known < 256 else b"j" + known.to_bytes(4, "little")
    elif isinstance(value, tuple):
        for each in value:
            yield from _pickled(each, memo)
        yield (b")", b"\x85", b"\x86", b"\x87")[len(value)]
    elif isinstance(value, list):
        yield b"]("
        for each in value:
            yield from _pickled(each, memo)
        yield b"e"
    else:
        yield b"}("
        for key, each in value.items():
            yield from _pickled(key, memo)
            yield from _pickled(each, memo)
        yield b"u"


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def analyse(folder: Path) -> None:
    """The child's work: everything in the folder, from bytes to claims."""
    from dataclasses import replace

    from consensus_checker.rules import call_mismatch, frontier
    from tracer.importers import flight_recorder
    from tracer.importers.dossier import Dossier, Who
    from tracer.importers.sniff import files_at

    dossier = Dossier()
    for file in files_at(folder):
        index = dossier.begin(file.name)
        flight_recorder.read(file, index, dossier)
        rank = int(file.name.rpartition("_")[2])
        dossier.dumps[-1] = replace(dossier.dumps[-1], who=Who(rank=rank))
    for claim in [*call_mismatch.find(dossier), *frontier.find(dossier)]:
        print(json.dumps({"rule": claim.finding.rule, "culprit": claim.finding.culprit}))


def process(*words: str) -> tuple[float, float, str]:
    """Seconds of processor time and peak MB of a whole process, and what it said."""
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(words, stdout=out, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        said = out.read().decode(errors="replace")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, said


def main(rank_counts: Sequence[int] = (64, 256), runs: int = RUNS) -> None:
    torch_python = os.environ.get("HICACHE_TORCH_PYTHON", "")
    print(f"flight recorder dumps, {ENTRIES:,} entries a rank, whole processes, median of {runs}")
    for rank_count in rank_counts:
        odd = rank_count // 2 + 3
        with tempfile.TemporaryDirectory() as folder:
            generate(Path(folder), rank_count, odd=odd)
            ours = (sys.executable, "-m", "benchmarks.flight_recorder", "--analyse", folder)
            sides: dict[str, tuple[str, ...]] = {"ours": ours}
            if torch_python:
                module = "torch.distributed.flight_recorder.fr_trace"
                sides["torchfrtrace"] = (torch_python, "-m", module, "-p", "comm_lib_trace_rank_", folder)
            figures: dict[str, list[tuple[float, float, str]]] = {name: [] for name in sides}
            for _ in range(runs):
                for name, words in sides.items():
                    figures[name].append(process(*words))
        medians = {
            name: (statistics.median(run[0] for run in runs), statistics.median(run[1] for run in runs))
            for name, runs in figures.items()
        }
        seconds, size = medians["ours"]
        torch_seconds, torch_size = medians.get("torchfrtrace", TORCH[rank_count])
        whose = "measured here" if torch_python else "once measured elsewhere"
        print(f"  {rank_count:4} ranks     {seconds:6.2f} s, {size:6.0f} MB")
        print(f"    torchfrtrace {torch_seconds:6.2f} s, {torch_size:6.0f} MB, {whose}")
        shares = f"{seconds / torch_seconds:6.2f},   {size / torch_size:6.2f}"
        print(f"    share        {shares}     budget {SHARE_MAX}")
        print(f"    said         {figures['ours'][0][2].strip()}; odd is {odd}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--analyse"]:
        analyse(Path(sys.argv[2]))
    else:
        main([int(count) for count in sys.argv[1:]] or (64, 256))
