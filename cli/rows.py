"""Query rows for other programs: JSON and CSV, a row at a time.

Owns what a value of the database becomes there. What JSON has no word for is text: a moment, an id, a
decimal; bytes are hexadecimal, and a number that is none is null.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracer.trace_store import Answer

Write = Callable[[str], object]
PLAIN = frozenset({str, int, bool, type(None)})


def write_json(answer: Answer, write: Write) -> None:
    """A list of row objects; columns of type JSON are decoded, columns of one name told apart."""
    names = unique(answer.columns)
    convert = [decoded if kind == "JSON" else json_value for kind in answer.types]
    before = "["
    for row in answer.rows:
        document = {
            name: of_column(value) for name, of_column, value in zip(names, convert, row, strict=True)
        }
        write(before + json.dumps(document, ensure_ascii=False, allow_nan=False))
        before = ",\n "
    write("]\n" if before != "[" else "[]\n")


def write_csv(answer: Answer, write: Write) -> None:
    """A header line, then the rows; null is nothing, lists and structures are JSON."""
    writer = csv.writer(_Stream(write), lineterminator="\n")
    writer.writerow(answer.columns)
    for row in answer.rows:
        writer.writerow([_csv_value(value) for value in row])


def json_value(value: Any) -> Any:
    """A value as JSON can hold it."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else None
    if kind is bytes or kind is bytearray:
        return value.hex()
    if kind is list or kind is tuple:
        return [json_value(item) for item in value]
    if kind is dict:
        return {str(key): json_value(item) for key, item in value.items()}
    return str(value)


def decoded(value: Any) -> Any:
    """A value of type JSON as what it says; text that is none stays text."""
    if not isinstance(value, str):
        return json_value(value)
    try:
        return json_value(json.loads(value))
    except (ValueError, RecursionError):
        return value


def unique(columns: Sequence[str]) -> list[str]:
    """Names that can be keys: the second `a` becomes `a_1`."""
    names: list[str] = []
    for column in columns:
        name, number = column, 0
        while name in names:
            number += 1
            name = f"{column}_{number}"
        names.append(name)
    return names


def _csv_value(value: Any) -> Any:
    if isinstance(value, list | dict | tuple):
        return json.dumps(json_value(value), ensure_ascii=False)
    return value.hex() if isinstance(value, bytes | bytearray) else value


class _Stream:
    """What `csv` needs of a file."""

    __slots__ = ("write",)

    def __init__(self, write: Write) -> None:
        self.write = write
