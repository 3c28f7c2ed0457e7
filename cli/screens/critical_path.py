"""What a run's time went into, tier by tier and request by request, and what it would be at other speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from cli.screens.table import counted, printable, table
from cli.theme import DOUBT, HEADING, headline, paragraph

if TYPE_CHECKING:
    from tracer.critical_path import RankPath, RequestPath
    from tracer.what_if_speed import Estimate, WhatIfSpeed

# The slowest requests are shown, the rest is counted.
ROWS_MAX = 12
REPLICAS_MAX = 4
LIMITS_MAX = 4
SHARE_MIN = 0.0005
# A part of a chain that is shorter is no link of it to a reader.
LINK_MIN = 0.01
LINKS_MAX = 10
# What a word stands for where it does not say it itself.
ABOUT = {
    "peers": "waits in collectives",
    "scheduler": "its own work, and polls",
    "deadline": "until a time was over",
    "no_request": "nobody to serve",
    "unknown": "not in the log",
}
NOTE = (
    "from one trace. In place: each wait is longer or shorter where it stands. In order: every step waits "
    "for all that it took over, so that no decision changes. A run decides anew"
)

Found = Sequence[tuple["RankPath", "WhatIfSpeed"]]


def path_lines(found: Found, others: Sequence[RankPath], missing: Sequence[int], width: int) -> list[Text]:
    """One rank of each replica: what bounds it, at these speeds and at others, and its slowest requests.

    Args:
        others: ranks that were read and are not shown.
        missing: ranks without a log.
    """
    lines: list[Text] = []
    for path, answer in found[:REPLICAS_MAX]:
        lines += [*([Text()] if lines else []), *_rank_lines(path, answer, width)]
    if len(found) > REPLICAS_MAX:
        lines.append(Text(f"(and {counted(len(found) - REPLICAS_MAX, 'more rank')}; --json has them all)"))
    if any(path.requests for path, _answer in found):
        if others:
            lines += paragraph("ranks", _about(others))
        lines += paragraph("note", NOTE)
    return [*lines, *_limits([*(path for path, _answer in found), *others], missing)]


def path_in_short(found: Found) -> list[Text]:
    """One line for each rank that is shown."""
    lines = []
    for path, answer in found:
        text = " ".join(line.plain.strip() for line in _headline(path))
        told = f"; {_speeds(answer.speeds)}: {_would(answer.run)}" if path.requests else ""
        lines.append(Text(text + told))
    return lines


def path_json(found: Found, leading: Sequence[int], missing: Sequence[int]) -> dict[str, Any]:
    """The same as plain values, every rank and request; nanoseconds of each rank's own clock."""
    return {
        "speeds": dict(found[0][1].speeds) if found else {},
        "ranks": [
            {
                "rank": path.rank,
                "waited_least_for_others": path.rank in leading,
                "bound_by": path.bound or None,
                **_told(answer.run, path.by_tier),
                "under_way_ns": dict(path.busy),
                "takings": answer.taken,
                "takings_moved": answer.moved,
                "requests": [
                    {
                        "rid": request.rid,
                        "bound_by": request.bound or None,
                        **_told(estimate, request.by_tier),
                        "chain": [list(link) for link in request.chain],
                    }
                    for request, estimate in zip(path.requests, answer.requests, strict=True)
                ],
                "undetermined": list(path.limits),
            }
            for path, answer in found
        ],
        "undetermined_ranks": list(missing),
    }


def _told(estimate: Estimate, by_tier: Mapping[str, int]) -> dict[str, Any]:
    return {
        "took_ns": estimate.before,
        "would_take_in_place_ns": estimate.in_place,
        "would_take_in_order_ns": estimate.in_order,
        "by_tier_ns": dict(by_tier),
    }


def _about(others: Sequence[RankPath]) -> str:
    shares = sorted(path.by_tier.get("peers", 0) / max(1, path.ns) for path in others)
    spread = f"{shares[0]:.0%} to {shares[-1]:.0%}" if len(shares) > 1 else f"{shares[0]:.0%}"
    ranks = _named([path.rank for path in others])
    return f"shown is who waited least for others; {ranks}: {spread} of the time on peers (--rank)"


def _headline(path: RankPath) -> list[Text]:
    if not path.requests:
        text = f"no request both began and ended in the log of rank {path.rank}"
        return headline("UNKNOWN", text, DOUBT)
    told = path.by_tier
    most = max(told, key=lambda word: told[word])
    served = counted(len(path.requests), "request")
    text = f"by {most}: {_share(told[most], path.ns)} of the {_ms(path.ns)} in which rank {path.rank} "
    return headline("BOUND", f"{text}served {served}", HEADING)


def _rank_lines(path: RankPath, answer: WhatIfSpeed, width: int) -> list[Text]:
    lines = _headline(path)
    if not path.requests:
        return lines
    told = path.by_tier
    if path.bound != max(told, key=lambda word: told[word]):
        lines += paragraph("", _of_tiers(path, told))
    lines += paragraph("what if", f"{_speeds(answer.speeds)}: {_would(answer.run)}")
    lines += [Text(), *_tier_table(path, answer, width), Text(), *_request_table(path, answer, width)]
    slowest = max(path.requests, key=lambda request: request.ns)
    lines += paragraph("slowest", f"{printable(slowest.rid)}, in ms: {_links(slowest)}")
    if answer.moved:
        text = (
            f"{answer.moved:,} of {counted(answer.taken, 'ack')} would have come in another step: decisions "
            "may differ from there on, and a run at these speeds may lie outside"
        )
        lines += paragraph("unsure", text, DOUBT)
    return lines


