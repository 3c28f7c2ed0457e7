"""The live watch: a thread in each rank's process that tells, while it runs, which rank took another turn.

Owns the thread, and what it does each period. It works out of band: no collective, no process group, only a
store that has `set`, `get` and `check`. Whatever goes wrong in it is a line of text, and never an exception
into the process that it watches.

    rank 0  watcher: post, compare all, publish ---+
    rank 1  watcher: post -------------------------+--- store ---  one verdict, told by every rank
    rank 2  watcher: post, deputy -----------------+

The lowest member compares; when it is silent the next one takes over. See `docs/live.md`.
"""

from __future__ import annotations

import atexit
import json
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import msgspec

from consensus_checker.live_finder import Finder
from consensus_checker.live_own import STILL_S, Own, contract
from consensus_checker.live_policy import ABORT, Case, act, end_process, known_policy
from consensus_checker.live_posts import (
    FINDER,
    PUBLISHED_MAX,
    VERDICT,
    VERSION,
    Answer,
    Bulletin,
    FinderPost,
    Post,
    Published,
    decoded,
    encoded,
    post_bytes,
)
from consensus_checker.live_store import LocalStore, Mailbox, StoreLostError
from tracer.record import Outcome
from tracer.sinks import tell as safely
from tracer.tracer import Tracer

if TYPE_CHECKING:
    from consensus_checker.verdict import Verdict

__all__ = ["LocalStore", "Watcher"]

Tell = Callable[[str], None]

SILENCE_S = 2.0
PERIOD_S = 0.05
# While a question is open, or ranks have ended and wait for each other.
URGENT_S = 0.005
# Posts into a store whose file grows: when something has changed, and when nothing has.
GROWING_S, GROWING_IDLE_S = 0.25, 1.0
# A post that is due so often is never missed by whoever takes silence for a death.
IDLE_PART = 0.5
# A pause of its own says nothing about others: of each period no more than this counts.
WATCHED_S_MAX = 0.5
# `stop` waits so long for the others, and so much longer for a store that does not answer.
STOP_S, STOP_MORE_S = 2.0, 1.0
# Tries to reach a store that is lost: each waits twice as long as the one before. Not for long, since torch
# writes a page of C++ frames for each that fails.
RETRY_S, RETRY_S_MAX = 0.1, 60.0
# Before a process is ended the others have so long to read why.
ABORT_S = 1.0
# Errors of the watch's own after which it gives up.
FAULTS_MAX = 10


def tell_on_stderr(text: str) -> None:
    """One write, so that lines of other ranks do not come between."""
    os.write(2, (f"\n{text}\n\n" if "\n" in text else f"hicache: {text}\n").encode())


