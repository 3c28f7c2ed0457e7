"""Match and insert on the runtime's own tree: agents' conversations, page 64.

32 conversations of 40 rounds grow to 40,000 tokens each. Every round matches its prompt, then inserts
prompt and answer; a tenth of each round's growth is the answer. `split` cuts new nodes where the prompt
ends, as a server does, which makes twice as many of them; `whole` does not.

Beside them, in the same run, one `bytes.startswith` over the same prompts: the speed of comparing memory,
which no tree that looks at every token can pass. Packing and naming pages are apart: they are paid once a
page, when it first comes, and not for a prefix that is known already. All times are the thread's own: it
waits for nothing but the processor, which others may be using too.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from hicache.control.keys import chain_digests, chain_hashes, pack, page_bytes
from hicache.control.tree import Tree

CONVERSATIONS = 32
ROUNDS = 40
TOKENS_MAX = 40_000
TOKENS_A_ROUND = TOKENS_MAX // ROUNDS
ANSWER_TOKENS = TOKENS_A_ROUND // 10
PAGE_TOKENS = 64
PAGE_BYTES = page_bytes(PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Million tokens a second, and how many nodes the tree had in the end."""

    match: float
    insert: float
    memory: float
    nodes: int


def conversations() -> list[list[bytes]]:
    """Conversation -> what it has come to after each round, each a prefix of the next."""
    chance = random.Random("tree benchmark")
    whole = [chance.randbytes(TOKENS_MAX * 4) for _ in range(CONVERSATIONS)]
    return [[text[: TOKENS_A_ROUND * turn * 4] for turn in range(1, ROUNDS + 1)] for text in whole]


def measure(*, is_split: bool) -> Speeds:
    """One pass over all conversations, round by round, as a server would see them."""
    talks = conversations()
    # Copies: comparing a string with itself costs nothing.
    twins = [bytes(bytearray(talk[-1])) for talk in talks]
    tree = Tree(PAGE_BYTES, backup_threshold=0)
    spent = {"match": 0, "insert": 0, "memory": 0}
    clock = time.thread_time_ns
    matched_tokens = inserted_tokens = 0
    next_slot = 0
    for turn in range(ROUNDS):
        for talk, twin in zip(talks, twins, strict=True):
            text = talk[turn]
            pages = len(text) // PAGE_BYTES
            prompt_pages = (TOKENS_A_ROUND * (turn + 1) - ANSWER_TOKENS) // PAGE_TOKENS

            start = clock()
            match = tree.match(text, prompt_pages)
            spent["match"] += clock() - start
            matched_tokens += match.device_pages * PAGE_TOKENS

            known = match.device_pages
            slots = tree.device_slots(match.node) + list(range(next_slot, next_slot + pages - known))
            next_slot += pages - known
            digests = bytes(8 * pages)
            cut = prompt_pages if is_split else 0
            start = clock()
            tree.insert(text, slots, digests, owned_pages=known, counted_pages=0, prompt_pages=cut)
            spent["insert"] += clock() - start
            inserted_tokens += pages * PAGE_TOKENS

            start = clock()
            is_equal = twin.startswith(text)
            spent["memory"] += clock() - start
            assert is_equal
    return Speeds(
        match=1e3 * matched_tokens / spent["match"],
        insert=1e3 * inserted_tokens / spent["insert"],
        memory=1e3 * inserted_tokens / spent["memory"],
        nodes=tree.nodes_created,
    )


def speed(work: Callable[[], object], tokens: int, runs: int = 9) -> float:
    """Million tokens a second, the median of a few runs."""
    seconds = []
    for _ in range(runs):
        start = time.thread_time()
        work()
        seconds.append(time.thread_time() - start)
    return tokens / statistics.median(seconds) / 1e6


def report(name: str, found: list[Speeds]) -> None:
    for what in ("match", "insert"):
        values = sorted(getattr(speeds, what) for speeds in found)
        middle = values[len(values) // 2]
        share = statistics.median(getattr(speeds, what) / speeds.memory for speeds in found)
        print(
            f"  {name}  {what:6} {middle:8.0f}   ({values[0]:.0f} to {values[-1]:.0f} in {len(values)} runs, "
            f"{share:.2f} of comparing memory, {found[0].nodes:,} nodes)"
        )


def main(runs: int = 5) -> None:
    whole = [measure(is_split=False) for _ in range(runs)]
    split = [measure(is_split=True) for _ in range(runs)]
    memory = statistics.median(speeds.memory for speeds in whole + split)
    print("tree, page 64, 32 conversations x 40 rounds to 40,000 tokens (million tokens a second)")
    report("whole", whole)
    report("split", split)
    print(f"  compare memory {memory:8.0f}")
    print("  budget: 1,000 each for whole, 600 each for split")
    tokens = [random.Random("packing").randrange(150_000) for _ in range(TOKENS_MAX)]
    packed = pack(tokens)
    pack_speed = speed(lambda: pack(tokens), TOKENS_MAX)
    hash_speed = speed(
        lambda: chain_hashes(packed, first_page=0, page_size_bytes=PAGE_BYTES, previous=b""), TOKENS_MAX
    )
    digest_speed = speed(
        lambda: chain_digests(packed, first_page=0, page_size_bytes=PAGE_BYTES, previous=b"", key=b"k" * 16),
        TOKENS_MAX,
    )
    print("paid once a token or page, outside the tree (million tokens a second)")
    print(f"  pack           {pack_speed:8.0f}   a list of numbers to u32")
    print(f"  chain_hashes   {hash_speed:8.0f}   SHA-256")
    print(f"  chain_digests  {digest_speed:8.0f}   keyed BLAKE2b")
