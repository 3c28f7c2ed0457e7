"""The same functions under SGLang's own decorator: the same events in the same order, the same errors.

It runs in an environment that has SGLang 0.5.23, which `HICACHE_PEERS` names.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEERS = os.environ.get("HICACHE_PEERS", "")
PYTHON = Path(PEERS) / "bin" / "python"

pytestmark = pytest.mark.skipif(
    not PEERS or not PYTHON.is_file(), reason="HICACHE_PEERS names no environment with SGLang"
)

# SGLang's module alone: its package wants much that has nothing to do with it.
SCRIPT = '''
import importlib.util, json, os, queue, sys, threading, types
from pathlib import Path
os.environ["SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"] = "1"
site = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
def load(name, path):
    spec = importlib.util.spec_from_file_location(name, site / path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
load("sglang.srt.environ", "srt/environ.py")
theirs = load("sglang.srt.utils.rank_consensus_checker", "srt/utils/rank_consensus_checker.py")
from consensus_checker import consensus as ours

SOURCE = """
from dataclasses import dataclass
@dataclass
class Params:
    rid: str
    key: list
class Tree:
    size = 3
    @rank_consensus(same_params=["params.rid", "len(params.key)"], same_results=["result[0]", "max(result)"])
    def match(self, params, limit=5): return [len(params.key), limit]
    @rank_consensus(same_params=True, same_results=True)
    def evict(self, count, *more, kind="a", **rest):
        self.drop(count)
        return count
    @rank_consensus
    def drop(self, count):
        if count > 2: raise LookupError(count)
    @rank_consensus(same_params=True)
    @classmethod
    def inside(cls, a): return a
    @classmethod
    @rank_consensus(same_params=True)
    def outside(cls, a): return a
    @rank_consensus(same_params=True)
    @staticmethod
    def static(a, b=2): return a
    @staticmethod
    @rank_consensus(same_params=True)
    def plain(a, b=2): return a
    @rank_consensus(same_params="missing")
    def no_name(self): pass
    @rank_consensus(same_params=["self.nothing"])
    def no_attribute(self): pass
    @rank_consensus(same_params=["self size"])
    def no_expression(self): pass
    @rank_consensus(same_results=["result.x"])
    def no_result(self): return 1
    @rank_consensus(same_params=["[one for one in key if one]", "(lambda a: a)(key)"], same_results=False)
    def gather(self, key): return key
@rank_consensus(same_params=None, same_results=["sorted(set(result))", "result == [2, 1]"])
def order(items): return items
def work(outcome):
    tree = Tree()
    for call in (
        lambda: tree.match(Params("r1", [1, 2])), lambda: tree.match(params=Params("r2", []), limit=7),
        lambda: tree.evict(1), lambda: tree.evict(2, 3, 4, kind="b", other=5), lambda: tree.evict(9),
        lambda: tree.inside(1), lambda: Tree.outside(2), lambda: Tree.static(3), lambda: tree.plain(4, b=5),
        lambda: tree.no_name(), lambda: tree.no_attribute(), lambda: tree.no_expression(),
        lambda: tree.no_result(), lambda: tree.gather([1, 0]), lambda: order([2, 1]), lambda: tree.match(),
        lambda: tree.match(1, 2, 3, 4), lambda: assert_same("took %d of %s", 1, "a"),
        lambda: assert_same("%d", "a"), lambda: in_a_thread(lambda: tree.drop(1)),
    ):
        try:
            outcome(repr(call()))
        except BaseException as error:
            outcome(type(error).__name__)
def in_a_thread(function):
    import threading
    found = []
    def run():
        try:
            function()
        except BaseException as error:
            found.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise found[0]
"""

def run(module, events):
    outcomes = []
    names = {"rank_consensus": module.rank_consensus, "assert_same": module.assert_same, "__name__": "tree"}
    exec(SOURCE, names)
    return names, outcomes

names, their_outcomes = run(theirs, [])
theirs._q, theirs._scheduler_thread = queue.Queue(), threading.current_thread()
names["work"](their_outcomes.append)
their_events = []
for text in list(theirs._q.queue):
    words = text.split()
    if len(words) > 1 and words[1] in ("called", "returns"):
        their_events.append([words[0], "call" if words[1] == "called" else "return"])
    else:
        their_events.append(["assert_same", text])
values = [text.split("=", 1)[1] for text in theirs._q.queue if "=" in text]

names, our_outcomes = run(ours, [])
os.environ["HICACHE_TRACE_DIR"] = sys.argv[1]
ours.configure([[0, 1]], rank=0, watcher=None, warn=lambda text: None)
names["work"](our_outcomes.append)
ours.shutdown()
from tracer.log import find_logs
(lane,) = [lane for lane in find_logs(sys.argv[1]).lanes if lane.lane == "scheduler"]
our_events = [
    [one["kind"], one.get("phase", "took 1 of a")] for one in lane.records() if one.get("phase") != "raise"
]
print(json.dumps([their_events, our_events, their_outcomes, our_outcomes]))
'''


def test_events_outcomes_and_errors_are_those_of_sglang(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(PYTHON), "-c", SCRIPT, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    their_events, our_events, their_outcomes, our_outcomes = json.loads(done.stdout.splitlines()[-1])
    assert len(their_events) > 25
    assert our_events == their_events
    assert our_outcomes == their_outcomes
    assert {"NameError", "AttributeError", "SyntaxError", "TypeError", "RuntimeError", "LookupError"} <= set(
        our_outcomes
    )
