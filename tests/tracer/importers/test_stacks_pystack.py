from __future__ import annotations

from pathlib import Path

from tracer.importers import stacks_pystack
from tracer.importers.dossier import Dossier, FileRead, Frame
from tracer.importers.sniff import File

DUMP = """\
Traceback for thread 9158 (prefetch) [Has the GIL] (most recent call last):
    (C) File "../sysdeps/unix/sysv/linux/x86_64/clone3.S", line 81, in __clone3 (/usr/lib/libc.so.6)
    (Python) File "/usr/lib/python3.11/threading.py", line 1002, in _bootstrap
        self._bootstrap_inner()
      Arguments:
        self: <Thread at 0x7f4ef27a39d0>
    (Python) File "/srv/app/cache.py", line 8, in drain
        return prompt_of_somebody()
      Locals:
        prompt: "never keep"
    (C) File "./Modules/timemodule.c", line 2159, in pysleep (inlined) (/opt/libpython3.11.so.1.0)

Traceback for thread 9156 (python) [] (most recent call last):
    (Python) File "/srv/app/server.py", line 28, in <module>
        threading.Event().wait(60)
    (Python) File "/usr/lib/python3.11/threading.py", line 331, in wait
        gotit = waiter.acquire(True, timeout)
"""


def read(tmp_path: Path, text: str) -> Dossier:
    path = tmp_path / "dump.txt"
    path.write_text(text)
    into = Dossier()
    stacks_pystack.read(File(path, "dump.txt"), into.begin("dump.txt"), into)
    return into


def test_threads_are_turned_and_the_main_one_is_told_by_its_outermost_frame(tmp_path: Path) -> None:
    found = read(tmp_path, DUMP)
    assert [(s.who.pid, s.thread_id, s.thread, s.state, s.wait, s.signature) for s in found.stacks] == [
        (9156, 9158, "prefetch", "active+gil", "running", ("srv/app/cache.py:8 drain",)),
        (9156, 9156, "MainThread", "", "queue", ("srv/app/server.py:28 <module>",)),
    ]
    assert (Frame("pysleep", "./Modules/timemodule.c", 2159, True)) == found.stacks[0].frames[0]
    assert [FileRead("dump.txt", "pystack", 1, 17, 0)] == found.files
    assert "never keep" not in repr(found)
    assert "somebody" not in repr(found)


def test_a_second_dump_is_a_second_look(tmp_path: Path) -> None:
    assert [(s.sample, s.thread_id) for s in read(tmp_path, DUMP + DUMP).stacks] == [
        (0, 9158),
        (0, 9156),
        (1, 9158),
        (1, 9156),
    ]


def test_pythons_own_traceback_is_somebody_elses(tmp_path: Path) -> None:
    text = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\nValueError: x\n'
    found = read(tmp_path, text)
    assert [FileRead("dump.txt", None, 0, 4, 4)] == found.files