def _links(request: RequestPath) -> str:
    """Its chain, without what is too short to see."""
    told: list[tuple[str, int]] = []
    for word, ns in request.chain:
        if ns < LINK_MIN * request.ns:
            continue
        total = ns + (told.pop()[1] if told and told[-1][0] == word else 0)
        told.append((word, total))
    text = ", ".join(f"{word} {_number(ns)}" for word, ns in told[:LINKS_MAX])
    return text + (f" (and {len(told) - LINKS_MAX} more)" if len(told) > LINKS_MAX else "")


def _of_tiers(path: RankPath, told: Mapping[str, int]) -> str:
    if not path.bound:
        return "nothing of it has a speed"
    return f"of what has a speed, {path.bound} is most: {_share(told[path.bound], path.ns)}"


def _speeds(speeds: Mapping[str, float]) -> str:
    """`storage_read at half...` would need words for every number: `storage_read x0.5`."""
    return ", ".join(f"{tier} x{speed:g}" for tier, speed in speeds.items())


def _would(run: Estimate) -> str:
    in_place = f"{_ms(run.before)} -> {_ms(run.in_place)} in place ({_change(run.before, run.in_place)})"
    return f"{in_place}, {_ms(run.in_order)} in order ({_change(run.before, run.in_order)})"


def _tier_table(path: RankPath, answer: WhatIfSpeed, width: int) -> list[Text]:
    rows: list[list[Any]] = []
    for word, ns in sorted(path.by_tier.items(), key=lambda entry: -entry[1]):
        if ns < SHARE_MIN * path.ns and word not in answer.speeds:
            continue
        rows.append([word, *_tier_row(word, ns, path, answer)])
    absent = [word for word in answer.speeds if word not in path.by_tier]
    rows += [[word, *_tier_row(word, 0, path, answer)] for word in absent]
    columns = ("on the path", "ms", "share", "under way", "in place", "what")
    return table(columns, rows, width=width, cell_max=44)


def _tier_row(word: str, ns: int, path: RankPath, answer: WhatIfSpeed) -> list[Any]:
    busy = path.busy.get(word)
    return [
        _number(ns),
        _share(ns, path.ns),
        _share(busy, path.ns) if busy is not None else "-",
        _number(ns / answer.speeds.get(word, 1.0)),
        ABOUT.get(word, ""),
    ]


def _request_table(path: RankPath, answer: WhatIfSpeed, width: int) -> list[Text]:
    pairs = sorted(zip(path.requests, answer.requests, strict=True), key=lambda pair: -pair[0].ns)
    rows = [
        [
            request.rid,
            _number(estimate.before),
            _number(estimate.in_place),
            _number(estimate.in_order),
            _parts(request.by_tier, request.ns),
        ]
        for request, estimate in pairs[:ROWS_MAX]
    ]
    lines = table(("request", "ms", "in place", "in order", "waited for"), rows, width=width, cell_max=48)
    if len(pairs) > ROWS_MAX:
        lines.append(Text(f"(and {counted(len(pairs) - ROWS_MAX, 'faster request')}; --json has them all)"))
    return lines


def _parts(by_tier: Mapping[str, int], ns: int) -> str:
    """The largest first, as long as they say something."""
    parts = sorted(by_tier.items(), key=lambda entry: -entry[1])
    told = [f"{word} {_share(part, ns)}" for word, part in parts if part >= 0.005 * ns]
    return ", ".join(told[:3])


def _limits(paths: Sequence[RankPath], missing: Sequence[int]) -> list[Text]:
    """Each reason once, with the ranks that it is true of."""
    ranks: dict[str, list[int]] = {}
    for path in paths:
        for limit in path.limits:
            ranks.setdefault(limit, []).append(path.rank)
    told = [f"{_named(missing)} left no log: waits for them are peers"] if missing else []
    told += [f"{_named(whose)}: {limit}" for limit, whose in ranks.items()]
    lines: list[Text] = []
    for text in told[:LIMITS_MAX]:
        lines += paragraph("unsure", text, DOUBT)
    if len(told) > LIMITS_MAX:
        lines += paragraph("unsure", f"and {len(told) - LIMITS_MAX} more; --json has them all", DOUBT)
    return lines


def _named(ranks: Sequence[int]) -> str:
    from consensus_checker.words import ranks_text

    return ranks_text(ranks)


def _number(ns: float) -> str:
    return f"{ns / 1e6:,.1f}"


def _ms(ns: float) -> str:
    return f"{_number(ns)} ms"


def _share(part: float, whole: int) -> str:
    share = part / max(1, whole)
    return f"{share:.0%}" if share >= 0.1 or not share else f"{share:.1%}"


def _change(before: int, after: int) -> str:
    return f"{(after - before) / max(1, before):+.1%}"
