"""What one replica's first rank recorded, added up: each request's prompt by tier, each page's fate.

Reads records and draws the one conclusion that takes several of them: why a page was missed. What the
records do not say is `unknown`, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tracer.errors import HitsError
from tracer.log import LaneLog
from tracer.record import MAIN_LANE
from tracer.served import RequestHits

DIGEST_CHARS = 16
# No prompt is longer, whatever a log says, and sums of such counts have room in every table.
COUNT_MAX = (1 << 53) - 1
# What last happened to a page's content, by its digest.
RESIDENT, DEMOTED, DROPPED, DROPPED_FROM_HOST = "resident", "demoted", "dropped", "dropped_from_host"
FLUSHED = "flushed"
ABORTED = "abort"
DECLINED = "declined_"


class Asked(msgspec.Struct):
    """What a waiting request asked the external tier for, and what came of it.

    Attributes:
        spans: prefetch -> prompt tokens before the span that it asked for.
        given: prefetch -> tokens of its span that came into the tree, or were there.
        declined: why the last one was not even issued, or "".
        word: what became of the last one that was, as far as that has a word.
        is_late: its deadline ended it.
        unanswered: the one that was ended before its hit was taken over, or None.
    """

    spans: dict[int, int] = {}
    given: dict[int, int] = {}
    declined: str = ""
    word: str = ""
    is_late: bool = False
    unanswered: int | None = None


class Draft(msgspec.Struct, gc=False):
    """A request while its records are read; the first admission is the one that counts.

    Nothing for the collector of garbage to look at: with a million of them that is a quarter of the time.

    Attributes:
        matched_tokens: found at the last look.
        asked: None for one that asked the external tier for nothing.
    """

    rid: str
    is_received: bool = False
    input_tokens: int = 0
    conversation: str | None = None
    step: int = 0
    time_ns: int = 0
    tiers: tuple[int, int, int] = (0, 0, 0)
    computed: int = 0
    is_admitted: bool = False
    is_finished: bool = False
    is_aborted: bool = False
    is_retracted: bool = False
    matched: str = "unknown"
    declined: str = ""
    # From its admission to its first forward: whether the host's part is loaded is told in between.
    is_load_due: bool = False
    refused: str = ""
    matched_tokens: int = 0
    asked: Asked | None = None

    @property
    def asking(self) -> Asked:
        """`asked`, from now on there."""
        if self.asked is None:
            self.asked = Asked()
        return self.asked


@dataclass(slots=True)
class Account:
    """One replica's requests and the fate of every page, as its first rank recorded them.

    Attributes:
        hit_tokens: prefetch -> tokens of its span that every rank's store had.
        local_tokens: prefetch -> tokens of it that this rank's store had.
        drafts: request id -> the last one that had it.
        received: every one, in the order of their arrival.
        reused: those whose id was received again before they had ended.
        throttled: kinds needed here of which the recorder has left records out.
        unasked: prefetches that were ended before this rank's store was asked; nobody knows what it had.
        is_whole: the log begins at its beginning; otherwise a page that was never seen may have been.
    """

    dp: int
    page_size_tokens: int = 0
    drafts: dict[str, Draft] = field(default_factory=dict)
    received: list[Draft] = field(default_factory=list)
    reused: int = 0
    fates: dict[str, str] = field(default_factory=dict)
    hit_tokens: dict[int, int] = field(default_factory=dict)
    local_tokens: dict[int, int] = field(default_factory=dict)
    unasked: set[int] = field(default_factory=set)
    throttled: set[str] = field(default_factory=set)
    has_backups: bool = False
    is_whole: bool = True

    def read(self, lane: LaneLog) -> None:
        handlers: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "request": self._request,
            "match": self._match,
            "load_back": self._load_back,
            "admit": self._admit,
            "forward": self._forward,
            "finish": self._finish,
            "abort": self._abort,
            "retract": self._retract,
            "insert": self._insert,
            "prefetch_submit": self._prefetch_submit,
            "query": self._query,
            "prefetch_hit": self._prefetch_hit,
            "prefetch_poll": self._prefetch_poll,
            "prefetch_outcome": self._prefetch_outcome,
            "prefetch_insert": self._prefetch_insert,
            "evict": self._evict,
            "evict_host": self._evict_host,
            "write_backup": self._write_backup,
            "command": self._command,
            "throttle": self._throttle,
        }
        find = handlers.get
        record: Mapping[str, Any] = {"seq": 0}
        if lane.lane == MAIN_LANE and lane.last_dropped_seq:
            self.is_whole = False
        try:
            for record in lane.records():
                if handler := find(record["kind"]):
                    handler(record)
        except (LookupError, TypeError, ValueError) as error:
            raise lacking(lane, record["seq"], error) from None

    def results(self, has_host_tier: bool) -> list[RequestHits]:
        return [self._result(draft, has_host_tier) for draft in self.received]

    def notes(self) -> list[str]:
        """What this replica's records lack."""
        notes = []
        unseen = sum(not draft.is_received for draft in self.drafts.values())
        if unseen:
            # Nobody knows their prompts.
            were = "1 request was" if unseen == 1 else f"{unseen:,} requests were"
            notes.append(f"{were} received before the log begins: not counted")
        if self.reused:
            was = "1 id was" if self.reused == 1 else f"{self.reused:,} ids were"
            notes.append(f"{was} received again while in use: records from then on are the later request's")
        if self.throttled:
            kinds = ", ".join(sorted(self.throttled))
            notes.append(f"the recorder left records out to save time: {kinds}")
        return notes

    def _result(self, draft: Draft, has_host_tier: bool) -> RequestHits:
        device, host, storage = draft.tiers
        return RequestHits(
            draft.rid,
            self.dp,
            draft.input_tokens,
            device,
            host,
            storage,
            draft.computed,
            self._reason(draft, has_host_tier) if draft.is_admitted else None,
            draft.conversation,
            draft.step,
            draft.time_ns,
            draft.is_finished,
            "" if draft.is_admitted else draft.refused,
            draft.is_aborted,
        )

    def _reason(self, draft: Draft, has_host_tier: bool) -> str:
        """Why the first computed page was not a hit: the highest tier that could have given it says so.

        host held it                   declined_<why>, by the load back
        the external tier held it      deadline, declined_<why>, by the prefetch
        it was asked, not waited for   the same two
        nobody did any more            what became of it
        """
        if draft.declined:
            return DECLINED + draft.declined
        matched = draft.matched
        if matched in NO_PAGE_MISSED:
            return matched
        if draft.asked is not None and (reason := self._of_storage(draft.asked, sum(draft.tiers), matched)):
            return reason
        if matched == DROPPED:
            return "not_backed_up" if has_host_tier else "evicted_device"
        return matched

    def _of_storage(self, asked: Asked, at: int, matched: str) -> str:
        """Why the external tier did not give the page at token `at`, where it might have; else nothing."""
        if self._is_withheld(asked, at):
            # Some logs call it a deadline whoever ended the prefetch; the poll that did knows better.
            if asked.word in ("", "terminated", "deadline"):
                return _not_awaited(asked)
            return _declined(asked.word)
        if self._is_unanswered(asked, at, matched):
            return _not_awaited(asked)
        if matched == "evicted_host" and asked.declined:
            # It has been on the host, so it was sent on to the external tier, and nobody asked there.
            return _declined(asked.declined)
        return ""

    def _is_withheld(self, asked: Asked, at: int) -> bool:
        """Whether the external tier had the page at token `at` on every rank, and did not give it.

        The last prefetch that reached it decides: what came and was lost again was not withheld.
        """
        for op, first in reversed(asked.spans.items()):
            if first <= at < first + self.hit_tokens.get(op, 0):
                return at >= first + asked.given.get(op, 0)
        return False

    def _is_unanswered(self, asked: Asked, at: int, matched: str) -> bool:
        """Whether the external tier was asked for the page at token `at`, and nobody waited for its answer.

        What the ranks agree on is then nothing, since one of them no longer asked; this rank's own answer
        counts where there is one.
        """
        op = asked.unanswered
        if op is None or at < asked.spans[op]:
            return False
        if op in self.unasked:
            return matched in MAY_BE_STORED
        return at < asked.spans[op] + self.local_tokens.get(op, 0)

    def _draft(self, rid: str) -> Draft:
        draft = self.drafts.get(rid)
        if draft is None:
            draft = self.drafts[rid] = Draft(rid)
        return draft

    def _request(self, record: Mapping[str, Any]) -> None:
        if type(record["rid"]) is not str:
            raise TypeError(f"{record['rid']!r:.40} is not a request's id")
        draft = self._draft(record["rid"])
        if draft.is_received:
            # Whoever sends requests chooses their ids, and may choose one again.
            self.reused += not draft.is_finished
            draft = self.drafts[draft.rid] = Draft(draft.rid)
        draft.is_received = True
        self.received.append(draft)
        draft.input_tokens = _count(record["input_tokens"])
        conversation = record.get("conversation")
        draft.conversation = None if conversation is None else str(conversation)
        draft.step, draft.time_ns = _whole(record["step"]), _whole(record["time_ns"])

    def _match(self, record: Mapping[str, Any]) -> None:
        draft = self._draft(record["rid"])
        if draft.is_admitted:
            return
        # A request that waits is matched again and again; the last match before admission decides.
        draft.declined = ""
        digest = record.get("miss_digest")
        found_tokens = _count(record["device_tokens"]) + _count(record["host_tokens"])
        draft.matched_tokens = found_tokens
        if digest is None:
            draft.matched = "unknown"
        elif digest == "":
            # What is left is one token that must be computed, or a page too short to be kept.
            is_partial = self.page_size_tokens and draft.input_tokens % self.page_size_tokens
            draft.matched = "partial_page" if is_partial else "last_token"
        elif _count(record.get("kv_tokens", 0)) > found_tokens:
            draft.matched = "no_state"
        else:
            draft.matched = self._fate(digest)

    def _fate(self, digest: str) -> str:
        fate = self.fates.get(digest)
        return "unknown" if fate is None and not self.is_whole else FATE_REASONS[fate]

    def _load_back(self, record: Mapping[str, Any]) -> None:
        draft = self._draft(record["rid"])
        if not draft.is_admitted or draft.is_load_due:
            draft.is_load_due = False
            draft.declined = str(record.get("declined") or "")

    def _admit(self, record: Mapping[str, Any]) -> None:
        draft = self._draft(record["rid"])
        if record["verdict"] == REFUSED and not draft.is_admitted:
            draft.refused = REFUSED
        if record["verdict"] == "admitted" and not draft.is_admitted:
            draft.is_admitted = draft.is_load_due = True
            draft.tiers = (
                _count(record["device_tokens"]),
                _count(record["host_tokens"]),
                _count(record["storage_tokens"]),
            )

    def _forward(self, record: Mapping[str, Any]) -> None:
        if record["mode"] == "extend":
            for rid, tokens in zip(record["rids"], record["computed_tokens"], strict=True):
                draft = self._draft(rid)
                if not draft.is_retracted:
                    draft.computed = _count(draft.computed + _count(tokens))
                draft.is_load_due = False

    def _finish(self, record: Mapping[str, Any]) -> None:
        draft = self._draft(record["rid"])
        draft.is_finished = True
        draft.is_aborted = draft.is_aborted or record.get("reason") == ABORTED
        if not draft.is_admitted:
            draft.refused = str(record.get("reason") or REFUSED)

    def _abort(self, record: Mapping[str, Any]) -> None:
        # One that finds its request nowhere came too late.
        if record.get("place"):
            self._draft(record["rid"]).is_aborted = True

    def _retract(self, record: Mapping[str, Any]) -> None:
        self._draft(record["rid"]).is_retracted = True

    def _insert(self, record: Mapping[str, Any]) -> None:
        # Phase `call` has no digests yet.
        self._set_fates(record.get("new_digests"), RESIDENT)

    def _prefetch_submit(self, record: Mapping[str, Any]) -> None:
        draft = self._draft(record["rid"])
        if draft.is_admitted:
            return
        asked, outcome = draft.asking, str(record["outcome"])
        is_issued = outcome == "issued"
        asked.declined = "" if is_issued or outcome == "ongoing" else outcome
        if is_issued:
            asked.spans[_count(record["op"])] = draft.matched_tokens
            asked.word, asked.is_late, asked.unanswered = "", False, _count(record["op"])

    def _query(self, record: Mapping[str, Any]) -> None:
        op = _count(record["op"])
        self.hit_tokens[op] = _count(record["agreed_pages"]) * self.page_size_tokens
        self.local_tokens[op] = _count(record.get("local_pages", 0)) * self.page_size_tokens
        if record.get("error") == UNASKED:
            self.unasked.add(op)

    def _prefetch_hit(self, record: Mapping[str, Any]) -> None:
        op, asked = _count(record["op"]), self._draft(record["rid"]).asking
        self.hit_tokens[op] = _count(record["hit_tokens"])
        if asked.unanswered == op and record["outcome"] not in ("stale", UNASKED):
            asked.unanswered = None
        self._tell(record, str(record["outcome"]), but_not=("allocated", "partial", "stale"))

    def _prefetch_poll(self, record: Mapping[str, Any]) -> None:
        draft = self._draft(record["rid"])
        if not draft.is_admitted and record["verdict"] == "end":
            draft.asking.is_late = record.get("policy") == "timeout"

    def _prefetch_outcome(self, record: Mapping[str, Any]) -> None:
        # What the device had already is not missing, and says nothing about what is.
        self._tell(record, str(record.get("reason") or record["outcome"]), but_not=("device_overlap",))

    def _prefetch_insert(self, record: Mapping[str, Any]) -> None:
        self._set_fates(record.get("new_digests"), RESIDENT)
        given = _count(record["matched_tokens"]) + _count(record["loaded_tokens"])
        self._draft(record["rid"]).asking.given[_count(record["op"])] = given
        # Where it was cut short the record before has said why.
        self._tell(record, str(record["outcome"]), but_not=("loaded", "nothing_completed"))

    def _tell(self, record: Mapping[str, Any], word: str, *, but_not: tuple[str, ...] = ()) -> None:
        draft = self._draft(record["rid"])
        if not draft.is_admitted and word not in but_not:
            draft.asking.word = word

    def _evict(self, record: Mapping[str, Any]) -> None:
        fates = self.fates
        for digest in split_digests(record.get("demoted_digests")):
            # Under write_back an eviction is recorded behind those from the host that it has led to. What
            # the host has dropped and nobody has brought back since can't have been on the device later.
            if fates.get(digest) != DROPPED_FROM_HOST:
                fates[digest] = DEMOTED
        self._set_fates(record.get("dropped_digests"), DROPPED)

    def _evict_host(self, record: Mapping[str, Any]) -> None:
        self._set_fates(record.get("dropped_digests"), DROPPED_FROM_HOST)

    def _write_backup(self, record: Mapping[str, Any]) -> None:
        self.has_backups = True

    def _command(self, record: Mapping[str, Any]) -> None:
        if record["verb"] == "flush" and record["verdict"] == "done":
            self.fates = dict.fromkeys(self.fates, FLUSHED)

    def _throttle(self, record: Mapping[str, Any]) -> None:
        self.throttled |= NEEDED & set(record.get("kinds") or ())

    def _set_fates(self, digests: str | None, fate: str) -> None:
        fates = self.fates
        for digest in split_digests(digests):
            fates[digest] = fate


