"""Marking the decisions that every rank must make alike, with the names and meaning of SGLang's checker.

    @rank_consensus(same_params=["req.rid", "len(key)"], same_results=["result.hit_length"])
    def match(self, req, key): ...

    configure([tp_group, pp_group])         once, by the thread that decides
    ...                                     each call and its outcome is a record of this rank's log
    shutdown()

Owns the one checker of the process: what is decorated, whether calls are recorded, and by which thread. What
is compared is in `consensus_calls`, what stands for a value in `payload`, who must agree in
`consensus_ranks`, where it is written in `consensus_recorder`. Behind `configure` nothing waits for a rank.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, Protocol, TypeVar, overload

from consensus_checker import consensus_ranks as ranks
from consensus_checker.consensus_calls import (
    MEMBER,
    Binding,
    Decorated,
    Selector,
    decorated,
    kind_names,
    selector,
)
from consensus_checker.consensus_recorder import Recording, has_logs, place_of
from consensus_checker.payload import Payloads
from tracer.keyed import keyed_digest
from tracer.record import HEADER, LANE_STATE, MAIN_LANE, OWN_KINDS, TRAILER, Kind, Outcome
from tracer.sinks import Warn, tell, warn_on_stderr
from tracer.tracer import Tracer

F = TypeVar("F", bound=Callable[..., Any])

SWITCH = "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"
ON = frozenset({"1", "true", "yes", "on", "y", "t"})
POLICY_VARIABLE, POLICY = "HICACHE_CHECKER_POLICY", "log"
TIMEOUT_S = 60.0
# What `assert_same` was told. The text itself may hold anything; its format was written by a programmer.
ASSERT_SAME = Kind("assert_same", "decision", agree=(MEMBER,), compared=("format", "message"))
FORMAT_CHARS_MAX = 200
RESERVED = frozenset(
    {HEADER, TRAILER, LANE_STATE, "block", ASSERT_SAME.name, *(kind.name for kind in OWN_KINDS)}
)


class Watching(Protocol):
    """What a watcher of this rank's records must do."""

    @property
    def verdict(self) -> Any: ...
    def start(self) -> None: ...
    def stop(self, outcome: Outcome) -> None: ...


WatcherFactory = Callable[..., Watching]

# Weak, for a function that nobody can call any more is none of a log's kinds.
_decorated: list[tuple[weakref.ref[Any], Decorated]] = []
# Modules are imported by other threads too.
_lock = threading.Lock()
_checker: _Checker | None = None
# How often this process has configured: all ranks do so equally often, and a store keeps what was said.
_round = 0
_forks_are_heard = False


@overload
def rank_consensus(func: F, /) -> F: ...
@overload
def rank_consensus(
    func: None = None, *, same_params: Selector = None, same_results: Selector = None
) -> Callable[[F], F]: ...
def rank_consensus(
    func: Any = None, *, same_params: Selector = None, same_results: Selector = None, **unknown: Any
) -> Any:
    """Mark a function that every rank must call in the same order, with parameters or results that are equal.

    Where the environment does not ask for the checker, the function itself comes back.

    Args:
        same_params: None or False, nothing; True, every parameter but the receiver of a method; or
            expressions over the parameters, defaults applied.
        same_results: the same of `result`.

    Raises:
        TypeError: a selector is none of those, or an argument is unknown.
    """
    if unknown:
        raise TypeError(f"rank_consensus() got unexpected keyword arguments: {', '.join(unknown)}")
    params, results = selector(same_params, "same_params"), selector(same_results, "same_results")

    def decorate(function: Any) -> Any:
        if not is_asked_for():
            return function
        wrapper, own = decorated(function, params, results)
        raw = wrapper.__func__ if isinstance(wrapper, classmethod | staticmethod) else wrapper
        with _lock:
            _decorated.append((weakref.ref(raw), own))
        checker = _checker
        if checker is not None:
            own.ask(checker.bind_late)
        return wrapper

    return decorate if func is None else decorate(func)


def assert_same(msg_fmt: str, *args: Any) -> None:
    """Record a decision that every rank must make alike, as text; nothing where nothing is configured.

    Raises:
        RuntimeError: called by another thread than the one that called `configure`.
    """
    if _checker is not None:
        _checker.assert_same(msg_fmt, args)


def enabled() -> bool:
    """Whether `configure` was called where the environment asks for the checker."""
    return _checker is not None


