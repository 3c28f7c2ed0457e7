"""How a prefill batch is cut: so many prompt tokens a batch, cuts only where a page ends.

budget 256, page 64      A: 100 tokens to go   counts as 128, fits
                         B: 300 tokens to go   gets the 128 that are left, goes on in the next batch
"""

from __future__ import annotations


class Budget:
    """Prompt tokens that one prefill batch may still compute.

    A request is charged whole pages, as its memory is. Whoever does not fit takes what is left, so a batch
    has at most one request that is cut, and it is the last.

    Args:
        tokens: of the whole batch; 0 is no limit.
        page_tokens: tokens a page.
    """

    __slots__ = ("_page_tokens", "_tokens_left")

    def __init__(self, tokens: int, page_tokens: int) -> None:
        self._tokens_left = tokens or None
        self._page_tokens = page_tokens

    @property
    def is_spent(self) -> bool:
        """Is there less than a page left? Then nobody else may even be asked."""
        return self._tokens_left is not None and self._tokens_left < self._page_tokens

    def take(self, tokens: int) -> int:
        """Of a prompt with `tokens` to go, those that this batch computes: all, or whole pages of them."""
        if self._tokens_left is None:
            return tokens
        page_tokens = self._page_tokens
        charged = -(-tokens // page_tokens) * page_tokens
        if charged > self._tokens_left:
            tokens = charged = self._tokens_left // page_tokens * page_tokens
        assert charged > 0, f"{tokens} tokens asked for, {self._tokens_left} left: nothing to take"
        self._tokens_left -= charged
        return tokens
