"""Everything that `benchmarks/README.md` reports, in one run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks import (
    agentic,
    check_scale,
    commands,
    consensus,
    conversation,
    evictions,
    exports,
    flight_recorder,
    hits,
    live,
    otlp,
    recorder,
    store,
    transfers,
    tree,
    volume,
    whole_run,
)

TRACE = "traces/mooncake_conversation_b512.jsonl.gz"


def main() -> int:
    commands.main()
    tree.main()
    recorder.main()
    consensus.main()
    live.main()
    whole_run.main()
    volume.main()
    check_scale.main()
    store.main()
    hits.main()
    exports.main()
    flight_recorder.main()
    transfers.main()
    otlp.main()
    agentic.main()
    folder = os.environ.get("HICACHE_DATA", "")
    path = Path(folder) / TRACE
    if not folder or not path.is_file():
        print(f"not run: conversation trace; HICACHE_DATA names no folder with {TRACE}", file=sys.stderr)
        return 0
    conversation.main(path)
    evictions.main(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
