"""The story of one request: its own records, its nodes' transfers, its prefetches, its missed page.

Owns the sentences; the numbers are `hits`'s. Records of several lanes are told in the order of the rank's
own clock, which they share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from tracer.account import UNASKED, split_digests
from tracer.errors import HitsError
from tracer.hits import leaders, page_size_tokens
from tracer.log import LaneLog, Run

Fields = Mapping[str, Any]
# What is told of a record from which nothing can be told.
LACKING = "a record that lacks some of its fields"


@dataclass(frozen=True, slots=True)
class StoryLine:
    """One moment in a request's life: the record it comes from and the same as a sentence."""

    step: int
    time_ns: int
    kind: str
    text: str
    record: Fields


def why(run: Run, rid: str) -> list[StoryLine]:
    """What happened to one request, in order: its own records, its nodes' transfers, its first missed page.

    Raises:
        HitsError: no replica's first rank has seen a request of that id.
    """
    replicas, _notes = leaders(run)
    for _dp, lanes in replicas:
        missed, has_seen = _first_miss(lanes, rid)
        if has_seen:
            teller = _Teller(rid, missed, page_size_tokens(lanes))
            lines = [line for lane in lanes for line in teller.tell(lane)]
            # Stable, so that each lane keeps its own order.
            return _until_its_end(sorted(lines, key=attrgetter("time_ns")), rid)
    raise HitsError(f"no request {rid} in {run.path}", hint=f"hicache hits {run.path}")


def _until_its_end(lines: Sequence[StoryLine], rid: str) -> list[StoryLine]:
    """What lanes still do with its pages and prefetches is no longer its story; a late abort is."""
    for number, line in enumerate(lines):
        if line.kind == "finish" and line.record.get("rid") == rid:
            return [*lines[: number + 1], *(later for later in lines[number + 1 :] if later.kind == "abort")]
    return list(lines)


def _first_miss(lanes: Sequence[LaneLog], rid: str) -> tuple[str, bool]:
    """The page that decided the request's reason ("" when there is none), and whether it was seen."""
    missed, has_seen, is_admitted = "", False, False
    for lane in lanes:
        for record in lane.records():
            if record.get("rid") != rid:
                continue
            has_seen = True
            if record["kind"] == "match" and not is_admitted:
                missed = record.get("miss_digest") or ""
            is_admitted = is_admitted or (record["kind"] == "admit" and record.get("verdict") == "admitted")
    return missed, has_seen


