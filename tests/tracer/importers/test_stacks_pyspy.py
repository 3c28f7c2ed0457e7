from __future__ import annotations

import gzip
from pathlib import Path

from tracer.importers import stacks_pyspy
from tracer.importers.dossier import Dossier, FileRead
from tracer.importers.sniff import File

DUMP = """\
Process 310: python -c import secret
print("a (b)")

Process 12: nobody
Python v3.12.3 (/usr/bin/python3.12)

Thread 310 (idle): "MainThread"
    0x7f4ef94a3f16 (libc.so.6)
    c10d::Work::wait(std::chrono::duration<long, 1>) (libtorch_cpu.so)
    all_reduce (torch/distributed/distributed_c10d.py:3000)
        Arguments:
            self: <Cache at 0x7f4ef271b710>
            prompt: "never keep (this.py:1)"
        Locals:
            n: 12
    HiCache.writing_check (hiradix_cache.py:700)
    event_loop_overlap (scheduler.py:1100)
Thread 0x7f08 (active+gil): "Thread-4 (prefetch_thread_func)"
    wait (threading.py:359)
    prefetch_thread_func (cache_controller.py:300)
Thread 355 (idle)
    <module> (<string>:1)
"""


def read(tmp_path: Path, text: str, name: str = "dump.txt") -> Dossier:
    path = tmp_path / name
    path.write_text(text)
    into = Dossier()
    stacks_pyspy.read(File(path, name), into.begin(name), into)
    return into


def test_every_thread_of_a_dump_is_read_and_no_argument_kept(tmp_path: Path) -> None:
    found = read(tmp_path, DUMP)
    told = [
        (s.who.pid, s.thread_id, s.thread, s.state, s.wait, s.signature, s.at.record) for s in found.stacks
    ]
    assert told == [
        (
            *(310, 310, "MainThread", "idle", "collective"),
            ("hiradix_cache.py:700 writing_check", "scheduler.py:1100 event_loop_overlap"),
            7,
        ),
        (
            *(310, 0x7F08, "Thread-4 (prefetch_thread_func)", "active+gil", "queue"),
            ("cache_controller.py:300 prefetch_thread_func",),
            18,
        ),
        (310, 355, "", "idle", "unknown", ("<string>:1 <module>",), 21),
    ]
    assert [FileRead("dump.txt", "py_spy", 1, 22, 0)] == found.files
    assert "never keep" not in repr(found)
    assert "secret" not in repr(found)


def test_native_frames_have_no_line_or_a_source_in_c(tmp_path: Path) -> None:
    dump = DUMP.replace("0x7f4ef94a3f16 (libc.so.6)", "_ctypes_callproc (callproc.c:1262)")
    frames = read(tmp_path, dump).stacks[0].frames
    assert [(frame.func, frame.is_native) for frame in frames[:3]] == [
        ("_ctypes_callproc", True),
        ("c10d::Work::wait(std::chrono::duration<long, 1>)", True),
        ("all_reduce", False),
    ]


SERVER = """\
[2031-02-03 04:10:08 TP5] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)
[2031-02-03 04:10:09 TP5] Pyspy dump for PID 310 (py-spy dump --pid 310):
Process 310: sglang::scheduler_TP5
Python v3.12.3 (/usr/bin/python3.12)

Thread 310 (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:3000)
    writing_check (hiradix_cache.py:700)
[2031-02-03 04:10:09 DP1 TP6] Pyspy dump for PID 311:
Process 311: python3 -m sglang.launch_server
Python v3.12.3 (/usr/bin/python3.12)

Thread 311 (idle): "MainThread"
    broadcast (torch/distributed/distributed_c10d.py:2800)
[2031-02-03 04:10:09 TP7] Pyspy failed (py-spy dump --pid 312). Error: Permission Denied: secret
[2031-02-03 04:10:13] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
"""


def test_dumps_in_a_servers_log_have_the_place_that_the_server_says(tmp_path: Path) -> None:
    found = read(tmp_path, SERVER)
    assert [(s.who.pid, dict(s.who.places)) for s in found.stacks] == [
        (310, {"tp": 5}),
        (311, {"dp": 1, "tp": 6}),
    ]
    assert [(line.event, dict(line.who.places), dict(line.fields)) for line in found.lines] == [
        ("py_spy_dump", {"tp": 5}, {}),
        ("py_spy_dump", {"dp": 1, "tp": 6}, {}),
        ("py_spy_failed", {"tp": 7}, {"reason": "permission denied"}),
    ]
    assert (found.files[0].records, found.files[0].unparsed) == (16, 2)
    assert "secret" not in repr(found)


