"""Pickles of plain data are read; what could do anything else is refused, by the name of what it would do."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest

from tracer.importers.safe_pickle import PickleRefusedError, loads


class Runs:
    """What an enemy puts into a dump."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("echo it ran > ran",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_comes_back(protocol: int) -> None:
    own = {
        "a": [1, -1, 300, 70_000, 1 << 40, 1 << 3000, 2.5, None, True, False],
        "b": ("x" * 300, (), {}, "é"),
    }
    data = pickle.dumps([own, own], protocol)
    assert loads(data + b"rest") == ([own, own], len(data))


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_what_would_run_is_refused_by_its_name(
    protocol: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PickleRefusedError, match=r"which would import (posix|nt)\.system"):
        loads(pickle.dumps(Runs(), protocol))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            b"\x80\x02]q\x00cbuiltins\neval\nq\x01.",
            "opcode GLOBAL at byte 5, which would import builtins.eval",
        ),
        (
            b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
            "opcode STACK_GLOBAL at byte 14, which would import os.system",
        ),
        (b"(ios\nsystem\n.", "opcode INST at byte 1, which would import os.system"),
        (b"\x80\x02NR.", "opcode REDUCE at byte 3"),
        (b"\x80\x02NN\x81.", "opcode NEWOBJ at byte 4"),
        (b"\x80\x02Nb.", "opcode BUILD at byte 3"),
        (b"\x80\x02NQ.", "opcode BINPERSID at byte 3"),
        (b"P1\n.", "opcode PERSID at byte 0"),
        (b"\x80\x02\x82\x01.", "opcode EXT1 at byte 2"),
        (b"\x80\x09N.", "pickle protocol 9, known are 2 to 5"),
        (b"\x80\x02\xff.", "byte 0xff at byte 2 is no opcode"),
        (b"\x80\x02c" + b"x" * 9000, "opcode GLOBAL at byte 2"),
    ],
)
def test_a_refusal_says_the_opcode_and_where_it_is(data: bytes, said: str) -> None:
    with pytest.raises(PickleRefusedError) as refused:
        loads(data)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "data",
    [
        # Room for 2,147,483,647 numbers was 32 GB.
        b"\x80\x02Nr\xff\xff\xff\x7f.",
        b"\x80\x02Nr\x00\x00\x00\x10.",
        b"\x80\x02X\xff\xff\xff\xffa.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fa.",
        b"\x80\x02\x8b\xff\xff\xff\x7f1.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
        b"\x80\x02" + b"]" * 9_000_000 + b".",
    ],
)
def test_a_few_bytes_do_not_get_gigabytes(data: bytes) -> None:
    with pytest.raises(PickleRefusedError):
        loads(data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cut pickle: it ends after 0 bytes"),
        (b"\x80", "cut pickle"),
        (b"\x80\x02]", "cut pickle: it ends after 3 bytes"),
        (b"\x80\x02t.", "damaged pickle: could not find MARK"),
        (b"\x80\x02h\x01.", "damaged pickle: Memo value not found at index 1"),
        (b"\x80\x02}]Ns.", "damaged pickle: unhashable type: 'list'"),
        (b"\x80\x02X\x01\x00\x00\x00\xff.", "damaged pickle: 'utf-8' codec"),
        (b"\x80\x02.", "damaged pickle"),
    ],
)
def test_what_is_cut_or_damaged_is_told(data: bytes, said: str) -> None:
    with pytest.raises(PickleRefusedError) as refused:
        loads(data)
    assert said in str(refused.value)
