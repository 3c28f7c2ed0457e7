"""Cache hits as tables, and the story of one request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.text import Text

from cli.screens.table import GAP, count, counted, percent, printable, table
from cli.theme import GOOD, WIDTH, headline, paragraph

if TYPE_CHECKING:
    from tracer.hits import Hits
    from tracer.served import Source
    from tracer.story import StoryLine

# Columns as a person reads them; the others keep the name that they have in the JSON.
SHORT = {
    **{"input_tokens": "prompt", "input_blocks": "blocks", "hit_rate": "hit rate"},
    **{"from_ns": "from ms", "to_ns": "to ms", "computed_again": "again"},
    **{"untiered": "cached", "stored_tokens": "stored", "stored_again_tokens": "again"},
    **{"removed_tokens": "removed", "held_tokens": "held", "held_tokens_max": "most held"},
}
PERCENTS = ("share", "hit_rate")
TIMES = ("from_ns", "to_ns")
# Rows of a table that a person reads; the rest is for --full and --json.
ROWS_MAX = 1000
# Columns that are left out where they say nothing: where all is 0, or where the source can't know.
EMPTY_HIDDEN = ("unplaced", "untiered")
TOLD_OR_HIDDEN = ("device", "host", "storage", "computed", "computed_again", "requests")
# In the table of prefixes these are shares of what the requests have in it together.
OF_PREFIX = ("device", "host", "storage", "untiered", "computed_again", "unplaced", "uncached")
PREFIX_RULE = (
    "A prefix is listed where sharing branches: no longer one is shared by as many requests. In order of "
    "tokens x requests; one with more than half of that in common with a row above is left out. Shares "
    "are of tokens x requests; again: computed though another request has computed it too."
)
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
    "declined_too_short": "on a lower tier, but too little to be worth bringing up",
    "declined_quota": "on the host, but the device has no room beside what is promised",
    "declined_below_threshold": "storage had less of it than is worth fetching",
    "declined_host_capacity": "storage had it, the host had no room",
    "declined_storage_transfer": "storage had it, a read came back short on some rank",
    "declined_rate_limited": "sent to storage before; too much was being fetched to ask for it",
    "declined_anchor": "sent to storage before; what it hangs below had no host copy, so nobody asked",
    "declined_hybrid_discard": "its KV was fetched, a side pool's state was not",
    "declined_dropped": "it was fetched, and the tree had no place for it any more",
    "no_state": "its KV was cached, a side pool's state to go on from was not",
    "flushed": "an operator had the cache flushed",
    "last_token": "all was cached; one token must be computed",
    "partial_page": "all full pages were cached; the rest is less than a page",
    "unknown": "the log does not hold its history",
}


def tables(hits: Hits, width: int, *, is_full: bool = False) -> list[Text]:
    """Totals, the rows asked for, and what limits the numbers."""
    lines = headline(*_top(hits), GOOD)
    if hits.source is not None:
        lines += paragraph("source", _told_source(hits.source))
    shown = hits.rows if is_full else hits.first_rows(ROWS_MAX)
    if shown:
        columns = [name for name in shown[0] if _is_shown(name, hits, shown)]
        cells = [[_cell(name, row, hits) for name in columns] for row in shown]
        names = [_heading(name, hits) for name in columns]
        lines += [Text(""), *table(names, cells, width=width, more="--json has them")]
    if len(shown) < hits.row_count:
        lines.append(
            Text(f"(the first {count(len(shown))} of {count(hits.row_count)} rows; --full shows all)")
        )
    lines += _explained(hits)
    if notes := _notes(hits):
        lines += [Text(""), *notes]
    return lines


def in_one_line(hits: Hits) -> list[Text]:
    """The totals under --quiet, whole on their line."""
    rate, totals = _top(hits)
    return [Text.assemble((rate, GOOD), f"  {totals}")]


def _top(hits: Hits) -> tuple[str, str]:
    """The hit rate, and over how much."""
    if hits.source is not None and hits.source.unit == "event":
        return "no hit rate", "events of what the tiers hold; who was served is not in them"
    return f"{percent(hits.hit_rate)} hit", _totals(hits)


def _totals(hits: Hits) -> str:
    source = hits.source
    unit = "request" if source is None else source.unit
    many = counted(hits.request_count, unit) if unit != "batch" else _batches(hits.request_count)
    what = "blocks asked for" if source is not None and source.is_in_blocks else "prompt tokens"
    told = f"{many}, {count(hits.input_tokens)} {what}, {count(hits.cached)} of them from the cache"
    if hits.served_count < hits.request_count:
        told += f" ({percent(hits.served_hit_rate)} over the served prompts alone)"
    return told


def _batches(number: int) -> str:
    return f"{count(number)} prefill batch{'' if number == 1 else 'es'}"


def _told_source(source: Source) -> str:
    files = source.files[0] if len(source.files) == 1 else f"{count(len(source.files))} files"
    return f"{source.format.replace('_', ' ')}: {files}, {counted(sum(source.lines), 'line')}"


def _heading(name: str, hits: Hits) -> str:
    if name in TIMES and hits.source is not None:
        return name.removesuffix("_ns")
    return SHORT.get(name, name)


def _is_shown(name: str, hits: Hits, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a column says something: the JSON has them all."""
    if hits.by == "prefix" and name in ("input_tokens", "input_blocks", "computed"):
        return False
    if name in EMPTY_HIDDEN:
        return any(row[name] for row in rows)
    if name == "file":
        return len({row[name] for row in rows}) > 1
    if name == "reason" and hits.source is not None:
        return False
    if name == "unplaced_reason":
        # Beside those that were not admitted it stands in the place of the reason that they don't have.
        return False
    return name not in TOLD_OR_HIDDEN or any(row[name] is not None for row in rows)


