from __future__ import annotations

from hicache.core import Transfer
from hicache.ledger import FORWARD, Ledger
from hicache.probes import Probes
from hicache.schedule import Schedule
from hicache.sim.engine import SimEngine
from tests.support.runs import of_kind, records
from tracer.sinks import MemorySink
from tracer.tracer import Tracer


def engine(
    *, answers: list[int] | None = None, polls_max: int = 0, delay: int = 0
) -> tuple[SimEngine, Ledger, MemorySink]:
    sink = MemorySink()
    ledger = Ledger()
    made = SimEngine(
        ledger,
        Schedule(answers=answers or []),
        Probes(Tracer(sink, {}, lambda: 0)),
        polls_max=polls_max,
        delay=lambda queue, index: delay if index == 0 else 0,
    )
    return made, ledger, sink


def polls_until_done(made: SimEngine, transfer: Transfer) -> int:
    polls = 1
    while not made.ready(transfer):
        polls += 1
    return polls


def test_the_dull_copy_is_done_at_its_first_poll() -> None:
    made, _, _ = engine(polls_max=5)
    transfer = Transfer(1, "write", [], [])
    made.submit(transfer)
    assert polls_until_done(made, transfer) == 1


def test_chance_and_faults_add_polls() -> None:
    made, _, _ = engine(answers=[3], polls_max=5, delay=2)
    transfer = Transfer(1, "write", [], [])
    made.submit(transfer)
    assert polls_until_done(made, transfer) == 6


def test_the_bytes_move_when_the_copy_is_done_and_not_before() -> None:
    """Whoever reuses a source slot too early is found out: its new page is what arrives."""
    made, ledger, _ = engine(delay=1)
    ledger.device.write([0], [b"a" * 8], writer=FORWARD)
    transfer = Transfer(1, "write", [0], [9])
    made.submit(transfer)
    assert not made.ready(transfer)
    assert ledger.host.read([9]) == [b"\0" * 8]
    ledger.device.write([0], [b"b" * 8], writer=FORWARD)
    assert made.ready(transfer)
    assert ledger.host.read([9]) == [b"b" * 8]


def test_a_load_moves_the_other_way_and_done_is_written_once() -> None:
    made, ledger, sink = engine()
    ledger.host.write([4], [b"h" * 8], writer=FORWARD)
    transfer = Transfer(2, "load", [4], [1])
    made.submit(transfer)
    assert made.ready(transfer)
    assert made.ready(transfer)
    assert ledger.device.read([1]) == [b"h" * 8]
    done = of_kind(records([*sink.lines, b'{"kind":"trailer"}']), "transfer_done")
    assert [(row["op"], row["queue"]) for row in done] == [(2, "load")]


def test_a_later_copy_may_be_done_before_an_earlier_one() -> None:
    """Its bytes have moved, its note is in the log; who drains acks from the front still waits."""
    made, ledger, sink = engine(delay=2)
    ledger.device.write([0, 1], [b"a" * 8, b"b" * 8], writer=FORWARD)
    early, late = Transfer(1, "write", [0], [5]), Transfer(2, "write", [1], [6])
    made.submit(early)
    made.submit(late)
    assert not made.ready(early)
    assert ledger.host.read([5, 6]) == [b"\0" * 8, b"b" * 8]
    assert (early.is_done, late.is_done) == (False, True)
    assert made.ready(late)
    assert not made.ready(early)
    assert made.ready(early)
    done = of_kind(records([*sink.lines, b'{"kind":"trailer"}']), "transfer_done")
    assert [row["op"] for row in done] == [2, 1]


def test_copies_of_the_other_queue_do_not_move_with_it() -> None:
    made, _, _ = engine(delay=1)
    write, load = Transfer(1, "write", [0], [0]), Transfer(2, "load", [1], [1])
    made.submit(write)
    made.submit(load)
    assert not made.ready(write)
    assert not load.is_done
