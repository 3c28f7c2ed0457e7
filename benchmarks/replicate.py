"""Ring logs of many ranks over an hour, made from a short run of a few, and how long it takes to judge them.

    python -m benchmarks.replicate OUT                       4 ranks of our own runtime, simulated
    python -m benchmarks.replicate OUT --source TRACES       logs of a real server, as its plugin wrote them
    python -m benchmarks.replicate OUT --only-check          what an earlier call has left in OUT

The run's own records are written again and again by the recorder itself, with steps, times, request ids and
counters that go on, until an hour is full: rings drop their oldest, checkpoints and checksums are its own.
Then each rank is copied to others, with another rank, place and members of groups in its headers. In the log
of one rank a decision is another one, in the last tenth of the hour. Each check is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tracer.blocks import is_packed
from tracer.log import LaneLog, Run, find_logs
from tracer.pack import MEMBER_BYTES, PackAtOnce, member
from tracer.record import HEART_LANE, IDLE_STEPS, MAIN_LANE, OWN_KINDS, Kind
from tracer.segments import SegmentSink
from tracer.sinks import meta_name
from tracer.tracer import Tracer

HOUR_NS = 3600 * 10**9
# Steps a second of a simulated run.
SIMULATED_PACE = 100.0
LIMIT_BYTES = 64 << 20
# Of a ring's limit, each lane beside the scheduler's and the heart have a sixteenth.
LANE_PART = 16
HOST_RANKS = 8
# Of these a volume is taken: cycles of a busy run, and idle steps.
VOLUME_CYCLES, IDLE_STEPS_WRITTEN, HOUR_STEPS = 3, 36_000, 360_000
EVERYTHING = 64 << 30
CLOCK_ERROR_NS = 7 * 60 * 10**9
BUDGET_S, BUDGET_BYTES = 60.0, 4 << 30
# Fields that go on counting over the whole of a run; of the others the same values may come again.
GOES_ON = frozenset({"order", "op", "publish_seq", "consume_seq", "group_seq", "round", "slot"})
COMMON = frozenset({"seq", "step", "time_ns", "kind", "phase"})
OWN = frozenset(kind.name for kind in OWN_KINDS)
PART_OF_WAY = 0.95

FIRST_BLOCK = re.compile(rb'(?s).*?\n(?P<seal>\{"kind":"block",[^\n]*\n)')

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a source fits into an hour.

    Attributes:
        length_ns: of one cycle.
        stretch: nanoseconds of an hour's clock for one of the source's.
    """

    cycles: int
    length_ns: int
    stretch: float
    steps_a_second: float

    @classmethod
    def of(cls, source: Run, hours: float, steps_a_second: float | None) -> Pace:
        """At the source's own pace, or at one that is given: the simulator's clock is not the world's."""
        main = next(lane for lane in source.lanes if lane.lane == MAIN_LANE)
        records = list(main.records(is_lenient=True))
        own_ns = max(1, records[-1]["time_ns"] - records[0]["time_ns"])
        steps = records[-1]["step"] - records[0]["step"] + 1
        length_ns = own_ns if steps_a_second is None else round(steps / steps_a_second * 10**9)
        cycles = max(1, round(hours * HOUR_NS / length_ns))
        return cls(cycles, length_ns, length_ns / own_ns, steps * 10**9 / length_ns)


@dataclass(slots=True)
class Template:
    """A record of the source.

    Attributes:
        is_idle: its step is like the one before it, so that the recorder counts both as one.
        counts: place of a field, and by how much it is further on in the next cycle.
        named: places of fields with ids of requests, which are new ones in each cycle.
    """

    seq: int
    step: int
    time_ns: int
    emit: Callable[..., None]
    values: list[Any]
    counts: Sequence[tuple[int, int]]
    named: Sequence[int]
    counters: Sequence[int] = ()
    is_idle: bool = False

    def later(self, steps: int, step: int, time_ns: int, advance: Sequence[int]) -> Template:
        """The same record in a later idle step."""
        values = self.values.copy()
        for at, more in zip(self.counters, advance, strict=True):
            values[at] += steps * more
        return replace(self, seq=-1, step=step, time_ns=time_ns, values=values, is_idle=True)


