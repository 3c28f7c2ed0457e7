"""Match and insert on the runtime's own tree: agents' conversations, page 64.

32 conversations of 40 rounds grow to 40,000 tokens each. Every round matches the whole prompt, then
inserts it. Beside it, in the same run, one `bytes.startswith` over the same prompts: the speed of
comparing memory, which no tree that looks at every token can pass.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from hicache.control.keys import page_bytes
from hicache.control.tree import Tree

CONVERSATIONS = 32
ROUNDS = 40
TOKENS_MAX = 40_000
PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Speeds:
    """Million tokens a second."""

    match: float
    insert: float
    memory: float


def prompts() -> list[list[bytes]]:
    """Conversation -> its prompts, each a prefix of the next."""
    chance = random.Random("tree benchmark")
    whole = [chance.randbytes(TOKENS_MAX * 4) for _ in range(CONVERSATIONS)]
    return [[text[: TOKENS_MAX // ROUNDS * turn * 4] for turn in range(1, ROUNDS + 1)] for text in whole]


def measure() -> Speeds:
    """One pass over all conversations, turn by turn, as a server would see them."""
    talks = prompts()
    # Copies: comparing a string with itself costs nothing.
    twins = [bytes(bytearray(talk[-1])) for talk in talks]
    tree = Tree(page_bytes(PAGE_TOKENS), backup_threshold=0)
    spent = {"match": 0, "insert": 0, "memory": 0}
    clock = time.perf_counter_ns
    matched_tokens = prompt_tokens = 0
    next_slot = 0
    for turn in range(ROUNDS):
        for talk, twin in zip(talks, twins, strict=True):
            prompt = talk[turn]
            pages = len(prompt) // tree.page_size_bytes

            start = clock()
            match = tree.match(prompt, pages)
            spent["match"] += clock() - start
            matched_tokens += match.device_pages * PAGE_TOKENS

            known = match.device_pages
            slots = tree.device_slots(match.node) + list(range(next_slot, next_slot + pages - known))
            next_slot += pages - known
            digests = bytes(8 * pages)
            start = clock()
            tree.insert(prompt, slots, digests, owned_pages=known, counted_pages=0)
            spent["insert"] += clock() - start
            prompt_tokens += pages * PAGE_TOKENS

            start = clock()
            is_equal = twin.startswith(prompt)
            spent["memory"] += clock() - start
            assert is_equal
    return Speeds(
        match=1e3 * matched_tokens / spent["match"],
        insert=1e3 * prompt_tokens / spent["insert"],
        memory=1e3 * prompt_tokens / spent["memory"],
    )


def main(runs: int = 5) -> None:
    found = sorted((measure() for _ in range(runs)), key=lambda speeds: speeds.match)
    middle = found[len(found) // 2]
    spread = f"{found[0].match:.0f} to {found[-1].match:.0f} in {runs} runs"
    print("tree, page 64, 32 conversations x 40 rounds to 40,000 tokens (million tokens a second)")
    print(f"  match            {middle.match:8.0f}   ({spread})")
    print(f"  insert           {middle.insert:8.0f}")
    print(f"  compare memory   {middle.memory:8.0f}   match reaches {middle.match / middle.memory:.2f} of it")
    print("  budget: match at least 322, what SGLang's Rust core does on such a machine")
