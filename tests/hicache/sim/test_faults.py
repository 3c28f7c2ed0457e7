from __future__ import annotations

import pytest

from hicache.control.pools import SlotMemory
from hicache.errors import ConfigError, StorageError
from hicache.sim.faults import NEVER, VERBS, Fault, FaultPlan, StorageFaults
from hicache.topology import Topology

FOUR = Topology(tp=4)


def plan(*texts: str) -> FaultPlan:
    return FaultPlan([Fault.parse(text, FOUR) for text in texts])


def storage(*texts: str, rank: int = 1) -> tuple[StorageFaults, list[str]]:
    made = plan(*texts)
    return made.storage(rank), made.fired


def test_every_verb_has_an_example_in_the_modules_docstring_that_is_read() -> None:
    import hicache.sim.faults

    lines = (hicache.sim.faults.__doc__ or "").splitlines()
    examples = [line.split()[0] for line in lines if line.startswith("    ") and ":rank=" in line]
    assert {Fault.parse(text, FOUR).verb for text in examples} == set(VERBS)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("explode:rank=1", "no fault 'explode'"),
        ("storage_fail:rank=1,call=get", "takes exactly rank, call, nth"),
        ("storage_fail:rank=1,call=get,nth=1,nth=2", "takes exactly rank, call, nth"),
        ("storage_fail:rank=1,call=put,nth=1", "call is one of exists, get, set"),
        ("storage_fail:rank=4,call=get,nth=1", "ranks 0..3"),
        ("storage_fail:rank=1,call=get,nth=0", "nth counts from 1"),
        ("storage_fail:rank=1,call=get,nth=-1", "nth is a whole number"),
        ("storage_slow:rank=1,call=get,nth=1,steps=2001", "at most 2000"),
        ("storage_short:rank=1,nth=1", "takes exactly rank, call, nth, pages"),
        ("storage_short:rank=1,nth=1,pages=0", "pages counts from 1"),
        ("storage_down:rank=1,from=9,to=8", "from call 9 to 8 is no range"),
        ("storage_down:rank=1,from=0,to=8", "from counts from 1"),
        ("delay_done:rank=1,queue=paper,op=1,steps=1", "queue is one of write, load, prefetch, backup"),
        ("alloc_fail:rank=1,pool=device,nth=1", "pool is one of host, mamba"),
        ("attach_fail:nth=1", "takes exactly rank, nth"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match="--fault") as error:
        Fault.parse(text, FOUR)
    assert complaint in str(error.value)


def test_a_short_call_is_a_get_where_nothing_is_said() -> None:
    assert Fault.parse("storage_short:rank=1,nth=2,pages=3", FOUR).words == {"call": "get"}


def test_memory_of_a_side_pool_fails_apart_from_the_hosts() -> None:
    made = plan("alloc_fail:rank=1,pool=mamba,nth=2")
    states = made.memory(1, "mamba", SlotMemory(4))
    host = made.memory(1, "host", SlotMemory(4))
    assert [states.alloc(1), states.alloc(1), host.alloc(1), host.alloc(1)] == [[0], None, [0], [1]]


def test_a_smaller_pool_says_so_and_gives_no_more_than_it_has() -> None:
    made = plan("resize:rank=1,pool=device,pages=2", "alloc_fail:rank=1,pool=host,nth=1")
    memory = made.memory(1, "device", SlotMemory(5))
    assert (memory.page_count, memory.pages_free) == (3, 3)
    assert memory.alloc(4) is None
    assert memory.alloc(3) == [0, 1, 2]
    assert (memory.pages_free, memory.pages_used) == (0, 3)
    memory.free([1])
    assert memory.alloc(1) == [1]
    assert made.fired == ["resize of device memory of rank 1: 3 pages"]
    assert made.memory(1, "host", SlotMemory(4)).page_count == 4


def test_memory_without_a_limit_cannot_be_made_smaller() -> None:
    made = plan("resize:rank=1,pool=device,pages=2")
    assert made.memory(1, "device", SlotMemory(0)).page_count == 0
    assert made.fired == []


def test_calls_of_a_kind_are_counted_apart() -> None:
    faults, fired = storage("storage_fail:rank=1,call=get,nth=2")
    for call in ("get", "exists", "exists", "set"):
        faults.begin(call)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="get 2 on rank 1"):
        faults.begin("get")
    assert faults.begin("get") == 0
    assert fired == ["storage_fail on rank 1: get 2"]


def test_a_store_that_is_down_fails_every_call_of_its_range_whatever_it_is() -> None:
    faults, fired = storage("storage_down:rank=1,from=2,to=3")
    faults.begin("get")
    for call in ("exists", "set"):
        with pytest.raises(StorageError):
            faults.begin(call)  # type: ignore[arg-type]
    faults.begin("get")
    assert fired == ["storage_down on rank 1: exists 1", "storage_down on rank 1: set 1"]


def test_turns_add_up_and_a_background_copys_delay_is_a_calls() -> None:
    faults, fired = storage(
        "storage_slow:rank=1,call=get,nth=2,steps=5",
        "delay_done:rank=1,queue=prefetch,op=2,steps=3",
        "delay_done:rank=1,queue=backup,op=1,steps=7",
        "delay_done:rank=1,queue=load,op=1,steps=9",
    )
    assert [faults.turns("get"), faults.turns("get"), faults.turns("set"), faults.turns("exists")] == [
        0,
        8,
        7,
        0,
    ]
    assert fired == [
        "delay_done on rank 1: get 2",
        "storage_slow on rank 1: get 2",
        "delay_done on rank 1: set 1",
    ]


def test_a_call_that_never_returns_says_so() -> None:
    faults, _ = storage("storage_never:rank=1,call=exists,nth=1")
    assert faults.turns("exists") == NEVER


def test_a_call_falls_short_by_so_many_pages() -> None:
    faults, _ = storage("storage_short:rank=1,call=exists,nth=1,pages=3")
    assert [faults.begin("exists"), faults.begin("exists")] == [3, 0]


def test_the_store_cannot_be_opened_the_nth_time() -> None:
    faults, fired = storage("attach_fail:rank=1,nth=2")
    faults.open()
    with pytest.raises(StorageError, match="rank 1"):
        faults.open()
    faults.open()
    assert fired == ["attach_fail on rank 1: open 2"]


def test_other_ranks_are_left_alone() -> None:
    faults, fired = storage("storage_down:rank=1,from=1,to=9", "attach_fail:rank=1,nth=1", rank=0)
    faults.open()
    assert faults.begin("get") == 0
    assert fired == []
