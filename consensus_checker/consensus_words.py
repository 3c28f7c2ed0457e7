"""Payloads for people: what of an object differs, and a value in a few characters.

Reads what `payload` has written, in a log or in memory. It never needs the values themselves.
"""

from __future__ import annotations

from typing import Any

# Of a digest, enough to see that two differ.
DIGEST_CHARS = 6
DIGEST_LENGTH = 16
HEX = frozenset("0123456789abcdef")


def fields_of(name: str, value: Any) -> dict[str, Any]:
    """The fields of an object's payload, called `params.key`; what is none, under its own name."""
    match value:
        case [str(), dict() as fields] if fields and all(isinstance(field, str) for field in fields):
            return {f"{name}.{field}": own for field, own in fields.items()}
    return {name: value}


def payload_text(value: Any) -> str:
    """`list of 4096 91aa52`, `Tensor int64 17x2 c0de12`, `MatchParams(...)`; what is no payload as it is.

    A log may hold any text: what is none of a terminal's business is escaped.
    """
    text = _payload_text(value)
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def _payload_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_payload_text(own)}" for name, own in value.items())
    if not (isinstance(value, list) and value and isinstance(value[0], str)):
        return "-" if value is None else str(value)
    name, *rest = value
    match rest:
        case [dict() as fields]:
            return f"{name}({_payload_text(fields)})"
        case [int(length), str(digest)] if _is_digest(digest):
            return f"{name} of {length} {digest[:DIGEST_CHARS]}"
        case [str(dtype), list(shape), str(content), *_]:
            size = "x".join(map(str, shape)) or "scalar"
            return f"{name} {dtype} {size} {content[:DIGEST_CHARS]}"
    words = [one[:DIGEST_CHARS] if isinstance(one, str) and _is_digest(one) else str(one) for one in rest]
    return " ".join([name, *words])


def _is_digest(text: str) -> bool:
    return len(text) == DIGEST_LENGTH and HEX.issuperset(text)
