"""One of two ranks that vote over gloo; rank 1 leaves one vote out, and every later answer is another vote's.

    python -m tests.support.skewed_votes --votes 400 --skip 200 --rate 1000       with what torchrun sets

Votes have one number each, so that gloo pairs the wrong ones without a word: how many were, is printed at the
end. With `--skip -1` nothing is left out. As JSON: what the watch has told, and how long after the vote.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from typing import Any

os.environ["SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"] = "1"

import torch
import torch.distributed as dist

from consensus_checker import configure, rank_consensus, shutdown

ODD = 1
# A vote of a rank without a partner ends the run.
LIMIT = timedelta(seconds=8)


@rank_consensus(same_params=["rid"])
def vote(rid: str, number: int) -> int:
    """Is everybody ready for this request? The answer is made of both ranks' numbers."""
    ballot = torch.tensor([number])
    dist.all_reduce(ballot)
    return int(ballot.item())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--votes", type=int, required=True)
    parser.add_argument("--skip", type=int, required=True)
    parser.add_argument("--rate", type=float, default=1000.0, help="votes a second")
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=LIMIT)
    rank = dist.get_rank()
    told: list[tuple[float, str]] = []
    configure([dist.group.WORLD], watcher=watcher(told))
    wrong = 0
    skipped_s = 0.0
    # The last vote has no partner, and none is wanted.
    votes = [number for number in range(options.votes) if rank != ODD or number != options.skip]
    for at, number in enumerate(votes):
        if number == options.skip + 1:
            skipped_s = time.monotonic()
        if at == options.votes - 1 and options.skip >= 0:
            break
        wrong += vote(f"r{number}", number) != 2 * number
        time.sleep(1 / options.rate)
    shutdown()
    after_ms = (told[0][0] - skipped_s) * 1e3 if told and skipped_s else None
    print(json.dumps({"wrong": wrong, "told": [text for _, text in told], "after_ms": after_ms}))
    dist.destroy_process_group()


def watcher(told: list[tuple[float, str]]) -> Any:
    """A live watcher whose words are kept, with the time at which they came."""
    from consensus_checker.live import Watcher

    def make(**given: Any) -> Watcher:
        given["tell"] = lambda text: told.append((time.monotonic(), text))
        return Watcher(**given)

    return make


if __name__ == "__main__":
    main()
