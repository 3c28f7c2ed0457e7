"""Classes of known bugs by their signature: a hint where to read on, never a proof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from consensus_checker.context import Stand
from consensus_checker.finding import DivergenceKind, Trigger
from consensus_checker.history import History

# class -> what it is about, in the words in which a screen names it; each has its page in `rule_pages`.
CLASSES = {
    "HC01": "skipped collective",
    "HC02": "free space",
    "HC03": "loop of rank-local length",
    "HC04": "acks consumed in other numbers",
    "HC05": "ready flag polled locally",
    "HC06": "abort seen at different steps",
    "HC07": "agreement on the wrong group",
    "HC08": "shards answer differently",
    "HC09": "slot reused in flight",
    "HC10": "streams without order",
    "HC11": "companion state missing",
    "HC12": "lock or budget not given back",
    "HC13": "visible before complete",
    "HC14": "promised length not kept",
    "HC15": "weak key",
    "HC16": "hole, or reads gated silently",
    "HC17": "starvation",
}


def resembles(
    history: History, kind: DivergenceKind, stands: Mapping[int, Stand], trigger: Trigger | None
) -> tuple[str, ...]:
    """Classes whose signature this divergence has.

    HC01: one side stands at a meeting that the other side, whose count is 0, does not enter.
    HC02: two results of one call, explained by free space: a fact with a declared need, or pages free.
    """
    if trigger is None:
        return ()
    if kind == "value" and (trigger.need is not None or trigger.fact.endswith("pages_free")):
        return ("HC02",)
    if kind == "collective" and trigger.need is None and not trigger.fact.endswith("pages_free"):
        outside = [rank for rank, stand in stands.items() if not _is_at_a_meeting(history, stand)]
        if outside and _are_zero(trigger.values.get(rank) for rank in outside):
            return ("HC01",)
    return ()


def _is_at_a_meeting(history: History, stand: Stand) -> bool:
    return stand.record is not None and history.kinds[stand.record["kind"]].role == "meeting"


def _are_zero(values: Iterable[object]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value == 0 for value in values)