class Replay:
    """One lane's records, written again under a clock of their own."""

    def __init__(self, lane: LaneLog, folder: Path, limit_bytes: int) -> None:
        self._kinds = lane.kinds
        self._now_ns = lane.header["time_ns"]
        self._is_main = lane.lane == MAIN_LANE
        head = {
            name: value
            for name, value in lane.header.items()
            if name not in ("seq", "step", "time_ns", "kind")
        }
        head.pop("counts_before", None)
        share = limit_bytes // LANE_PART if not self._is_main else limit_bytes // 2
        sink = SegmentSink(folder, lane.rank, lane.lane, limit_bytes=share, packer=PackAtOnce())
        self.tracer = Tracer(sink, head, lambda: self._now_ns, has_steps=self._is_main)
        self._emitters: dict[tuple[Any, ...], Callable[..., None]] = {}
        self._step: int | None = None
        self._is_idle = False

    def template(self, record: Fields, spans: Mapping[str, int]) -> Template:
        """What a record becomes in each cycle."""
        fields = tuple(name for name in record if name not in COMMON)
        key = (record["kind"], record.get("phase", ""), fields)
        emit = self._emitters.get(key)
        if emit is None:
            kind = self._kinds[record["kind"]]
            emit = self._emitters[key] = self.tracer.emitter(kind, phase=key[1], fields=fields)
        values = [record[name] for name in fields]
        counts = [
            (at, spans[name]) for at, name in enumerate(fields) if name in spans and type(values[at]) is int
        ]
        named = [at for at, name in enumerate(fields) if name in ("rid", "rids") and values[at]]
        own = self._kinds[record["kind"]].counters
        counters = [at for at, name in enumerate(fields) if name in own]
        return Template(
            record["seq"], record["step"], record["time_ns"], emit, values, counts, named, counters
        )

    def write(self, template: Template, cycle: int, step: int, time_ns: int, *, odd_at: int = -1) -> None:
        self._now_ns = time_ns
        if self._is_main and step != self._step:
            if self._step is not None:
                self.tracer.end_step(is_idle=self._is_idle)
            self.tracer.begin_step(step)
            self._step = step
        self._is_idle = template.is_idle
        values = template.values.copy()
        for at, span in template.counts:
            values[at] += cycle * span
        for at in template.named if cycle else ():
            value = values[at]
            values[at] = (
                f"{value}.{cycle}" if isinstance(value, str) else [f"{each}.{cycle}" for each in value]
            )
        if odd_at >= 0:
            values[odd_at] = 0
        template.emit(*values)

    def close(self) -> None:
        self.tracer.close("completed")


def simulated(folder: Path) -> Path:
    """A short busy run of our own runtime on four ranks."""
    from benchmarks.agentic import config
    from hicache.job import PlanSpec
    from hicache.sim.world import simulate

    agentic = "conversations=8,rounds=12,max-context=20000,output=100"
    plan = PlanSpec(config(tp=4, is_limited=True), agentic=agentic).plan()
    result = simulate(plan, out=folder, trace="full")
    assert result.outcome == "completed", result.error or result.parked
    return folder


def hour_of(lane: LaneLog, folder: Path, pace: Pace, limit_bytes: int, *, is_odd: bool = False) -> int:
    """An hour of one lane; records written."""
    everything = list(lane.records(is_lenient=True))
    records = [record for record in everything if record["kind"] not in OWN]
    if not records:
        return 0
    replay = Replay(lane, folder, limit_bytes)
    first, last = records[0], everything[-1]
    first_ns, steps = first["time_ns"], last["step"] - first["step"] + 1
    spans = _spans(records, lane.kinds)
    templates = _with_idle(everything, lambda record: replay.template(record, spans))
    odd_seq, odd_field = _odd(records, lane.kinds) if is_odd else (-1, -1)
    odd_cycle = int(pace.cycles * PART_OF_WAY)
    for cycle in range(pace.cycles):
        for template in templates:
            own_ns = first_ns + round((template.time_ns - first_ns) * pace.stretch)
            is_it = is_odd and (cycle, template.seq) == (odd_cycle, odd_seq)
            replay.write(
                template,
                cycle,
                template.step + cycle * steps,
                own_ns + cycle * pace.length_ns,
                odd_at=odd_field if is_it else -1,
            )
    replay.close()
    return pace.cycles * len(templates)


def _with_idle(everything: Sequence[Fields], template: Callable[[Fields], Template]) -> list[Template]:
    """Templates of all records, with idle steps written out as they were before the recorder counted them."""
    found: list[Template] = []
    own: list[Template] = []
    for record in everything:
        if record["kind"] == IDLE_STEPS.name:
            first, count = record["first_step"], record["count"]
            begin_ns = own[0].time_ns if own else record["time_ns"]
            for one in own:
                one.is_idle = True
            for number in range(1, count + 1):
                time_ns = begin_ns + (record["time_ns"] - begin_ns) * number // count
                advance = iter(record["advance"])
                for one in own:
                    more = [next(advance) for _ in one.counters]
                    found.append(one.later(number, first + number - 1, time_ns, more))
        elif record["kind"] not in OWN:
            one = template(record)
            own = [one] if not own or own[0].step != one.step else [*own, one]
            found.append(one)
    return found


