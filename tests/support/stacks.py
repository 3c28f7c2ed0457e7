"""Stacks of several ranks as a test reads them: one line a thread, one text a look.

    0  all_reduce  writing_check hiradix_cache.py:700, check_hicache_events hiradix_cache.py:900
    1  get         recv_requests scheduler.py:1210
    2  -           load_back hiradix_cache.py:640                              state=active+gil
    0:prefetch  get  prefetch_thread_func cache_controller.py:300

The second word is what the thread is in; own frames follow, innermost first. Files are `look1/rank0.txt`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tracer.importers.dossier import At, Dossier, Frame, Line, Stack, Who
from tracer.importers.stacks import MAIN_THREAD, signature_of, wait_of

MEETING = "torch/distributed/distributed_c10d.py"
INNER = {
    "get": (Frame("wait", "threading.py", 327), Frame("get", "queue.py", 171)),
    "lock": (Frame("acquire", "threading.py", 180),),
    "device": (Frame("cudaStreamSynchronize", "libcudart.so.12", 0, True),),
    "read": (Frame("pread64", "libc.so.6", 0, True),),
    "gil": (Frame("take_gil", "libpython3.11.so", 0, True),),
    "-": (),
}


def dossier_of(
    *looks: str,
    places: Mapping[int, Mapping[str, int]] | None = None,
    events: tuple[str, ...] = (),
    tool: str = "py_spy",
) -> Dossier:
    """Rows as the importers would have made them; each look in a folder of its own."""
    into = Dossier()
    for number, look in enumerate(looks, start=1):
        files: dict[int, int] = {}
        for line in filter(None, map(str.strip, look.splitlines())):
            words = line.split()
            state = "idle"
            if words[-1].startswith("state="):
                state = words.pop()[len("state=") :]
            rank_text, _, name = words[0].partition(":")
            rank = int(rank_text)
            if rank not in files:
                files[rank] = into.begin(f"look{number}/rank{rank}.txt")
                into.files[files[rank]].format = tool
            own = [_frame(text.split()) for text in " ".join(words[2:]).split(",") if text.strip()]
            frames = (*_inner(words[1]), *own, *_outer(name))
            at = At(files[rank], 1 + len(into.stacks))
            who = Who(rank, 100 + rank, "", dict((places or {}).get(rank, {})))
            thread = name or MAIN_THREAD
            stack = Stack(
                who,
                number - 1,
                thread_number(rank, thread),
                thread,
                state,
                frames,
                wait_of(frames, state),
                signature_of(frames),
                at,
            )
            into.stacks.append(stack)
    for event in events:
        into.lines.append(Line(Who(0), event, {}, At(0, 1)))
    return into


def thread_number(rank: int, thread: str) -> int:
    """A thread's number, the same in every look."""
    return 1000 * (rank + 1) + sum(map(ord, thread)) % 997


def _inner(word: str) -> tuple[Frame, ...]:
    return INNER[word] if word in INNER else (Frame(word, MEETING, 3000),)


def _outer(name: str) -> tuple[Frame, ...]:
    if not name:
        return ()
    return (Frame("run", "threading.py", 982), Frame("_bootstrap", "threading.py", 1002))


def _frame(words: list[str]) -> Frame:
    file, _, line = words[1].partition(":")
    return Frame(words[0], file, int(line))
