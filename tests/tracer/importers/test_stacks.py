from __future__ import annotations

import pytest

from tracer.importers.dossier import At, Frame, Stack, Wait, Who
from tracer.importers.stacks import (
    bare,
    is_own_code,
    is_pairwise,
    kind_of,
    meeting_of,
    package_path,
    same_place,
    signature_of,
    wait_of,
)

OWN = Frame("drain", "cache.py", 88)
STORE = Frame("batch_get", "sglang/srt/mem_cache/storage/mooncake_store/mooncake_store.py", 210)
WAIT = Frame("Condition.wait", "threading.py", 327)
C10D = "/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"


def native(func: str) -> Frame:
    return Frame(func, "libc.so.6", 0, True)


@pytest.mark.parametrize(
    ("frames", "state", "wait"),
    [
        ((Frame("all_reduce", C10D, 3000), OWN), "idle", "collective"),
        ((Frame("_wait", C10D, 9), OWN), "idle", "unknown"),
        ((native("c10d::ProcessGroupWrapper::allreduce"), OWN), "idle", "collective"),
        (
            (native("futex_wait"), native("gloo::transport::tcp::UnboundBuffer::waitRecv"), OWN),
            "",
            "collective",
        ),
        ((Frame("all_reduce", "sglang/srt/distributed/parallel_state.py", 500), OWN), "idle", "collective"),
        ((native("take_gil"), Frame("all_reduce", C10D, 3000), OWN), "idle", "gil"),
        ((native("cudaStreamSynchronize"), OWN), "active", "device"),
        ((Frame("synchronize", "torch/cuda/streams.py", 105), OWN), "active", "device"),
        ((Frame("wait", "threading.py", 327), Frame("get", "queue.py", 171), OWN), "idle", "queue"),
        (
            (Frame("Condition.wait", "threading.py", 327), Frame("Queue.get", "queue.py", 171), OWN),
            "",
            "queue",
        ),
        ((Frame("select", "selectors.py", 468), OWN), "idle", "queue"),
        ((Frame("_worker", "concurrent/futures/thread.py", 81),), "idle", "queue"),
        ((Frame("recv_pyobj", "zmq/sugar/socket.py", 975), OWN), "idle", "queue"),
        ((STORE, OWN), "active", "storage"),
        (
            (Frame("wait", "threading.py", 327), Frame("result", "concurrent/futures/_base.py", 451), STORE),
            "",
            "storage",
        ),
        ((Frame("wait", "threading.py", 327), Frame("get", "queue.py", 171), STORE), "idle", "queue"),
        ((native("__libc_pread64"), OWN), "idle", "storage"),
        ((native("my_spread"), OWN), "idle", "unknown"),
        ((Frame("Thread.join", "threading.py", 1119), OWN), "idle", "lock"),
        ((native("PyThread_acquire_lock_timed"), OWN), "idle", "lock"),
        ((OWN,), "active+gil", "running"),
        ((OWN,), "idle", "unknown"),
        ((OWN, Frame("all_reduce", C10D, 3000)), "active", "running"),
        ((), "", "unknown"),
    ],
    ids=repr,
)
def test_a_thread_is_in_what_stands_above_its_own_code(
    frames: tuple[Frame, ...], state: str, wait: Wait
) -> None:
    assert wait == wait_of(frames, state)


@pytest.mark.parametrize(
    ("file", "path"),
    [
        ("/opt/venv/lib/python3.12/site-packages/sglang/srt/mem_cache/a.py", "sglang/srt/mem_cache/a.py"),
        ("/usr/lib/python3.11/threading.py", "threading.py"),
        ("/sgl-workspace/sglang/python/sglang/srt/managers/scheduler.py", "srt/managers/scheduler.py"),
        ("sglang/srt/utils.py", "sglang/srt/utils.py"),
        ("C:\\Python311\\Lib\\site-packages\\torch\\a.py", "torch/a.py"),
        ("<string>", "<string>"),
    ],
)
def test_a_file_is_shortened_to_its_package(file: str, path: str) -> None:
    assert path == package_path(file)


@pytest.mark.parametrize(
    ("frame", "is_own"),
    [
        (Frame("f", "threading.py", 1), False),
        (Frame("f", "/usr/lib/python3.11/json/decoder.py", 1), False),
        (Frame("f", "/opt/lib/python3.11/site-packages/torch/nn/module.py", 1), False),
        (Frame("f", "/opt/lib/python3.11/site-packages/sglang/srt/a.py", 1), True),
        (Frame("f", "<frozen runpy>", 88), False),
        (Frame("f", "<string>", 3), True),
        (Frame("f", "libc.so.6", 0, True), False),
        (Frame("f", "scheduler.py", 9), True),
    ],
    ids=repr,
)
def test_own_code_is_what_neither_waits_nor_starts_for_a_living(frame: Frame, is_own: bool) -> None:
    assert is_own == is_own_code(frame)


def test_a_signature_holds_own_code_alone_with_bare_names() -> None:
    frames = (
        Frame("Condition.wait", "threading.py", 327),
        Frame("Cache.drain.<locals>.inner", "/srv/app/lib/cache.py", 7),
        native("thread_run"),
        Frame("Thread.run", "threading.py", 982),
    )
    assert signature_of(frames) == ("app/lib/cache.py:7 inner",)


def test_tools_that_spell_a_place_differently_mean_one() -> None:
    assert same_place("sglang/srt/mem_cache/hiradix_cache.py:700 f") == same_place("hiradix_cache.py:700 f")


def test_a_function_of_a_nameless_scope_is_called_as_it_is() -> None:
    assert (bare("<lambda>"), bare("A.f.<locals>.inner"), bare("f")) == ("<lambda>", "inner", "f")


def stack(name: str, *frames: Frame) -> Stack:
    return Stack(Who(), 0, 1, name, "", frames, wait_of(frames, ""), signature_of(frames), At(0, 1))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("MainThread", "main"),
        ("Thread-4 (drain)", "drain"),
        ("Thread-9", "drain"),
        ("tp0/events", "drain tp#/events"),
        ("", "drain"),
    ],
)
def test_threads_of_one_kind_have_one_name_on_all_ranks(name: str, kind: str) -> None:
    assert kind == kind_of(stack(name, Frame("wait", "threading.py", 1), OWN))


def test_a_meeting_is_called_as_the_program_called_it() -> None:
    inner = (Frame("broadcast", C10D, 1), Frame("wrapper", C10D, 2), Frame("broadcast_object_list", C10D, 3))
    assert meeting_of(stack("", *inner, OWN)) == "broadcast_object_list"
    assert meeting_of(stack("", native("gloo::barrier"), OWN)) == "collective"
    assert meeting_of(stack("", OWN)) == ""


def test_a_message_waits_for_one_peer_and_a_reduction_for_all() -> None:
    assert [is_pairwise(call) for call in ("recv", "batch_isend_irecv", "all_reduce")] == [True, True, False]
