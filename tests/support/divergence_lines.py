"""Lines as SGLang's rank consensus checker prints them, made from literal events."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha1

MOMENT = "2026-03-01 12:00:00"


def divergence_line(
    events: Sequence[str],
    tag: str = "",
    *,
    moment: str = MOMENT,
    count: int | None = None,
    digest: str | None = None,
    launcher: str = "",
) -> str:
    """One rank's line with its newline; `tag` is ` TP0 PP1`, `count` and `digest` what it states wrongly."""
    stated = sha1("".join(events).encode(), usedforsecurity=False).hexdigest() if digest is None else digest
    return (
        f"{launcher}[{moment}{tag}] Found rank divergence for {len(events) if count is None else count} "
        f"events(s)! local hash: {stated}, events = {list(events)}\n"
    )
