"""Plain values from outside, held against the annotations of the record that they are to become.

A dataclass takes whatever it is given. What a person or another program has written is looked at first, so
that a wrong word is told by its name, and not found out by whoever trips over it later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# Characters of a value that are repeated to whoever gave it.
TOLD_MAX = 60


def demand_annotated(record: Any, name: str = "") -> None:
    """Every field is what its annotation says, and so are the fields of records in it.

    Args:
        name: of the record, in front of its fields' names; empty for the outermost.

    Raises:
        TypeError: the first that is not; names it, and what was expected.
    """
    hints = get_type_hints(type(record))
    for field in fields(record):
        value, path = getattr(record, field.name), f"{name}{field.name}"
        if is_dataclass(value) and isinstance(value, hints[field.name]):
            demand_annotated(value, f"{path}.")
        elif not _fits(value, hints[field.name]):
            told = repr(value)[:TOLD_MAX]
            raise TypeError(f"{path} is {told}, expected {_words(hints[field.name])}")


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return type(value) is str and value in arguments
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is tuple:
        return type(value) is tuple and all(_fits(each, arguments[0]) for each in value)
    if origin is Mapping:
        return isinstance(value, dict) and all(type(key) is str for key in value)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


def _words(hint: Any) -> str:
    """An annotation as a person says it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, UnionType):
        return " or ".join(_words(each) for each in arguments)
    if origin is tuple:
        return "a list of texts"
    if origin is Mapping:
        return "an object"
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}.get(hint, "null")
