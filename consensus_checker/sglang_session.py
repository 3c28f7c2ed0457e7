"""One recording of one rank of a server: from the end of the scheduler's start to its end.

Owns the hooks of the process and what they are bound to. They are put in place when the plugin is loaded, and
record while there is a session. Whatever goes wrong here is a line of text; the server goes on.

    entry  ->  hooks in place  ->  threads start  ->  session: agree, files, lanes, watcher  ->  end: trailers
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from typing import Any

from consensus_checker import consensus_ranks as ranks
from consensus_checker import sglang_kinds as kinds
from consensus_checker.consensus import FORMAT_CHARS_MAX, POLICY, POLICY_VARIABLE, Watching
from consensus_checker.consensus_recorder import has_logs
from consensus_checker.payload import Payloads
from consensus_checker.sglang_hooks import Hook, Point, fitted, owner_of, put, undecorated
from consensus_checker.sglang_paths import EXTRA, FORMER, FORMER_MODULE, FORMER_POOLS, LANES, UNIFIED
from consensus_checker.sglang_place import place_of
from consensus_checker.sglang_points import POINTS, THREADS, Thread
from consensus_checker.sglang_recorder import ServerRecording
from consensus_checker.sglang_see import See
from tracer.emitters import PARTS
from tracer.keyed import keyed_digest
from tracer.record import ENDED, MAIN_LANE, Kind, Outcome
from tracer.sinks import tell as safely
from tracer.tracer import Tracer

CHECKER = "sglang.srt.utils.rank_consensus_checker"
PREFIX = "hicache/sglang"
# Of the points: below that nobody can say that ranks agree, whatever is equal.
FLOOR = 0.6
# What a log says that it lacks then.
UNKNOWN_VERSION = "decisions of this version"
TIMEOUT_S = 60.0
KINDS: Sequence[Kind] = tuple(value for value in vars(kinds).values() if isinstance(value, Kind))


class Hooks:
    """All hooks of the process.

    Attributes:
        found: path -> hook, in the order of the points.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.see = See()
        self.found: dict[str, Hook] = {}
        # Path -> a point that was not found, and whether its class was.
        self._absent: dict[str, tuple[Point, bool]] = {}
        self._threads: set[str] = set()
        self._tell = tell
        self._session: Session | None = None

    @property
    def missing(self) -> list[str]:
        """Paths that this version has not, of what every server with such a cache runs."""
        return [path for path, (point, _) in self._absent.items() if self._is_due(point)]

    @property
    def lacking(self) -> list[str]:
        """The same of parts that few run, where the class is there and the function is not."""
        return [
            path for path, (point, has_owner) in self._absent.items() if has_owner and not self._is_due(point)
        ]

    @property
    def share(self) -> float:
        """Of the points that a server with such a cache must have, how many this version has."""
        return self.due_count / max(1, self.due_count + len(self.missing))

    @property
    def due_count(self) -> int:
        """How many of those were found."""
        return sum(self._is_due(hook.point) for hook in self.found.values())

    def install(
        self, points: Sequence[Point] = POINTS, threads: Sequence[Thread] = THREADS, *, is_last: bool
    ) -> None:
        """Put in place what can be had.

        Args:
            is_last: modules that nobody has imported yet are looked for too; what is not there is missing.
        """
        for point in points:
            # A class may come later, with a module; a function does not.
            _, has_owner = self._absent.get(point.path, (point, False))
            if point.path not in self.found and not has_owner:
                self._install(point, is_last=is_last)
        for thread in threads:
            if thread.path not in self._threads:
                self._install_thread(thread)

    def _is_due(self, point: Point) -> bool:
        """Whether each server must have it: those of the one cache where no server makes the other."""
        cache = FORMER if FORMER_MODULE in sys.modules else UNIFIED
        return point.part in ("", cache)

    def _install(self, point: Point, *, is_last: bool) -> None:
        if point.part in (FORMER, FORMER_POOLS) and FORMER_MODULE not in sys.modules:
            return
        # Nobody is made to import what they do not run.
        may_import = is_last and point.part not in EXTRA
        try:
            owner = owner_of(point, may_import=may_import)
            raw = vars(owner).get(point.name, getattr(owner, point.name, None)) if owner is not None else None
            if not callable(raw) or isinstance(raw, staticmethod | classmethod):
                if is_last:
                    self._absent[point.path] = point, owner is not None
                return
            function = undecorated(raw, CHECKER)
            own = fitted(point, function)
            if own is None:
                self._absent[point.path] = point, True
                return
            hook = Hook(own, self._tell)
            put(owner, point.name, raw, hook.wrapper(function, self.see))
            self.found[point.path] = hook
            self._absent.pop(point.path, None)
        except Exception as error:
            self._absent[point.path] = point, True
            safely(self._tell, f"{point.short} can't be recorded: {type(error).__name__}: {error}"[:300])

    def _install_thread(self, thread: Thread) -> None:
        module, owner, name = thread.path.rsplit(".", 2)
        found = getattr(sys.modules.get(module), owner, None)
        function = vars(found).get(name) if found is not None else None
        if callable(function):
            setattr(found, name, _as_lane(function, thread.lane, self._thread_began, self._thread_ended))
            self._threads.add(thread.path)

    def bind(self, session: Session) -> None:
        self._session = session
        self.bind_thread(threading.get_ident(), MAIN_LANE)
        for ident, lane in list(self.see.threads.items()):
            self.bind_thread(ident, lane)

    def bind_thread(self, ident: int, lane: str) -> None:
        session = self._session
        if session is None:
            return
        tracer = session.recording.lanes[lane]
        for hook in self.found.values():
            axis = hook.point.axis
            if lane in hook.point.lanes and (not axis or axis in session.axes):
                hook.bind(lane, ident, tracer, partial(_drop, tracer, hook.point.kind))

    def unbind(self) -> None:
        self._session = None
        for hook in self.found.values():
            hook.unbind()

    def _thread_began(self, lane: str) -> None:
        ident = threading.get_ident()
        self.see.threads[ident] = lane
        self.bind_thread(ident, lane)

    def _thread_ended(self, lane: str, error: BaseException | None) -> None:
        ident = threading.get_ident()
        self.see.threads.pop(ident, None)
        for hook in self.found.values():
            hook.unbind(ident)
        if self._session is not None:
            self._session.lane_ended(lane, error)


