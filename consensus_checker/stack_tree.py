"""The main threads of all ranks in one tree: where they are together, and where they part.

    ranks 0-3
    event_loop_overlap  scheduler.py:1100
    get_next_batch      scheduler.py:1310,1342
      0    check_hicache_events  hiradix_cache.py:900
           writing_check  hiradix_cache.py:700
           = waits in all_reduce
      1-3  recv_requests  scheduler.py:1210
           = waits in broadcast

Outermost frame first, own code alone, plain text of at most 80 columns. A function is one node whatever line
a rank is at, and both lines are told: two branches of a function are often one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from consensus_checker.stack_looks import WRAPPER, Scope, Stand, scopes
from consensus_checker.stack_words import DOING
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier

WIDTH = 80
# A deeper step to the right would leave no room for names.
INDENT_MAX = 36
LINES_TOLD = 3
BRANCHES_MAX = 8
CHAIN_FRAMES_MIN = 2


@dataclass(slots=True)
class Node:
    """One function on the way of some ranks.

    Attributes:
        function: as `file.py func`; empty at the root.
        lines: of the file, where these ranks are in it.
        ends: what those ranks do whose way ends here, by words.
    """

    function: str
    ranks: list[int] = field(default_factory=list)
    lines: set[int] = field(default_factory=set)
    children: dict[str, Node] = field(default_factory=dict)
    ends: dict[str, list[int]] = field(default_factory=dict)

    def by_size(self) -> list[Node]:
        return sorted(self.children.values(), key=lambda node: (-len(node.ranks), node.ranks[0]))


def tree(scope: Scope) -> Node:
    """The merged stacks of one scope's main threads, without ranks whose only look is an old one."""
    root = Node("")
    for stand in scope.fresh:
        node = root
        node.ranks.append(stand.rank)
        for entry in reversed(stand.place.path):
            file, _, func = entry.rpartition(" ")
            name, _, line = file.rpartition(":")
            node = node.children.setdefault(f"{name} {func}", Node(f"{name} {func}"))
            node.ranks.append(stand.rank)
            node.lines.add(int(line) if line.isdecimal() else 0)
        node.ends.setdefault(_ending(stand), []).append(stand.rank)
    return root


def merged_tree(dossier: Dossier, *, lines_max: int = 1000, width: int = WIDTH) -> list[str]:
    """All scopes' trees as text; frames are left out, the inner ones last, where they would not fit.

    Empty where no rank has a stack.
    """
    found = scopes(dossier)
    whole = [line for scope in found for line in _scope_lines(scope, None, width)]
    if len(whole) <= lines_max:
        return whole
    for frames_max in (12, 8, 6, 4, 3, CHAIN_FRAMES_MIN):
        shorter = [line for scope in found for line in _scope_lines(scope, frames_max, width)]
        if len(shorter) <= lines_max:
            return shorter
    rest = len(shorter) - lines_max + 1
    return [*shorter[: max(0, lines_max - 1)], f".. {rest} more lines"]


def rank_set(ranks: Sequence[int]) -> str:
    """`0-2,5`."""
    return ranks_text(ranks).partition(" ")[2].replace(", ", ",")


def _scope_lines(scope: Scope, frames_max: int | None, width: int) -> list[str]:
    root = tree(scope)
    if not root.ranks:
        return []
    name = f"{scope.name}: " if scope.name else ""
    lines = [f"{name}{ranks_text(root.ranks)}", *_node_lines(root, 0, frames_max)]
    if scope.missing:
        lines.append(f"no stack of {ranks_text(scope.missing)} at the end")
    return [line if len(line) <= width else f"{line[: width - 2]}.." for line in lines]


def _node_lines(node: Node, indent: int, frames_max: int | None) -> Iterator[str]:
    """A chain of frames up to where ranks part, then each branch under its ranks."""
    pad = " " * indent
    chain: list[Node] = []
    while len(node.children) == 1 and not node.ends:
        (node,) = node.children.values()
        chain.append(node)
    for text in _shortened(chain, frames_max):
        yield f"{pad}{text}"
    if not node.children and len(node.ends) == 1:
        yield f"{pad}= {next(iter(node.ends))}"
        return
    inner = min(indent + 2, INDENT_MAX)
    branches = node.by_size()
    shown = branches[:BRANCHES_MAX]
    labels = [rank_set(branch.ranks) for branch in shown]
    labels += [rank_set(ranks) for ranks in node.ends.values()]
    wide = min(max(map(len, labels)), 12)
    step = min(inner + wide + 2, INDENT_MAX + 14)
    for branch, label in zip(shown, labels, strict=False):
        holder = Node("", branch.ranks, set(), {branch.function: branch})
        yield from _labelled(label, list(_node_lines(holder, step, frames_max)), inner, step)
    for words, ranks in node.ends.items():
        yield from _labelled(rank_set(ranks), [f"{' ' * step}= {words}"], inner, step)
    if len(branches) > len(shown):
        rest = sorted(rank for branch in branches[BRANCHES_MAX:] for rank in branch.ranks)
        yield f"{' ' * inner}.. {len(branches) - len(shown)} more ways, {ranks_text(rest)}"


def _labelled(label: str, lines: Sequence[str], indent: int, step: int) -> Iterator[str]:
    """The first line with its ranks in front, above it where they are too many for that."""
    head = f"{' ' * indent}{label}"
    if len(head) + 2 > step:
        yield head
        yield from lines
        return
    yield f"{head:<{step}}{lines[0].lstrip()}"
    yield from lines[1:]


def _shortened(chain: Sequence[Node], frames_max: int | None) -> Iterator[str]:
    """The frames of a chain; wrappers go first where there is no room for all, then the outer ones."""
    kept = chain
    if frames_max is not None and len(chain) > frames_max:
        named = [node for node in chain if not WRAPPER.fullmatch(node.function.rpartition(" ")[2])]
        kept = (named or chain)[-frames_max + 1 :]
        yield f".. {len(chain) - len(kept)} frames"
    for node in kept:
        yield _frame_text(node)


def _frame_text(node: Node) -> str:
    file, _, func = node.function.rpartition(" ")
    lines = ",".join(map(str, sorted(node.lines)[:LINES_TOLD]))
    more = ",.." if len(node.lines) > LINES_TOLD else ""
    return f"{func}  {file}:{lines}{more}"


def _ending(stand: Stand) -> str:
    words = f"waits in {stand.place.call}" if stand.is_waiting else DOING[stand.doing].removesuffix(" in")
    moved = {True: ", not moved between looks", False: ", moved between looks", None: ""}[stand.is_same]
    return f"{words}{moved}"
