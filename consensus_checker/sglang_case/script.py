"""The steps that a scheduler took with its cache, read out of one rank's log.

A record is written when its function returns, so the last record of a step says what it was:

    alloc  admit  forward  alloc_host  write_backup  insert  checkpoint_insert   ->  prefill r4
    insert  checkpoint_insert  finish                                           ->  finish r4
    prefetch_vote  prefetch_insert  prefetch_poll                               ->  poll r5
    event_round ... acks  storage_backup  prefetch_hit ...                       ->  round

What a real server does beyond that (chunks of a prompt, retraction, an operator's commands) is no step here:
it ends the script, and is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]

# What a round is made of, besides what is agreed on in it.
OF_A_ROUND = frozenset(
    {"event_round", "meeting", "adopted", "acks", "transfer_ack", "storage_backup", "prefetch_outcome"}
    | {"prefetch_hit", "prefetch_retry", "free_host", "alloc_host", "evict_host", "evict_leaf"}
)
# What nobody can be made to do again from a log.
UNKNOWN: Mapping[str, str] = {
    "retract": "a request was retracted",
    "abort": "a request was aborted",
    "command": "an operator's command",
    "advance_unpublished": "a request without a prefix of its own",
    "own_pages": "context parallelism",
    "accept": "draft tokens",
    "pd_prefix": "prefill and decode apart",
    "pd_restore": "prefill and decode apart",
    "pd_transfer": "prefill and decode apart",
}
# Behind which a write is flushed by itself; inside of anything else it is a part of that.
TOP = frozenset({"request", "match", "prefetch_poll", "prefetch_vote", "evict", "alloc", "event_round"})


@dataclass(slots=True)
class Step:
    """One step.

    Attributes:
        begin, end: of the records it was read from, the first and the last.
    """

    do: str
    begin: int
    end: int
    rid: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> tuple[str, str]:
        return self.do, self.rid

    def to_json(self) -> dict[str, Any]:
        return {"do": self.do, **({"rid": self.rid} if self.rid else {}), **self.more}


@dataclass(frozen=True, slots=True)
class Script:
    """What one rank's scheduler did.

    Attributes:
        steps: in order, up to what is not known.
        stop: index of the record that no step was read from, and why; None if there is none.
    """

    steps: Sequence[Step]
    stop: tuple[int, str] | None


def script_of(records: Sequence[Record], *, has_storage: bool) -> Script:
    """The steps behind the records of a scheduler's lane, from its beginning."""
    steps: list[Step] = []
    for step in _steps(records, has_storage=has_storage):
        if isinstance(step, str):
            at = steps[-1].end + 1 if steps else 0
            return Script(steps, (at, step))
        step.begin = steps[-1].end + 1 if steps else 0
        steps.append(step)
    return Script(steps, None)


def _steps(records: Sequence[Record], *, has_storage: bool) -> Iterator[Step | str]:
    at = 0
    admitted: set[str] = set()
    while at < len(records):
        record = records[at]
        kind, rid = record["kind"], str(record.get("rid", ""))
        if kind in UNKNOWN:
            yield UNKNOWN[kind]
            return
        if kind == "event_round" and record.get("phase") == "call":
            last = _end_of_round(records, at)
            yield Step("round", at, last, more=_agreed(records[at : last + 1]))
            at = last
        elif kind == "request":
            if has_storage:
                # It is looked up at once, and what is stored of it asked for.
                at = _end_of_look(records, at, rid)
            yield Step("arrive", at, at, rid)
        elif kind == "match":
            last = _end_of_look(records, at - 1, rid)
            if last > at and has_storage:
                # It had lost a part of its prefix: what the step before found, and a look of its own.
                at = last
            else:
                is_admitted = _is_admitted(records, at, rid)
                at = _end_of_admission(records, at, rid) if is_admitted else at
                yield Step("match", at, at, rid, {"admit": is_admitted})
        elif kind == "prefetch_poll":
            vote = record.get("verdict") == "end"
            yield Step("poll", at, at, rid, {"vote": vote})
        elif kind == "transfer_enqueue":
            if record.get("queue") == "load":
                yield Step("load", at, at)
            elif at + 1 == len(records) or records[at + 1]["kind"] in TOP:
                yield Step("flush", at, at)
        elif kind == "checkpoint_insert" and rid not in admitted:
            admitted.add(rid)
            yield Step("prefill", at, at, rid)
        elif kind == "admit" and _is_chunk(records, at):
            yield "a prompt was computed in parts"
            return
        elif kind == "finish":
            admitted.discard(rid)
            yield Step("finish", at, at, rid)
        at += 1