class Watcher:
    """Watches one rank, and with its deputies all members of a replica.

    Args:
        store: shared by all members: any object with `set`, `get` and `check`.
        members: global ranks that must agree in anything, directly or through others.
        lanes: name -> tracer of each lane of this process; looked at and never written to.
        header: of the lanes: it says who must agree with whom on what.
        folder: where this rank's logs are; None: records are made up from what is compared.
        silence_s: how long a rank may say nothing, or keep others waiting.
        tell: takes text of a few lines, once for each thing found.
        command: for the policy `command`; else HICACHE_CHECKER_COMMAND.

    Attributes:
        cpu_s: processor time that the thread has taken, once it has ended.
    """

    def __init__(
        self,
        *,
        store: Any,
        rank: int,
        members: Sequence[int],
        lanes: Mapping[str, Tracer],
        header: Mapping[str, Any],
        folder: Path | None,
        policy: str = "log",
        silence_s: float = SILENCE_S,
        period_s: float = PERIOD_S,
        tell: Tell = tell_on_stderr,
        command: str | None = None,
    ) -> None:
        self.rank = rank
        self.members = tuple(sorted({*members, rank}))
        self._verdict: Verdict | None = None
        self._tell_all = tell
        self._tell = partial(_tell_as, tell, rank)
        self._policy = known_policy(policy, self._tell)
        self._command = command
        self._header = header
        self._folder = folder
        self._silence_s = silence_s
        self._period_s = period_s
        self._idle_s = min(GROWING_IDLE_S, IDLE_PART * silence_s)
        run = f"{header.get('run_id', '')}.{header.get('attempt', 0)}"
        self._mailbox = Mailbox(store, f"hicache.watch/{run}/{self.members[0]}/")
        self._own = Own(rank, lanes, header, folder, self.members, still_s=min(STILL_S, silence_s / 8))
        self._contract = contract(header)
        self._finder: Finder | None = None
        # The finder that is heard, for how long it has been the same, and its last beat.
        self._heard: FinderPost | None = None
        self._heard_s = 0.0
        self._epoch = 0
        self._beat = 0
        self._answered = self._told = 0
        self._posted: tuple[Any, ...] = ()
        self._posted_s = -GROWING_IDLE_S
        self._said: tuple[Any, ...] = ()
        self._said_s = 0.0
        self._ticked_s = 0.0
        self._lag_s = 0.0
        self._lost_since_s: float | None = None
        self._retry_s = RETRY_S
        self._faults = 0
        self._ended: str = ""
        self._is_said_behind = False
        self._abort_s: float | None = None
        self._stop = Event()
        self._done = Event()
        self._exit = partial(_at_exit, weakref.ref(self))
        self._bulletin: list[Published] = []
        self._is_bulletin_due = False
        # The finder that was heard first, and whether anything new has come from one since.
        self._first_heard: tuple[str, int] | None = None
        self._is_believed = False
        self._pid = os.getpid()
        # What the thread has cost, once it has ended.
        self.cpu_s = 0.0
        self._thread = Thread(target=self._work, name=f"hicache watch {rank}", daemon=True)

    @property
    def verdict(self) -> Verdict | None:
        """What all ranks were told last; None while nothing is wrong."""
        return self._verdict

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def compared(self) -> int:
        """Calls found equal on all ranks so far; 0 where another rank compares."""
        return self._finder.compared if self._finder is not None else 0

    @property
    def lost(self) -> int:
        """Calls of this rank that were gone before they were looked at."""
        return self._own.lost

    def start(self) -> None:
        """Begin to watch. The chains are kept from here on, so that no link of theirs is missed."""
        try:
            self._own.follow()
            self._thread.start()
        except RuntimeError as error:
            safely(self._tell, f"nothing is watched: {error}")
            return
        atexit.register(self._exit)

    def stop(self, outcome: Outcome) -> None:
        """Say how the lanes ended, and wait a moment for the others: a missing last call shows only then.

        Never waits for more than about three seconds, whatever the store does.
        """
        if self._pid != os.getpid() or not self._thread.is_alive():
            return
        self._ended = outcome
        self._stop.set()
        self._done.wait(STOP_S + STOP_MORE_S)
        if not self._done.is_set():
            seconds = time.monotonic() - self._ticked_s
            safely(self._tell, f"the watch is left as it is: the store has not answered for {seconds:.1f} s")
        atexit.unregister(self._exit)

    # The thread.

    def _work(self) -> None:
        self._ticked_s = time.monotonic()
        ended_s: float | None = None
        try:
            self._mailbox.open()
            while True:
                wait_s = self._turn()
                now_s = time.monotonic()
                if self._ended and ended_s is None:
                    ended_s = now_s
                if ended_s is not None and (self._is_over() or now_s - ended_s >= STOP_S):
                    self._leave()
                    return
                if ended_s is not None:
                    left_s = ended_s + STOP_S - now_s
                    time.sleep(max(0.0, min(left_s, wait_s if self._lost_since_s else URGENT_S)))
                else:
                    self._stop.wait(wait_s)
        except _GivenUpError:
            return
        finally:
            self.cpu_s = time.thread_time()
            self._done.set()

    def _turn(self) -> float:
        """One period; how long to wait for the next."""
        now_s = time.monotonic()
        dt_s = now_s - self._ticked_s
        self._ticked_s = now_s
        try:
            self._tick(now_s, dt_s)
        except StoreLostError as error:
            return self._lost(now_s, str(error))
        except Exception as error:
            self._faults += 1
            if self._faults == 1:
                safely(self._tell, f"the watch had an error of its own ({type(error).__name__}: {error})")
            if self._faults >= FAULTS_MAX:
                safely(self._tell, "the watch has given up: too many errors of its own")
                raise _GivenUpError from None
            return 1.0
        if self._lost_since_s is not None:
            seconds = time.monotonic() - self._lost_since_s
            safely(self._tell, f"the store is back: nothing was watched for {seconds:.1f} s")
            self._lost_since_s, self._retry_s = None, RETRY_S
        return URGENT_S if self._is_urgent else self._period_s

    @property
    def _is_urgent(self) -> bool:
        if self._finder is not None and self._finder.is_urgent:
            return True
        return self._heard is not None and self._heard.is_urgent and not self._heard.has_left

    def _lost(self, now_s: float, reason: str) -> float:
        if self._lost_since_s is None:
            self._lost_since_s = now_s
            when = time.strftime("%H:%M:%S")
            safely(self._tell, f"the watch is blind since {when}: the store says: {reason}")
        wait_s = self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_S_MAX)
        return wait_s

    def _tick(self, now_s: float, dt_s: float) -> None:
        watched_s = min(dt_s, WATCHED_S_MAX, self._silence_s / 4)
        self._own.follow()
        self._look_behind(dt_s)
        self._listen(watched_s)
        # The post goes first, so that whoever reads an answer knows what its rank has left out.
        self._post(now_s)
        self._answer()
        if self._finder is None and self._should_find():
            self._take_over()
        if self._finder is not None:
            self._find(self._finder, watched_s)
        self._abort_when_told(now_s)

    def _look_behind(self, dt_s: float) -> None:
        """Whether this thread came too late to see all calls."""
        self._lag_s = max(0.0, dt_s - self._period_s - WATCHED_S_MAX)
        if self._own.lost and not self._is_said_behind:
            self._is_said_behind = True
            safely(
                self._tell,
                f"the watch is behind: {self._own.lost:,} calls were gone before they were looked at; "
                "they are not compared, and nobody is accused of them",
            )

    def _listen(self, watched_s: float) -> None:
        """Hear the finder, and what it has published."""
        data = self._mailbox.get([FINDER]).get(FINDER)
        heard = decoded(data, FinderPost) if data is not None else None
        if heard is None:
            self._heard_s += watched_s
            return
        before = self._heard
        is_new = before is None or (heard.session, heard.beat) != (before.session, before.beat)
        self._heard_s = 0.0 if is_new else self._heard_s + watched_s
        self._heard = heard
        if self._finder is not None and heard.session != self._own.session and heard.epoch >= self._epoch:
            # Another one has taken over meanwhile, and goes on.
            self._finder = None
        self._epoch = max(self._epoch, heard.epoch)
        if self._first_heard is None:
            self._first_heard = heard.session, heard.beat
        # One that says nothing new may be of a run that is long over, and so may its verdict.
        self._is_believed = self._is_believed or self._first_heard != (heard.session, heard.beat)
        if heard.verdict > self._told and self._is_believed:
            self._hear_verdict(heard.verdict)

    def _hear_verdict(self, number: int) -> None:
        data = self._mailbox.get([VERDICT]).get(VERDICT)
        bulletin = decoded(data, Bulletin) if data is not None else None
        if bulletin is None:
            return
        self._bulletin = bulletin.items
        for published in bulletin.items:
            if published.number > self._told:
                self._be_told(published)
        self._told = max(self._told, number)

    def _answer(self) -> None:
        heard = self._heard
        if heard is None or not heard.ask or heard.ask == self._answered:
            return
        self._answered = heard.ask
        told = self._own.answers(heard.questions)
        answer = Answer(VERSION, self.rank, self._own.session, heard.ask, told)
        self._mailbox.put(f"answer/{self.rank}", encoded(answer))

    def _post(self, now_s: float) -> None:
        if self._mailbox.is_growing and not self._is_post_due(now_s):
            return
        self._posted_s = now_s
        post = self._own.post(now_s, told=self._told, lag_s=self._lag_s, ended=self._ended)
        self._mailbox.put(f"post/{self.rank}", post_bytes(post))

    def _is_post_due(self, now_s: float) -> bool:
        """A file that grows is written when something has changed, and else once a second."""
        state = self._own.links, self._own.step, self._told, self._ended
        has_changed = state != self._posted
        is_last = bool(self._ended) and has_changed
        due_s = min(GROWING_S, self._idle_s) if has_changed else self._idle_s
        if not is_last and now_s - self._posted_s < due_s:
            return False
        self._posted = state
        return True

    # The finder.

    def _should_find(self) -> bool:
        """The lowest member at once; the others when those before them have been silent for long enough."""
        heard = self._heard
        if heard is None:
            position = self.members.index(self.rank)
            return self._heard_s >= self._silence_s * position
        others = [rank for rank in self.members if rank != heard.rank]
        if heard.rank == self.rank or heard.session == self._own.session:
            # Of an earlier process of this rank.
            return True
        if heard.has_left:
            return not heard.is_closed and self._heard_s >= self._period_s * others.index(self.rank)
        # The next one at once, each further one half as long later.
        return self._heard_s >= self._silence_s * (1 + others.index(self.rank) / 2)

    def _take_over(self) -> None:
        heard = self._heard
        self._epoch += 1
        self._finder = Finder(
            self._mailbox,
            self.members,
            self._header,
            main=self._own.main,
            silence_s=self._silence_s,
            folder=self._folder,
            contract=self._contract,
            declarations=self._own.declarations,
            number=max(self._told, heard.verdict if heard is not None else 0),
            ask=heard.ask if heard is not None else 0,
            is_first=not self._is_believed,
        )
        if not self._is_believed:
            # What an earlier run of that name has left is not told again.
            self._bulletin, self._is_bulletin_due = [], True
        if self._verdict is not None and self._verdict.kind == "divergence":
            self._finder.is_final = True
        if heard is None or heard.has_left or heard.rank == self.rank or not self._is_believed:
            return
        data = self._mailbox.get([f"post/{heard.rank}"]).get(f"post/{heard.rank}")
        post = decoded(data, Post) if data is not None else None
        if post is not None and post.rank == heard.rank:
            self._finder.assume(heard.rank, post, self._heard_s)

    def _find(self, finder: Finder, watched_s: float) -> None:
        for published in finder.tick(watched_s):
            own = msgspec.structs.replace(published, rank=self.rank)
            self._bulletin = [*self._bulletin, own][-PUBLISHED_MAX:]
            self._is_bulletin_due = True
            # First here: the store may be gone by now.
            self._be_told(own)
        if self._is_bulletin_due:
            self._mailbox.put(VERDICT, encoded(Bulletin(VERSION, self._bulletin)))
            self._said = ()
            self._is_bulletin_due = False
        if self._is_word_due(finder):
            self._say(finder)

    def _is_word_due(self, finder: Finder) -> bool:
        """A file that grows is written when something has changed, and else once a second."""
        state = finder.ask, finder.is_urgent, finder.is_closed
        now_s = time.monotonic()
        if self._mailbox.is_growing and state == self._said and now_s - self._said_s < self._idle_s:
            return False
        self._said, self._said_s = state, now_s
        return True

    def _say(self, finder: Finder, *, has_left: bool = False) -> None:
        self._beat += 1
        asked = finder.asked
        post = FinderPost(
            VERSION,
            self._epoch,
            self.rank,
            self._own.session,
            self._beat,
            asked.number if asked is not None else finder.ask,
            asked.questions if asked is not None else [],
            finder.is_urgent,
            finder.number,
            finder.is_closed,
            has_left,
        )
        self._mailbox.put(FINDER, encoded(post))
        self._heard, self._heard_s, self._is_believed = post, 0.0, True

    # What is told.

    def _be_told(self, published: Published) -> None:
        self._told = published.number
        safely(self._tell_all, published.text)
        if not published.verdict:
            return
        from consensus_checker.verdict import Verdict

        self._verdict = msgspec.json.decode(published.verdict, type=Verdict)
        document = json.dumps(self._verdict.to_json(), ensure_ascii=False, indent=1) + "\n"
        case = Case(published, document, self.rank, self._folder, published.rank == self.rank)
        act(self._policy, case, self._command, self._tell)
        if self._policy == ABORT and published.may_abort and self._abort_s is None:
            self._abort_s = time.monotonic()

    def _abort_when_told(self, now_s: float) -> None:
        """End the process once the others know why: the store may be in this one."""
        if self._abort_s is None:
            return
        is_finder = self._finder is not None
        if not is_finder or now_s - self._abort_s >= ABORT_S or self._have_all_told():
            end_process()

    def _have_all_told(self) -> bool:
        names = [f"post/{rank}" for rank in self.members if rank != self.rank]
        posts = [decoded(data, Post) for data in self._mailbox.get(names).values()]
        return all(post is not None and post.told >= self._told for post in posts)

    # The end.

    def _is_over(self) -> bool:
        heard = self._heard
        is_closed = heard is not None and self._is_believed and heard.is_closed
        return len(self.members) == 1 or (is_closed and heard is not None and heard.verdict <= self._told)

    def _leave(self) -> None:
        try:
            if self._finder is not None:
                self._say(self._finder, has_left=True)
        except StoreLostError:
            return


class _GivenUpError(Exception):
    """The watch ends itself."""


def _tell_as(tell: Tell, rank: int, text: str) -> None:
    """What is only this rank's trouble."""
    tell(f"rank {rank}: {text}")


def _at_exit(reference: weakref.ref[Watcher]) -> None:
    """A thread that is inside a store's own code when the interpreter goes would take the process with it."""
    watcher = reference()
    if watcher is not None and watcher._pid == os.getpid():
        watcher._ended = watcher._ended or "stopped"
        watcher._stop.set()
        watcher._done.wait(STOP_MORE_S)