@dataclass(slots=True)
class _Teller:
    """What is known of one request while its records are read, the scheduler's lane first.

    Attributes:
        missed: the page that decides its reason, until it is admitted.
        nodes: its own from the record that names them on; transfers name nodes, not requests.
        ops: its prefetches; reads and acks name those.
        policy: by which the last of them was ended before it was complete, or "".
        cut: those that were ended before their hit was taken over; what ranks then agree on says nothing of
            what storage has.
        inserting: tokens of an insert that has not returned; backups that it asks for lie in between.
        to_compute: tokens of its prompt that no forward has computed yet.
        is_dropped: the host's copy of that page went before the eviction that made it was recorded.
        told: kind -> what was last told of it. Whoever waits is asked in every pass, and it need not be told
            again that nothing has changed.
    """

    rid: str
    missed: str
    page_tokens: int
    nodes: set[int] = field(default_factory=set)
    ops: set[int] = field(default_factory=set)
    policy: str = ""
    cut: set[int] = field(default_factory=set)
    inserting: int | None = None
    to_compute: int = 0
    is_dropped: bool = False
    told: dict[str, str] = field(default_factory=dict)

    def tell(self, lane: LaneLog) -> Iterator[StoryLine]:
        for record in lane.records():
            try:
                text = self._sentence(record)
            except (LookupError, TypeError, ValueError, AttributeError):
                text = LACKING
            if text:
                yield StoryLine(record["step"], record["time_ns"], record["kind"], text, record)
            if record.get("rid") == self.rid and record.get("verdict") == "admitted":
                # What becomes of the page from here on no longer concerns this request.
                self.missed = ""

    def _sentence(self, record: Fields) -> str:
        """The record's part in the story, or nothing."""
        kind = record["kind"]
        if record.get("rid") == self.rid:
            return self._own(kind, record)
        if self.rid in record.get("rids", ()):
            return self._shared(kind, record)
        if kind in OF_PREFETCH:
            return OF_PREFETCH[kind](record) if record.get("op") in self.ops else ""
        if self.missed and (text := self._of_page(kind, record)):
            return text
        return self._of_nodes(kind, record)

    def _of_page(self, kind: str, record: Fields) -> str:
        """What happens to the page that it will miss."""
        if kind == "command":
            was_flushed = record.get("verb") == "flush" and record.get("verdict") == "done"
            return "an operator has the cache flushed, whatever pages it has" if was_flushed else ""
        for name, sentence in PAGE_MOVES.get(kind, ()):
            if self.missed in split_digests(record.get(name)):
                was_dropped, self.is_dropped = self.is_dropped, kind == "evict_host"
                if was_dropped and name == "demoted_digests":
                    return LATE_EVICTION
                return sentence.format(rid=record.get("rid", ""))
        return ""

    def _own(self, kind: str, record: Fields) -> str:
        node = record.get("node")
        if kind in ("insert", "load_back") and type(node) is int:
            self.nodes.add(node)
        if kind == "insert":
            return self._insert(record)
        if kind in PREFETCH_TURNS:
            self._follow(kind, record)
        if kind == "admit" and record["verdict"] == "admitted":
            self.to_compute = record["extend_tokens"]
        text = self._own_text(kind, record)
        if kind in ASKED_AGAIN and self.told.get(kind) == text:
            return ""
        self.told[kind] = text
        return text

    def _follow(self, kind: str, record: Fields) -> None:
        """Keep up with what becomes of its prefetches."""
        if kind == "prefetch_submit" and record["outcome"] == "issued":
            self.ops.add(record["op"])
            self.cut.add(record["op"])
            self.policy = ""
        elif kind == "prefetch_hit" and record["outcome"] not in CUT_SHORT:
            self.cut.discard(record["op"])
        elif kind == "prefetch_poll" and record["verdict"] == "end":
            self.policy = record["policy"]

    def _own_text(self, kind: str, record: Fields) -> str:
        if kind == "query":
            return _told_query(record, is_cut=record["op"] in self.cut)
        if kind == "prefetch_outcome":
            return _told_outcome(record, self.policy)
        template = OWN.get(kind)
        return f"{kind} of the request" if template is None else template(record)

    def _insert(self, record: Fields) -> str:
        """Told when it returns: new tokens, copies of what was there, and the prefix it was read from."""
        if record.get("phase") == "call":
            self.inserting = record["tokens"]
            return ""
        tokens = record["tokens"] if self.inserting is None else self.inserting
        self.inserting = None
        new, duplicates = record["new_tokens"], record["duplicate_pages"]
        told = f"{_counted(new, 'new token')} entered the tree (node {record['node']})"
        if duplicates:
            told += f", {_counted(duplicates, 'page')} {_was(duplicates)} there already"
            if not self.page_tokens:
                return told
        prefix = tokens - new - duplicates * self.page_tokens
        if prefix > 0:
            told += f", the other {prefix} {_was(prefix)} its cached prefix"
        return told

    def _shared(self, kind: str, record: Fields) -> str:
        if kind == "forward" and "computed_tokens" in record:
            tokens = record["computed_tokens"][record["rids"].index(self.rid)]
            told = f"forward ({record['mode']}): {_counted(tokens, 'token')} computed"
            if record["mode"] == "extend":
                self.to_compute -= tokens
                if self.to_compute > 0:
                    told += f", {self.to_compute} to go in later chunks"
            return told
        requests = _counted(len(record["rids"]), "request")
        return f"{kind} ({record.get('mode', '')}) of {requests}"

    def _of_nodes(self, kind: str, record: Fields) -> str:
        if kind not in NODE_MOVES:
            return ""
        node = record.get("node")
        own = {node} if type(node) is int else set()
        if kind == "write_backup" and self.inserting is not None:
            self.nodes |= own
        involved = self.nodes & own or self.nodes & set(record.get("nodes") or ())
        if not involved:
            return ""
        return NODE_MOVES[kind](record) + f" (node {', '.join(map(str, sorted(involved)))})"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _words(word: str) -> str:
    return word.replace("_", " ")


