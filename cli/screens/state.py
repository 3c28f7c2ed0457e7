"""One rank's control plane at a step, and two ranks' trees side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from cli.screens.table import counted, table
from cli.theme import BAD, DOUBT, GOOD, HEADING, headline, paragraph

if TYPE_CHECKING:
    from hicache.sim.reenact_state import NodeState, State

NODES_MAX = 40
QUEUED_MAX = 4
LABELS = {"vote": "to vote", "write": "writes", "load": "loads", "prefetch": "reads", "backup": "backups"}


def state_lines(state: State, width: int) -> list[Text]:
    """Pools, queues, and the tree from its root, children below their parent."""
    if state.done.limits:
        return [
            *headline("UNKNOWN", f"what rank {state.rank} held can't be made again", DOUBT),
            *_unsure([state]),
        ]
    nodes = counted(len(state.nodes), "node")
    lines: list[Text] = headline(
        "STATE", f"rank {state.rank} at the end of step {state.step:,}: {nodes}", HEADING
    )
    pools = [[each.name, each.capacity, each.free, each.evictable, each.protected] for each in state.pools]
    lines += [Text(), *table(("pool", "pages", "free", "evictable", "protected"), pools, width=width)]
    for name, items in state.queues.items():
        if items:
            told = "; ".join(map(_queued, items[:QUEUED_MAX]))
            more = f"; {len(items) - QUEUED_MAX} more" if len(items) > QUEUED_MAX else ""
            lines += paragraph(LABELS[name], told + more)
    if state.nodes:
        rows = [[indent + str(node.node), _span(node), *_about(node)] for indent, node in _in_order(state)]
        heads = ("node", "pages", "tiers", "locks", "host locks", "hits", "backup")
        lines += [Text(), *table(heads, rows[:NODES_MAX], width=width)]
        if len(rows) > NODES_MAX:
            lines.append(Text(f"(and {counted(len(rows) - NODES_MAX, 'more node')}; --json has them all)"))
    return [*lines, *_unsure([state])]


def diff_lines(first: State, second: State, width: int) -> list[Text]:
    """Nodes that are not alike on two ranks."""
    if lacking := [each for each in (first, second) if each.done.limits]:
        ranks = " and ".join(str(each.rank) for each in lacking)
        noun = "rank" if len(lacking) == 1 else "ranks"
        return [
            *headline("UNKNOWN", f"what {noun} {ranks} held can't be made again", DOUBT),
            *_unsure(lacking),
        ]
    pairs = differing(first, second)
    at = f"step {min(first.step, second.step):,}"
    ranks = f"ranks {first.rank} and {second.rank}"
    if not pairs:
        word, style = (
            ("ALIKE", GOOD) if not (first.undetermined or second.undetermined) else ("ALIKE SO FAR", DOUBT)
        )
        lines: list[Text] = headline(word, f"{ranks} have the same {len(first.nodes):,} nodes at {at}", style)
    else:
        lines = headline("DIFFERENT", f"{ranks} differ in {counted(len(pairs), 'node')} at {at}", BAD)
        rows = [[number, _words(one), _words(other)] for number, one, other in pairs[:NODES_MAX]]
        heads = ("node", f"rank {first.rank}", f"rank {second.rank}")
        lines += [Text(), *table(heads, rows, width=width, cell_max=36)]
        if len(pairs) > NODES_MAX:
            lines.append(Text(f"(and {counted(len(pairs) - NODES_MAX, 'more node')}; --json has them all)"))
    return [*lines, *_unsure([first, second])]


def differing(first: State, second: State) -> list[tuple[int, NodeState | None, NodeState | None]]:
    """Number of a node, and what each of two ranks has of it; None where it has none."""
    one = {node.node: node for node in first.nodes}
    other = {node.node: node for node in second.nodes}
    return [
        (number, one.get(number), other.get(number))
        for number in sorted(one.keys() | other.keys())
        if one.get(number) != other.get(number)
    ]


def _in_order(state: State) -> list[tuple[str, NodeState]]:
    """Every node behind its parent, with the spaces in front of it."""
    below: dict[int, list[NodeState]] = {}
    for node in state.nodes:
        below.setdefault(node.parent, []).append(node)
    found: list[tuple[str, NodeState]] = []
    waiting = [("", node) for node in reversed(below.get(0, []))]
    while waiting:
        indent, node = waiting.pop()
        found.append((indent, node))
        waiting += [(indent + " ", child) for child in reversed(below.get(node.node, []))]
    return found


def _span(node: NodeState) -> str:
    return f"{node.first_page}-{node.first_page + node.pages - 1}"


def _about(node: NodeState) -> list[Any]:
    backup = "pending" if node.is_pending else ""
    return [node.tiers or "-", node.locks, node.host_locks, node.hits, backup]


def _words(node: NodeState | None) -> str:
    if node is None:
        return "not there"
    locks = f", locks {node.locks}" if node.locks else ""
    host = f", host locks {node.host_locks}" if node.host_locks else ""
    return f"{_span(node)} {node.tiers or '-'}{locks}{host}, hits {node.hits}" + (
        ", pending" if node.is_pending else ""
    )


def _queued(item: dict[str, Any]) -> str:
    names = {"op": "#{}", "rid": "{}", "nodes": "node {}", "pages": "{} pages", "read": "{} read"}
    parts = []
    for name, shape in names.items():
        value = item.get(name)
        if value is not None:
            parts.append(shape.format(",".join(map(str, value)) if isinstance(value, list) else value))
    return " ".join(parts) + (" done" if item.get("done") else "")


def _unsure(states: Sequence[State]) -> list[Text]:
    lines: list[Text] = []
    for limit in dict.fromkeys(state.undetermined for state in states if state.undetermined):
        lines += paragraph("unsure", limit, DOUBT)
    return lines
