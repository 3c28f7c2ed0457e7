"""Rule `watchdog_frontier`: whose counters of a group stand still behind all others', by NCCL's own lines.

Equation, for a group with members m, A the last enqueued and B the last completed work in m's newest line:

    top = max A(m)
    A(m) < top                          m did not call what the others called          not joined, 11
    A(m) = top for all, B(m) < max B    m's device has not done what the others' has   device behind, 12
    A(m) = top > B(m) = b for all       all have joined, and nobody gets further       13

    rank 0  last enqueued 5123, completed 5119
    rank 1  last enqueued 5120, completed 5119     rank 1 did not join #5121
    rank 2  last enqueued 5123, completed 5119

Who stands in a work that others have completed has joined it, and is behind with its device at most. With a
group's minority ahead, it is the minority that made calls of its own. A tie, a group along pipeline stages, a
rank without a line, or two groups that name different ranks leave open who it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Evidence, Finding, Level
from consensus_checker.said import entries, expected_ranks, lines_of, unless_circle
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier, Line

RULE = "watchdog_frontier"
EVENTS = ("watchdog_exception", "watchdog_abort", "remote_dump")
DEFAULT = ("default_pg", "undefined")
# Stages of a pipeline are legally apart by the microbatches between them.
STAGED = ("pp", "pipe", "stage")


@dataclass(frozen=True, slots=True)
class Counters:
    """A group as its members' lines tell it.

    Attributes:
        is_default: the group has all ranks of the job.
        missing: ranks of the job without a line; only known of that group.
        is_staged: its members may be apart legally.
    """

    name: str
    lines: Mapping[int, Line]
    enqueued: Mapping[int, int]
    completed: Mapping[int, int]
    is_default: bool
    missing: tuple[int, ...]
    is_staged: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.enqueued))


def find(dossier: Dossier) -> list[Claim]:
    claims = unless_circle([claim for group in _groups(dossier) for claim in _judged(dossier, group)])
    order = ("high", "medium", "low", "undetermined")
    return sorted(claims, key=lambda claim: order.index(claim.finding.level))


def _groups(dossier: Dossier) -> Iterator[Counters]:
    newest: dict[tuple[str, str], dict[int, Line]] = {}
    for line in lines_of(dossier, EVENTS):
        if line.who.rank is not None and line.fields["enqueued"] is not None:
            key = (line.fields["group"], line.fields["description"])
            newest.setdefault(key, {})[line.who.rank] = line
    staged = {
        (line.fields["group"], line.fields["description"])
        for line in lines_of(dossier, ("watchdog_timeout",))
        if line.fields["op"].upper() in ("SEND", "RECV", "COALESCED")
    }
    expected = expected_ranks(dossier)
    for (name, description), lines in newest.items():
        used = {rank: line for rank, line in lines.items() if line.fields["enqueued"] >= 0}
        group_ranks = [line.fields["group_rank"] for line in used.values()]
        # One name for several groups: older versions count them process by process.
        is_ambiguous = len(set(group_ranks)) < len(group_ranks) and None not in group_ranks
        if len(used) < 2 or is_ambiguous:
            continue
        is_default = description in DEFAULT or (not description and name in ("", "0"))
        completed = {rank: line.fields["completed"] for rank, line in used.items()}
        yield Counters(
            description or name or "of the watchdog",
            used,
            {rank: line.fields["enqueued"] for rank, line in used.items()},
            {rank: -1 if value is None else value for rank, value in completed.items()},
            is_default=is_default,
            missing=tuple(rank for rank in expected if rank not in used) if is_default else (),
            is_staged=(name, description) in staged or any(part in description.lower() for part in STAGED),
        )


def _judged(dossier: Dossier, group: Counters) -> Iterator[Claim]:
    top, done = max(group.enqueued.values()), max(group.completed.values())
    inside = [rank for rank in group.ranks if group.completed[rank] < group.enqueued[rank] <= done < top]
    left = tuple(rank for rank in group.ranks if group.enqueued[rank] < done and rank not in inside)
    if left:
        # What some ranks complete without the others is a broadcast. Or the line is of an earlier time.
        yield _claim(
            dossier,
            group,
            left,
            is_named=False,
            code=11,
            summary=f"{ranks_text(left)} did not come to {_called(group, done)}, which others completed, "
            "or its line is older than theirs",
        )
    elif inside:
        odd = tuple(inside) if 2 * len(inside) < len(group.ranks) else ()
        first = min(group.enqueued[rank] for rank in inside)
        yield _claim(
            dossier,
            group,
            odd or tuple(inside),
            is_named=bool(odd),
            code=12,
            summary=f"{ranks_text(inside)} {_verb(tuple(inside), 'is', 'are')} still in "
            f"{_called(group, first)}, which others have completed: the device is behind",
        )
    elif min(group.enqueued.values()) == top:
        yield from _all_joined(dossier, group, top)
    else:
        yield _not_joined(dossier, group, top)


def _not_joined(dossier: Dossier, group: Counters, top: int) -> Claim:
    """Who stands furthest back; whoever stands between it and the first waits for it too."""
    least = min(group.enqueued.values())
    last = tuple(rank for rank in group.ranks if group.enqueued[rank] == least)
    ahead = tuple(rank for rank in group.ranks if group.enqueued[rank] == top)
    if 2 * len(last) < len(group.ranks):
        waiting = tuple(rank for rank in group.ranks if rank not in last)
        return _claim(
            dossier,
            group,
            last,
            is_named=True,
            code=11,
            summary=f"{ranks_text(last)} did not join {_called(group, least + 1)}, "
            f"in which {ranks_text(waiting)} {_verb(waiting, 'waits', 'wait')}",
            alternative=f"{ranks_text(ahead)} made a call that nobody else was to make",
        )
    if 2 * len(ahead) < len(group.ranks) and len(ahead) + len(last) == len(group.ranks):
        return _claim(
            dossier,
            group,
            ahead,
            is_named=True,
            code=11,
            summary=f"{ranks_text(ahead)} called {_called(group, least + 1)}, which nobody else did",
            alternative=f"{ranks_text(last)} stopped before it",
        )
    return _claim(
        dossier,
        group,
        group.ranks,
        is_named=False,
        code=11,
        summary=f"{ranks_text(last)} did not join what {ranks_text(ahead)} called in group "
        f"{group.name}, up to #{top}: no majority says who is right",
    )


def _all_joined(dossier: Dossier, group: Counters, top: int) -> Iterator[Claim]:
    done = max(group.completed.values())
    behind = tuple(rank for rank in group.ranks if group.completed[rank] < done)
    if behind and 2 * len(behind) < len(group.ranks):
        yield _claim(
            dossier,
            group,
            behind,
            is_named=True,
            code=12,
            summary=f"all have called {_called(group, top)}, and {ranks_text(behind)} "
            f"{_verb(behind, 'has', 'have')} completed less than the others: the device is behind",
        )
    elif not behind and done < top and group.is_default and not group.missing:
        yield _claim(
            dossier,
            group,
            (),
            is_named=False,
            code=13,
            summary=f"all of {ranks_text(group.ranks)} have joined {_called(group, top)}, "
            f"and nobody completes #{done + 1}",
        )


def _claim(
    dossier: Dossier,
    group: Counters,
    odd: tuple[int, ...],
    *,
    is_named: bool,
    code: int,
    summary: str,
    alternative: str = "",
) -> Claim:
    """A claim as sure as the group's coverage allows."""
    is_open = bool(group.missing) or group.is_staged
    is_named = is_named and not is_open
    basis = [f"counters of {len(group.lines)} ranks"]
    if group.missing:
        basis.append(f"no line of {ranks_text(group.missing)}")
    if group.is_staged:
        basis.append("a group along pipeline stages, whose members are apart legally")
    level: Level = "undetermined"
    if is_named or code == 13:
        # Another group, of which there is no line, may tell another story.
        level = "medium"
    elif group.missing:
        level = "low"
    victims = tuple(rank for rank in group.ranks if rank not in odd) if odd and is_named else ()
    waiting = () if odd else group.ranks
    finding = Finding(
        "stall" if level != "undetermined" else "undetermined",
        code if level != "undetermined" else 20,
        RULE,
        summary,
        level,
        basis=tuple(basis),
        culprit=odd if is_named else (),
        victims=(*victims, *waiting),
        silent=group.missing,
        unknown=() if is_named else odd,
        evidence=(
            *entries(dossier, group.lines, odd, "culprit" if is_named else "unknown"),
            *entries(dossier, group.lines, (*victims, *waiting), "victim"),
            *(Evidence(None, None, f"silent {rank}: no counters of it") for rank in group.missing),
        ),
        alternatives=(Alternative(alternative, RULE),) if alternative and is_named else (),
    )
    return Claim(finding, missing=group.missing)


def _called(group: Counters, work: int) -> str:
    return f"#{work} of group {group.name}"


def _verb(ranks: tuple[int, ...], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many
