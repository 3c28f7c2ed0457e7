from __future__ import annotations

import random

import pytest

from hicache.control.pools import Room, SlotMemory


def test_memory_hands_out_each_slot_once_and_all_or_nothing() -> None:
    memory = SlotMemory(4)
    assert memory.alloc(3) == [0, 1, 2]
    assert memory.alloc(2) is None
    assert (memory.pages_free, memory.pages_used) == (1, 3)


def test_freed_slots_are_used_again() -> None:
    memory = SlotMemory(2)
    slots = memory.alloc(2)
    assert slots is not None
    memory.free(slots)
    assert sorted(memory.alloc(2) or []) == [0, 1]


def test_memory_without_a_limit_grows() -> None:
    memory = SlotMemory(0)
    assert memory.pages_free is None
    assert len(memory.alloc(1000) or []) == 1000


def test_freeing_a_slot_twice_is_a_programmers_error() -> None:
    memory = SlotMemory(2)
    memory.alloc(1)
    memory.free([0])
    with pytest.raises(AssertionError, match="slot 0 is freed twice"):
        memory.free([0])


def test_room_counts_what_is_missing() -> None:
    room = Room(10)
    room.take(7)
    assert (room.shortage(3), room.shortage(5)) == (0, 2)
    room.give_back(7)
    assert room.pages_free == 10


def test_room_without_a_limit_is_never_short() -> None:
    room = Room(0)
    room.take(10**9)
    assert room.shortage(10**9) == 0


def test_giving_back_more_than_was_taken_is_a_programmers_error() -> None:
    with pytest.raises(AssertionError, match="11 free of 10"):
        Room(10).give_back(1)


def test_memory_keeps_its_books_over_100_000_random_operations() -> None:
    chance = random.Random("pools")
    memory = SlotMemory(500)
    held: list[list[int]] = []
    for _ in range(100_000):
        if held and chance.random() < 0.5:
            memory.free(held.pop(chance.randrange(len(held))))
        else:
            wanted = chance.randint(0, 60)
            free = memory.pages_free
            slots = memory.alloc(wanted)
            assert free is not None
            assert (slots is None) == (wanted > free)
            if slots is not None:
                assert len(set(slots)) == wanted
                held.append(slots)
        assert memory.pages_used == sum(map(len, held))
        assert memory.pages_free == 500 - memory.pages_used