def _told_load_back(record: Fields) -> str:
    if record.get("declined"):
        pages = _counted(record["pages"], "page")
        return f"load back of {pages} from host declined: {_words(record['declined'])}"
    return f"load back of {_counted(record['tokens'], 'token')} from host (node {record['node']})"


def _told_match(record: Fields) -> str:
    if record.get("miss_digest"):
        end = f"first page missed: {record['miss_digest']}"
    else:
        end = "every usable page was found"
    device = _counted(record["device_tokens"], "token")
    return f"matched {device} on device, {record['host_tokens']} on host; {end}"


def _told_abort(record: Fields) -> str:
    return f"aborted ({record['place']})" if record["place"] else "an abort came after its end"


def _told_admit(record: Fields) -> str:
    if record["verdict"] != "admitted":
        return _told_refusal(record)
    told = f"admitted: {_counted(record['device_tokens'], 'token')} from device, {record['host_tokens']} "
    return f"{told}from host, {record['storage_tokens']} from storage, {record['extend_tokens']} to compute"


def _told_refusal(record: Fields) -> str:
    told = f"not admitted ({_words(record['verdict'])})"
    pages, free, evictable = (
        record.get(name) for name in ("pages", "device_pages_free", "device_pages_evictable")
    )
    if pages is None:
        return told
    told += f": it needs {_counted(pages, 'more page')} on the device"
    if record["verdict"] != "no_room" or free is None or evictable is None:
        return told
    told += f", {free} {_is(free)} free and {evictable} can be evicted"
    return told if free + evictable < pages else f"{told}; others of its batch have been promised theirs"


def _told_submit(record: Fields) -> str:
    if record["outcome"] != "issued":
        of = f" of {_counted(record['pages'], 'page')}" if record["pages"] else ""
        return f"no prefetch{of} from storage: {_words(record['outcome'].removeprefix('declined_'))}"
    return f"prefetch {record['op']} from storage submitted: {_counted(record['tokens'], 'token')}"


def _told_hit(record: Fields) -> str:
    if record["outcome"] in CUT_SHORT:
        return f"prefetch {record['op']}: its answer came when nobody waited for it any more"
    found = f"prefetch {record['op']}: every rank's storage gives {_counted(record['hit_tokens'], 'token')}"
    if not record["tokens"]:
        return f"{found}; it ends ({_words(record['outcome'])})"
    return f"{found}, host memory for {record['tokens']} ({record['outcome']})"


def _told_prefetch_insert(record: Fields) -> str:
    told = f"prefetch {record['op']} {_words(record['outcome'])}: {record['completed_tokens']} tokens read"
    return f"{told}, {record['matched_tokens']} were there, {record['loaded_tokens']} entered the tree"


def _told_query(record: Fields, *, is_cut: bool) -> str:
    number = f"hit {record['publish_seq']}"
    if record.get("error") == UNASKED:
        return f"prefetch {record['op']}: this rank did not ask its storage any more ({number})"
    told = f"prefetch {record['op']}: {_counted(record['local_pages'], 'page')} in this rank's storage"
    if is_cut and record["agreed_pages"] < record["local_pages"]:
        # A rank that no longer asks counts as one that has nothing.
        told += f"; nobody waited for what the others have ({number})"
    else:
        told += f", {record['agreed_pages']} on every rank ({number})"
    return f"{told}; {record['error']}" if record.get("error") else told


def _told_poll(record: Fields) -> str:
    if record["verdict"] == "wait":
        return f"waits for prefetch {record['op']} ({record['policy']})"
    return f"goes on without the rest of prefetch {record['op']} ({record['policy']})"


def _told_outcome(record: Fields, policy: str) -> str:
    reason = record.get("reason") or ""
    why = f": {_words(reason)}" if reason else ""
    if reason == "deadline" and policy not in ("", "timeout"):
        # Some logs have one word for whatever ends a prefetch early.
        why = f": not waited for ({policy})"
    return f"{_counted(record['tokens'], 'token')} of its prefetch {_words(record['outcome'])}{why}"


