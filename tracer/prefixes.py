"""Which prefixes prompts have in common, and how often each was served, and computed.

A page's digest is chained: it names the page and all before it. So pages make a tree, and a prompt is a
path in it. The tree is put together from what the scheduler's records name: the pages that an insert
brings, the first page that a match misses, and, where the log has it, the last page that it finds.

    page   1        40        90           page digests of an insert, one behind the other
           |- system |- turn 1 |           <- a node that a match ends at
                     |- other turn 1 |     <- its parent is the page at which the match ended

A log that does not name the page at which a match ended can still name the node. A node keeps its end for
life: where the node is known the page is; where it is not, the page is one that can be told only if there is
no other at that depth. Requests for which it can't be told are left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracer.account import lacking, split_digests
from tracer.log import LaneLog
from tracer.served import TIERS, RequestHits, Source

PREFIXES_MAX = 20
# Of two prefixes with more than this share of their tokens in common, only the one above is listed.
COMMON_SHARE_MAX = 1 / 2
# Pages that may be the one that a match ended at; with more of them nobody looks which it is.
CANDIDATES_MAX = 64
ROOT = ""


@dataclass(slots=True)
class Pages:
    """Every page that was named, of all replicas: digests are the run's.

    Attributes:
        parents: digest -> digest of the page before it, `ROOT`, or None where nobody could tell.
        depths: digest -> pages up to its end.
        at: (namespace, depth) -> pages there.
    """

    parents: dict[str, str | None] = field(default_factory=dict)
    depths: dict[str, int] = field(default_factory=dict)
    at: dict[tuple[str, int], list[str]] = field(default_factory=dict)

    def add(self, digest: str, parent: str | None, depth: int, namespace: str) -> None:
        """Take a page up, or learn which page is before one that is there.

        Only the page right before it can be: so no way up is ever a circle, whatever a log says.
        """
        if self.depths.get(digest, depth) != depth or (parent and self.depths.get(parent) != depth - 1):
            parent = None
        if digest not in self.depths:
            self.depths[digest] = depth
            self.parents[digest] = parent
            self.at.setdefault((namespace, depth), []).append(digest)
        elif self.parents[digest] is None:
            self.parents[digest] = parent

    def up_to(self, digest: str, depth: int) -> str | None:
        """The page at `depth` on the way to `digest`; None where the way is not known that far up."""
        found: str | None = digest
        while found and self.depths[found] > depth:
            found = self.parents[found]
        return found


@dataclass(slots=True)
class _Prompt:
    """A request's path as far as it is known.

    Attributes:
        tip: its deepest page that is known, at `depth`.
        matched: the page at which its last match ended, and the pages up to there; None: not known.
        pages: whole pages of the prompt.
        key: what it is known by: its id, which may be used again, and when it was received.
    """

    namespace: str
    pages: int
    key: tuple[str, int, int] = ("", 0, 0)
    tip: str | None = ROOT
    depth: int = 0
    matched: tuple[str | None, int] = (ROOT, 0)


@dataclass(slots=True)
class Paths:
    """One replica's prompts as paths, read from its scheduler's records.

    Attributes:
        is_whole: the log begins at its beginning; else pages may be there that it has not named.
        prompts: request id -> the last one that had it.
        received: every one.
        ends: node -> its last page.
        spans: prefetch -> its request, and the pages before its span.
    """

    pages: Pages
    page_tokens: int
    is_whole: bool = True
    prompts: dict[str, _Prompt] = field(default_factory=dict)
    received: list[_Prompt] = field(default_factory=list)
    ends: dict[int, str] = field(default_factory=dict)
    inserting: dict[str, int] = field(default_factory=dict)
    spans: dict[int, tuple[str, int]] = field(default_factory=dict)

    def read(self, lane: LaneLog) -> None:
        """Follow the scheduler's records.

        Raises:
            HitsError: one lacks a field that is needed.
        """
        handlers = {
            "request": self._request,
            "match": self._match,
            "insert": self._insert,
            "prefetch_submit": self._submit,
            "prefetch_insert": self._prefetch_insert,
        }
        find = handlers.get
        seq = 0
        try:
            for record in lane.records():
                if handler := find(record["kind"]):
                    seq = record["seq"]
                    handler(record)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise lacking(lane, seq, error) from None

    def tips(self) -> dict[tuple[str, int, int], tuple[str, bool]]:
        """Id, step and time of a request -> the last page of its prompt that is known, and whether it is the
        last one.

        Without those whose path is not known up to the root.
        """
        found: dict[tuple[str, int, int], tuple[str, bool]] = {}
        # Whether the way up from a page ends at the root.
        whole: dict[str, bool] = {ROOT: True}
        for prompt in self.received:
            tip = None if prompt.tip is None else self.pages.up_to(prompt.tip, prompt.pages)
            if tip is not None and self._is_whole(tip, whole):
                found[prompt.key] = tip, prompt.depth >= prompt.pages
        return found

    def _is_whole(self, tip: str, whole: dict[str, bool]) -> bool:
        passed = []
        step: str | None = tip
        while step is not None and step not in whole:
            passed.append(step)
            step = self.pages.parents[step]
        answer = step is not None and whole[step]
        whole.update(dict.fromkeys(passed, answer))
        return answer

    def _request(self, record: Mapping[str, Any]) -> None:
        pages = record["input_tokens"] // self.page_tokens
        rid = record["rid"]
        key = rid, record["step"], record["time_ns"]
        prompt = self.prompts[rid] = _Prompt(record.get("namespace") or "", pages, key)
        self.received.append(prompt)

    def _match(self, record: Mapping[str, Any]) -> None:
        prompt = self.prompts.get(record["rid"])
        if prompt is None:
            return
        depth = (record["device_tokens"] + record["host_tokens"]) // self.page_tokens
        missed = _digest(record.get("miss_digest"))
        hit = self._hit(record, prompt, depth, missed)
        node = record.get("node")
        if hit and type(node) is int:
            self.ends[node] = hit
        prompt.matched = (hit, depth)
        if depth + bool(missed) < prompt.depth:
            # It knows more already: it has been retracted, and what it had was lost.
            return
        if missed:
            self.pages.add(missed, hit, depth + 1, prompt.namespace)
        prompt.tip, prompt.depth = (missed, depth + 1) if missed else (hit, depth)

    def _hit(self, record: Mapping[str, Any], prompt: _Prompt, depth: int, missed: str) -> str | None:
        """The page at which a match ended."""
        if not depth:
            return ROOT
        if told := _digest(record.get("hit_digest")):
            self.pages.add(told, None, depth, prompt.namespace)
            return told
        if prompt.tip and depth <= prompt.depth:
            return self.pages.up_to(prompt.tip, depth)
        if known := self.pages.parents.get(missed):
            return known
        end = self.ends.get(record["node"])
        if end is not None and self.pages.depths[end] == depth:
            return end
        return self._only(self.pages.at.get((prompt.namespace, depth), ()))

    def _only(self, candidates: Sequence[str], below: str = ROOT) -> str | None:
        """The only one of these pages, of those that stand below `below`; None where there are more."""
        if not self.is_whole:
            return None
        if below and len(candidates) <= CANDIDATES_MAX:
            depth = self.pages.depths[below]
            candidates = [page for page in candidates if self.pages.up_to(page, depth) in (below, None)]
        return candidates[0] if len(candidates) == 1 else None

    def _insert(self, record: Mapping[str, Any]) -> None:
        rid = record["rid"]
        prompt = self.prompts.get(rid)
        if prompt is None:
            return
        if record.get("phase") == "call":
            self.inserting[rid] = record["tokens"] // self.page_tokens
            return
        new = split_digests(record.get("new_digests"))
        end = self.inserting.pop(rid, record.get("tokens", 0) // self.page_tokens)
        node = record.get("node")
        if new:
            self._grow(prompt, new, end - len(new), _digest(record.get("parent_digest")))
            if type(node) is int:
                self.ends[node] = new[-1]
        elif (last := self.ends.get(record["node"], ROOT)) and self.pages.depths[last] == end > prompt.depth:
            prompt.tip, prompt.depth = last, end

    def _grow(self, prompt: _Prompt, new: Sequence[str], before: int, told: str) -> None:
        """Pages that a prompt has brought, behind its first `before` ones."""
        parent = told or self._page_at(prompt, before)
        for depth, digest in enumerate(new, before + 1):
            self.pages.add(digest, parent, depth, prompt.namespace)
            parent = digest
        if before + len(new) >= prompt.depth:
            prompt.tip, prompt.depth = new[-1], before + len(new)

    def _page_at(self, prompt: _Prompt, depth: int) -> str | None:
        """The page of a prompt at `depth`; others may have brought it while this one was computed."""
        if depth == 0:
            return ROOT
        if prompt.tip is None:
            return None
        if depth <= prompt.depth:
            return self.pages.up_to(prompt.tip, depth)
        return self._only(self.pages.at.get((prompt.namespace, depth), ()), prompt.tip)

    def _submit(self, record: Mapping[str, Any]) -> None:
        prompt = self.prompts.get(record["rid"])
        if prompt is not None and record["outcome"] == "issued":
            self.spans[record["op"]] = record["rid"], prompt.matched[1]

    def _prefetch_insert(self, record: Mapping[str, Any]) -> None:
        new = split_digests(record.get("new_digests"))
        rid, first = self.spans.get(record["op"], ("", 0))
        if not new or rid not in self.prompts:
            return
        before = first + record["completed_tokens"] // self.page_tokens - len(new)
        self._grow(self.prompts[rid], new, before, _digest(record.get("parent_digest")))
        if type(record.get("node")) is int:
            self.ends[record["node"]] = new[-1]


def _digest(value: Any) -> str:
    """A digest, "" where there is none."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a digest")
    return value or ROOT


