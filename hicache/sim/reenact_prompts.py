"""Prompts made up from a log: not what was asked, but something with the same shared prefixes.

A log has no token. It has digests of pages, each over everything before it, so a page's digest says where it
stands. Whoever gives equal digests equal pages, and different ones different pages, gets a tree that parts
where the real one parted:

    insert r7:  parent a1, new b2 c3     ->   root - a1 - b2 - c3
    match r9:   hit b2, miss d4          ->   root - a1 - b2 - d4     shares two pages with r7
    r9 beyond d4                         ->   pages of its own: no record has ever looked at them
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from hicache.core import TOKEN_BYTES, Request

# Hex characters of one digest.
WIDTH = 16
ROOT = ""

Record = Mapping[str, Any]


class Prompts:
    """Requests of one rank's log, each with tokens that were made up for it.

    Args:
        records: of the scheduler, in order.
        page_tokens: tokens a page.
        has_answers: whether generated tokens enter the tree.
    """

    def __init__(self, records: Sequence[Record], page_tokens: int, *, has_answers: bool) -> None:
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._has_answers = has_answers
        self._parent: dict[str, str] = {}
        # Order of a request -> the page of it that stands deepest, as far as any record says.
        self._ends: dict[int, set[str]] = {}
        self._read(records)

    def request(self, record: Record) -> Request:
        """The request that a record of one stands for."""
        input_tokens, output_tokens = int(record["input_tokens"]), int(record["output_tokens"])
        order = int(record["order"])
        answer_tokens = output_tokens if self._has_answers else 0
        tokens = self._tokens(order, (input_tokens + answer_tokens) * TOKEN_BYTES)
        end = input_tokens * TOKEN_BYTES
        return Request(
            str(record["rid"]),
            tokens[:end],
            tokens[end:],
            output_tokens,
            str(record.get("conversation", "")),
            int(record.get("arrival_ms") or 0),
            int(record.get("priority") or 0),
            str(record.get("namespace", "")),
        )

    def _tokens(self, order: int, size: int) -> bytes:
        path = max((self._path(end) for end in self._ends.get(order, ())), key=len, default=[])
        pages = [_page(digest, self._page_bytes) for digest in path]
        known = b"".join(pages)[:size]
        return known + _page(f"request {order}", size - len(known))

    def _path(self, digest: str) -> list[str]:
        """Digests from the root to this page; empty where the log does not say what is above it."""
        path = []
        while digest != ROOT:
            path.append(digest)
            # A damaged log may have a digest below itself.
            if len(path) > len(self._parent) or digest not in self._parent:
                return []
            digest = self._parent[digest]
        return path[::-1]

    def _read(self, records: Sequence[Record]) -> None:
        order_of: dict[str, int] = {}
        submitted: dict[str, str] = {}
        for record in records:
            rid, kind = record.get("rid"), record["kind"]
            if not isinstance(rid, str):
                continue
            if kind == "request":
                order_of[rid] = int(record["order"])
                continue
            pages: list[str] = []
            if kind == "match":
                pages = [str(record.get("hit_digest", ROOT)), *_split(record.get("miss_digest"))]
                if record.get("purpose") == "submit":
                    submitted[rid] = pages[0]
            elif kind == "insert" and record.get("phase") == "return":
                pages = [str(record.get("parent_digest", ROOT)), *_split(record.get("new_digests"))]
            elif kind == "prefetch_insert":
                new = [*_split(record.get("new_digests"))]
                # Behind pages that have come by another way nothing says where these begin.
                above = [] if record.get("matched_tokens") else [submitted.get(rid, ROOT)]
                pages = [*above, *new] if new else []
            for upper, lower in pairwise(pages):
                self._parent.setdefault(lower, upper)
            if kind == "match" and record.get("kv_digest"):
                # Not below the others page by page, but deeper: others have told the way there.
                pages.append(str(record["kv_digest"]))
            if rid in order_of:
                ends = {page for page in pages[-2:] if page != ROOT}
                self._ends.setdefault(order_of[rid], set()).update(ends)


def _split(digests: Any) -> Iterator[str]:
    text = digests if isinstance(digests, str) else ""
    return (text[at : at + WIDTH] for at in range(0, len(text), WIDTH))


def _page(name: str, size: int) -> bytes:
    """Bytes that no other name gets, as many as are wanted."""
    seed = hashlib.blake2b(name.encode(), digest_size=32).digest()
    return (seed * (size // len(seed) + 1))[:size]
