"""Transfer queues read fast against the same read plainly: every line decoded whole, one rule a line.

On random logs that hold odd values, in either dialect, and on the same logs damaged.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.logs import lines
from tracer.log import LaneLog, find_logs
from tracer.record import Kind
from tracer.transfers import COUNTS, QUEUES, RankQueue, replay

SEEDS = 20
NEVER = 2**62 - 1
LANES = {
    "scheduler": "transfer_enqueue transfer_done transfer_ack event_round event_round meeting acks "
    "prefetch_submit prefetch_hit prefetch_ack prefetch_insert prefetch_outcome storage_backup storage_ack",
    "prefetch": "query meeting",
    "sync": "progress meeting event_round",
    "backup": "storage_write meeting",
}
BESIDE = {"prefetch": ("prefetch", "sync"), "backup": ("backup",)}
# What another version, another program or a bad disk may put in the place of a number.
ODD = (None, -1, 2**62, 2**62 - 1, 2**70, 1.0, 1.5, True, "3", [1], {"a": 1}, "", [])
WORDS = {
    "queue": ("write", "write", "load"),
    "rid": ("r0", "r1", "r2"),
    "outcome": ("issued", "issued", "revoked", "allocated"),
    "ack": ("completed", "progress"),
}
MORE = "op attempt node pages tokens count left round agreed_pages local_pages written_pages"
NUMBERS = [*MORE.split(" "), *(name for pairs in COUNTS.values() for pair in pairs for name in pair)]
Fields = Mapping[str, Any]


class Plain:
    """A queue of one rank from whole records: written to be read, not to be fast."""

    def __init__(self, queue: str, lanes: list[LaneLog]) -> None:
        self.queue = queue
        self.transfers: list[dict[str, Any]] = []
        self.rounds: list[tuple[Any, ...]] = []
        self.unknown, self.last_step = 0, -1
        self.open: list[dict[str, Any]] = []
        self.by_op: dict[Any, dict[str, Any]] = {}
        self.submitted: dict[Any, dict[str, Any]] = {}
        self.called: Fields | None = None
        (main,) = (lane for lane in lanes if lane.lane == "scheduler")
        self.is_counted = "acks" in main.kinds
        rule = {"prefetch": self.prefetch, "backup": self.backup}.get(queue, self.copy)
        for lane in (main, *(lane for lane in lanes if lane.lane in BESIDE.get(queue, ()))):
            for record in lane.records(is_lenient=True):
                (self.round if record["kind"] == "event_round" else rule)(record)
                self.last_step = record["step"] if lane is main else self.last_step
            if lane is main and self.called is not None:
                self.rounds.append(self.told(self.called, {}))
                self.called = None

    def told(self, call: Fields, back: Fields) -> tuple[Any, ...]:
        saw = tuple(number(back.get(name)) for name, _ in COUNTS[self.queue])
        if None in saw:
            saw = tuple(number((call or back).get(name)) for name, _ in COUNTS[self.queue])
        of = back or call
        applied = tuple(number(back.get(name)) for _, name in COUNTS[self.queue])
        return of["step"], number(of.get("round")), saw, applied

    def round(self, record: Fields) -> None:
        if record.get("phase") == "call":
            if self.called is not None:
                self.rounds.append(self.told(self.called, {}))
            self.called = record
            return
        self.rounds.append(self.told(self.called or {}, record))
        self.called = None
        _step, _number, saw, applied = self.rounds[-1]
        if self.queue in ("write", "load"):
            for transfer in self.open[: saw[0] or 0]:
                transfer["done_step"] = min(transfer["done_step"], record["step"])
        elif self.queue == "backup" and self.is_counted:
            self.end_oldest(applied[0] or 0, record)

    def begin(self, record: Fields, nodes: list[Any], middle: list[Any] | None = None) -> dict[str, Any]:
        transfer = {
            "op": number(record.get("op")),
            "nodes": tuple(node for node in nodes if type(node) is int),
            "pages": number(record.get("pages")),
            "rid": record["rid"] if type(record.get("rid")) is str else "",
            "begin_step": record["step"],
            "begin_ns": record["time_ns"],
            "begin_seq": record["seq"],
            "middle": middle,
            "done_step": NEVER,
            "end_step": NEVER,
            "end_ns": 0,
            "end": "",
            "told": None,
        }
        self.transfers.append(transfer)
        self.open.append(transfer)
        if transfer["op"] is not None:
            self.by_op[transfer["op"]] = transfer
        return transfer

    def end(self, transfer: dict[str, Any] | None, record: Fields, word: str = "acked") -> None:
        if transfer is None:
            self.unknown += 1
        elif transfer["end_step"] == NEVER:
            transfer.update(end_step=record["step"], end_ns=record["time_ns"], end=word)
            self.by_op.pop(transfer["op"], None)
            while self.open and self.open[0]["end_step"] != NEVER:
                del self.open[0]

    def end_oldest(self, count: int, record: Fields) -> None:
        for left in range(count, 0, -1):
            if not self.open:
                self.unknown += left
                return
            self.end(self.open[0], record)

    def copy(self, record: Fields) -> None:
        kind = record["kind"]
        if record.get("queue") != self.queue:
            return
        transfer = self.by_op.get(number(record.get("op"), -1))
        if kind == "transfer_enqueue":
            self.begin(record, record["nodes"] if type(record.get("nodes")) is list else [])
        elif kind == "transfer_done" and transfer is not None:
            transfer["done_step"] = min(transfer["done_step"], record["step"])
        elif kind == "transfer_ack" and not self.is_counted:
            self.end(transfer, record)
        elif kind == "acks":
            self.end_oldest(number(record.get("count"), 0), record)
            while len(self.open) > number(record.get("left"), NEVER):
                self.end(self.open[0], record)

    def prefetch(self, record: Fields) -> None:
        kind, op, rid, outcome = (record.get(name) for name in ("kind", "op", "rid", "outcome"))
        attempt = number(record.get("attempt"), 0)
        if kind == "prefetch_submit":
            if outcome == "issued":
                transfer = self.begin(record, [record.get("node")], [])
                self.submitted[transfer["rid"], attempt] = transfer
                if transfer["op"] is not None:
                    self.submitted[transfer["op"]] = transfer
            return
        if not kind.startswith(("prefetch_", "query", "progress")):
            return
        of = op if type(op) is int else (rid, attempt) if type(rid) is str else None
        if (found := self.submitted.get(of)) is None:
            self.unknown += kind == "prefetch_hit"
        elif kind == "query":
            found["middle"].append((record["step"], "answered"))
            for name in ("local_pages", "agreed_pages"):
                if number(record.get(name)) is not None:
                    found["told"] = {**(found["told"] or {}), name: record[name]}
        elif kind == "prefetch_hit" and number(record.get("tokens"), 0):
            found["middle"].append((record["step"], "reading"))
        elif kind == "prefetch_hit":
            self.end(found, record, "ended")
        elif kind == "progress":
            if record.get("ack") == "completed":
                found["done_step"] = min(found["done_step"], record["step"])
        elif kind == "prefetch_outcome":
            if outcome == "revoked":
                self.end(found, record, "ended")
        elif kind == "prefetch_insert" or record.get("ack") == "completed":
            self.end(found, record)

    def backup(self, record: Fields) -> None:
        if record["kind"] == "storage_backup":
            self.begin(record, [record.get("node")])
        elif record["kind"] == "storage_ack":
            self.end(self.by_op.get(number(record.get("op"), -1)), record)
        elif record["kind"] == "storage_write":
            written = [each for each in self.transfers if "is_written" not in each]
            if written:
                written[0].update(done_step=record["step"], is_written=True)
                if written[0]["pages"] is None:
                    written[0]["pages"] = number(record.get("pages"))
                if (pages := number(record.get("written_pages"))) is not None:
                    written[0]["told"] = {"written_pages": pages}


def number(value: Any, otherwise: Any = None) -> Any:
    return value if type(value) is int and 0 <= value < NEVER else otherwise


def records(chance: random.Random, count: int, names: list[str]) -> Iterator[dict[str, Any]]:
    step = 0
    for _ in range(count):
        step += chance.choice((0, 0, 0, 1, 2))
        record: dict[str, Any] = {"kind": chance.choice(names), "step": step, "time_ns": step * 10}
        if record["kind"] == "event_round" and chance.random() < 0.9:
            record["phase"] = chance.choice(("call", "return"))
        for name in chance.sample(NUMBERS, len(NUMBERS) * 3 // 4):
            record[name] = chance.randint(0, 5) if chance.random() < 0.96 else chance.choice(ODD)
        for name, words in WORDS.items():
            record[name] = chance.choice(words) if chance.random() < 0.96 else chance.choice(ODD)
        nodes = [chance.randint(0, 9) for _ in range(chance.randint(0, 3))]
        record["nodes"] = nodes if chance.random() < 0.9 else [*nodes, chance.choice(ODD)]
        yield record


def sealed(rows: list[bytes]) -> bytes:
    """The lines, with a checksum behind every 40."""
    blocks = [b"".join(rows[at : at + 40]) for at in range(0, len(rows), 40)]
    seal = b'{"kind":"block","bytes":%d,"crc32":"%08x"}\n'
    return b"".join(block + seal % (len(block), zlib.crc32(block)) for block in blocks)


def damaged(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data) // 3, len(data))
    end = data.find(b"\n", at) + 1 or len(data)
    return chance.choice(
        (
            data[:at],
            data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :],
            data[:at] + data[end:],
            data[:end] + b'{"seq":1.0,"kind":"event_round","step":"x"}\n' + data[end:],
            data[:end] + b"\0" * 64,
            data[:end] + data[at:],
        )
    )


def write(folder: Path, seed: int, *, is_damaged: bool) -> None:
    chance = random.Random(seed)
    for lane, words in LANES.items():
        # Half of the runs are in SGLang's dialect, which counts acks and gives them no number.
        names = [name for name in words.split(" ") if seed % 2 or name != "acks"]
        rows = lines(
            records(chance, 160 if lane == "scheduler" else 30, names),
            lane=lane,
            kinds=[Kind(name, "note") for name in dict.fromkeys(names)],
        )
        data = sealed(rows) if chance.random() < 0.7 else b"".join(rows)
        if is_damaged and chance.random() < 0.7:
            data = damaged(chance, data)
        (folder / f"rank0000.{lane}.000.jsonl").write_bytes(data)


def as_plain(own: RankQueue) -> tuple[Any, ...]:
    transfers = [{name: getattr(each, name) for name in each.__struct_fields__} for each in own.transfers]
    rounds = [(each.step, each.number, each.saw, each.applied) for each in own.rounds]
    return transfers, rounds, own.unknown, own.last_step


@pytest.mark.parametrize("is_damaged", [False, True])
def test_queues_are_as_if_every_line_had_been_decoded_whole(tmp_path: Path, is_damaged: bool) -> None:
    began = 0
    for seed in range(SEEDS):
        write(tmp_path, seed, is_damaged=is_damaged)
        for queue in QUEUES:
            run = find_logs(tmp_path)
            plain = Plain(queue, list(run.lanes))
            for each in plain.transfers:
                each.pop("is_written", None)
                if each["middle"]:
                    each["middle"].sort(key=lambda entry: (entry[0], entry[1] != "answered"))
            (own,) = replay(run, queue).ranks
            where = f"seed {seed}, {queue}"
            assert (plain.transfers, plain.rounds, plain.unknown, plain.last_step) == as_plain(own), where
            for step in range(0, own.last_step + 1, 7):
                held = [
                    each["begin_seq"]
                    for each in plain.transfers
                    if each["begin_step"] <= step < each["end_step"]
                ]
                assert held == [each.begin_seq for each in own.at(step)], where
            began += len(own.transfers)
    assert began > SEEDS * 20
