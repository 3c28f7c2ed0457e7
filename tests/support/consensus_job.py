"""One of three ranks that record rounds of calls over one store.

    python -m tests.support.consensus_job FILE '[[1, "", "live"], ...]'     with a RANK

A round: who is odd in it (-1 for nobody), the folder of its records ("" for none of its own), who watches.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

from consensus_checker import configure, rank_consensus, shutdown

SIZE = 3
# Said on stderr behind each round.
END_OF_ROUND = "-- end of round --"


def main(file: str, rounds: list[tuple[int, str, Any]]) -> None:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=SIZE)
    group = dist.new_group(list(range(SIZE)), backend="gloo")
    # As SGLang's own groups are.
    coordinator = SimpleNamespace(unique_name="tp:0", cpu_group=group)

    @rank_consensus(same_params=True)
    def admit(rid: str, tokens: list[int]) -> None:
        pass

    for odd, folder, watcher in rounds:
        if folder:
            os.environ["HICACHE_TRACE_DIR"] = folder
        configure([None, coordinator, dist.group.WORLD], watcher=watcher)
        for number in range(20):
            admit(f"r{number}", [number, 1 if (rank, number) == (odd, 7) else 0])
        dist.barrier()
        shutdown()
        dist.barrier()
        print(END_OF_ROUND, file=sys.stderr, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
