"""What `rank_consensus` costs a call, beside SGLang's own.

    python -m benchmarks.consensus                       ours
    HICACHE_PEERS=VENV python -m benchmarks.consensus    and SGLang's, both in that environment's Python

Calls are recorded into a ring, as they are when nobody says otherwise; SGLang's go into its queue, and nobody
compares them. Rounds of all sides alternate, and the best of each counts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import types
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 40
TOKENS = 40_000
SWITCH = "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"
# The budgets.
SHARE_MAX = 0.2
LIST_NS_MAX = 1_000_000

Side = tuple[Callable[[], object], int]


class Key:
    """Its text is its first tokens, as that of SGLang's key is."""

    __slots__ = ("extra_key", "token_ids")

    def __init__(self, token_ids: Any) -> None:
        self.token_ids = token_ids
        self.extra_key = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return f"Key({self.token_ids[:10]}...)"


class Request:
    """Its text is all of its tokens, as SGLang's is."""

    def __init__(self, rid: str, token_ids: Any) -> None:
        self.rid = rid
        self.origin_input_ids = token_ids

    def __repr__(self) -> str:
        return f"Request(rid={self.rid}, input_ids={self.origin_input_ids})"


@dataclass
class Params:
    key: Key
    req: Request | None = None


def plain(node: int, pages: int, tokens: int) -> int:
    return node


def match(params: Params) -> int:
    return 64


def rows(module: Any) -> dict[str, Side]:
    """The same calls under either decorator."""
    same = {"same_params": True, "same_results": True}
    small = module.rank_consensus(**same)(plain)
    long = module.rank_consensus(same_params=["params"], same_results=True)(match)
    by_rid = module.rank_consensus(same_params=["params.req.rid", "len(params.key)"])(match)
    ids = list(range(TOKENS))
    as_list, as_array = (Params(Key(tokens), Request("r7", tokens)) for tokens in (ids, array("q", ids)))
    return {
        "three integers in, one out": (lambda: small(1, 2, 3), 500),
        "a request's id and the length of its key": (lambda: by_rid(as_list), 500),
        "a key and its request of 40,000 tokens, lists": (lambda: long(as_list), 10),
        "a key and its request of 40,000 tokens, arrays": (lambda: long(as_array), 10),
    }


def sglang() -> Any:
    """Its module alone: the package wants much that has nothing to do with it."""
    package = importlib.util.find_spec("sglang")
    assert package is not None and package.submodule_search_locations
    site = Path(package.submodule_search_locations[0])
    for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []
    _load("sglang.srt.environ", site / "srt" / "environ.py")
    checker: Any = _load(
        "sglang.srt.utils.rank_consensus_checker", site / "srt" / "utils" / "rank_consensus_checker.py"
    )
    return checker


def _load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def best_ns(sides: dict[str, Side], after: Callable[[], object]) -> dict[str, float]:
    found: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, (call, count) in sides.items():
            call()
            start = time.perf_counter_ns()
            for _ in range(count):
                call()
            spent = (time.perf_counter_ns() - start) / count
            found[name] = min(spent, found.get(name, spent))
            after()
    return found


def measure(*, has_sglang: bool) -> dict[str, float]:
    os.environ[SWITCH] = "1"
    from consensus_checker import consensus

    own = rows(consensus)
    unconfigured = consensus.rank_consensus(same_params=True, same_results=True)(plain)
    bare: Side = (lambda: plain(1, 2, 3), 500)
    found = best_ns({"plain": bare, "unconfigured": (lambda: unconfigured(1, 2, 3), 500)}, int)
    other: dict[str, Side] = {}
    forget: Callable[[], object] = int
    if has_sglang:
        theirs = sglang()
        # Its queue and its thread are set as `configure` sets them.
        theirs._q, theirs._scheduler_thread = queue.Queue(), threading.current_thread()
        other = rows(theirs)
        forget = theirs._q.queue.clear
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HICACHE_TRACE_DIR"] = folder
        consensus.configure([[0, 1]], rank=0, watcher=None, store=Met())
        try:
            for name, side in own.items():
                # Row by row, so that each side's caches are warm.
                sides = {f"ours: {name}": side}
                if name in other:
                    sides[f"sglang: {name}"] = other[name]
                found |= best_ns(sides, forget)
            return found
        finally:
            consensus.shutdown()


class Met:
    """A store in which the partner has said what there is to say, so that the digest is the usual one."""

    def __init__(self) -> None:
        from tracer.keyed import best_algorithm

        self._values: dict[str, Any] = {}
        self._partner = json.dumps({"groups": [[0, 1]], "algorithm": best_algorithm()})

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value

    def get(self, key: str) -> Any:
        return self._partner if key.endswith("hello/1") else self._values.get(key)


def table(found: dict[str, float]) -> None:
    base = found["plain"]
    print("| one call, of it what recording takes | ns | of SGLang's |")
    print("|---|---:|---:|")
    print(f"| decorated, nothing configured | {found['unconfigured'] - base:,.0f} | |")
    for name, spent in found.items():
        side, _, row = name.partition(": ")
        if side != "ours":
            continue
        own, theirs = spent - base, found.get(f"sglang: {row}", 0.0) - base
        part = f"{own / theirs:.3f} of {theirs:,.0f}" if theirs > 0 else ""
        if row.startswith("three"):
            part += f" (at most {SHARE_MAX})"
        if "lists" in row:
            part += f" (at most {LIST_NS_MAX:,} ns)"
        print(f"| {row} | {own:,.0f} | {part.strip()} |")


def main() -> int:
    if "--in-peers" in sys.argv:
        print(json.dumps(measure(has_sglang=True)))
        return 0
    peers = os.environ.get("HICACHE_PEERS", "")
    python = Path(peers) / "bin" / "python"
    # A process of its own in any case: nothing of this one is decorated.
    words = ["-m", "benchmarks.consensus", "--in-peers"]
    if peers and python.is_file():
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run([str(python), *words], capture_output=True, text=True, env=env, cwd=ROOT)
        if not done.returncode:
            table(json.loads(done.stdout.splitlines()[-1]))
            return 0
        print(f"not run: SGLang's decorator: {done.stderr.splitlines()[-1:]}", file=sys.stderr)
    else:
        print("not run: SGLang's decorator; HICACHE_PEERS names no environment with SGLang", file=sys.stderr)
    table(measure(has_sglang=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
