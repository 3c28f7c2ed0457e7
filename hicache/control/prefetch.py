"""The external tier as the scheduler sees it: what is asked for, what has come, what is inserted.

One prefetch, from lane to lane. Each arrow is a queue of this rank; what crosses into the scheduler is
consumed by counts that the group has agreed on, so every rank applies the same thing at the same step.

    scheduler        prefetch lane      io lane           sync lane        scheduler
    submit --------> query, MIN ------> (hit) drain: room, slots
                                        read batches ---> MIN a batch ---> (acks) drain, insert
    back_up ------------------------------------------- backup lane -----> (acks) unlock

Background lanes compute the minimum over ranks *before* they publish an ack, and publish as many acks on
every rank, whatever went wrong on one of them. The k-th ack therefore says the same everywhere; only when
it exists differs, and that is what the event round agrees on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hicache.config import StorageConfig
from hicache.control import agreement, locks
from hicache.control.actions import Action
from hicache.control.active import Active
from hicache.control.agreement import Agreement
from hicache.control.host_memory import HostMemory
from hicache.control.keys import hash_names
from hicache.control.node import Node
from hicache.control.pools import HostSlots
from hicache.control.queues import Prefetch, Progress, Queues, StorageBackup
from hicache.control.tree import Match, Tree
from hicache.core import DIGEST_BYTES, HASH_BYTES, TOKEN_BYTES, OpId, SidePool, vector_digest
from hicache.ports import Clock, Storage, Transport
from hicache.probes import Probes

# What can become of a prefetch, as records have it; `stale` is one that was ended before its hit was drained.
OUTCOMES = (
    "issued",
    "declined_too_short",
    "declined_rate_limited",
    "declined_deadline",
    "declined_anchor",
    "ongoing",
    "allocated",
    "partial",
    "miss",
    "below_threshold",
    "host_capacity",
    "stale",
    "loaded",
    "dropped",
    "hybrid_discard",
    "nothing_completed",
)
NS_PER_S = 1_000_000_000


@dataclass(slots=True)
class Retry:
    """A prefetch that is to be tried again.

    Attributes:
        due_step: None until a pass has seen its request waiting.
        known_end: page of the prompt up to which an earlier try has proved pages to be there, or 0.
    """

    cause: str
    due_step: int | None = None
    known_end: int = 0


@dataclass(slots=True)
class _Books:
    """Counted since the start, equal on every rank."""

    submitted: int = 0
    backups: int = 0
    occupied_pages: int = 0
    tries: dict[tuple[str, int], int] = field(default_factory=dict)


class Prefetches:
    """One rank's dealings with the external tier, on the scheduler lane.

    Args:
        pools: side pools that travel with pages.
        main: the scheduler's transport, for attach and detach.
        decides_deadline: whether this rank looks at its clock: stage 0 does.
        has_stages: whether vectors go from stage to stage; then the log says which one is gone by here.
    """

    def __init__(
        self,
        config: StorageConfig,
        tree: Tree,
        host: HostMemory,
        queues: Queues,
        storage: Storage,
        group: Agreement,
        main: Transport,
        clock: Clock,
        probes: Probes,
        *,
        pools: Sequence[SidePool],
        decides_deadline: bool,
        has_stages: bool = False,
    ) -> None:
        self._config = config
        self._tree = tree
        self._host = host
        self.queues = queues
        self._storage = storage
        self._agreement = group
        self._main = main
        self._clock = clock
        self._probes = probes
        self._pools = pools
        self._has_trailing = any(pool.policy == "trailing" for pool in pools)
        self._decides_deadline = decides_deadline
        self._has_stages = has_stages
        self._page_tokens = tree.page_size_bytes // TOKEN_BYTES
        self._threshold_pages = -(-max(config.prefetch_threshold_tokens, 1) // self._page_tokens)
        # Attached by a vote, also at the start.
        self.is_attached = False
        self.books = _Books()
        self._step = 0
        # Handle -> the prefetch that counts for it; an older one of the same handle may still be read.
        self._ongoing: dict[tuple[str, int], Prefetch] = {}
        # Op -> prefetches that still have acks or slots to come back.
        self._unfinished: dict[OpId, Prefetch] = {}
        self._backups: dict[OpId, StorageBackup] = {}
        self._retries: dict[tuple[str, int], Retry] = {}
        # Handle -> when its first blocked admission was; survives another try of the same request.
        self._waits: dict[tuple[str, int], int] = {}
        self._expired: set[tuple[str, int]] = set()
        self._apply: Callable[[Sequence[Action]], None] = _no_actions
        self._match: Callable[[Active], Match] | None = None

    def bind(self, apply: Callable[[Sequence[Action]], None], match: Callable[[Active], Match]) -> None:
        """What the cache does for it: carry out the tree's actions, and look a waiting request up again."""
        self._apply = apply
        self._match = match

    # State that the whole replica has in common

    @property
    def is_idle(self) -> bool:
        queues = self.queues
        return not (self._unfinished or self._backups or len(queues.releases) or len(queues.state_releases))

    @property
    def occupied_tokens(self) -> int:
        return self.books.occupied_pages * self._page_tokens

    @property
    def unfinished(self) -> Iterable[Prefetch]:
        """Prefetches that still hold slots or have acks to come, in order of submission."""
        return self._unfinished.values()

    @property
    def backups(self) -> Iterable[StorageBackup]:
        return self._backups.values()

    def ongoing(self, active: Active) -> Prefetch | None:
        return self._ongoing.get(active.handle)

    @property
    def has_timed_waits(self) -> bool:
        """Is somebody waiting for a deadline that will come? Once all KV is there, none does any more."""
        if self._config.prefetch_policy != "timeout":
            return False
        return any(not prefetch.is_kv_complete for prefetch in self._ongoing.values())

    # Submission

    def submit(self, active: Active, match: Match, *, known_end: int = 0) -> str:
        """Ask for what the tree lacks of a request's prompt; returns the outcome, a word of `OUTCOMES`."""
        matched_pages = match.device_pages + match.host_pages
        usable_pages = active.usable_pages(self._page_tokens)
        span_pages = usable_pages - matched_pages
        active.matched_pages_at_submit = matched_pages
        outcome = self._may_submit(active, match, span_pages)
        op = 0
        if outcome == "issued":
            op = self._issue(active, match, matched_pages, span_pages, known_end)
        elif outcome == "declined_rate_limited":
            self._arm(active.handle, "rate_limited")
        self._probes.prefetch_submit(
            active.rid,
            active.attempt,
            op,
            match.node.id,
            span_pages,
            outcome,
            self.occupied_tokens,
            span_pages * self._page_tokens if outcome == "issued" else 0,
            *self._facts(),
        )
        return outcome

    def _may_submit(self, active: Active, match: Match, span_pages: int) -> str:
        """In the order of SGLang's early outs."""
        if active.handle in self._expired:
            return "declined_deadline"
        if active.handle in self._ongoing:
            return "ongoing"
        if not self._tree.can_anchor(match.node):
            return "declined_anchor"
        if span_pages < self._threshold_pages:
            return "declined_too_short"
        host_tokens = self._host.page_count * self._page_tokens
        if host_tokens and self.occupied_tokens >= int(self._config.prefetch_capacity_fraction * host_tokens):
            return "declined_rate_limited"
        return "issued"

    def _issue(self, active: Active, match: Match, first_page: int, span_pages: int, known_end: int) -> OpId:
        size = self._tree.page_size_bytes
        end = first_page + span_pages
        self.books.submitted += 1
        op = self.books.submitted
        prefix: Sequence[str] = ()
        if self._config.pass_prefix_keys:
            prefix = hash_names(active.hashes[: first_page * HASH_BYTES])
        prefetch = Prefetch(
            op=op,
            active=active,
            handle=active.handle,
            anchor=match.node,
            lock=locks.lock_host(self._tree, match.node),
            first_page=first_page,
            tokens=active.tokens[first_page * size : end * size],
            digests=active.digests[first_page * DIGEST_BYTES : end * DIGEST_BYTES],
            hashes=active.hashes[first_page * HASH_BYTES : end * HASH_BYTES],
            pages_asked=span_pages,
            prefix=prefix,
            known_pages=max(0, min(known_end, end) - first_page),
        )
        self._ongoing[active.handle] = prefetch
        self._unfinished[op] = prefetch
        self.books.occupied_pages += span_pages
        self.queues.prefetch.put(prefetch)
        return op

    # What the event round says has come

    async def drain_hits(self, count: int) -> None:
        for _ in range(count):
            hit = await self.queues.hits.get()
            prefetch = hit.prefetch
            prefetch.agreed_pages = hit.agreed_pages
            consume_seq = self.queues.hits.taken_count
            outcome, pages, is_reserved = self._take_over(prefetch, hit.agreed_pages)
            self._probes.prefetch_hit(
                prefetch.op,
                prefetch.handle[0],
                prefetch.handle[1],
                consume_seq,
                outcome,
                hit.agreed_pages * self._page_tokens,
                pages * self._page_tokens,
                self._host.pages_free,
                is_reserved,
                len(self.queues.hits),
                len(self.queues.acks),
            )
            if pages:
                self.queues.buffer.put(prefetch)
                continue
            del self._unfinished[prefetch.op]
            if outcome == "stale":
                continue
            self._revoke(prefetch, outcome)

    def _take_over(self, prefetch: Prefetch, agreed_pages: int) -> tuple[str, int, bool]:
        """Slots for a hit: outcome, pages, and whether this rank really has them."""
        if self._ongoing.get(prefetch.handle) is not prefetch:
            # Of a handle that has been tried again or has gone; never that of the newer one.
            return "stale", 0, False
        if agreed_pages < self._threshold_pages:
            return ("below_threshold" if agreed_pages else "miss"), 0, False
        host = self._host
        state_count = int(self._has_trailing)
        pages = agreed_pages
        if not host.make_room(pages, state_count):
            available = host.pages_available()
            pages = min(pages, available) if available is not None else pages
            # A shorter span would end where there may be no state.
            is_enough = pages >= self._threshold_pages and not self._has_trailing
            if not (is_enough and host.has_room(pages, state_count)):
                return "host_capacity", 0, False
        host.take(pages, state_count)
        prefetch.slots = host.reserve(pages, state_count)
        prefetch.page_count, prefetch.state_count = pages, state_count
        prefetch.cut(pages, self._tree.page_size_bytes)
        self._count_lost(prefetch, "host_capacity", agreed_pages - pages)
        return ("allocated" if pages == agreed_pages else "partial"), pages, prefetch.slots is not None

    def _revoke(self, prefetch: Prefetch, outcome: str) -> None:
        """It ends without a page. A miss is tried again, with what it has proved."""
        self._retire(prefetch)
        if outcome in ("below_threshold", "host_capacity"):
            self._count_lost(prefetch, outcome, prefetch.agreed_pages)
        elif outcome == "terminated":
            self._count_lost(prefetch, self._end_reason, prefetch.pages_asked)
        if prefetch.handle in self._expired:
            return
        known_end = prefetch.first_page + prefetch.agreed_pages if outcome == "host_capacity" else 0
        self._arm(prefetch.handle, outcome, known_end)

    def _retire(self, prefetch: Prefetch) -> None:
        """It no longer counts for its handle; its slots and acks may still be out."""
        del self._ongoing[prefetch.handle]
        self.books.occupied_pages -= prefetch.pages_asked
        locks.unlock_host(self._tree, prefetch.lock)

    async def drain_acks(self, count: int) -> None:
        for _ in range(count):
            ack = await self.queues.acks.get()
            prefetch = ack.prefetch
            is_current = self._ongoing.get(prefetch.handle) is prefetch
            self._probes.prefetch_ack(
                prefetch.op,
                ack.ack,
                self.queues.acks.taken_count,
                is_current,
                ack.pages * (1 if ack.ack == "pool_hits" else self._page_tokens),
            )
            if is_current:
                self._apply_ack(prefetch, ack)
            if ack.ack == "completed":
                self._release_rest(prefetch)

    def _apply_ack(self, prefetch: Prefetch, ack: Progress) -> None:
        if ack.ack == "progress":
            assert ack.pages >= prefetch.completed_pages, (
                f"prefetch {prefetch.op}: progress fell from {prefetch.completed_pages} to {ack.pages} pages"
            )
            prefetch.completed_pages = ack.pages
            prefetch.is_kv_complete = ack.pages == prefetch.page_count
        elif ack.ack == "pool_hits":
            prefetch.has_state = bool(ack.pages)
        else:
            self._insert(prefetch, "storage_transfer")

    @property
    def _end_reason(self) -> str:
        """Why tokens are missing that nobody waited for."""
        return "deadline" if self._config.prefetch_policy == "timeout" else "not_waited_for"

    def _insert(self, prefetch: Prefetch, shortfall_reason: str) -> None:
        """Hang what every rank has read below the anchor; what is short stays accounted for."""
        tree, host = self._tree, self._host
        completed = prefetch.completed_pages
        is_discarded = self._has_trailing and not (prefetch.is_kv_complete and prefetch.has_state)
        missing = prefetch.page_count - (0 if is_discarded else completed)
        self._count_lost(prefetch, shortfall_reason, missing)
        new_digests = b""
        matched = loaded = 0
        if is_discarded:
            # All or nothing: KV without the state at its end can't be gone on from.
            outcome = "hybrid_discard"
            self._give_pages(prefetch, completed)
        elif completed == 0:
            outcome = "nothing_completed"
        else:
            assert prefetch.slots is not None, f"prefetch {prefetch.op}: pages agreed on that this rank lacks"
            done = tree.host_insert(
                prefetch.anchor,
                prefetch.tokens[: completed * tree.page_size_bytes],
                prefetch.slots.pages[:completed],
                prefetch.digests[: completed * DIGEST_BYTES],
                prefetch.hashes[: completed * HASH_BYTES],
                namespace=prefetch.active.namespace,
            )
            self._apply(done.actions)
            prefetch.given_pages = completed
            for slots in (done.duplicate_slots, done.dropped_slots):
                host.free(slots)
            takes_state = done.node.host is not None and done.node.host_state is None
            if prefetch.slots.states and takes_state and not done.dropped_slots:
                tree.set_host_state(done.node, prefetch.slots.states[0])
                prefetch.slots.states.clear()
                prefetch.state_count = 0
            matched, loaded, new_digests = done.matched_pages, done.loaded_pages, done.new_digests
            self._count_lost(prefetch, "device_overlap", matched)
            self._count_lost(prefetch, "dropped", len(done.dropped_slots))
            outcome = done.outcome or "loaded"
        self._probes.prefetch_insert(
            prefetch.op,
            prefetch.handle[0],
            prefetch.anchor.id,
            outcome,
            completed * self._page_tokens,
            matched * self._page_tokens,
            loaded * self._page_tokens,
            *self._facts(),
            new_digests.hex(),
        )
        prefetch.active.storage_first_page = prefetch.first_page + matched
        prefetch.active.storage_pages = loaded
        self._retire(prefetch)

    def _give_pages(self, prefetch: Prefetch, page_count: int) -> None:
        """Free the first `page_count` pages at once; the lanes are done with them on every rank."""
        if not page_count:
            return
        slots = None
        if prefetch.slots is not None:
            slots = HostSlots(prefetch.slots.pages[prefetch.given_pages : page_count], [])
        self._host.give_back(slots, page_count - prefetch.given_pages, 0)
        prefetch.given_pages = page_count

    def _release_rest(self, prefetch: Prefetch) -> None:
        """All acks are in: what was allocated and not given away goes to the release queues."""
        del self._unfinished[prefetch.op]
        slots = prefetch.slots
        for page in range(prefetch.given_pages, prefetch.page_count):
            self.queues.releases.put(slots.pages[page] if slots is not None else None)
        for _ in range(prefetch.state_count):
            self.queues.state_releases.put(slots.states[0] if slots is not None else None)

    async def drain_releases(self, pages: int, states: int) -> None:
        """Free what a later stage, too, has queued by now."""
        for pool, queue, count in (
            ("kv", self.queues.releases, pages),
            ("mamba", self.queues.state_releases, states),
        ):
            if not count:
                continue
            found = [slot for _ in range(count) if (slot := await queue.get()) is not None]
            self._host.give_back(
                HostSlots(found, []) if pool == "kv" else HostSlots([], found),
                count if pool == "kv" else 0,
                count if pool == "mamba" else 0,
            )
            self._probes.release(pool, count, self._host.pages_free)

    # Admission

    async def check(self, active: Active) -> bool:
        """May `active` be admitted now, as far as its prefetch is concerned? Ends the prefetch if so.

        With policy `timeout` ranks meet here, once for every request that is polled: the loop that
        calls must make as many calls on every rank.
        """
        prefetch = self._ongoing.get(active.handle)
        if prefetch is None:
            return True
        policy = self._config.prefetch_policy
        elapsed_ns: int | None = None
        is_late = False
        if policy == "timeout":
            if self._decides_deadline:
                elapsed_ns, is_late = self._look_at_clock(prefetch)
            agreed = await self._agreement.agree(
                [int(is_late)], op="max", purpose=agreement.PREFETCH_TIMEOUT, transfers_in_flight=0
            )
            if self._has_stages:
                self._probes.adopted(agreement.PREFETCH_TIMEOUT, vector_digest(agreed))
            may_end = bool(agreed[0])
            if may_end:
                self._expired.add(active.handle)
        else:
            may_end = policy == "best_effort"
        self._probes.prefetch_poll(
            active.rid,
            active.attempt,
            prefetch.op,
            policy,
            prefetch.completed_pages * self._page_tokens,
            "end" if may_end else "wait",
            elapsed_ns,
            is_late,
            len(self.queues.hits),
            len(self.queues.acks),
        )
        if not may_end:
            return False
        prefetch.is_terminated = True
        if prefetch.page_count:
            self._insert(prefetch, self._end_reason)
        else:
            self._revoke(prefetch, "terminated")
        return True

    def _look_at_clock(self, prefetch: Prefetch) -> tuple[int, bool]:
        """Time since the first blocked poll, and whether that is too long.

        Once all KV has come and only a side pool is being read, there is no deadline any more.
        """
        now_ns = self._clock.now_ns()
        since_ns = now_ns - self._waits.setdefault(prefetch.handle, now_ns)
        return since_ns, since_ns >= self.timeout_ns(prefetch.pages_asked) and not prefetch.is_kv_complete

    def timeout_ns(self, pages_asked: int) -> int:
        """base + pages asked for x (page size / 1024 x per_ki_token)."""
        config = self._config
        per_page_s = self._page_tokens / 1024 * config.prefetch_timeout_per_ki_token_s
        return round((config.prefetch_timeout_base_s + pages_asked * per_page_s) * NS_PER_S)

    def is_lost(self, active: Active, match: Match) -> bool:
        """Has the device or the host lost some of what was there when the prefetch was decided?

        Then the prefetch is issued again for the longer span, as one more try, and the request waits.
        """
        matched_pages = match.device_pages + match.host_pages
        if not self.is_attached or matched_pages >= active.matched_pages_at_submit:
            return False
        tries = self.books.tries.get(active.handle, 0)
        if tries >= self._config.retry_max_attempts:
            # Once: from here on what is there now counts.
            active.matched_pages_at_submit = matched_pages
            self._record_retry(active, "device_loss", "cap_reached", self._step)
            return False
        self.books.tries[active.handle] = tries + 1
        outcome = self.submit(active, match)
        self._record_retry(active, "device_loss", outcome, self._step)
        if outcome != "issued":
            return False
        # It is being tried again now; a miss before that has nothing left to repeat.
        self._retries.pop(active.handle, None)
        return True

    def admitted(self, active: Active, *, used_pages: int) -> None:
        """It runs: whatever was to be tried again for it is not.

        Args:
            used_pages: of what its prefetch has brought, those that it starts from.
        """
        short = active.storage_pages - used_pages
        if short > 0:
            self._probes.prefetch_outcome(
                active.rid,
                active.attempt,
                "unfulfilled",
                "cache_admission_shortfall",
                short * self._page_tokens,
            )
        active.storage_pages = 0
        self._forget(active.handle)

    def cancelled(self, active: Active) -> None:
        """It was aborted or retracted: its prefetch ends, its pages go as the lanes let go of them."""
        prefetch = self._ongoing.get(active.handle)
        if prefetch is not None:
            prefetch.is_terminated = True
            self._give_pages(prefetch, prefetch.completed_pages)
            self._retire(prefetch)
            self._probes.prefetch_outcome(
                active.rid, active.attempt, "cancelled", "", prefetch.pages_asked * self._page_tokens
            )
        active.storage_pages = 0
        self._forget(active.handle)

    def _forget(self, handle: tuple[str, int]) -> None:
        self._retries.pop(handle, None)
        self._waits.pop(handle, None)
        self._expired.discard(handle)
        self.books.tries.pop(handle, None)

    # Retries

    def _arm(self, handle: tuple[str, int], cause: str, known_end: int = 0) -> None:
        if self._config.retry_poll_interval and handle not in self._expired:
            self._retries[handle] = Retry(cause, known_end=known_end)

    def process_retries(self, waiting: Iterable[Active]) -> None:
        """Issue again what is due, in queue order. Called once a scheduling pass, on every rank.

        The head of the queue does not wait for a plain miss: it would only be held up.
        """
        self._step += 1
        if not self.is_attached:
            return
        for place, active in enumerate(waiting):
            retry = self._retries.get(active.handle)
            if retry is None:
                continue
            if place == 0:
                del self._retries[active.handle]
                self._record_retry(active, retry.cause, "cancelled", self._step)
                continue
            if retry.due_step is None:
                retry.due_step = self._step + self._config.retry_poll_interval
                self._record_retry(active, retry.cause, "armed", retry.due_step)
            if self._step < retry.due_step:
                continue
            del self._retries[active.handle]
            tries = self.books.tries.get(active.handle, 0)
            if tries >= self._config.retry_max_attempts:
                self._record_retry(active, retry.cause, "cap_reached", retry.due_step)
                continue
            self.books.tries[active.handle] = tries + 1
            assert self._match is not None
            outcome = self.submit(active, self._match(active), known_end=retry.known_end)
            self._record_retry(active, retry.cause, outcome, retry.due_step)

    def _record_retry(self, active: Active, cause: str, verdict: str, due_step: int) -> None:
        tries = self.books.tries.get(active.handle, 0)
        self._probes.prefetch_retry(
            active.rid, active.attempt, cause, verdict, due_step, tries, *self._facts()
        )

    def _facts(self) -> tuple[int | None, int, int]:
        """What this rank alone sees: free host pages, and what its lanes have published by now."""
        return self._host.pages_free, len(self.queues.hits), len(self.queues.acks)

    def _count_lost(self, prefetch: Prefetch, reason: str, pages: int) -> None:
        if pages > 0:
            rid, attempt = prefetch.handle
            self._probes.prefetch_outcome(rid, attempt, "unfulfilled", reason, pages * self._page_tokens)

    # Backup: host to external tier

    def back_up(self, node: Node) -> None:
        """A write has been acknowledged: send its pages on, under a host lock until that is acknowledged."""
        if not self.is_attached or node.host is None or node.hashes is None:
            return
        self.books.backups += 1
        op = self.books.backups
        prefix: Sequence[str] = ()
        if self._config.pass_prefix_keys and node.parent is not None:
            prefix = hash_names(self._tree.path_hashes(node.parent))
        backup = StorageBackup(
            op=op,
            node_id=node.id,
            lock=locks.lock_host(self._tree, node),
            digests=node.digests,
            names=hash_names(node.hashes),
            slots=list(node.host),
            has_state=node.host_state is not None,
            prefix=prefix,
        )
        self._backups[op] = backup
        self._probes.storage_backup(
            op,
            node.id,
            node.page_count,
            self._host.pages_free,
            len(self.queues.backup_acks),
            len(self._backups),
        )
        self.queues.backup.put(backup)

    async def drain_backups(self, count: int) -> None:
        for _ in range(count):
            backup = await self.queues.backup_acks.get()
            del self._backups[backup.op]
            locks.unlock_host(self._tree, backup.lock)
            self._probes.storage_ack(backup.op, [backup.node_id], len(backup.slots), backup.written_pages)

    # Attach and detach: all ranks or none

    async def attach(self) -> tuple[bool, str]:
        """Whether it is attached now, and what this rank itself has met with if not.

        Reaches for the store on every rank, then vote; whoever had reached it lets go if one could not.

        Every rank takes part in the vote, whatever it has found: a rank that returned before would leave
        its peers waiting.
        """
        if self.is_attached:
            return False, ""
        error = ""
        try:
            await self._storage.open()
        except Exception as problem:
            # Whatever it is, this rank has not reached the store, and its peers wait for its vote.
            error = str(problem) or type(problem).__name__
        if not await agreement.vote(self._main, not error, purpose="storage_attach", channel="main"):
            if not error:
                await self._storage.close()
            return False, error
        self.is_attached = True
        self._tree.backfill_hashes()
        return True, ""

    async def detach(self) -> tuple[bool, str]:
        """Let go of the store on every rank. The caller has made sure that nothing is under way."""
        if not self.is_attached:
            return False, ""
        assert self.is_idle, "detach with prefetches or backups under way"
        if not await agreement.vote(self._main, True, purpose="storage_detach", channel="main"):
            return False, ""
        self.is_attached = False
        self._retries.clear()
        try:
            await self._storage.close()
        except Exception as problem:
            # It is let go of on every rank, whatever one store says to that.
            return True, str(problem) or type(problem).__name__
        return True, ""


def _no_actions(actions: Sequence[Action]) -> None:
    assert not actions, f"{len(actions)} actions of the tree and nobody to carry them out"