def test_a_title_that_contradicts_the_server_gives_no_place(tmp_path: Path) -> None:
    found = read(tmp_path, SERVER.replace("scheduler_TP5", "scheduler_TP4"))
    assert found.stacks[0].who.places == {}
    assert found.files[0].notes == ["process 310: its title says tp4, the line before it tp5"]


def test_subprocesses_are_apart_and_a_second_dump_is_a_second_look(tmp_path: Path) -> None:
    child = (
        "\n" + "-" * 80 + "\nProcess 77: x\nPython v3.11.7 (p)\nParent Process 310: y\n\n"
        'Thread 77 (idle): "MainThread"\n    f (a.py:1)\n'
    )
    found = read(tmp_path, DUMP + child + DUMP)
    assert [(s.who.pid, s.sample) for s in found.stacks if s.thread == "MainThread"] == [
        *((310, 0), (77, 0), (310, 1)),
    ]


def test_dumps_that_a_launcher_has_mixed_line_by_line_come_apart(tmp_path: Path) -> None:
    one, two = DUMP.splitlines(), DUMP.replace("310", "900").splitlines()
    mixed = "\n".join(
        f"[rank{rank}]: {line}" for pair in zip(one, two, strict=True) for rank, line in enumerate(pair)
    )
    found = read(tmp_path, mixed)
    assert [(s.who.rank, s.who.pid, len(s.frames)) for s in found.stacks] == [
        *((0, 310, 5), (0, 310, 2), (0, 310, 1), (1, 900, 5), (1, 900, 2), (1, 900, 1)),
    ]


def test_a_containers_log_and_colours_are_unwrapped(tmp_path: Path) -> None:
    lines = "\n".join(f'{{"log":{line!r},"stream":"stderr"}}'.replace("'", '"') for line in _plain())
    coloured = "\n".join(f"\x1b[32m2031-02-03T04:05:06.1Z stderr F {line}\x1b[0m" for line in _plain())
    for text in (lines, coloured):
        assert [(s.who.pid, s.signature) for s in read(tmp_path, text).stacks] == [(7, ("a.py:1 f",))]


def _plain() -> list[str]:
    return ["Process 7: x", "Python v3.11.7 (p)", "Thread 7 (idle)", "    f (a.py:1)"]


def test_sections_of_torchs_debug_server_say_the_rank(tmp_path: Path) -> None:
    text = (
        f"1 of 2 ranks answered\n=== Rank 3: host-a:25999 ===\n{DUMP}\n=== Rank 4: host-b:1 ===\nError: 500\n"
    )
    found = read(tmp_path, text)
    assert {(3, "host-a")} == {(s.who.rank, s.who.host) for s in found.stacks}
    assert found.files[0].unparsed == 2


def test_a_log_without_a_dump_is_nobodys(tmp_path: Path) -> None:
    found = read(tmp_path, "hello\n\nProcess started\n    f (a.py:1)\n" * 50)
    assert [FileRead("dump.txt", None, 0, 150, 150)] == found.files
    assert found.stacks == []


def test_somebody_elses_lines_inside_a_dump_are_counted_and_the_dump_goes_on(tmp_path: Path) -> None:
    text = DUMP.replace(
        "    event_loop", "[2031-01-01 00:00:00 TP1] Decode batch, #running-req: 1\n    event_loop"
    )
    found = read(tmp_path, text)
    assert (found.files[0].unparsed, len(found.stacks[0].signature)) == (1, 2)


def test_a_line_of_gigabytes_costs_no_more_than_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "dump.txt.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"Process " + b"9" * (3 << 20) + b"\n" + DUMP.encode())
    into = Dossier()
    stacks_pyspy.read(File(path, "dump.txt.gz"), into.begin("dump.txt.gz"), into)
    assert len(into.stacks) == 3


def test_a_file_that_unwraps_to_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(DUMP.encode() + b"x" * (17 << 20)))
    into = Dossier()
    stacks_pyspy.read(File(path, "bomb.gz"), into.begin("bomb.gz"), into)
    assert into.files[0].refused == "bomb.gz unwraps to more than 200 times its size: refused"