def _notes(hits: Hits) -> list[Text]:
    """What limits the numbers."""
    lines = [line for note in hits.notes for line in paragraph("note", printable(note))]
    for each in hits.unaccounted[:3]:
        parts = f"{each.accounted_tokens} of {each.input_tokens} prompt tokens accounted for"
        lines += paragraph("note", f"{printable(each.rid)}: {parts}")
    more = len(hits.unaccounted) - 3
    if more > 0:
        lines += paragraph("note", f"and {count(more)} more whose tokens do not add up; --json has them")
    return lines


def story(row: Mapping[str, Any], lines: Sequence[StoryLine]) -> list[Text]:
    """One request across the tiers; a run of decode steps is one line."""
    told = headline(printable(row["rid"]), _parts(row), GOOD)
    told += [*paragraph("reason", _why(row)), Text("")]
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
    return [Text.assemble((printable(row["rid"]), GOOD), f"  {_parts(row)}; {_why(row)}")]


def _parts(row: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{count(row[part])} {part}" for part in ("device", "host", "storage", "computed"))
    told = f"{count(row['input_tokens'])} prompt tokens: {parts}"
    if row["unplaced"]:
        told += f", {count(row['unplaced'])} of no tier ({_words(row['unplaced_reason'])})"
    return told


def _why(row: Mapping[str, Any]) -> str:
    """Why the first computed page was not a hit, or why there was none."""
    reason = row["reason"]
    if reason is not None:
        return f"{printable(reason)}: {meaning(reason)}"
    return f"nothing was computed: {_words(row['unplaced_reason'] or 'never_admitted')}"


def _words(text: str) -> str:
    return printable(text.replace("_", " "))


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
    from tracer.story import LACKING

    return line.kind in ("batch", "forward") and line.record.get("mode") == "decode" and line.text != LACKING


def _decoded(lines: Sequence[StoryLine], rid: str) -> int:
    """Tokens of its answer that these decode steps gave the request."""
    total = 0
    for line in lines:
        rids, tokens = line.record.get("rids"), line.record.get("computed_tokens")
        if line.kind == "forward" and isinstance(rids, list) and isinstance(tokens, list) and rid in rids:
            own = tokens[rids.index(rid) :][:1]
            total += sum(number for number in own if type(number) is int)
    return total


def _explained(hits: Hits) -> list[Text]:
    """How the prefixes were chosen; what the reasons in the table mean, those that occur."""
    if hits.by == "prefix":
        if not hits.row_count:
            return [Text(""), Text("No prefix of whole pages is shared by two requests.")]
        return [Text(""), *map(Text, wrap(PREFIX_RULE, WIDTH))]
    if hits.by not in ("request", "reason") or hits.source is not None:
        return []
    found = hits.reasons
    lines: list[Text] = [Text("")] if found else []
    beside = max(20, *(len(reason) + GAP for reason in found)) if found else 0
    for reason in found:
        first, *rest = wrap(meaning(reason), WIDTH - GAP - beside) or [""]
        lines.append(Text(" " * GAP + printable(reason).ljust(beside) + first))
        lines += [Text(" " * (GAP + beside) + line) for line in rest]
    return lines


def meaning(reason: str) -> str:
    """A reason in words; one that this version doesn't know is its own explanation."""
    if reason not in REASONS and reason.startswith(DECLINED):
        return f"not brought up from a lower tier: {_words(reason.removeprefix(DECLINED))}"
    return REASONS.get(reason, _words(reason))


def _cell(name: str, row: Mapping[str, Any], hits: Hits) -> Any:
    value = row[name]
    if name == "reason" and value is None:
        return row.get("unplaced_reason")
    if hits.by == "prefix" and name in OF_PREFIX:
        whole = row.get("input_tokens") or row.get("input_blocks")
        return percent(value / whole) if whole and value is not None else value
    if value is not None and name in PERCENTS:
        return percent(value)
    if name in TIMES:
        return _milliseconds(value) if hits.source is None else _moment(value)
    if value == "untiered":
        return "cached" if hits.source is None or hits.source.tiers_are_told is False else "cached, untold"
    if name == "line":
        return str(value)
    return count(value) if isinstance(value, int) else value


def _moment(nanoseconds: int) -> str:
    """Wall clock, in the zone of whoever wrote it down."""
    moment = datetime.fromtimestamp(nanoseconds // 1_000_000_000, UTC)
    rest = nanoseconds % 1_000_000_000
    fraction = f".{rest:09d}".rstrip("0") if rest else ""
    return f"{moment:%Y-%m-%d %H:%M:%S}{fraction}"


def _milliseconds(nanoseconds: int) -> str:
    """Exactly, without trailing zeros."""
    whole, rest = divmod(nanoseconds, 1_000_000)
    return f"{whole}.{rest:06d}".rstrip("0").rstrip(".")
