"""Collectives as PyTorch's flight recorder dumps them, so that its readers open our logs: one file a rank.

Version 2.10 of the JSON form, as `_dump_fr_trace_json` writes it, with what gloo's own recorder leaves out:
the groups' members, and whether a call has completed. Under the key `hicache`, which other readers pass over,
stands what the collective was for and what had been decided before it:

    rank 2   decisions 412, digest 5d41...      ranks that decided alike have one digest at one collective;
    rank 3   decisions 412, digest 9b74...      here they have parted before this one

Times are those of the log. Readers take the rank from the digits at the end of the file's name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tracer.log import LaneLog, Run
from tracer.record import Record
from tracer.spans import ExportCount
from tracer.timeline import MEETING, Progress, limits, timeline

VERSION = "2.10"
NAME = "comm_lib_trace_rank_{}"
# The runtime's collectives are paired as gloo pairs them, and carry int64. Neither is in the log.
BACKEND, DTYPE = "gloo", "Long"
DIGEST_BYTES = 8
# The recorder's word for a sequence number that there is none of.
NONE = "-1"

encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Group:
    """A process group as one rank uses it; sequence numbers count from 1, 0 is none."""

    name: str
    pg_id: int
    members: tuple[int, ...]
    enqueued: int = 0
    completed: int = 0
    ops: int = 0

    @property
    def config(self) -> dict[str, str]:
        return {"name": self.name, "desc": self.desc, "ranks": str(list(self.members))}

    @property
    def desc(self) -> str:
        """What it is for: `events` of `tp0/events`."""
        return self.name.rpartition("/")[2]

    @property
    def status(self) -> dict[str, str]:
        """When a collective was started is not in the log."""
        return {
            "last_enqueued_collective": str(self.enqueued or NONE),
            "last_started_collective": NONE,
            "last_completed_collective": str(self.completed or NONE),
        }

    def position(self, rank: int) -> int:
        """A rank as the group counts it; its global number where the members are not known."""
        return self.members.index(rank) if rank in self.members else rank


@dataclass(slots=True)
class Decided:
    """What one lane has decided so far, as long as nothing of it is gone that other ranks may have."""

    lane: LaneLog
    count: int = 0
    digest: Any = field(default_factory=lambda: blake2b(digest_size=DIGEST_BYTES))

    def add(self, kind: str, compared: tuple[str, ...], record: Record) -> None:
        self.count += 1
        self.digest.update(encode([kind, *(record[name] for name in compared if name in record)]))

    @property
    def so_far(self) -> dict[str, Any]:
        if self.lane.last_dropped_seq or self.lane.damage:
            return {}
        return {"decisions": self.count, "digest": self.digest.hexdigest()}


def write_flight_recorder(run: Run, folder: Path, *, progress: Progress | None = None) -> ExportCount:
    """Write one dump for each rank that has a log; equal logs give equal bytes.

    Args:
        folder: made if it is not there. Ranks of whom an older dump is in it get a new one.
        progress: told after each rank how many records have been read so far.
    Raises:
        LogError: the logs can't be read on, for a shortage of our own.
        OSError: the folder or a file can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    records = entries = 0
    for rank in run.ranks:
        dump = Dump(rank, tuple(lane for lane in run.lanes if lane.rank == rank))
        with (folder / NAME.format(rank)).open("wb") as out:
            dump.write(out, run)
        records += dump.records
        entries += dump.entries
        if progress is not None:
            progress(records)
    return ExportCount(records, entries)