def _end_of_round(records: Sequence[Record], begin: int) -> int:
    """Where it ends: with the last record that only a round has."""
    last = at = begin
    while at + 1 < len(records):
        at += 1
        record = records[at]
        kind = record["kind"]
        if kind == "event_round" and record.get("phase") == "call":
            break
        if kind == "match":
            # A look that is due again is a part of the round.
            found = _end_of_look(records, at - 1, str(record.get("rid", "")))
            if found + 1 < len(records) and records[found + 1]["kind"] == "prefetch_retry":
                last = at = found + 1
                continue
            break
        if kind == "transfer_enqueue" and records[at - 1].get("phase") == "call":
            last = at
        elif kind not in OF_A_ROUND:
            break
        elif kind not in ("alloc_host", "evict_host", "evict_leaf", "free_host"):
            # Those may belong to what comes next, unless a round's own record stands behind them.
            last = at
    # A prefetch that a poll has ended is no part of the round before.
    while last > begin and records[last]["kind"] == "prefetch_outcome" and _is_of_a_poll(records, last):
        last -= 1
    return last


def _is_of_a_poll(records: Sequence[Record], at: int) -> bool:
    behind = records[at + 1] if at + 1 < len(records) else {"kind": ""}
    return behind["kind"] == "prefetch_poll" and behind.get("rid") == records[at].get("rid")


def _end_of_look(records: Sequence[Record], at: int, rid: str) -> int:
    """Behind `at` a match of the request, and the prefetch that comes of it: the last of these."""
    last = at
    for kind in ("match", "prefetch_submit"):
        behind = last + 1
        if behind == len(records):
            break
        found = records[behind]
        if found["kind"] != kind or str(found.get("rid", "")) != rid:
            break
        last = behind
    return last


def _is_admitted(records: Sequence[Record], at: int, rid: str) -> bool:
    """Whether this look was the one that the request was admitted with."""
    for record in records[at + 1 :]:
        kind = record["kind"]
        if kind == "admit" and record.get("rid") == rid:
            return True
        if kind == "match" and record.get("rid") == rid:
            return False
        if kind == "event_round" and record.get("phase") == "call":
            return False
    return False


def _end_of_admission(records: Sequence[Record], at: int, rid: str) -> int:
    """Its load from the host, where there is one."""
    for index in range(at + 1, len(records)):
        record = records[index]
        if record["kind"] == "load_back" and record.get("rid") == rid:
            return index
        if record["kind"] in ("match", "admit", "event_round", "prefetch_poll", "request"):
            break
    return at


def _is_chunk(records: Sequence[Record], at: int) -> bool:
    """Whether an admitted request has computed only a part of its prompt."""
    behind = records[at + 1] if at + 1 < len(records) else {"kind": ""}
    return behind["kind"] == "forward" and behind.get("tokens") != records[at].get("extend_tokens")


def _agreed(records: Sequence[Record]) -> dict[str, Any]:
    """Of a round, what the group agreed on, in the order of the vector; and what was done here."""
    found = next((r for r in records if r["kind"] == "event_round" and r.get("phase") == "return"), {})
    storage = ("hits_agreed", "prefetch_acks_agreed", "storage_acks_agreed", "releases_agreed")
    counts = [found.get(name) for name in ("writes_agreed", "loads_agreed", *storage)]
    agreed = [int(count or 0) for count in counts] + [int(n) for n in found.get("side_releases_agreed") or ()]
    # A later stage counts nothing of its own: it goes by what it is sent.
    done = [
        found.get(own) if found.get(own) is not None else found.get(other)
        for own, other in (("writes_done", "writes_agreed"), ("loads_done", "loads_agreed"))
    ]
    return {"agreed": agreed, "done": [int(count or 0) for count in done]}