# Kinds of record without which these numbers are not what they say.
NEEDED = frozenset(
    {"request", "match", "load_back", "admit", "forward", "finish", "abort", "retract", "insert"}
    | {"prefetch_submit", "query", "prefetch_hit", "prefetch_poll", "prefetch_outcome", "prefetch_insert"}
    | {"evict", "evict_host", "write_backup", "command"}
)
# What a rank says instead of asking its store, once the prefetch has been ended.
UNASKED = "terminated"
# A page with such a past may be in the external tier, whatever happened to it on this machine.
MAY_BE_STORED = ("cold", "evicted_host", FLUSHED, "unknown")
# The verdict of an admission on a request that can never fit.
REFUSED = "too_long"
# What is computed then is no page that anybody could have had.
NO_PAGE_MISSED = ("last_token", "partial_page")
# A page that is still somewhere and was missed all the same has a history that the log doesn't hold.
FATE_REASONS = {
    None: "cold",
    RESIDENT: "unknown",
    DEMOTED: "unknown",
    DROPPED: DROPPED,
    DROPPED_FROM_HOST: "evicted_host",
    FLUSHED: FLUSHED,
}


def lacking(lane: LaneLog, seq: int, error: Exception) -> HitsError:
    """What to say of a record that is not as its kind is documented."""
    return HitsError(
        f"record {seq} lacks a count or field that the hit analysis needs: {error!r}",
        where=lane.file_of(seq).name,
        expected="the fields of the same kind in docs/log_format.md",
    )


def _not_awaited(asked: Asked) -> str:
    """The reason where admission went on without a prefetch: its policy says by what right."""
    return "deadline" if asked.is_late else DECLINED + "not_waited_for"


def _declined(word: str) -> str:
    """The reason that a prefetch's outcome makes."""
    word = word.removeprefix(DECLINED)
    return word if word == "deadline" else DECLINED + word


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        raise TypeError(f"{value!r:.40} is not a count")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.40} is not a whole number")
    return value


def split_digests(digests: str | None) -> list[str]:
    """One digest a page out of a field that holds them one behind the other."""
    if not digests:
        return []
    return [digests[start : start + DIGEST_CHARS] for start in range(0, len(digests), DIGEST_CHARS)]
