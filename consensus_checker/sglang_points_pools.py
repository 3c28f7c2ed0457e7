"""What is looked at of other pools: of states, of single tokens, and of pages that ranks own by turns.

Pools of sliding windows consist of paged allocators, which are looked at where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from consensus_checker import sglang_kinds as kinds
from consensus_checker.sglang_hooks import Point
from consensus_checker.sglang_paths import ALLOCATORS, POOLS

STATES = f"{ALLOCATORS}mamba.MambaSlotAllocator."
TOKENS = f"{ALLOCATORS}token.TokenToKVPoolAllocator."
ENDS = f"{ALLOCATORS}unified_sub_pool.MultiEndedAllocator."
BY_TURNS = f"{ALLOCATORS}page_interleave.PageInterleavePoolAllocator."


def _slots(path: str, purpose: str) -> tuple[Point, ...]:
    """Of an allocator whose unit is a slot: how many are wanted, had and given back."""
    return (
        Point(
            path + "alloc",
            kinds.ALLOC,
            {
                "purpose": f"'{purpose}'",
                "pages_wanted": "need_size",
                "pages": "0 if result is None else len(result)",
                "device_pages_free": "_h_free",
            },
            before={"_h_free": "self.available_size()"},
            part=POOLS,
        ),
        Point(
            path + "free",
            kinds.FREE,
            {
                "purpose": f"'{purpose}'",
                "tokens": "free_index.numel()",
                "device_pages_free": "self.available_size()",
            },
            part=POOLS,
        ),
    )


SIDE_POOLS: Sequence[Point] = (
    *_slots(STATES, "state"),
    *_slots(TOKENS, "token"),
    # What of these is free depends on its neighbour, and takes a while to count.
    Point(
        ENDS + "alloc",
        kinds.ALLOC,
        {
            "purpose": "'sub_pool'",
            "pages_wanted": "need_size",
            "pages": "0 if result is None else len(result)",
        },
        part=POOLS,
    ),
    *(
        Point(
            ENDS + name,
            kinds.ALLOC,
            {"purpose": f"'sub_pool {name}'", "pages": "0 if result is None else len(result)"},
            part=POOLS,
        )
        for name in ("alloc_extend", "alloc_decode")
    ),
    # Which rank owns a page follows from the page at which its chain begins, here or on the host.
    Point(
        BY_TURNS + "alloc_extend",
        kinds.OWN_PAGES,
        {
            "owners": "list(rotation_bases)",
            "tokens": "0 if result is None else len(result)",
            "tokens_wanted": "extend_num_tokens",
            "owner_pages_free": "_h_free",
        },
        before={"_h_free": "self.class_free_page_counts()"},
        part=POOLS,
    ),
)
