"""The story of one request: its own records, its nodes' transfers, and what became of its missed page.

Owns the sentences; the numbers are `hits`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracer.errors import HitsError
from tracer.hits import leaders, page_size_tokens, split_digests
from tracer.log import LaneLog, Run


@dataclass(frozen=True, slots=True)
class StoryLine:
    """One moment in a request's life: the record it comes from and the same as a sentence."""

    step: int
    time_ns: int
    kind: str
    text: str
    record: Mapping[str, Any]


def why(run: Run, rid: str) -> list[StoryLine]:
    """What happened to one request, in order: its own records, its nodes' transfers, its first missed page.

    Raises:
        HitsError: no replica's first rank has seen a request of that id.
    """
    replicas, _notes = leaders(run)
    for _dp, lanes in replicas:
        missed, has_seen = _first_miss(lanes, rid)
        if has_seen:
            return list(_story(lanes, rid, missed))
    raise HitsError(f"no request {rid} in {run.path}", hint=f"hicache hits {run.path}")


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


def _story(lanes: Sequence[LaneLog], rid: str, missed: str) -> Iterator[StoryLine]:
    # Nodes are the request's own from the record that names them on; transfers name nodes, not requests.
    nodes: set[int] = set()
    page_tokens = page_size_tokens(lanes)
    for lane in lanes:
        for record in lane.records():
            try:
                text = _sentence(record, rid, missed, nodes, page_tokens)
            except (LookupError, TypeError, ValueError):
                text = "a record that lacks some of its fields"
            if text:
                yield StoryLine(record["step"], record["time_ns"], record["kind"], text, record)
            if record.get("rid") == rid and record.get("verdict") == "admitted":
                # What becomes of the page from here on no longer concerns this request.
                missed = ""


def _sentence(record: Mapping[str, Any], rid: str, missed: str, nodes: set[int], page_tokens: int) -> str:
    """The record's part in the story, or nothing; adds the nodes that it makes the request's own."""
    kind = record["kind"]
    if record.get("rid") == rid:
        node = record.get("node")
        if kind in ("insert", "load_back") and type(node) is int:
            nodes.add(node)
        if kind == "insert":
            return _told_insert(record, page_tokens)
        template = OWN.get(kind)
        if template is None:
            return f"{kind} of the request"
        return template(record)
    if rid in record.get("rids", ()):
        return _shared(record, rid)
    if missed:
        for name, sentence in PAGE_MOVES.get(kind, ()):
            if missed in split_digests(record.get(name)):
                return sentence.format(rid=record.get("rid", ""))
    node = record.get("node")
    involved = nodes & ({node} if type(node) is int else set()) or nodes & set(record.get("nodes") or ())
    if involved and kind in NODE_MOVES:
        return NODE_MOVES[kind](record) + f" (node {', '.join(map(str, sorted(involved)))})"
    return ""


def _shared(record: Mapping[str, Any], rid: str) -> str:
    if record["kind"] == "forward" and "computed_tokens" in record:
        tokens = record["computed_tokens"][record["rids"].index(rid)]
        return f"forward ({record['mode']}): {_counted(tokens, 'token')} computed"
    requests = _counted(len(record["rids"]), "request")
    return f"{record['kind']} ({record.get('mode', '')}) of {requests}"


def _told_load_back(record: Mapping[str, Any]) -> str:
    if record.get("declined"):
        pages = _counted(record["pages"], "page")
        return f"load back of {pages} from host declined: {record['declined'].replace('_', ' ')}"
    return f"load back of {_counted(record['tokens'], 'token')} from host (node {record['node']})"


def _told_insert(record: Mapping[str, Any], page_tokens: int) -> str:
    """New tokens, own copies of pages that others had brought in before, and the prefix it was read from."""
    new, duplicates, tokens = record["new_tokens"], record["duplicate_pages"], record["tokens"]
    told = f"{_counted(new, 'new token')} entered the tree (node {record['node']})"
    if duplicates:
        told += f", {_counted(duplicates, 'page')} {'was' if duplicates == 1 else 'were'} there already"
        if not page_tokens:
            return told
    prefix = tokens - new - duplicates * page_tokens
    if prefix > 0:
        told += f", the other {prefix} {'was' if prefix == 1 else 'were'} its cached prefix"
    return told


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _told_match(record: Mapping[str, Any]) -> str:
    if record.get("miss_digest"):
        end = f"first page missed: {record['miss_digest']}"
    else:
        end = "every usable page was found"
    device = _counted(record["device_tokens"], "token")
    return f"matched {device} on device, {record['host_tokens']} on host; {end}"


OWN: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "request": lambda r: f"received with {_counted(r['input_tokens'], 'prompt token')}",
    "match": _told_match,
    "load_back": _told_load_back,
    "admit": lambda r: (
        f"{r['verdict']}: {_counted(r['device_tokens'], 'token')} from device, {r['host_tokens']} from host, "
        f"{r['storage_tokens']} from storage, {r['extend_tokens']} to compute"
    ),
    "finish": lambda r: f"finished ({r['reason']}) after {_counted(r['output_tokens'], 'token')}",
}

# Record kind -> fields that may hold the missed page, each with what that means.
PAGE_MOVES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "insert": (("new_digests", "the page it will miss enters the tree with {rid}"),),
    "evict": (
        ("demoted_digests", "the page it will miss leaves the device, its host copy stays"),
        ("dropped_digests", "the page it will miss is dropped from the device without a host copy"),
    ),
    "evict_host": (("dropped_digests", "the page it will miss is dropped from the host"),),
}

NODE_MOVES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
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
}
