"""Who waits for whom, and who is at the root of it. Nodes are ranks or lanes: anything ordered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Node = TypeVar("Node", bound=Any)


def roots(edges: Mapping[Node, Iterable[Node]]) -> list[tuple[Node, ...]]:
    """Groups of those that wait for nobody outside themselves, in order.

    A single one is one that everybody else waits for, directly or not; more than one are a circle, in
    which each is both cause and victim.

        0 -> 3,  1 -> 3,  2 -> 0        roots: (3,)
        0 -> 1,  1 -> 0,  2 -> 0        roots: (0, 1)
    """
    nodes = sorted({*edges, *(target for targets in edges.values() for target in targets)})
    component = _components(nodes, {node: sorted(set(edges.get(node, ()))) for node in nodes})
    leaving = {
        component[node]
        for node in nodes
        for target in edges.get(node, ())
        if component[target] != component[node]
    }
    groups: dict[int, list[Node]] = {}
    for node in nodes:
        groups.setdefault(component[node], []).append(node)
    return sorted(tuple(group) for name, group in groups.items() if name not in leaving)


def _components(nodes: list[Node], edges: Mapping[Node, list[Node]]) -> dict[Node, int]:
    """Node -> number of its strongly connected component (Tarjan, without recursion)."""
    number: dict[Node, int] = {}
    low: dict[Node, int] = {}
    component: dict[Node, int] = {}
    stack: list[Node] = []
    for start in nodes:
        if start in number:
            continue
        work = [(start, 0)]
        while work:
            node, at = work.pop()
            if at == 0:
                number[node] = low[node] = len(number)
                stack.append(node)
            else:
                low[node] = min(low[node], low[edges[node][at - 1]])
            for position in range(at, len(edges[node])):
                target = edges[node][position]
                if target not in number:
                    work += [(node, position + 1), (target, 0)]
                    break
                if target not in component:
                    low[node] = min(low[node], number[target])
            else:
                if low[node] == number[node]:
                    while True:
                        member = stack.pop()
                        component[member] = number[node]
                        if member == node:
                            break
    return component