def configure(
    groups: Sequence[Any],
    *,
    store: Any = None,
    rank: int | None = None,
    world_size: int | None = None,
    watcher: WatcherFactory | Literal["live"] | None = "live",
    timeout_s: float = TIMEOUT_S,
    warn: Warn | None = None,
) -> None:
    """Begin to record, by the thread that calls; nothing where the environment does not ask for it.

    Ranks that share a group, directly or by way of others, must agree. They find that out over `store`.

    Args:
        groups: this rank's process groups, objects with a `cpu_group`, or lists of ranks; None is skipped.
        store: any object with `set` and `get`; torch's own where None. Without any, calls are only recorded.
        rank, world_size: as torch or the environment say where None.
        watcher: makes what compares the ranks while they run: `consensus_checker.live` where that is there.
        timeout_s: how long to wait for the others.

    Raises:
        TypeError: something in `groups` is no group.
        ValueError: nobody says which rank this is, or it is in none of its groups.
    """
    global _checker, _round, _forks_are_heard
    if not is_asked_for():
        return
    shutdown()
    own_groups = _group_ranks(groups)
    own_rank = ranks.own_rank(rank, list(own_groups.values()))
    if not _forks_are_heard:
        os.register_at_fork(after_in_child=_forget)
        _forks_are_heard = True
    _round += 1
    # What nobody can call any more is gone on every rank, and in no header.
    gc.collect()
    try:
        _checker = _Checker(
            own_groups,
            store,
            own_rank,
            world_size=world_size,
            watcher=watcher,
            timeout_s=timeout_s,
            warn=warn or warn_on_stderr,
        )
    except Exception as error:
        # Whatever it is, it is none of the server's business.
        shutdown()
        tell(warn or warn_on_stderr, f"decisions of rank {own_rank} are not recorded: {error}")


def shutdown(outcome: Outcome = "completed") -> None:
    """Write the last lines and let decorated functions run untouched. May be called at any time."""
    global _checker
    checker, _checker = _checker, None
    _release_all()
    if checker is not None:
        checker.close(outcome)


def is_asked_for() -> bool:
    """Whether the environment asks for the checker."""
    return os.environ.get(SWITCH, "").strip().lower() in ON


def _forget() -> None:
    """In a forked child nobody is the thread that decides, and the files are its parent's."""
    global _checker, _lock
    # Another thread, which the child does not have, may hold it.
    _lock = threading.Lock()
    checker, _checker = _checker, None
    _release_all()
    if checker is not None:
        checker.abandon()


def _release_all() -> None:
    for _wrapper, own in _decorated:
        own.release()


