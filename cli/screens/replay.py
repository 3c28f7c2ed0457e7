"""Transfer queues as tables: all of them in short, or one of them at one step with ranks side by side.

Ranks whose queue is alike share a column, so that 64 ranks of which one is odd are two columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from cli.screens.table import counted, table
from cli.theme import BAD, DOUBT, GOOD, HEADING, INDENT, headline, paragraph

if TYPE_CHECKING:
    from tracer.transfers import RankQueue, Replay, Transfer
    from tracer.what_if import WhatIf

# Lines of a queue that are shown; the rest is counted.
ROWS_MAX = 14
COLUMNS_MAX = 4
NODES_NAMED_MAX = 3
LIMITS_MAX = 4
NAMED_MAX = 6
# What an event round counts, as a person says it.
WORDS = {
    "writes_done": ("done here", "applied"),
    "loads_done": ("done here", "applied"),
    "hits_ready": ("answers here", "answers taken"),
    "prefetch_acks_ready": ("acks here", "acks taken"),
    "storage_acks_ready": ("acks here", "acks taken"),
}

Key = tuple[Any, ...]


def overview(found: Sequence[Replay], width: int) -> list[Text]:
    """One line for each queue, and for ranks that are alike in it."""
    first = found[0]
    ranks = [each.rank for each in first.ranks]
    until = f"up to step {first.last_step:,}" if first.last_step >= 0 else "without a step"
    lines: list[Text] = headline("QUEUES", f"{_named(ranks)}, {until}", HEADING)
    rows: list[list[Any]] = []
    for replay in found:
        for members in _alike(replay.ranks, _summary):
            summary = _summary(members[0])
            rows.append([replay.queue, _named([own.rank for own in members]), *summary.values()])
    columns = ("queue", "ranks", *(_summary(first.ranks[0]) if first.ranks else ()))
    lines += [Text(), *table(columns, rows, width=width)]
    for replay in found:
        if (step := replay.parts_at()) is not None:
            lines += paragraph(replay.queue, f"ranks applied different counts at step {step:,}", BAD)
    return [*lines, *_limits(found)]


def _summary(own: RankQueue) -> dict[str, Any]:
    ages = [each.steps for each in own.transfers if each.steps is not None]
    held = [len(own.at(each.begin_step)) for each in own.transfers]
    return {
        "begun": len(own.transfers),
        "ended": len(ages),
        "open": len(own.transfers) - len(ages),
        "at once": max(held, default=0),
        "oldest": max(ages, default=None),
    }


def overview_json(found: Sequence[Replay]) -> list[dict[str, Any]]:
    """The same as plain values; ages in steps."""
    return [
        {
            "queue": replay.queue,
            "ranks": [
                {"rank": own.rank, **{key.replace(" ", "_"): value for key, value in _summary(own).items()}}
                for own in replay.ranks
            ],
            "steps_with_moves": len(replay.steps),
            "last_step": replay.last_step,
            "parts_at_step": replay.parts_at(),
            "undetermined": _undetermined(replay),
        }
        for replay in found
    ]


def at_step(replay: Replay, step: int, width: int) -> list[Text]:
    """The queue at the end of a step: what each rank had seen, what was applied, what is in it."""
    groups = _alike(replay.ranks, lambda own: _column(own, step))
    shown = groups[:COLUMNS_MAX]
    is_odd = len(groups) > 1
    number = next((found.number for own in replay.ranks if (found := own.round_at(step))), None)
    where = f"at the end of step {step:,}" + (f", event round {number:,}" if number is not None else "")
    lines = headline(f"{replay.queue.upper()} QUEUE", where, HEADING)
    columns = ["", *(_named([own.rank for own in members]) for members in shown), "since", "what"]
    rows: list[list[Any]] = []
    for index, (saw, _applied) in enumerate(replay.counts):
        rounds = [members[0].round_at(step) for members in shown]
        here, taken = WORDS[saw]
        rows.append([here, *(_told(found.saw[index] if found else None) for found in rounds), "", ""])
        rows.append([taken, *(_told(found.applied[index] if found else None) for found in rounds), "", ""])
    keys = _keys(replay, step)
    for key in keys[:ROWS_MAX]:
        owns = [_find(members[0], key, step) for members in shown]
        about = next(own for own in (*owns, *(_find(each, key, step) for each in replay.ranks)) if own)
        states = [own.state(step) if own is not None else "-" for own in owns]
        rows.append([_label(about), *states, f"{about.begin_step:,}", _about(about)])
    if not keys:
        columns, rows = columns[:-2], [row[:-2] for row in rows]
    lines += [Text(), *table(columns, rows, width=width, cell_max=44)]
    if len(keys) > ROWS_MAX:
        lines.append(Text(f"(and {counted(len(keys) - ROWS_MAX, 'younger transfer')})"))
    if not keys:
        lines.append(Text("(empty on every rank)"))
    if len(groups) > COLUMNS_MAX:
        rest = [own.rank for members in groups[COLUMNS_MAX:] for own in members]
        lines.append(Text(f"(not shown: {_named(rest)}, each different from these)"))
    lines += paragraph("moved", _moved(replay, step))
    if is_odd and (odd := _odd_words(replay, step)):
        lines += paragraph("ranks", odd, DOUBT)
    return [*lines, *_limits([replay])]


def at_step_json(replay: Replay, step: int) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "queue": replay.queue,
        "step": step,
        "ranks": [
            {
                "rank": own.rank,
                "round": found.number if (found := own.round_at(step)) else None,
                **{
                    side: {
                        names[at]: (getattr(found, side)[index] if found else None)
                        for index, names in enumerate(replay.counts)
                    }
                    for at, side in enumerate(("saw", "applied"))
                },
                "in_queue": [each.to_json(step) for each in own.at(step)],
                "moved": [{"what": word, **each.to_json(step)} for word, each in own.moves_in(step)],
            }
            for own in replay.ranks
        ],
        "undetermined": _undetermined(replay),
    }


def what_if_lines(found: WhatIf, replay: Replay, width: int) -> list[Text]:
    """Whether ranks would have parted under another agreement, and where first."""
    policy = found.policy
    if not found.rounds:
        return headline(
            "UNKNOWN", f"no round of the {replay.queue} queue says what ranks counted themselves", DOUBT
        )
    rounds = counted(found.rounds, "round")
    if found.parting is None:
        text = f"under {policy} no rank would have left the others in {rounds}"
        lines = headline("TOGETHER", text, GOOD)
    else:
        part = found.parting
        text = f"under {policy} ranks would have come apart at step {part.step:,} ({part.count_name})"
        lines = headline("APART", text, BAD)
        rows = [[_named(ranks), count] for count, ranks in _by_count(part.counts)]
        lines += [Text(), *table(("ranks", "applied by then"), rows, width=width)]
        lines += paragraph("then", "what would have followed is not in the log")
    if found.is_own and found.parting is None:
        lines += paragraph("note", "this is what the run did, or gives the same counts")
    if found.waits:
        waits = ", ".join(f"rank {rank} in {count:,}" for rank, count in list(found.waits.items())[:6])
        lines += paragraph("waits", f"rounds in which a copy had not been seen done yet: {waits}")
    if found.blind:
        lines += paragraph(
            "unsure", f"{_named(found.blind)} did not count: a stage before decides for them", DOUBT
        )
    return [*lines, *_limits([replay])]


def what_if_json(found: WhatIf, replay: Replay) -> dict[str, Any]:
    part = found.parting
    return {
        "queue": replay.queue,
        "policy": found.policy,
        "rounds": found.rounds,
        "parting": None
        if part is None
        else {
            "step": part.step,
            "count": part.count_name,
            "by_rank": {str(rank): count for rank, count in sorted(part.counts.items())},
        },
        "waits": {str(rank): count for rank, count in found.waits.items()},
        "is_what_the_run_did": found.is_own,
        "undetermined_ranks": list(found.blind),
        "undetermined": _undetermined(replay),
    }


def on_one_line(lines: Sequence[Text]) -> list[Text]:
    """The headline alone, however long it is."""
    told = lines[0].copy()
    for line in lines[1:]:
        if not line.plain.startswith(" " * INDENT):
            break
        told.append(" " + line.plain.strip())
    return [told]


def _by_count(counts: Mapping[int, int]) -> list[tuple[int, list[int]]]:
    by: dict[int, list[int]] = {}
    for rank, count in sorted(counts.items()):
        by.setdefault(count, []).append(rank)
    return sorted(by.items())


def _alike(ranks: Sequence[RankQueue], column: Callable[[RankQueue], object]) -> list[list[RankQueue]]:
    """Ranks by what their column would show, the largest group first, then by rank."""
    groups: dict[str, list[RankQueue]] = {}
    for own in ranks:
        groups.setdefault(repr(column(own)), []).append(own)
    return sorted(groups.values(), key=lambda members: (-len(members), members[0].rank))


def _column(own: RankQueue, step: int) -> list[Any]:
    found = own.round_at(step)
    shown = [(_key(each), each.state(step)) for each in own.at(step)]
    return [found and (found.saw, found.applied), shown]


def _key(each: Transfer) -> Key:
    """What tells a transfer on all ranks: its number, or where SGLang gives none its place and nodes."""
    return (each.op,) if each.op is not None else (each.begin_step, *each.nodes)


def _keys(replay: Replay, step: int) -> list[Key]:
    """Transfers that are in the queue of any rank, oldest first."""
    found: dict[Key, int] = {}
    for own in replay.ranks:
        for each in own.at(step):
            found.setdefault(_key(each), each.begin_step)
    return sorted(found, key=lambda key: (found[key], key))


def _find(own: RankQueue, key: Key, step: int) -> Transfer | None:
    """On this rank, whether it is in the queue or has just left it."""
    here = next((each for each in own.at(step) if _key(each) == key), None)
    return here or next((each for _word, each in own.moves_in(step) if _key(each) == key), None)


def _label(each: Transfer) -> str:
    if each.op is not None:
        return f"#{each.op}"
    return f"node {each.nodes[0]}" if each.nodes else "-"


def _about(each: Transfer) -> str:
    parts = [each.rid] if each.rid else []
    if each.nodes and each.op is not None:
        more = f" +{len(each.nodes) - NODES_NAMED_MAX}" if len(each.nodes) > NODES_NAMED_MAX else ""
        named = ",".join(map(str, each.nodes[:NODES_NAMED_MAX]))
        parts.append(f"{'node' if len(each.nodes) == 1 else 'nodes'} {named}{more}")
    if each.pages is not None:
        parts.append(counted(each.pages, "page"))
    return ", ".join(parts)


def _moved(replay: Replay, step: int) -> str:
    """In one sentence, of the ranks that are most."""
    words: dict[str, list[str]] = {}
    if not replay.ranks:
        return "-"
    own = _alike(replay.ranks, lambda own: [(word, _key(each)) for word, each in own.moves_in(step)])[0][0]
    for word, each in own.moves_in(step):
        words.setdefault(word, []).append(_label(each))
    told = [
        f"{word} {', '.join(names[:6])}" + (" ..." if len(names) > 6 else "") for word, names in words.items()
    ]
    return "; ".join(told) or "nothing"


def _odd_words(replay: Replay, step: int) -> str:
    applied: dict[tuple[int | None, ...], list[int]] = {}
    for own in replay.ranks:
        if (found := own.round_at(step)) is not None:
            applied.setdefault(found.applied, []).append(own.rank)
    if len(applied) > 1:
        return "apart: " + "; ".join(
            f"{_named(ranks)} applied {_counts(counts)}"
            if None not in counts
            else f"{_named(ranks)} applied nothing yet"
            for counts, ranks in applied.items()
        )
    return "what they saw differs, as it may; they applied alike" if applied else ""


def _named(ranks: Sequence[int]) -> str:
    from consensus_checker.words import ranks_text

    return ranks_text(ranks)


def _counts(values: Sequence[int | None]) -> str:
    return ", ".join(map(_told, values)) if None not in values else "nothing yet"


def _told(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _undetermined(replay: Replay) -> list[str]:
    told = [limit for own in replay.ranks for limit in own.limits]
    if replay.missing:
        told.insert(0, f"{_named(replay.missing)} left no log")
    return told


def _limits(found: Sequence[Replay]) -> list[Text]:
    told = list(dict.fromkeys(limit for replay in found for limit in _undetermined(replay)))
    lines: list[Text] = []
    for limit in told[:LIMITS_MAX]:
        lines += paragraph("unsure", limit, DOUBT)
    if len(told) > LIMITS_MAX:
        lines += paragraph("unsure", f"and {len(told) - LIMITS_MAX} more; --json has them all", DOUBT)
    return lines