@dataclass(frozen=True, slots=True)
class _Shared:
    """A prefix where sharing branches: no longer one is shared by as many requests."""

    digest: str
    pages: int
    requests: int
    above: frozenset[str]

    @property
    def weight(self) -> int:
        """Pages that it has in all of its requests together."""
        return self.pages * self.requests

    def common_share(self, other: _Shared) -> float:
        """Of the pages of the two, in all their requests, the share that belongs to both."""
        if other.digest in self.above:
            common = self.requests * other.pages
        elif self.digest in other.above:
            common = other.requests * self.pages
        else:
            return 0.0
        return common / (self.weight + other.weight - common)


def prefix_rows(
    pages: Pages,
    page_tokens: int,
    requests: Sequence[tuple[RequestHits, str | None]],
    *,
    source: Source | None = None,
) -> list[dict[str, Any]]:
    """The top shared prefixes: those where sharing branches, as no longer one is shared by as many requests.

    In order of tokens times requests; one that has more than half of that in common with a row above is
    left out, so that a long conversation does not fill the table with its turns.

    Args:
        page_tokens: 1 where counts are blocks.
        requests: each with the last page of its prompt; without one it shares nothing that is known.
        source: what they are from, if not from own logs.
    """
    shared, branch_of = _branches(pages, [tip for _request, tip in requests if tip])
    listed: list[_Shared] = []
    for each in sorted(shared.values(), key=lambda each: (-each.weight, each.pages, each.digest)):
        if all(each.common_share(other) <= COMMON_SHARE_MAX for other in listed):
            listed.append(each)
            if len(listed) == PREFIXES_MAX:
                break
    members: dict[str, list[RequestHits]] = {each.digest: [] for each in listed}
    for request, tip in requests:
        branch = shared.get(branch_of.get(tip, ROOT)) if tip else None
        if branch is not None:
            for digest in (branch.digest, *branch.above):
                if digest in members:
                    members[digest].append(request)
    return [_row(each.digest, each.pages * page_tokens, members[each.digest], source) for each in listed]


