"""What came of taking decisions again, rank by rank: the first that does not follow from its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from cli.theme import BAD, DOUBT, GOOD, headline, next_step, paragraph

if TYPE_CHECKING:
    from hicache.sim.reenact import Reenacted

# Ranks whose difference is shown in full.
SHOWN_MAX = 3
# What a record is about, worth telling also where both have it alike.
IDS = ("rid", "op", "node")


def reenacted_lines(found: Sequence[Reenacted], path: Path) -> list[Text]:
    """The earliest difference first, as a sentence, then what the log has and what the rules say."""
    from consensus_checker.words import call_text, ranks_text

    differing = [each for each in found if each.difference is not None]
    differing.sort(key=lambda each: (each.difference.step if each.difference else 0, each.rank))
    same = [each for each in found if each.is_same]
    limited = [each for each in found if each.limits]
    lines: list[Text] = []
    if not differing:
        records = sum(each.records for each in same)
        if same:
            ranks = ranks_text([each.rank for each in same])
            text = f"every decision of {ranks} follows from what it was given ({records:,} records)"
            lines += headline("SAME", text, GOOD)
        else:
            lines += headline("UNKNOWN", "no rank's decisions could be taken again", DOUBT)
    for number, each in enumerate(differing[:SHOWN_MAX]):
        part = each.difference
        assert part is not None
        kind = str(part.logged.get("kind"))
        about = f"rank {each.rank} at step {part.step:,}, record {part.seq:,}: {call_text(kind)}"
        why = "does not follow from what it was given" if number == 0 else "differs as well"
        lines += [*([Text()] if number else []), *headline("DIFFERS", f"{about} {why}", BAD)]
        lines += paragraph("log", _told(part.logged, part.done))
        lines += paragraph("rules", _told(part.done, part.logged) if part.done else part.why or "nothing")
        if part.done and part.why:
            lines += paragraph("", part.why)
    if rest := [each.rank for each in differing[SHOWN_MAX:]]:
        lines += paragraph("also", f"{ranks_text(rest)} later or at the same step")
    if differing and same:
        lines += paragraph("same", f"{ranks_text([each.rank for each in same])}, up to the end of the log")
    doubts = [each.limits for each in limited] + [each.cut for each in found if each.cut]
    for told in list(dict.fromkeys(filter(None, doubts)))[:SHOWN_MAX]:
        lines += paragraph("unsure", told, DOUBT)
    if differing:
        lines += next_step("check", path)
    return lines


def reenacted_json(each: Reenacted) -> dict[str, Any]:
    part = each.difference
    return {
        "rank": each.rank,
        "records": each.records,
        "difference": None
        if part is None
        else {
            "seq": part.seq,
            "step": part.step,
            "logged": dict(part.logged),
            "by_the_rules": None if part.done is None else dict(part.done),
            "why": part.why or None,
        },
        "undetermined": each.limits or each.cut or None,
    }


def _told(record: Mapping[str, Any], other: Mapping[str, Any] | None) -> str:
    """A record in words: what it is, and the fields that tell it from the other one."""
    is_same_call = other is not None and all(
        record.get(name) == other.get(name) for name in ("kind", "phase")
    )
    words = " ".join(str(record[name]) for name in ("kind", "phase") if record.get(name))
    fields = {
        name: value
        for name, value in record.items()
        if name not in ("kind", "phase")
        and (name in IDS or not (is_same_call and other and other.get(name) == value))
    }
    told = ", ".join(f"{name} {value}" for name, value in list(fields.items())[:8])
    return f"{words.replace('_', ' ')}: {told}" if told else words.replace("_", " ")