def volumes(source: Run, pace: Pace, folder: Path) -> Iterator[str]:
    """What a rank writes in an hour, busy as the source is, and with nothing but its last idle step."""
    rank = source.lanes[0].rank
    lanes = [lane for lane in source.lanes if lane.rank == rank and lane.lane != HEART_LANE]
    some = replace(pace, cycles=VOLUME_CYCLES)
    records = sum(hour_of(lane, folder / "busy", some, EVERYTHING) for lane in lanes)
    busy = _bytes(folder / "busy") * pace.cycles / VOLUME_CYCLES
    yield (
        f"busy: {busy / 1e6:,.0f} MB a rank-hour, {records * pace.cycles // VOLUME_CYCLES:,} records, "
        f"{pace.steps_a_second:,.0f} steps a second"
    )
    main = next(lane for lane in lanes if lane.lane == MAIN_LANE)
    replay = Replay(main, folder / "idle", EVERYTHING)
    templates = _with_idle(list(main.records()), lambda record: replay.template(record, {}))
    last = [one for one in templates if one.is_idle][-1:]
    if not last:
        return
    step = [one for one in templates if one.step == last[0].step]
    for number in range(IDLE_STEPS_WRITTEN):
        for one in step:
            advance = [1] * len(one.counters)
            later = one.later(number, number, main.header["time_ns"] + number * 10**7, advance)
            replay.write(later, 0, later.step, later.time_ns)
    replay.close()
    idle = _bytes(folder / "idle") * HOUR_STEPS / IDLE_STEPS_WRITTEN
    yield f"idle: {idle / 1e6:,.2f} MB a rank-hour of the scheduler at 100 steps a second"


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _spans(records: Sequence[Fields], kinds: Mapping[str, Kind]) -> dict[str, int]:
    """Field -> by how much it is further on in the next cycle."""
    found: dict[str, list[int]] = {}
    names = GOES_ON | {name for kind in kinds.values() for name in kind.counters}
    for record in records:
        for name in names & record.keys():
            if type(record[name]) is int:
                found.setdefault(name, []).append(record[name])
    return {name: max(values) - min(values) + 1 for name, values in found.items()}


def _odd(records: Sequence[Fields], kinds: Mapping[str, Kind]) -> tuple[int, int]:
    """The record of a decision in the middle whose result can be another one, and the place of that."""
    for index in range(len(records) // 2, len(records)):
        record = records[index]
        kind = kinds[record["kind"]]
        if kind.role == "decision" and kind.result and record.get(kind.result):
            return record["seq"], [name for name in record if name not in COMMON].index(kind.result)
    raise SystemExit("no decision with a result in the second half of the source")


def as_rank(source: Path, target: Path, changes: Mapping[str, Any]) -> None:
    """One file of another rank: its header changed, and the checksum of the block that the header is in."""
    raw = source.read_bytes()
    if not is_packed(source):
        begin, end = _changed(raw, changes)
        target.write_bytes(begin + raw[end:])
        return
    # Only the members that the first block is in are packed again.
    data = b""
    at = 0
    while at < len(raw) and not FIRST_BLOCK.match(data):
        length: int = struct.unpack_from("<H", raw, at + 16)[0] + 1
        data += zlib.decompress(raw[at : at + length], zlib.MAX_WBITS | 16)
        at += length
    begin, end = _changed(data, changes)
    fresh = begin + data[end:]
    parts = [fresh[place : place + MEMBER_BYTES] for place in range(0, len(fresh), MEMBER_BYTES)]
    target.write_bytes(b"".join(map(member, parts)) + raw[at:])


def _changed(data: bytes, changes: Mapping[str, Any]) -> tuple[bytes, int]:
    """The header and the rest of its block under a new checksum; and where they end in what is there."""
    end = data.index(b"\n") + 1
    header = json.loads(data[:end]) | changes
    first = json.dumps(header, separators=(",", ":")).encode() + b"\n"
    found = FIRST_BLOCK.match(data)
    if found is None:
        return first, end
    lines = first + data[end : found.start("seal")]
    return lines + b'{"kind":"block","bytes":%d,"crc32":"%08x"}\n' % (
        len(lines),
        zlib.crc32(lines),
    ), found.end()


def replicate(source: Run, out: Path, *, ranks: int, pace: Pace, limit_bytes: int, odd: int) -> None:
    lanes = [lane for lane in source.lanes if lane.lane != HEART_LANE]
    models = sorted({lane.rank for lane in lanes})
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="hicache-replicate-", dir=out.parent) as folder:
        written = 0
        for lane in lanes:
            written += hour_of(lane, Path(folder, "models"), pace, limit_bytes)
            if lane.rank == models[odd % len(models)]:
                is_odd = lane.lane == MAIN_LANE
                hour_of(lane, Path(folder, "odd"), pace, limit_bytes, is_odd=is_odd)
        print(f"{written // len(models):,} records a rank in {pace.cycles} cycles", flush=True)
        for rank in range(ranks):
            model = models[rank % len(models)]
            place = Path(folder, "odd" if rank == odd else "models")
            for path in sorted(place.glob(f"rank{model:04d}.*")):
                name = path.name.replace(f"rank{model:04d}", f"rank{rank:04d}", 1)
                as_rank(path, out / name, _place(source, rank, ranks))
            meta = {
                "host": f"node-{rank // HOST_RANKS}",
                "pid": 100 + rank,
                "wall_clock_ns": 1_800_000_000 * 10**9 + rank // HOST_RANKS * CLOCK_ERROR_NS,
                "monotonic_ns": 0,
            }
            (out / meta_name(rank)).write_text(json.dumps(meta) + "\n")


