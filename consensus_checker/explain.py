"""From a finding to a short proof in plain text: Let, Then, However, So.

    Let      the call, and who must agree on what
    Then     what the majority did, and with which facts
    However  what the odd rank did, and its own facts
    So       what came of it, and how far away

Every line is at most 80 columns and readable without colour. It adds nothing to the finding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from consensus_checker.finding import STEP_UNKNOWN, Finding, FirstDivergence, Trigger
from consensus_checker.history import History
from consensus_checker.words import call_text, ranks_text, value_text

WIDTH = 80
INDENT = 10


def proof(finding: Finding, history: History) -> list[str]:
    """The argument for one finding, as lines."""
    first = finding.first_divergence
    if first is None:
        so = paragraph("So", after(finding)) if finding.victim is not None else []
        return [*paragraph("Seen", finding.summary), *so]
    odd = finding.culprit or _smaller_side(first)
    rest = tuple(rank for rank in sorted(first.by_rank) if rank not in odd)
    doubt = ""
    if not finding.culprit and any("against it" in reason for reason in finding.basis):
        doubt = " Most ranks are on one side and precedent is on the other: the logs do not say who is right."
    elif not finding.culprit:
        doubt = " Neither side is a majority: the logs alone do not say who is right."
    return [
        *paragraph("Let", _let(first, history)),
        *paragraph("Then", _did(first, finding.trigger, rest)),
        *paragraph("However", _did(first, finding.trigger, odd)),
        *paragraph("So", after(finding) + doubt),
    ]


def after(finding: Finding) -> str:
    """What the finding led to, in a sentence or two."""
    victim = finding.victim
    if victim is None and finding.consequence is not None:
        return "The run did not complete; no rank is inside a recorded collective."
    if victim is None:
        return "Nothing else is seen of it in these logs."
    if victim.step == STEP_UNKNOWN:
        did = "waits" if len(victim.ranks) == 1 else "wait"
        return f"{ranks_text(victim.ranks)} {did}: {victim.where}."
    if finding.first_divergence is None:
        return f"{ranks_text(victim.ranks)}: {victim.where}, step {victim.step}."
    verb = "waits" if len(victim.ranks) == 1 else "wait"
    is_hang = finding.consequence is not None and finding.consequence[0] == "stall"
    text = f"{ranks_text(victim.ranks)} {verb} in" if is_hang else f"{ranks_text(victim.ranks)}:"
    text += f" {victim.where}, step {victim.step}."
    if victim.calls_later == 0:
        text += " That is the call at which they part."
    elif victim.calls_later is not None:
        calls = "1 call" if victim.calls_later == 1 else f"{victim.calls_later} calls"
        later = "" if victim.seconds_later is None else f" ({victim.seconds_later:.3g} s)"
        text += f" The hang is {calls}{later} after the divergence."
    return text


def paragraph(label: str, text: str, *, lines_max: int = 6) -> list[str]:
    """`text` beside a label, wrapped; what does not fit ends in two dots."""
    lines = wrap(text, WIDTH - INDENT, break_on_hyphens=False) or ["-"]
    if len(lines) > lines_max:
        lines = lines[:lines_max]
        lines[-1] = lines[-1][: WIDTH - INDENT - 3] + " .."
    head = f"  {label}".ljust(INDENT)
    return [(head if number == 0 else " " * INDENT) + line for number, line in enumerate(lines)]


def _let(first: FirstDivergence, history: History) -> str:
    scope = history.scope(first.scope)
    ranks = ranks_text(scope.ranks if scope else sorted(first.by_rank))
    own = history.kinds.get(first.call)
    inside = "is" if first.kind in ("value", "missing", "extra") else "is open at"
    text = f"{call_text(first.call)} {inside} call {first.index} of lane {first.lane}, step {first.step}"
    if first.request is not None:
        text += f", request {first.request}"
    ranks = ranks[0].upper() + ranks[1:]
    if own is None or not own.compared or first.kind != "value":
        return f"{text}. {ranks} ({first.scope}) must make the same calls in the same order."
    return f"{text}. {ranks} ({first.scope}) must agree on its {', '.join(own.compared)}."


def _did(first: FirstDivergence, trigger: Trigger | None, ranks: Sequence[int]) -> str:
    did = _each(ranks, {rank: _fields_text(first.by_rank[rank]) for rank in ranks if rank in first.by_rank})
    if trigger is None or not all(rank in trigger.values for rank in ranks):
        return did + "."
    facts = _each(
        ranks, {rank: f"{trigger.fact} {value_text(trigger.values[rank])}" for rank in ranks}, name=False
    )
    need = f" (needed {value_text(trigger.need)})" if trigger.need is not None else ""
    return f"{did}, with {facts}{need}."


def _each(ranks: Sequence[int], texts: Mapping[int, str], *, name: bool = True) -> str:
    """What ranks have in common is said once."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(texts.get(rank, "wrote nothing"), []).append(rank)
    if len(groups) == 1 and not name:
        return next(iter(groups))
    if name:
        return "; ".join(f"{ranks_text(members)} {text}" for text, members in groups.items())
    return ", ".join(f"{text} on {ranks_text(members)}" for text, members in groups.items())


def _fields_text(fields: Mapping[str, Any]) -> str:
    """What a rank did: the record it wrote where kinds differ, else the fields that differ."""
    if fields.get("kind") == "trailer":
        return "had closed its log"
    if fields.get("kind") is not None or fields.get("purpose") is not None:
        words = (fields.get("kind"), fields.get("phase"), fields.get("purpose"))
        return "wrote " + " ".join(str(word) for word in words if word is not None)
    texts = [f"{name} {value_text(value)}" for name, value in fields.items()]
    return "had " + (", ".join(texts) or "the same")


def _smaller_side(first: FirstDivergence) -> tuple[int, ...]:
    sides: dict[str, list[int]] = {}
    for rank in sorted(first.by_rank):
        sides.setdefault(repr(first.by_rank[rank]), []).append(rank)
    ordered = sorted(sides.values(), key=len, reverse=True)
    return tuple(sorted(rank for side in ordered[1:] for rank in side))
