"""What an external tier without a limit gives, written to be obviously right: a set of prefixes.

No tree, no tiers, no nodes. Whatever was computed once is there for ever, page by page, by all the tokens up
to its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hicache.core import TOKEN_BYTES, Request


@dataclass
class SeenPrefixes:
    """Pages that somebody has had before.

    Args:
        page_tokens: tokens a page.
        least_pages: a shorter prefix is not worth fetching.
    """

    page_tokens: int
    least_pages: int = 1
    _seen: set[bytes] = field(default_factory=set)

    def request(self, request: Request) -> int:
        """Cached pages of this request, which then leaves its prompt and its answer behind.

        At least one token is computed. The last token of an answer is never fed back, so it is in no page.
        """
        usable_pages = (request.input_tokens - 1) // self.page_tokens
        cached = 0
        while cached < usable_pages and self._prefix(request.tokens, cached + 1) in self._seen:
            cached += 1
        whole = request.tokens + request.output[:-TOKEN_BYTES]
        for pages in range(1, len(whole) // (self.page_tokens * TOKEN_BYTES) + 1):
            self._seen.add(self._prefix(whole, pages))
        return cached if cached >= self.least_pages else 0

    def _prefix(self, tokens: bytes, pages: int) -> bytes:
        return tokens[: pages * self.page_tokens * TOKEN_BYTES]
