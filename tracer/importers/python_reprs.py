"""What Python's `repr` wrote of arguments and results, taken apart without ever being evaluated.

A text in, fields out: objects and keyword arguments become dotted names, whatever may legally differ between
two processes (addresses, the order of sets and dicts) is made alike, and what could be a prompt becomes its
type, its length and a digest. Nothing here fails: what can't be taken apart is one opaque text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

# Objects inside of objects that still become fields of their own, and fields an event has.
DEPTH_MAX = 4
FIELDS_MAX = 96
NAME_CHARS_MAX = 60
DIGEST_BYTES = 16
INTEGER_CHARS_MAX = 18

# One step through a repr; a list of integers, as prompts are, is a single one.
TOKEN = re.compile(
    r"\[-?\d+(?:, -?\d+)*\]"
    r"|'[^'\\]*(?:\\.[^'\\]*)*'"
    r'|"[^"\\]*(?:\\.[^"\\]*)*"'
    r"|[\[({]|[\])}]|, ?| \| ",
    re.DOTALL,
)
INTEGERS = re.compile(r"\[-?\d+(?:, -?\d+)*\]")
STRING = re.compile(r"""'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*\"""", re.DOTALL)
ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,16}\b")
OBJECT = re.compile(r"<(?:[\w.]*\.)?(?:<locals>\.)?(\w+) (?:object|instance) at 0x[0-9a-fA-F]*>")
ENUM = re.compile(r"<([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+): [^<>]*>")
CONSTANT = re.compile(r"torch\.\w+|[A-Z]\w*(?:\.[A-Za-z_]\w*)+")
CALL = re.compile(r"([A-Za-z_][\w.]*)\((.*)\)(\.\.\.)?", re.DOTALL)
KEYWORD = re.compile(r"(?:self\.)?([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
KEY = re.compile(r"'([A-Za-z_]\w*)': (.*)", re.DOTALL)
FLOAT = re.compile(r"-?\d{1,17}\.\d{0,17}(?:e[+-]?\d{1,3})?|-?\d{1,17}e[+-]?\d{1,3}")
COLLECTIONS = {"array", "list", "tuple", "set", "frozenset", "deque", "tensor"}
# An `=` between an expression and its value, not one of a comparison.
EQUALS = re.compile(r"(?<![=!<>:])=(?!=)")

# Names of fields whose words are ids or states, and never what somebody typed.
REQUEST_NAMES = ("rid", "req_id", "request_id")
WORD_NAMES = frozenset(
    {*REQUEST_NAMES, "op", "op_id", "id", "state", "status", "reason", "verdict", "policy", "mode", "kind"}
)
WORD = re.compile(r"[A-Za-z0-9][\w.:-]{0,63}")
# A number that is itself a token of a prompt, and not a count of them.
TOKEN_NAME = re.compile(r"(?:^|_)token(?:_id)?$")


@dataclass(frozen=True, slots=True)
class Digest:
    """A value that is not shown: equal digests are equal values, as far as their repr told them.

    Attributes:
        length: elements of a collection, characters of anything else.
        is_elided: the repr itself left something out, so that equal digests prove nothing about that.
    """

    type: str
    length: int
    digest: bytes
    is_elided: bool = False


Value = bool | int | float | str | Digest


class Leaf(NamedTuple):
    """One field before it is made into a value. `is_type`: the text is the name of an object's class."""

    name: str
    text: str
    is_type: bool = False


def leaves(payload: str, *, is_result: bool) -> list[Leaf]:
    """The fields of what a call was given or has returned, in order.

    Three forms: a dict of all arguments, `expression=repr` joined by ` | `, and a bare repr of a result.
    """
    found: list[Leaf] = []
    if is_result:
        parts = _selected(payload)
        if parts and all("result" in name for name, _ in parts):
            for name, text in parts:
                found += _flat(name, text, 0)
        else:
            found += _flat("result", payload, 0)
    elif payload.startswith("{"):
        entries = _entries(payload)
        if entries is None:
            found.append(Leaf("params", payload))
        for name, text in entries or ():
            found += _flat(name, text, 0)
    else:
        for name, text in _selected(payload) or [("params", payload)]:
            found += _flat(name, text, 0)
    return _limited(found)


def value(leaf: Leaf) -> Value:
    """What of a field is compared, and shown where it is short and no text."""
    text = leaf.text.strip()
    if leaf.is_type:
        return text
    name = leaf.name.rpartition(".")[2]
    plain = None if TOKEN_NAME.search(name) else _plain(text)
    if plain is not None:
        return plain
    inner = text[1:-1] if STRING.fullmatch(text) else text
    if name in WORD_NAMES and WORD.fullmatch(inner):
        return inner
    return _digest(text)


def normal(text: str) -> str:
    """The same text for values that are equal: no addresses, sets and dicts in one order."""
    if "0x" in text:
        text = ADDRESS.sub("0x", text)
    return _sorted_braces(text) if "{" in text else text


def elements(text: str) -> list[str] | None:
    """What a list, tuple, set or array holds, each as text; None for anything else."""
    inside = _inside(text)
    return None if inside is None else _split(inside)


def _plain(text: str) -> Value | None:
    """A short value that is no text, or None. Python's None is a word here: a field that is there has it."""
    if text in ("True", "False"):
        return text == "True"
    if text == "None":
        return text
    if text.isascii():
        digits = text.removeprefix("-")
        if digits.isdecimal() and len(digits) <= INTEGER_CHARS_MAX:
            return int(text)
        if FLOAT.fullmatch(text):
            return float(text)
    if found := OBJECT.fullmatch(text):
        return f"<{found[1]}>"
    if found := ENUM.fullmatch(text):
        return found[1]
    return text if len(text) <= NAME_CHARS_MAX and CONSTANT.fullmatch(text) else None


def _digest(text: str) -> Digest:
    held = normal(text)
    digest = blake2b(held.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
    inside = _inside(text)
    is_elided = text.endswith("...") or ", ..., " in text
    if inside is not None:
        return Digest(_type_of(text), _count(inside), digest, is_elided)
    if STRING.fullmatch(text):
        return Digest("str", len(text) - 2, digest)
    return Digest(_type_of(text), len(held), digest, is_elided)


def _type_of(text: str) -> str:
    if call := CALL.fullmatch(text):
        return call[1].rpartition(".")[2][:NAME_CHARS_MAX]
    if text.startswith("{"):
        first = next(iter(_split(text[1:-1])), "")
        return "dict" if not first or ": " in first else "set"
    return {"[": "list", "(": "tuple", "<": "object"}.get(text[:1], "text")


def _inside(text: str) -> str | None:
    """What stands between the brackets of a collection."""
    call = CALL.fullmatch(text)
    if call is not None:
        if call[1].rpartition(".")[2] not in COLLECTIONS:
            return None
        found = next(
            (token for token in TOKEN.finditer(call[2]) if token[0][0] in "[{" and token.start() < 8), None
        )
        if found is None:
            return "" if call[1].endswith("array") else None
        end = max(call[2].rfind("]"), call[2].rfind("}"))
        return call[2][found.start() + 1 : end]
    if len(text) >= 2 and text[0] + text[-1] in ("[]", "()", "{}"):
        return text[1:-1]
    return None


def _count(inside: str) -> int:
    if not inside.strip():
        return 0
    if INTEGERS.fullmatch(f"[{inside}]"):
        return inside.count(",") + 1
    return len(_split(inside))


def _flat(name: str, text: str, depth: int) -> Iterator[Leaf]:
    """An object's keyword arguments as fields of their own, with the name of its class as another."""
    call = CALL.fullmatch(text) if depth < DEPTH_MAX else None
    if call is not None and call[1] not in COLLECTIONS and not call[3]:
        parts = _split(call[2])
        keywords = [KEYWORD.fullmatch(part) for part in parts]
        if parts and all(keywords):
            yield Leaf(name, call[1], is_type=True)
            for keyword in keywords:
                assert keyword is not None
                yield from _flat(f"{name}.{keyword[1]}", keyword[2], depth + 1)
            return
    yield Leaf(name, text)


def _limited(found: list[Leaf]) -> list[Leaf]:
    """Fields with names that differ and are short; what is too much is one field."""
    if len(found) > FIELDS_MAX:
        rest = " | ".join(f"{leaf.name}={leaf.text}" for leaf in found[FIELDS_MAX:])
        found = [*found[:FIELDS_MAX], Leaf("rest", rest)]
    names: dict[str, int] = {}
    limited = []
    for leaf in found:
        name = leaf.name if len(leaf.name) <= NAME_CHARS_MAX else leaf.name[: NAME_CHARS_MAX - 2] + ".."
        names[name] = names.get(name, 0) + 1
        limited.append(leaf._replace(name=name if names[name] == 1 else f"{name}#{names[name]}"))
    return limited


def _selected(payload: str) -> list[tuple[str, str]] | None:
    """`expression=repr | expression=repr` as pairs; None where it is something else."""
    pairs = []
    for part in _split(payload, " | "):
        at = _equals(part)
        if at <= 0:
            return None
        pairs.append((part[:at], part[at + 1 :]))
    return pairs


def _equals(part: str) -> int:
    """Where the expression ends and its value begins; -1 where that is nowhere."""
    depth = start = 0
    for token in TOKEN.finditer(part):
        if depth <= 0 and (found := EQUALS.search(part, start, token.start())):
            return found.start()
        depth += len(token[0]) == 1 and token[0] in "[({"
        depth -= token[0] in ("]", ")", "}")
        start = token.end()
    found = EQUALS.search(part, start) if depth <= 0 else None
    return found.start() if found else -1


def _entries(text: str) -> list[tuple[str, str]] | None:
    """The entries of a dict whose keys are names; None where it is not whole, or none."""
    if not text.endswith("}"):
        return None
    found = [KEY.fullmatch(part) for part in _split(text[1:-1])]
    return [(match[1], match[2]) for match in found if match] if all(found) else None


def _split(text: str, separator: str = ", ") -> list[str]:
    """Parts between separators that stand in no brackets and no quotes."""
    parts: list[str] = []
    depth = start = 0
    for token in TOKEN.finditer(text):
        mark = token[0]
        if len(mark) == 1 and mark in "[({":
            depth += 1
        elif mark in ("]", ")", "}"):
            depth -= 1
        elif mark == separator and depth <= 0:
            parts.append(text[start : token.start()])
            start = token.end()
    if rest := text[start:].strip().rstrip(","):
        parts.append(rest)
    return parts


def _sorted_braces(text: str) -> str:
    """The text with what stands in braces in one order; as it is where the brackets do not match."""
    stack: list[tuple[str, list[str], list[str]]] = [("", [], [])]
    at = 0
    for token in TOKEN.finditer(text):
        mark = token[0]
        _, parts, piece = stack[-1]
        piece.append(text[at : token.start()])
        at = token.end()
        if len(mark) == 1 and mark in "[({":
            stack.append((mark, [], []))
        elif mark in ("]", ")", "}"):
            opened, _, _ = stack.pop()
            if opened + mark not in ("[]", "()", "{}"):
                return text
            parts.append("".join(piece))
            ordered = sorted(parts) if mark == "}" else parts
            stack[-1][2].append(opened + ", ".join(ordered) + mark)
        elif mark == ", ":
            parts.append("".join(piece))
            piece.clear()
        else:
            piece.append(mark)
    if len(stack) != 1:
        return text
    _, parts, piece = stack[0]
    return ", ".join([*parts, "".join(piece) + text[at:]])
