from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tracer.importers import stacks_faulthandler
from tracer.importers.dossier import Dossier, FileRead
from tracer.importers.sniff import File

DUMP = """\
Timeout (0:00:30)!
Thread 0x00007f4ef1efb6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/queue.py", line 171 in get
  File "/srv/app/cache.py", line 88 in prefetch_thread_func
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f4ef2ffd6c0 (most recent call first):
  File "/srv/app/deep.py", line 3 in deep
  ...

Thread 0x00007f4ef2ffd6c1 (most recent call first):
  <no Python frame>

Current thread 0x00007f4ef9c50b80 (most recent call first):
  File "/opt/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3151 in broadcast
  File "/srv/app/scheduler.py", line 1210 in recv_requests
  File "<frozen runpy>", line 88 in _run_code
"""
BROADCAST = ("srv/app/scheduler.py:1210 recv_requests",)


def read(tmp_path: Path, text: str) -> Dossier:
    path = tmp_path / "dump.txt"
    path.write_text(text)
    into = Dossier()
    stacks_faulthandler.read(File(path, "dump.txt"), into.begin("dump.txt"), into)
    return into


def test_threads_have_no_names_and_the_last_is_the_main_one(tmp_path: Path) -> None:
    found = read(tmp_path, DUMP)
    assert [(s.thread_id, s.thread, s.state, s.wait, s.signature, s.at.record) for s in found.stacks] == [
        (0x7F4EF1EFB6C0, "", "", "queue", ("srv/app/cache.py:88 prefetch_thread_func",), 2),
        (0x7F4EF2FFD6C0, "", "", "unknown", ("srv/app/deep.py:3 deep",), 9),
        (0x7F4EF2FFD6C1, "", "", "unknown", (), 13),
        (0x7F4EF9C50B80, "MainThread", "current", "collective", BROADCAST, 16),
    ]
    assert [FileRead("dump.txt", "faulthandler", 1, 19, 0)] == found.files


def test_names_that_lie_beside_a_dump_are_taken(tmp_path: Path) -> None:
    names = {"0x00007f4ef1efb6c0": "prefetch", "0x00007f4ef9c50b80": "MainThread", "0x7f4ef2ffd6c0": "io"}
    (tmp_path / "dump.threads.json").write_text(json.dumps(names))
    assert [s.thread for s in read(tmp_path, DUMP).stacks] == ["prefetch", "io", "", "MainThread"]


def test_names_that_can_not_be_read_are_told_and_the_dump_is(tmp_path: Path) -> None:
    (tmp_path / "dump.threads.json").write_text('{"0x1": 7}')
    found = read(tmp_path, DUMP)
    assert found.files[0].notes == ["the names of its threads in dump.threads.json can't be read"]
    assert len(found.stacks) == 4


def test_a_thread_that_comes_again_begins_another_look(tmp_path: Path) -> None:
    text = DUMP.replace("Timeout (0:00:30)!\n", "")
    assert [s.sample for s in read(tmp_path, text + text).stacks] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_python_3_14_says_names_and_frames_of_c(tmp_path: Path) -> None:
    text = """\
Fatal Python error: Aborted

Thread 0x00007f4ef1efb6c0 [prefetch] (most recent call first):
  File "/srv/app/cache.py", line ??? in drain

Current thread's C stack trace (most recent call first):
  Binary file "/usr/lib/libpython3.14.so", at _Py_DumpStack+0x3b [0x7f]
  <truncated rest of calls>

Extension modules: torch._C, numpy (total: 2)
"""
    found = read(tmp_path, text)
    assert [(s.thread, s.frames[0].line) for s in found.stacks] == [("prefetch", 0)]
    assert [(line.event, dict(line.fields)) for line in found.lines] == [
        ("fatal_python_error", {"error": "Aborted"})
    ]
    assert found.files[0].unparsed == 0


def test_pythons_own_traceback_is_somebody_elses(tmp_path: Path) -> None:
    text = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\n'
    assert [FileRead("dump.txt", None, 0, 3, 3)] == read(tmp_path, text).files


JOB = """\
import faulthandler, queue, sys, threading
def prefetch_thread_func():
    ready.set()
    queue.Queue().get()
ready = threading.Event()
threading.Thread(target=prefetch_thread_func, daemon=True, name="prefetch").start()
ready.wait()
def scheduler():
    faulthandler.dump_traceback(file=sys.stdout, all_threads=True)
scheduler()
"""


def test_a_real_dump_is_read_to_its_last_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", JOB], capture_output=True, text=True, timeout=100, check=True
    )
    found = read(tmp_path, done.stdout)
    prefetch, main = found.stacks
    assert "prefetch_thread_func" in prefetch.signature[-1]
    assert (main.thread, main.signature) == ("MainThread", ("<string>:9 scheduler", "<string>:10 <module>"))
    assert found.files[0].unparsed == 0