class Dump:
    """One rank's dump while it is written."""

    def __init__(self, rank: int, lanes: tuple[LaneLog, ...]) -> None:
        self.rank = rank
        self.records = 0
        self.entries = 0
        self._lanes = lanes
        self._decided = [Decided(lane) for lane in lanes]
        self._groups: dict[str, Group] = {}
        groups: Mapping[str, list[int]] = lanes[0].header.get("groups", {})
        for name in sorted(groups):
            self._groups[name] = Group(name, len(self._groups) + 1, tuple(sorted(groups[name])))
        # Entries in the order of their calls; those behind one that has not completed wait for it.
        self._pending: deque[dict[str, Any]] = deque()
        self._open: dict[tuple[int, Any, Any], tuple[dict[str, Any], Group]] = {}

    def write(self, out: BinaryIO, run: Run) -> None:
        """The whole document, entry by entry; the status of the groups comes behind them."""
        head = {"version": VERSION, "comm_lib_version": "", "nccl_comm_state": {}}
        out.write(encode(head)[:-1])
        before = b',"entries":[\n'
        for entry in self._read(run):
            out.write(before + encode(entry))
            before = b",\n"
        if self.entries:
            out.write(b"\n]")
        groups = self._groups.values()
        status = {
            "pg_config": {group.name: group.config for group in groups},
            "pg_status": {str(group.pg_id): group.status for group in groups},
            "hicache": self._about(run),
        }
        out.write(b"," + encode(status)[1:] + b"\n")

    def _about(self, run: Run) -> dict[str, Any]:
        own = Run(run.path, self._lanes)
        about: dict[str, Any] = {
            "run_id": run.run_id,
            "rank": self.rank,
            "world_size": run.world_size,
            "coordinates": self._lanes[0].coordinates,
            "outcomes": {lane.lane: lane.outcome for lane in self._lanes},
        }
        if missing := [note for note in limits(own) if not note.startswith("no log of")]:
            about["missing"] = missing
        return about

    def _read(self, run: Run) -> Iterator[dict[str, Any]]:
        for time_ns, index, record in timeline(Run(run.path, self._lanes), {}):
            self.records += 1
            kind = record["kind"]
            if kind != MEETING:
                declared = self._lanes[index].kinds.get(kind)
                if declared is not None and declared.role == "decision" and declared.agree:
                    self._decided[index].add(kind, declared.compared, record)
            elif record.get("phase") == "enter":
                self._enter(index, time_ns, record)
            elif record.get("phase") == "leave":
                self._leave(index, time_ns, record)
                while self._pending and self._pending[0]["retired"]:
                    yield self._pending.popleft()
        yield from self._pending

    def _enter(self, index: int, time_ns: int, record: Record) -> None:
        name, group_seq, peer = record.get("group"), record.get("group_seq"), record.get("peer")
        if type(name) is not str or type(group_seq) is not int:
            return
        group = self._group(name, peer)
        group.ops += 1
        self.entries += 1
        is_p2p = type(peer) is int
        if not is_p2p:
            group.enqueued = max(group.enqueued, group_seq + 1)
        numel = record.get("numel")
        sizes = [[numel if type(numel) is int else 0]]
        entry: dict[str, Any] = {
            "record_id": self.entries - 1,
            "pg_id": group.pg_id,
            "process_group": [group.name, group.desc],
            "collective_seq_id": group.enqueued,
            "p2p_seq_id": group_seq + 1 if is_p2p else 0,
            "op_id": group.ops,
            "profiling_name": f"{BACKEND}:{self._operation(group, record)}",
            "input_sizes": sizes,
            "input_dtypes": [DTYPE],
            "output_sizes": sizes,
            "output_dtypes": [DTYPE],
            "state": "scheduled",
            "retired": False,
            "is_p2p": is_p2p,
            "timeout_ms": 0,
            "thread_id": str(index),
            "thread_name": self._lanes[index].lane,
            "time_created_ns": time_ns,
            "time_discovered_started_ns": 0,
            "time_discovered_completed_ns": 0,
            "hicache": {
                "seq": record["seq"],
                "step": record["step"],
                "purpose": record.get("purpose"),
                "reduce": record.get("reduce"),
                **self._decided[index].so_far,
            },
        }
        self._pending.append(entry)
        self._open[index, name, group_seq] = (entry, group)

    def _leave(self, index: int, time_ns: int, record: Record) -> None:
        name, group_seq = record.get("group"), record.get("group_seq")
        if type(name) is not str or type(group_seq) is not int:
            return
        entry, group = self._open.pop((index, name, group_seq), (None, None))
        if entry is None or group is None:
            # Its enter is older than the log: there is no entry, as in a recorder whose ring has turned.
            return
        entry["state"], entry["retired"] = "completed", True
        entry["time_discovered_completed_ns"] = time_ns
        if not entry["is_p2p"]:
            group.completed = max(group.completed, group_seq + 1)

    def _group(self, name: str, peer: Any) -> Group:
        """The process group of a call. One direction between two stages is a group of its own.

        It counts its own calls, and readers take neighbours of one number in a group for one coalesced call.
        """
        group = self._groups.get(name)
        if group is None:
            members = (min(self.rank, peer), max(self.rank, peer)) if type(peer) is int else ()
            group = self._groups[name] = Group(name, len(self._groups) + 1, members)
        return group

    def _operation(self, group: Group, record: Record) -> str:
        op, peer = record.get("op"), record.get("peer")
        if type(peer) is not int:
            return str(op)
        arrow = "<-" if op == "recv" else "->"
        return f"{op} {group.position(self.rank)}{arrow}{group.position(peer)}"
