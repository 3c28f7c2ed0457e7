"""Pickles of plain data, and of nothing else: what could call something is refused before anything is built.

    bytes -> every opcode against a white list -> the unpickler of the standard library, which finds no class

The first pass is what keeps a few bytes from asking for gigabytes: the unpickler makes room for the highest
memo number that it is told, whatever comes after it. Numbers are therefore held against the position they are
at, and lists and dictionaries are counted, before any memory is spent. Runs of opcodes of fixed size are
matched at once, so that the pass costs a small part of the decoding.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from typing import Any, NoReturn

# A list or dictionary takes one byte here and about 70 in memory.
CONTAINERS_MAX = 8_000_000
SHOWN_CHARS_MAX = 80

# Marks, containers and constants; memo and integers of fixed size; times of eight bytes; a memo number of
# four bytes as long as the room for it is small. Possessive, so that nothing is kept for a way back.
_ONE = rb"[}\](tuesaN)\x85-\x89\x94]"
RUN = re.compile(
    b"(?:" + _ONE + rb"*+[hqK].|" + _ONE + rb"++|M..|\x8a\x08.{8}|J.{4}|j.{4}|r..[\x00-\x0f]\x00|G.{8})++",
    re.DOTALL,
)
CONTAINERS = (b"]", b"}", b")", b"\x85", b"\x86", b"\x87")
# opcode -> bytes of the length that follows it, before the text itself.
TEXTS = {b"X": 4, b"\x8c": 1, b"\x8d": 8}
LONGS = {b"\x8a": 1, b"\x8b": 4}
PROTOCOLS = range(2, 6)
PROTO, FRAME, LONG_PUT, STOP = b"\x80", b"\x95", b"r", b"."
# Bytes that every memo number of four bytes costs at least: what it numbers, its opcode, itself.
PUT_BYTES = 6
BROKEN = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError, AttributeError),
    *(OverflowError, RecursionError),
)


class PickleRefusedError(ValueError):
    """It holds more than plain data, or is no whole pickle; the text is one sentence."""


def loads(data: bytes) -> tuple[Any, int]:
    """What the first pickle in `data` holds, and how many bytes it has.

    Raises:
        PickleRefusedError: an opcode that plain data does not need, with the name of what it would call; a
            cut or damaged pickle; more containers than any honest one has.
    """
    length = _examine(data)
    try:
        # Buffered: of a stream that can't be peeked into, every opcode is a call of its own.
        return _Plain(io.BufferedReader(io.BytesIO(data))).load(), length
    except PickleRefusedError:
        raise
    except BROKEN as error:
        raise PickleRefusedError(f"damaged pickle: {_short(str(error)) or type(error).__name__}") from None


class _Plain(pickle.Unpickler):
    """The second lock on the door: the white list lets nothing come so far."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise PickleRefusedError(f"refused: it would import {_short(f'{module}.{name}')}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise PickleRefusedError("refused: it refers to an object outside of the file")


def _examine(data: bytes) -> int:
    """Hold every opcode against the white list; where the pickle ends."""
    # Only a pickle of so many bytes can have so many.
    if len(data) > CONTAINERS_MAX and (containers := sum(map(data.count, CONTAINERS))) > CONTAINERS_MAX:
        raise PickleRefusedError(
            f"refused: about {containers:,} lists and dictionaries, {CONTAINERS_MAX:,} at most"
        )
    at, end = 0, len(data)
    texts: list[bytes] = []
    while at < end:
        run = RUN.match(data, at)
        if run is not None:
            at = run.end()
        opcode = data[at : at + 1]
        if opcode in TEXTS:
            start = at + 1 + TEXTS[opcode]
            length = int.from_bytes(data[at + 1 : start], "little")
            texts = [*texts[-1:], data[start : start + min(length, SHOWN_CHARS_MAX)]]
            at = start + length
        elif opcode in LONGS:
            start = at + 1 + LONGS[opcode]
            at = start + int.from_bytes(data[at + 1 : start], "little")
        elif opcode == LONG_PUT:
            number = int.from_bytes(data[at + 1 : at + 5], "little")
            if number > at // PUT_BYTES:
                raise PickleRefusedError(
                    f"refused: memo number {number:,} at byte {at:,}: nothing can have so many"
                )
            at += 5
        elif opcode == FRAME:
            at += 9
        elif opcode == PROTO:
            if data[at + 1 : at + 2] and data[at + 1] not in PROTOCOLS:
                raise PickleRefusedError(f"refused: pickle protocol {data[at + 1]}, known are 2 to 5")
            at += 2
        elif opcode == STOP:
            return at + 1
        elif opcode:
            _refuse(data, at, texts)
    raise PickleRefusedError(f"cut pickle: it ends after {end:,} bytes, before its end is said")


def _refuse(data: bytes, at: int, texts: list[bytes]) -> NoReturn:
    """Say which opcode it is, and what it would call."""
    code = data[at]
    name = next((opcode.name for opcode in pickletools.opcodes if opcode.code == chr(code)), "")
    if not name:
        raise PickleRefusedError(f"refused: byte 0x{code:02x} at byte {at:,} is no opcode")
    called: list[bytes] = []
    if name in ("GLOBAL", "INST"):
        called = data[at + 1 : at + 1 + 2 * SHOWN_CHARS_MAX].split(b"\n")[:2]
    elif name == "STACK_GLOBAL":
        called = texts
    told = ".".join(part.decode("utf-8", "replace") for part in called)
    would = f", which would import {_short(told)}" if told else ""
    raise PickleRefusedError(f"refused: opcode {name} at byte {at:,}{would}; plain data needs none")


def _short(text: str) -> str:
    kept = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return kept if len(kept) <= SHOWN_CHARS_MAX else kept[:SHOWN_CHARS_MAX] + "..."
