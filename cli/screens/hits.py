"""Cache hits as tables, and the story of one request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.text import Text

from cli.screens.table import GAP, count, counted, percent, table
from cli.theme import GOOD, WIDTH, headline, paragraph

if TYPE_CHECKING:
    from tracer.hits import Hits
    from tracer.story import StoryLine

# Columns as a person reads them; the others keep the name that they have in the JSON.
SHORT = {"input_tokens": "prompt", "hit_rate": "hit rate", "from_ns": "from ms", "to_ns": "to ms"}
PERCENTS = ("share", "hit_rate")
TIMES = ("from_ns", "to_ns")
STORY = ("step", "kind", "what happened")
DECLINED = "declined_"
# Why the first computed page was not a hit, in words.
REASONS = {
    "cold": "never seen before",
    "evicted_device": "dropped from the device; there is no host tier",
    "evicted_host": "dropped from the host",
    "not_backed_up": "dropped from the device before it had a host copy",
    "deadline": "storage had not given it when the deadline passed",
    "declined_not_waited_for": "storage was asked for it, and its answer not waited for",
    "no_state": "its KV was cached, a side pool's state to go on from was not",
    "flushed": "an operator had the cache flushed",
    "last_token": "all was cached; one token must be computed",
    "partial_page": "all full pages were cached; the rest is less than a page",
    "unknown": "the log does not hold its history",
}


def tables(hits: Hits, width: int) -> list[Text]:
    """Totals, the rows asked for, and what limits the numbers."""
    lines = headline(_rate(hits), _totals(hits), GOOD)
    if hits.rows:
        columns = list(hits.rows[0])
        cells = [[_cell(name, row[name]) for name in columns] for row in hits.rows]
        lines += [Text(""), *table([SHORT.get(name, name) for name in columns], cells, width=width)]
    lines += _reasons(hits)
    if notes := _notes(hits):
        lines += [Text(""), *notes]
    return lines


def in_one_line(hits: Hits) -> list[Text]:
    """The totals under --quiet, whole on their line."""
    return [Text.assemble((_rate(hits), GOOD), f"  {_totals(hits)}")]


def _rate(hits: Hits) -> str:
    return f"{percent(hits.hit_rate)} hit"


def _totals(hits: Hits) -> str:
    cached = sum(request.cached for request in hits.requests)
    requests = counted(len(hits.requests), "request")
    told = f"{requests}, {count(hits.input_tokens)} prompt tokens, {count(cached)} of them from the cache"
    if len(hits.served) < len(hits.requests):
        told += f" ({percent(hits.served_hit_rate)} over the served prompts alone)"
    return told


def _notes(hits: Hits) -> list[Text]:
    """What limits the numbers."""
    lines = [line for note in hits.notes for line in paragraph("note", note)]
    for each in hits.unaccounted[:3]:
        lines += paragraph(
            "note", f"{each.rid}: {each.accounted_tokens} of {each.input_tokens} prompt tokens accounted for"
        )
    more = len(hits.unaccounted) - 3
    if more > 0:
        lines += paragraph("note", f"and {count(more)} more whose tokens do not add up; --json has them")
    return lines


def story(row: Mapping[str, Any], lines: Sequence[StoryLine]) -> list[Text]:
    """One request across the tiers; a run of decode steps is one line."""
    told = headline(row["rid"], _parts(row), GOOD)
    told += [*paragraph("reason", _why(row["reason"])), Text("")]
    rows: list[tuple[Any, str, str]] = []
    for is_decode, group in groupby(lines, key=_is_decode):
        members = list(group)
        if is_decode and len(members) > 2:
            steps = f"{members[0].step}-{members[-1].step}"
            rows.append((steps, "decode", f"{counted(_decoded(members, row['rid']), 'token')} decoded"))
        else:
            rows += [(line.step, line.kind, line.text) for line in members]
    return told + table(STORY, list(_wrapped(rows)), width=WIDTH, cell_max=WIDTH)


def story_in_one_line(row: Mapping[str, Any]) -> list[Text]:
    return [Text.assemble((row["rid"], GOOD), f"  {_parts(row)}; {_why(row['reason'])}")]


def _parts(row: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{count(row[part])} {part}" for part in ("device", "host", "storage", "computed"))
    return f"{count(row['input_tokens'])} prompt tokens: {parts}"


def _why(reason: str | None) -> str:
    return "it was never admitted" if reason is None else f"{reason}: {meaning(reason)}"


def _wrapped(rows: Sequence[tuple[Any, str, str]]) -> Iterator[tuple[Any, str, str]]:
    """Rows whose sentence fits beside the other two columns; its further lines have rows of their own."""
    every = [STORY, *rows]
    beside = max(len(str(step)) for step, _kind, _text in every)
    beside += max(len(kind) for _step, kind, _text in every) + 2 * GAP
    for step, kind, text in rows:
        first, *rest = wrap(text, WIDTH - beside) or [""]
        yield step, kind, first
        for line in rest:
            yield "", "", line


def _is_decode(line: StoryLine) -> bool:
    return line.kind in ("batch", "forward") and line.record.get("mode") == "decode"


def _decoded(lines: Sequence[StoryLine], rid: str) -> int:
    """Tokens of its answer that these decode steps gave the request."""
    forwards = [
        line.record for line in lines if line.kind == "forward" and rid in line.record.get("rids", ())
    ]
    return sum(record["computed_tokens"][record["rids"].index(rid)] for record in forwards)


def _reasons(hits: Hits) -> list[Text]:
    """What the reasons in the table mean, those that occur."""
    if hits.by not in ("request", "reason"):
        return []
    found = sorted({row["reason"] for row in hits.rows if row["reason"]})
    lines: list[Text] = [Text("")] if found else []
    beside = max(20, *(len(reason) + GAP for reason in found)) if found else 0
    for reason in found:
        first, *rest = wrap(meaning(reason), WIDTH - GAP - beside) or [""]
        lines.append(Text(" " * GAP + reason.ljust(beside) + first))
        lines += [Text(" " * (GAP + beside) + line) for line in rest]
    return lines


def meaning(reason: str) -> str:
    """A reason in words; one that this version doesn't know is its own explanation."""
    if reason not in REASONS and reason.startswith(DECLINED):
        why = reason.removeprefix(DECLINED).replace("_", " ")
        return f"not brought up from a lower tier: {why}"
    return REASONS.get(reason, reason.replace("_", " "))


def _cell(name: str, value: Any) -> Any:
    if name in PERCENTS:
        return percent(value)
    if name in TIMES:
        return _milliseconds(value)
    return count(value) if isinstance(value, int) else value


def _milliseconds(nanoseconds: int) -> str:
    """Exactly, without trailing zeros."""
    whole, rest = divmod(nanoseconds, 1_000_000)
    return f"{whole}.{rest:06d}".rstrip("0").rstrip(".")
