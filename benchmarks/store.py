"""Logs into the store and out of it, beside what DuckDB's own `read_json` makes of the same files.

The logs are copies of one simulated run with an external tier, each as a rank of its own, written through the
recorder's own files. Each line is a process of its own, so that its memory is its own.

    python -m benchmarks.store                 a million events
    python -m benchmarks.store --events 10000000 --requests 1000000
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hicache.config import Config, StorageConfig
from hicache.job import PlanSpec
from hicache.probes import KINDS, Probes
from hicache.sim.world import simulate
from hicache.topology import Topology
from tracer.log import find_logs
from tracer.record import COMMON, Place, header
from tracer.segments import SegmentSink
from tracer.tracer import Tracer

SPEC = "conversations=8,rounds=20,max-context=20000,output=60,shared-prefix=500"
AGGREGATE = (
    "SELECT kind, count(*) AS records, max(step) AS steps, sum(pages)::BIGINT AS pages, "
    "min(host_pages_free) AS least FROM records GROUP BY kind ORDER BY kind"
)
LINE_BYTES_MAX = 33_554_432
BUDGETS = {
    "logs to query-ready": "half of read_json's rows a second, 2.5 GB",
    "aggregate from Parquet": "2 s",
    "hits by request as JSON, Parquet": "3 s",
    "hits by request as JSON, kept database": "3 s",
}


def write_events(folder: Path, events: int) -> int:
    """At least so many records, as ranks of a data-parallel job; how many there are."""
    config = Config(
        topology=Topology(),
        page_size_tokens=64,
        device_pages=400,
        host_pages=900,
        storage=StorageConfig(backend="memory"),
    )
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as base:
        result = simulate(PlanSpec(config, agentic=SPEC).plan(), out=Path(base))
        assert result.outcome == "completed", result.error or result.parked
        encode = msgspec.json.Encoder().encode
        lanes = {
            lane.lane: ([encode(record) for record in lane.records()], body(lane.header))
            for lane in find_logs(base).lanes
        }
    each = sum(len(lines) for lines, _header in lanes.values())
    ranks = -(-events // each)
    for rank in range(ranks):
        for lane, (lines, head) in lanes.items():
            own = place(rank, ranks)
            sink = SegmentSink(folder, rank, lane)
            tracer = Tracer(sink, {**head, **own}, lambda: 0)
            for line in lines:
                sink.write(line)
                tracer.seq += 1
            tracer.close("completed")
    return each * ranks


def write_requests(folder: Path, requests: int) -> int:
    """So many requests on one rank, five records each."""
    where = Place(
        0, dict.fromkeys(("dp", "pp", "cp", "tp"), 0), dict.fromkeys(("dp", "pp", "cp", "tp"), 1), {}
    )
    head = header(
        where, KINDS, lane="scheduler", run_id="bench", tool_version="bench", config={"page_size_tokens": 64}
    )
    tracer = Tracer(SegmentSink(folder, 0, "scheduler"), head, time.monotonic_ns)
    probes = Probes(tracer)
    for number in range(requests):
        tracer.step = number // 8
        rid, host = f"c{number % 4096}.t{number // 4096}", 64 * (number % 5)
        probes.request(number, rid, "", f"{number:016x}", 0, 1024, 32, f"c{number % 4096}", float(number))
        probes.match(rid, "admit", number % 97, 512 + host, host, 512, 100, 200, 1, "", 1023, "")
        probes.admit(rid, "admitted", 8, 512, host, 0, 512 - host, 100, 200, 300, 8)
        probes.forward("extend", 512 - host, [rid], [512 - host])
        probes.finish(rid, "stop", 32)
    tracer.close("completed")
    return requests


def body(head: Mapping[str, Any]) -> dict[str, Any]:
    """A header without what a tracer adds to it."""
    return {name: value for name, value in head.items() if name not in (*COMMON, "counts_before")}


def place(rank: int, ranks: int) -> Mapping[str, Any]:
    """The header fields of one replica among `ranks`."""
    ones = dict.fromkeys(("pp", "cp", "tp"), 1)
    return {
        "rank": rank,
        "world_size": ranks,
        "coordinates": {"dp": rank, **dict.fromkeys(ones, 0)},
        "sizes": {"dp": ranks, **ones},
        "groups": {},
    }


def files_of(logs: Path) -> str:
    return "[" + ", ".join(f"'{path}'" for path in sorted(logs.glob("*.jsonl"))) + "]"


def read_json_auto(logs: Path, kept: Path) -> None:
    """DuckDB alone, types detected, on disk like the store."""
    _read_json(
        kept / "auto.duckdb",
        f"read_json({files_of(logs)}, format = 'newline_delimited', maximum_object_size = {LINE_BYTES_MAX})",
    )


def read_json_typed(logs: Path, kept: Path) -> None:
    """DuckDB alone, told every type."""
    from tracer.load import _columns_there, _types

    lanes = find_logs(logs).lanes
    for lane in lanes:
        lane.kinds_seen = set(lane.kinds)
    types = _types(lanes)
    there = _columns_there(lanes, types)
    columns = ", ".join(f"'{field}': '{kind}'" for field, kind in types.items() if field in there)
    _read_json(
        kept / "typed.duckdb",
        f"read_json({files_of(logs)}, format = 'newline_delimited', "
        f"columns = {{{columns}}}, maximum_object_size = {LINE_BYTES_MAX})",
    )


def _read_json(database: Path, reader: str) -> None:
    import duckdb

    with duckdb.connect(str(database)) as connection:
        connection.execute("SET memory_limit = '4GB'")
        connection.execute(f"CREATE TABLE records AS FROM {reader}")
    database.unlink()


def ready(logs: Path, kept: Path) -> None:
    from tracer.trace_store import open_store

    with open_store(logs) as store:
        assert not store.query("FROM lanes WHERE torn IS NOT NULL").rows


def keep(logs: Path, kept: Path) -> None:
    from tracer.trace_store import open_store

    open_store(logs, keep=kept / "run.duckdb").close()


def export(logs: Path, kept: Path) -> None:
    from tracer.parquet import export_parquet

    export_parquet(find_logs(logs), kept / "parquet")


def aggregate_parquet(logs: Path, kept: Path) -> None:
    _aggregate(kept / "parquet")


def aggregate_kept(logs: Path, kept: Path) -> None:
    _aggregate(kept / "run.duckdb")


def _aggregate(path: Path) -> None:
    from tracer.trace_store import open_store

    with open_store(path) as store:
        assert store.query(AGGREGATE).rows


def hits_parquet(logs: Path, kept: Path) -> None:
    _hits(kept / "parquet")


def hits_kept(logs: Path, kept: Path) -> None:
    _hits(kept / "run.duckdb")


def _hits(path: Path) -> None:
    from tracer.stored_hits import StoredHits, stored_hits

    found, store = stored_hits(path)
    with store, open("/dev/null", "w", encoding="utf-8") as out:
        assert isinstance(found, StoredHits), f"{path} is not kept by request"
        json.dump(found.cached_tokens, out)
        out.write(",\n".join(found.rows_text()))


ON_EVENTS: Mapping[str, Callable[[Path, Path], None]] = {
    "read_json, types detected": read_json_auto,
    "read_json, types given": read_json_typed,
    "logs to query-ready": ready,
    "logs to a kept database": keep,
    "logs to Parquet": export,
    "aggregate from Parquet": aggregate_parquet,
    "aggregate from the kept database": aggregate_kept,
}
ON_REQUESTS: Mapping[str, Callable[[Path, Path], None]] = {
    "requests to a kept database": keep,
    "requests to Parquet": export,
    "hits by request as JSON, Parquet": hits_parquet,
    "hits by request as JSON, kept database": hits_kept,
}


def one(name: str, logs: Path, kept: Path) -> None:
    """Do one thing in this process, and say how long it took and the memory it had."""
    start = time.perf_counter()
    {**ON_EVENTS, **ON_REQUESTS}[name](logs, kept)
    seconds = time.perf_counter() - start
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_kb = int(status[status.index("VmHWM:") :].split()[1])
    print(json.dumps({"seconds": seconds, "peak_gb": peak_kb / 1e6}))


def in_a_process(name: str, logs: Path, kept: Path) -> tuple[float, float]:
    words = ["--one", name, "--logs", str(logs), "--kept", str(kept)]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.store", *words], check=True, stdout=subprocess.PIPE, text=True
    )
    whole_s = time.perf_counter() - start
    found = json.loads(done.stdout)
    # What a person waits for begins with the process.
    return (whole_s if name in BUDGETS and name.startswith("hits") else found["seconds"]), found["peak_gb"]


def measure(
    rows: int, unit: str, logs: Path, kept: Path, todo: Mapping[str, Callable[[Path, Path], None]]
) -> None:
    size = sum(path.stat().st_size for path in logs.glob("*.jsonl"))
    print(f"store: {rows:,} {unit}, {size / 1e6:,.0f} MB of logs")
    first = 0.0
    for name in todo:
        seconds, peak_gb = in_a_process(name, logs, kept)
        first = first or seconds
        budget = f"   budget {BUDGETS[name]}" if name in BUDGETS else ""
        print(
            f"  {name:<38} {seconds:7.2f} s  {rows / seconds / 1e6:6.2f} M/s  {first / seconds:6.2f} x  "
            f"{peak_gb:5.2f} GB{budget}",
            flush=True,
        )


def main(events: int = 1_000_000, requests: int = 100_000) -> None:
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        for count, unit, write, todo in (
            (events, "events", write_events, ON_EVENTS),
            (requests, "requests", write_requests, ON_REQUESTS),
        ):
            logs, kept = Path(folder) / unit, Path(folder) / f"{unit}-kept"
            kept.mkdir()
            measure(write(logs, count), unit, logs, kept, todo)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--one")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--kept", type=Path)
    given = parser.parse_args()
    if given.one is None:
        main(given.events, given.requests)
    else:
        one(given.one, given.logs, given.kept)