def _group_ranks(groups: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """The groups that have somebody to compare with, each once, by name."""
    found: dict[str, tuple[int, ...]] = {}
    for number, group in enumerate(groups):
        own = () if group is None else ranks.ranks_of(group)
        if len(own) < 2 or set(own) in map(set, found.values()):
            continue
        name = getattr(group, "unique_name", None)
        found[name if isinstance(name, str) and name not in found else f"group{number}"] = own
    return found


class _Checker:
    """What is there from `configure` to `shutdown`."""

    def __init__(
        self,
        groups: Mapping[str, tuple[int, ...]],
        store: Any,
        rank: int,
        *,
        world_size: int | None,
        watcher: WatcherFactory | Literal["live"] | None,
        timeout_s: float,
        warn: Warn,
    ) -> None:
        self._warn = warn
        self._rank = rank
        self._thread = threading.get_ident()
        self._thread_name = threading.current_thread().name
        agreed, own_store = self._agree(list(groups.values()), store, timeout_s)
        self._payloads = Payloads(keyed_digest(agreed.algorithm, agreed.key), self._tell)
        # Decorated function -> its kind; what is decorated later comes in with its first call.
        self._kinds: dict[Decorated, Kind] = {}
        fresh = self._name_fresh()
        world = ranks.world_size(world_size, agreed.members)
        place = place_of(rank, agreed.members, world, groups)
        self._recording = Recording(
            place, agreed, [ASSERT_SAME, *fresh.values()], world_size=world, warn=warn
        )
        tracer = self._recording.tracer
        self._same = tracer.emitter(ASSERT_SAME)
        for own, kind in fresh.items():
            self._bind(own, kind)
        self._watcher = self._started(watcher, own_store, agreed.members)

    def assert_same(self, msg_fmt: str, args: tuple[Any, ...]) -> None:
        self._demand_thread("assert_same")
        # Now, for what the arguments refer to may change.
        message = msg_fmt % args
        # A text without arguments may have been put together by the caller, of anything.
        is_format = bool(args) and len(msg_fmt) <= FORMAT_CHARS_MAX
        written = msg_fmt if is_format else self._payloads.of(msg_fmt)
        self._same(written, self._payloads.of(message))

    def bind_late(self) -> bool:
        """Record what was decorated since `configure`, the call that asks too; true if it is too late."""
        if _checker is not self:
            return True
        self._demand_thread("a decorated function")
        fresh = self._name_fresh()
        self._recording.declare(list(fresh.values()))
        for own, kind in fresh.items():
            self._bind(own, kind)
        return False

    def close(self, outcome: Outcome) -> None:
        is_evidence = False
        if self._watcher is not None:
            try:
                self._watcher.stop(outcome)
                is_evidence = self._watcher.verdict is not None
            except Exception as error:
                self._tell(f"the watcher did not stop: {error}")
        self._recording.close(outcome, is_evidence=is_evidence)

    def abandon(self) -> None:
        self._recording.abandon()

    def _agree(
        self, groups: Sequence[Sequence[int]], store: Any, timeout_s: float
    ) -> tuple[ranks.Agreed, ranks.Prefixed | None]:
        """With the others if that can be; else by this rank alone, and then nobody compares while it runs."""
        alone = ranks.alone(groups, self._rank, has_logs=has_logs([self._rank]))
        if len(alone.members) == 1:
            return alone, None
        found = store if store is not None else ranks.default_store()
        if found is None:
            self._tell(
                "no store to meet the other ranks in: decisions are recorded, and compared by nobody"
                + ranks.lacking()
            )
            return alone, None
        own_store = ranks.own_store(found, f"{ranks.PREFIX}/{_round}/")
        try:
            agreed = ranks.agree(own_store, groups, self._rank, timeout_s=timeout_s, has_logs=has_logs)
        except Exception as error:
            self._tell(
                f"rank {self._rank} could not find out which ranks must agree: {error}. Decisions are "
                "recorded, and compared by nobody"
            )
            return alone, None
        return agreed, ranks.own_store(found, f"{ranks.PREFIX}/{_round}/replica{agreed.members[0]}/")

    def _name_fresh(self) -> dict[Decorated, Kind]:
        """The kinds of functions that have none yet."""
        with _lock:
            _decorated[:] = [(wrapper, own) for wrapper, own in _decorated if wrapper() is not None]
            due = [own for _wrapper, own in _decorated if own not in self._kinds]
        taken = RESERVED | {kind.name for kind in self._kinds.values()}
        fresh = {own: own.kind(name) for own, name in zip(due, kind_names(due, taken), strict=True)}
        self._kinds |= fresh
        return fresh

    def _bind(self, own: Decorated, kind: Kind) -> None:
        own.bind(
            Binding(
                thread=self._thread,
                refuse=self._demand_thread,
                payload=self._payloads.of,
                fail=lambda error: self._leave_out(own, kind, error),
                name=kind.name,
                **self._recording.parts(own, kind),
            )
        )

    def _leave_out(self, own: Decorated, kind: Kind, error: Exception) -> None:
        """Its records can't be written: none of them is from here on, and the log says how many."""
        tracer = self._recording.tracer
        if kind.name in tracer.dropped:
            tracer.dropped[kind.name] += 1
        else:
            self._recording.drop(kind, error)
        own.ask(lambda: self._is_left_out(own, kind))

    def _is_left_out(self, own: Decorated, kind: Kind) -> bool:
        self._demand_thread(own.name)
        self._recording.tracer.dropped[kind.name] += 2
        return True

    def _demand_thread(self, what: str) -> None:
        """Refuse another thread: its calls come in between in another order on every rank.

        Raises:
            RuntimeError: it is another one.
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                f"{what} was called by thread {threading.current_thread().name}; decisions that ranks must "
                f"agree on are those of the thread that called configure, {self._thread_name}"
            )

    def _started(
        self, watcher: WatcherFactory | Literal["live"] | None, store: Any, members: Sequence[int]
    ) -> Watching | None:
        if watcher is None or store is None:
            return None
        try:
            factory = import_module("consensus_checker.live").Watcher if watcher == "live" else watcher
            lanes: Mapping[str, Tracer] = {MAIN_LANE: self._recording.tracer}
            # The live one has its own way to say on a terminal what is more than a warning.
            has_own = watcher == "live" and self._warn is warn_on_stderr
            more: dict[str, Any] = {} if has_own else {"tell": self._tell}
            found: Watching = factory(
                store=store,
                rank=self._rank,
                members=members,
                lanes=lanes,
                header=self._recording.header,
                folder=self._recording.folder,
                policy=os.environ.get(POLICY_VARIABLE, "") or POLICY,
                **more,
            )
            found.start()
        except Exception as error:
            self._tell(f"nobody compares the ranks while they run: {error}")
            return None
        return found

    def _tell(self, text: str) -> None:
        tell(self._warn, text)
