"""Logs in, verdict out: which rank left the others first, at which call, because of which local fact.

A process that makes decisions marks them with the names below; they are imported when they are asked for, so
that whoever only reads logs does not load what writes them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from consensus_checker.consensus import assert_same, configure, enabled, rank_consensus, shutdown

__all__ = ["assert_same", "configure", "enabled", "rank_consensus", "shutdown"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("consensus_checker.consensus"), name)
