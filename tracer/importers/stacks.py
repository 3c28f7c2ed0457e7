"""What the frames of one thread say: what it waits in, where its own code stands, which kind of thread it is.

Frames come from four tools that spell them differently: with and without the class of a function, with the
whole path of a file or its end, with native frames between or without. What is compared across ranks is
therefore made here: of user code alone, the function's bare name, the end of the path, and the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from tracer.importers.dossier import Frame, Stack, Wait

MAIN_THREAD = "MainThread"
# What stands between a program's own code and where it waits.
STDLIB = {
    *("threading", "queue", "_queue", "selectors", "socket", "ssl", "socketserver", "subprocess", "runpy"),
    *("contextlib", "functools", "asyncio", "concurrent", "multiprocessing", "importlib", "logging", "http"),
    *("urllib", "signal", "weakref", "traceback", "faulthandler", "_bootstrap_external", "pickle", "json"),
}
LIBRARIES = {"torch", "zmq", "uvloop", "ray", "numpy"}
INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
PYTHONS = re.compile(r".*/lib(?:64)?/(?:python|pypy)\d[^/]*/")
PATH_PARTS_MAX = 3

MEETS = re.compile(
    r"_?(?:i?send|i?recv|recv_any_source|batch_isend_irecv|(?:send|recv)_object_list|(?:monitored_)?barrier"
    r"|all_reduce\w*|reduce|reduce_scatter\w*|all_gather\w*|gather\w*|scatter\w*|broadcast\w*|all_to_all\w*"
    r"|wait_tensor)"
)
PAIRWISE = re.compile(r"_?(?:batch_)?i?(?:send|recv)(?:_.*)?")
MEETING_FILES = {
    *("distributed_c10d.py", "_functional_collectives.py", "parallel_state.py", "communication_op.py"),
    *("pynccl.py", "custom_all_reduce.py", "quick_all_reduce.py"),
}
NATIVE_MEETS = re.compile(
    r"gloo::|\bgloo_|c10d::\w*(?:Process|Work|Backend)|(?:p?nccl|rccl)(?:All|Broadcast|Reduce|Send|Recv|Group)"
)
DEVICE = re.compile(
    r"(?:cuda|hip|cu|musa|acl)(?:rt)?(?:Stream|Event|Device|Ctx)\w*Synchronize|^(?:cuda|hip|cu)Memcpy"
)
DEVICE_FILES = re.compile(r"torch/(?:cuda|hip|xpu|npu|musa)/")
GIL = re.compile(r"take_gil|PyGILState_Ensure|PyEval_(?:RestoreThread|AcquireThread|AcquireLock)")
READS = re.compile(
    r"^_*(?:libc_)?(?:pread|preadv|pwrite|pwritev|fsync|fdatasync|io_getevents)(?:64)?(?:v2)?\b"
)
STORES = re.compile(r"(?:^|[/_])(?:storage|mooncake|nixl|hf3fs|lmcache|aibrix|eic|redis|boto3|botocore|s3fs)")
LOCKS = re.compile(r"PyThread_acquire_lock|pthread_mutex|pthread_rwlock|sem_(?:timed)?wait")
# (function, file's end) of what waits for work, and of what waits for one other thread.
QUEUES = re.compile(
    r"get \S*queues?\.py|wait \S*threading\.py|(?:select|poll) \S*selectors\.py|accept \S*socket\.py"
    r"|(?:poll|recv\w*) \S*zmq/\S+|(?:_poll|_recv|recv|wait) \S*multiprocessing/connection\.py"
    r"|_worker \S*concurrent/futures/thread\.py|_run_once \S*asyncio/\S+"
)
IDLE = re.compile(r"get \S*queues?\.py|_worker \S*concurrent/futures/thread\.py")
JOINS = re.compile(r"(?:join|_wait_for_tstate_lock|acquire|__enter__) \S*threading\.py")

PREFIX_OF_OWN = re.compile(r"Thread-\d+(?: \(.*\))?")
DIGITS = re.compile(r"\d+")


def wait_of(frames: Sequence[Frame], state: str) -> Wait:
    """What a thread is in, by the frames between its innermost own code and where it stands.

    Args:
        frames: innermost first.
        state: the source's word; a thread of which nothing tells is `running` only where that says so.
    """
    inner = list(_above_own_code(frames))
    own = next((frame for frame in frames if is_own_code(frame)), None)
    if inner and inner[0].is_native and _says(GIL, _leading_natives(inner)):
        return "gil"
    if any(is_meeting(frame) for frame in inner) or (own is not None and is_meeting(own)):
        return "collective"
    if _says(DEVICE, inner) or any(_is_device_wait(frame) for frame in inner):
        return "device"
    texts = [f"{bare(frame.func)} {frame.file}" for frame in inner if not frame.is_native]
    if any(IDLE.fullmatch(text) for text in texts):
        return "queue"
    if (own is not None and STORES.search(package_path(own.file))) or _says(READS, inner):
        return "storage"
    if any(QUEUES.fullmatch(text) for text in texts):
        return "queue"
    if any(JOINS.fullmatch(text) for text in texts) or _says(LOCKS, inner):
        return "lock"
    return "running" if state.startswith("active") else "unknown"


def signature_of(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Frames of a program's own code, innermost first, as `package/file.py:line func`."""
    return tuple(_place(frame) for frame in frames if is_own_code(frame))