def _branches(pages: Pages, tips: Sequence[str]) -> tuple[dict[str, _Shared], dict[str, str]]:
    """The prefixes where sharing branches, and page -> the deepest of them on the way to it, or `ROOT`."""
    counts: dict[str, int] = {}
    for tip in tips:
        counts[tip] = counts.get(tip, 0) + 1
    reached = _with_ancestors(pages, counts)
    longest: dict[str, int] = {}
    for page in reversed(reached):
        parent = pages.parents[page] or ROOT
        counts[parent] = counts.get(parent, 0) + counts[page]
        longest[parent] = max(longest.get(parent, 0), counts[page])
    branch_of: dict[str, str] = {ROOT: ROOT}
    shared: dict[str, _Shared] = {}
    for page in reached:
        above = branch_of[pages.parents[page] or ROOT]
        branch_of[page] = above
        if counts[page] > max(1, longest.get(page, 0)):
            ancestors = shared[above].above | {above} if above else frozenset[str]()
            shared[page] = _Shared(page, pages.depths[page], counts[page], ancestors)
            branch_of[page] = page
    return shared, branch_of


def _with_ancestors(pages: Pages, tips: Iterable[str]) -> list[str]:
    """These pages and all before them, from the root down."""
    found: set[str] = set()
    for tip in tips:
        step: str = tip
        while step and step not in found:
            found.add(step)
            step = pages.parents[step] or ROOT
    return sorted(found, key=lambda page: (pages.depths[page], page))


def _row(digest: str, tokens: int, members: Sequence[RequestHits], source: Source | None) -> dict[str, Any]:
    """How the tokens of one prefix were served to the requests that share it."""
    parts = dict.fromkeys((*TIERS, "untiered", "computed"), 0)
    computed: list[tuple[int, int]] = []
    for request in members:
        at = 0
        for part in parts:
            end = min(tokens, at + getattr(request, part))
            parts[part] += end - at
            if part == "computed" and end > at:
                computed.append((at, end))
            at = end
    whole = tokens * len(members)
    cached = sum(parts[part] for part in (*TIERS, "untiered"))
    row: dict[str, Any] = {"prefix": digest}
    if source is None:
        del parts["untiered"]
        row |= {"tokens": tokens, "requests": len(members), "input_tokens": whole, **parts}
        row["computed_again"] = parts["computed"] - _covered(computed)
        row["unplaced"] = whole - cached - parts["computed"]
    else:
        # Only sources of lookups in blocks have keys.
        row |= {"blocks": tokens, "lookups": len(members), "input_blocks": whole}
        row |= dict.fromkeys(TIERS) if not source.tiers_are_told else {tier: parts[tier] for tier in TIERS}
        row |= {"untiered": parts["untiered"], "computed": None, "computed_again": None}
        row["uncached"] = whole - cached
    row["hit_rate"] = round(cached / whole, 6) if whole else 0.0
    return row


def _covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Tokens that lie in at least one of these."""
    covered = 0
    behind = 0
    for start, end in sorted(intervals):
        covered += max(0, end - max(start, behind))
        behind = max(behind, end)
    return covered


def chained(pages: Pages, keys: Iterable[int]) -> str:
    """Take up a prompt whose blocks have chained keys; its last page."""
    parent = ROOT
    for depth, key in enumerate(keys, 1):
        name = str(key)
        pages.add(name, parent, depth, "")
        parent = name
    return parent