def _place(source: Run, rank: int, ranks: int) -> dict[str, Any]:
    """What a header says of a rank in one replica of tensor parallel ranks."""
    header = source.lanes[0].header
    groups = {name: list(range(ranks)) for name in header.get("groups", {})}
    axes = header["sizes"] or header["coordinates"]
    sizes = dict.fromkeys(axes, 1) | {"tp": ranks}
    coordinates = dict.fromkeys(axes, 0) | {"tp": rank}
    return {
        "rank": rank,
        "world_size": ranks,
        "sizes": sizes,
        "coordinates": coordinates,
        "groups": groups,
        "run_id": "replicated",
    }


def measured(out: Path, command: str) -> Iterator[str]:
    """What a command takes, each time in a process of its own."""
    code = (
        "import resource, sys, time\nfrom cli.app import main\nstart = time.perf_counter()\n"
        f"code = main([{command!r}, {str(out)!r}, '--quiet'])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(code, time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss << 10)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=1800, check=False
    )
    *said, last = done.stdout.strip().splitlines() or [done.stderr.strip()]
    verdict = " ".join(said)[:160]
    try:
        exit_code, seconds, used_s, memory = last.split()
    except ValueError:
        yield f"| {command} | did not end: {last[:100]} | | | |"
        return
    yield (
        f"| {command} | {float(seconds):.1f} (at most {BUDGET_S:.0f}) | {float(used_s):.1f} "
        f"| {int(memory) / 1e9:.2f} (at most {BUDGET_BYTES >> 30}) | {exit_code}: {verdict} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicate")
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--pace", type=float, help="steps a second; the source's own")
    parser.add_argument("--limit", type=int, default=LIMIT_BYTES, help="bytes of a rank's ring")
    parser.add_argument("--odd", type=int, default=37, help="the rank with another decision")
    parser.add_argument("--only-check", action="store_true")
    parser.add_argument("--commands", default="check,diagnose")
    given = parser.parse_args()
    if not given.only_check:
        shutil.rmtree(given.out, ignore_errors=True)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="hicache-source-") as folder:
            source = find_logs(given.source or simulated(Path(folder) / "run"))
            asked = given.pace or (None if given.source else SIMULATED_PACE)
            for line in volumes(source, Pace.of(source, 1.0, asked), Path(folder)):
                print(line, flush=True)
            replicate(
                source,
                given.out,
                ranks=given.ranks,
                pace=Pace.of(source, given.hours, asked),
                limit_bytes=given.limit,
                odd=given.odd,
            )
        print(f"written in {time.perf_counter() - start:.0f} s", flush=True)
    size = sum(path.stat().st_size for path in given.out.iterdir())
    print(f"{size / 1e6:,.0f} MB on disk, {size / given.ranks / 1e6:,.1f} a rank; {os.cpu_count()} cores\n")
    print("| command | seconds | of processor | GB | verdict |\n|---|---:|---:|---:|---|")
    for command in given.commands.split(","):
        for line in measured(given.out, command):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