def meeting_of(stack: Stack) -> str:
    """The call of a collective that a thread is in, such as `all_reduce`; empty where it is in none."""
    if stack.wait != "collective":
        return ""
    own = next((frame for frame in stack.frames if is_own_code(frame)), None)
    meetings = [frame for frame in (*_above_own_code(stack.frames), own) if frame and is_meeting(frame)]
    named = [bare(frame.func).lstrip("_") for frame in meetings if not frame.is_native]
    return named[-1] if named else "collective"


def is_pairwise(call: str) -> bool:
    """Whether a call waits for one peer and not for a group."""
    return PAIRWISE.fullmatch(call) is not None


def is_main(stack: Stack) -> bool:
    return stack.thread == MAIN_THREAD


def is_started_thread(frames: Sequence[Frame]) -> bool:
    """Whether a thread was begun by `threading`: the main one never was."""
    outermost = next((frame for frame in reversed(frames) if not frame.is_native), None)
    return (
        outermost is not None
        and bare(outermost.func) == "_bootstrap"
        and outermost.file.endswith("threading.py")
    )


def kind_of(stack: Stack, *, by_name: bool = True) -> str:
    """What tells threads of one kind on several ranks: `main`, or the function that it was begun with.

    Args:
        by_name: add the thread's name, without numbers; not where some rank's tool tells no names.
    """
    if is_main(stack):
        return "main"
    own = [frame for frame in stack.frames if is_own_code(frame)]
    target = bare(own[-1].func) if own else ""
    name = "" if not by_name or PREFIX_OF_OWN.fullmatch(stack.thread) else stack.thread
    return f"{target} {DIGITS.sub('#', name)}".strip()


@lru_cache(1 << 14)
def is_own_code(frame: Frame) -> bool:
    """Whether it is the program's: not native, no library that only waits or starts, nothing frozen."""
    if frame.is_native or frame.file.startswith("<frozen") or PYTHONS.match(_outside(frame.file)):
        return False
    first = package_path(frame.file).partition("/")[0]
    if "/" not in frame.file and frame.file.endswith(".py"):
        return first.removesuffix(".py") not in STDLIB
    return first not in STDLIB | LIBRARIES


def _outside(file: str) -> str:
    """A path without what is installed below a Python's library: that is no standard library."""
    return "" if INSTALLED.match(file) else file


@lru_cache(1 << 14)
def is_meeting(frame: Frame) -> bool:
    if frame.is_native:
        return NATIVE_MEETS.search(frame.func) is not None
    return frame.file.rpartition("/")[2] in MEETING_FILES and MEETS.fullmatch(bare(frame.func)) is not None


@lru_cache(1 << 14)
def package_path(file: str) -> str:
    """A file's path from its package on; of one that is installed nowhere the last parts."""
    file = file.replace("\\", "/")
    for start in (INSTALLED, PYTHONS):
        if found := start.match(file):
            return file[found.end() :]
    return "/".join(file.split("/")[-PATH_PARTS_MAX:]) if file.startswith("/") else file


def bare(func: str) -> str:
    """A function's name without its class and its enclosing functions."""
    return func.rpartition(".")[2] or func


def same_place(entry: str) -> str:
    """A place of a signature as every tool tells it: the file's own name, line and function."""
    path, _, func = entry.rpartition(" ")
    return f"{path.rpartition('/')[2]} {func}"


def _place(frame: Frame) -> str:
    return f"{package_path(frame.file)}:{frame.line} {bare(frame.func)}"


def _above_own_code(frames: Sequence[Frame]) -> Iterator[Frame]:
    for frame in frames:
        if is_own_code(frame):
            return
        yield frame


def _leading_natives(frames: Sequence[Frame]) -> Iterator[Frame]:
    for frame in frames:
        if not frame.is_native:
            return
        yield frame


def _says(pattern: re.Pattern[str], frames: Sequence[Frame] | Iterator[Frame]) -> bool:
    return any(frame.is_native and pattern.search(frame.func) for frame in frames)


def _is_device_wait(frame: Frame) -> bool:
    return bare(frame.func) in ("synchronize", "current_stream_synchronize") and (
        DEVICE_FILES.search(frame.file) is not None
    )