def _as_lane(
    function: Callable[..., Any],
    lane: str,
    began: Callable[[str], None],
    ended: Callable[[str, BaseException | None], None],
) -> Callable[..., Any]:
    """The same function, which says when its thread begins and ends."""

    def run(*args: Any, **kwargs: Any) -> Any:
        _quietly(partial(began, lane))
        raised: BaseException | None = None
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            raised = error
            raise
        finally:
            _quietly(partial(ended, lane, raised))

    update_wrapper(run, function)
    return run


def _quietly(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:
        return


def _drop(tracer: Tracer, kind: Kind | None, error: Exception) -> None:
    """Say in the log that records of a kind are missing from here on."""
    if kind is not None:
        parts = dict(zip(PARTS, tracer.parts(kind), strict=True))
        parts["drop"](parts["gate"], kind.name, error)


class Session:
    """What there is from `begin` to `end`.

    Args:
        along: axis -> the ranks of this one's group along it.

    Raises:
        ValueError: nobody says which rank this is.
    """

    def __init__(
        self,
        hooks: Hooks,
        along: Mapping[str, Sequence[int]],
        number: int,
        *,
        tell: Callable[[str], None],
        config: Mapping[str, Any],
        store: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._hooks = hooks
        self._tell = tell
        self._thread = threading.get_ident()
        self._is_over = self._has_told = False
        self.axes = frozenset(axis for axis, group in along.items() if len(group) > 1)
        groups = [tuple(group) for group in along.values() if len(group) > 1]
        own = ranks.own_rank(rank, groups)
        self.rank = own
        agreed, own_store = self._agree(groups, own, number, store, timeout_s)
        world = ranks.world_size(world_size, agreed.members)
        place = place_of(own, along, agreed.members, world)
        self.members = agreed.members
        self.recording = ServerRecording(
            place, agreed, KINDS, LANES, world_size=world, config=config, warn=tell
        )
        digest = keyed_digest(agreed.algorithm, agreed.key)
        self._payloads = Payloads(digest, tell)
        self._same = self.recording.tracer.emitter(kinds.ASSERT_SAME)
        if hooks.share < FLOOR:
            self.recording.tracer.dropped[UNKNOWN_VERSION] = len(hooks.missing)
        page_tokens = int(config.get("page_size_tokens", 0)) if self.recording.is_whole else 0
        hooks.see.begin(self.recording.lanes, place, digest, page_tokens=page_tokens)
        self._watcher = self._started(own_store)
        hooks.bind(self)
        atexit.register(self._at_exit)

    def assert_same(self, msg_fmt: str, args: tuple[Any, ...]) -> None:
        """What SGLang's own code, or a function of it that no point has, says to its checker."""
        if threading.get_ident() != self._thread:
            return
        try:
            message = msg_fmt % args
        except Exception as error:
            if not self._has_told:
                self._has_told = True
                safely(self._tell, f"a message of the checker was not recorded: {type(error).__name__}")
            return
        is_format = bool(args) and len(msg_fmt) <= FORMAT_CHARS_MAX
        self._same(msg_fmt if is_format else self._payloads.of(msg_fmt), self._payloads.of(message))

    def lane_ended(self, lane: str, error: BaseException | None) -> None:
        """A thread has returned, or has died of what it raised."""
        if self._is_over:
            return
        self._hooks.see.state(lane, ENDED, None)
        if error is not None:
            self.recording.lanes[lane].close("crashed")
            safely(self._tell, f"thread {lane} of rank {self.rank} has died: {type(error).__name__}")

    def end(self, outcome: Outcome = "completed") -> None:
        if self._is_over:
            return
        self._is_over = True
        atexit.unregister(self._at_exit)
        see = self._hooks.see
        done = {lane: see.work_done(lane) for lane in LANES}
        self._hooks.unbind()
        is_evidence = False
        if self._watcher is not None:
            try:
                self._watcher.stop(outcome)
                is_evidence = self._watcher.verdict is not None
            except Exception as error:
                safely(self._tell, f"the watcher did not stop: {error}")
        for lane in LANES:
            own = see.outcome_of(lane, done[lane])
            self.recording.lanes[lane].close(own if outcome == "completed" else outcome)
        self.recording.close(outcome, is_evidence=is_evidence)

    def abandon(self) -> None:
        """In a forked child: nothing of it is its own."""
        self._is_over = True
        self._hooks.unbind()
        self.recording.abandon()

    def _at_exit(self) -> None:
        _quietly(partial(self.end, "stopped"))

    def _agree(
        self, groups: Sequence[Sequence[int]], rank: int, number: int, store: Any, timeout_s: float
    ) -> tuple[ranks.Agreed, ranks.Prefixed | None]:
        alone = ranks.alone(groups, rank, has_logs=has_logs([rank]))
        if len(alone.members) == 1:
            return alone, None
        found = store if store is not None else ranks.default_store()
        if found is None:
            safely(
                self._tell,
                "no store to meet the other ranks in: records are kept, and compared by nobody"
                + ranks.lacking(),
            )
            return alone, None
        own_store = ranks.own_store(found, f"{PREFIX}/{number}/")
        try:
            agreed = ranks.agree(own_store, groups, rank, timeout_s=timeout_s, has_logs=has_logs)
        except Exception as error:
            safely(self._tell, f"rank {rank} could not find out which ranks must agree: {error}")
            return alone, None
        return agreed, ranks.own_store(found, f"{PREFIX}/{number}/replica{agreed.members[0]}/")

    def _started(self, store: Any) -> Watching | None:
        if store is None:
            return None
        try:
            from consensus_checker.live import Watcher

            watcher: Watching = Watcher(
                store=store,
                rank=self.rank,
                members=self.members,
                lanes=self.recording.lanes,
                header=self.recording.header,
                folder=self.recording.folder,
                policy=os.environ.get(POLICY_VARIABLE, "") or POLICY,
                tell=self._tell,
            )
            watcher.start()
        except Exception as error:
            safely(self._tell, f"nobody compares the ranks while they run: {error}")
            return None
        return watcher