def _told_retry(record: Fields) -> str:
    told = f"retry of its prefetch after {_words(record['cause'])}: {_words(record['verdict'])}"
    if record["verdict"] == "cancelled":
        return f"{told}, it is at the head of the queue"
    return told


def _told_retraction(record: Fields) -> str:
    after, given = _counted(record["output_tokens"], "token"), _counted(record["pages"], "page")
    return f"retracted after {after}: {given} given back, it waits again"


def _told_read(record: Fields) -> str:
    told = f"prefetch {record['op']}, batch {record['batch']}: "
    told += f"{_counted(record['local_tokens'], 'token')} of {_counted(record['pages'], 'page')} read"
    return f"{told}; {record['error']}" if record.get("error") else told


def _told_progress(record: Fields) -> str:
    agreed, local = record["agreed_tokens"], record["local_tokens"]
    told = f"prefetch {record['op']}: {_words(record['ack'])} {agreed} on every rank, {local} here"
    return f"{told} (ack {record['publish_seq']})"


OWN: Mapping[str, Callable[[Fields], str]] = {
    "request": lambda r: f"received with {_counted(r['input_tokens'], 'prompt token')}",
    "match": _told_match,
    "load_back": _told_load_back,
    "admit": _told_admit,
    "finish": lambda r: f"finished ({r['reason']}) after {_counted(r['output_tokens'], 'token')}",
    "abort": _told_abort,
    "retract": _told_retraction,
    "prefetch_submit": _told_submit,
    "prefetch_hit": _told_hit,
    "prefetch_insert": _told_prefetch_insert,
    "prefetch_poll": _told_poll,
    "prefetch_retry": _told_retry,
}

ASKED_AGAIN = ("match", "admit", "prefetch_poll")
PREFETCH_TURNS = ("prefetch_submit", "prefetch_hit", "prefetch_poll")
# Outcomes of a hit that came when its prefetch no longer counted.
CUT_SHORT = ("stale", "terminated")

# Record kinds that name one of its prefetches and nothing else.
OF_PREFETCH: Mapping[str, Callable[[Fields], str]] = {
    "read": _told_read,
    "progress": _told_progress,
    "prefetch_ack": lambda r: (
        f"prefetch {r['op']}: {_words(r['ack'])} {r['tokens']} applied (ack {r['consume_seq']})"
        + ("" if r["is_current"] else ", though it no longer counts")
    ),
}

# Record kind -> fields that may hold the missed page, each with what that means.
PAGE_MOVES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "insert": (("new_digests", "the page it will miss enters the tree with {rid}"),),
    "prefetch_insert": (("new_digests", "the page it will miss comes from storage with {rid}"),),
    "evict": (
        ("demoted_digests", "the page it will miss leaves the device, its host copy stays"),
        ("dropped_digests", "the page it will miss is dropped from the device without a host copy"),
    ),
    "evict_host": (("dropped_digests", "the page it will miss is dropped from the host"),),
}

# Under write_back an eviction is recorded behind those from the host that it has led to.
LATE_EVICTION = "that was in this eviction, by which the page it will miss has left the device too"

NODE_MOVES: Mapping[str, Callable[[Fields], str]] = {
    "write_backup": lambda r: (
        f"backup of {_counted(r['pages'], 'page')} to host {'begins' if r['tokens'] else 'is refused'}"
    ),
    "backup_cancel": lambda r: f"backup of {_counted(r['pages'], 'page')} is cancelled",
    "evict": lambda r: "evicted from the device",
    "evict_host": lambda r: "evicted from the host",
    "transfer_enqueue": lambda r: (
        f"transfer {r['op']} ({r['queue']}, {_counted(r['pages'], 'page')}) enqueued"
    ),
    "transfer_ack": lambda r: f"transfer {r['op']} ({r['queue']}) applied",
    "storage_backup": lambda r: f"write {r['op']} to storage begins: {_counted(r['pages'], 'page')}",
    "storage_ack": lambda r: (
        f"write {r['op']} to storage: {r['written_pages']} of {r['pages']} pages written"
    ),
}
