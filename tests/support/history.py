"""The history language: one line a rank or lane, so that a test looks like the figure in a rule's docstring.

    h = history('''
        0  match:r1=64  backup:17=64{host_pages_free=5}  round?{writes_done=1}  events!  #hung
        1  match:r1=64  backup:17=0{host_pages_free=0}   round?{writes_done=1}  round=1
    ''')

A line begins with the rank, and with its lane where that is not `scheduler`: `0/io`.

| token | record |
|---|---|
| `match:r1=64` | a decision: what it is about, and its result; `{fact=5 other=2}` adds local facts |
| `backup:17=64` | `write_backup` of node 17, one page, 64 tokens |
| `evict:17=2`, `admit:r1=1`, `finish:r1=8` | as `match` |
| `put:r1=17{content=5 tokens=64}` | as `match`, behind what the call did, with what it was given |
| `submit:r1=64`, `hit:7=64`, `poll:r1=wait` | a prefetch, on the scheduler |
| `query:7=3`, `read:7=2`, `progress:7=64` | and on the lanes that work for it |
| `abort:r1=waiting`, `retract:r1=4` | as `match` |
| `insert?`, `insert=2` | `insert`, phase call, and phase return with the nodes that were counted |
| `round?`, `round=2` | `event_round`, phase call with its facts, and phase return with the agreed count |
| `round=2:7` | the same with 7 queued, a field that no leader decides |
| `events!`, `events.` | `meeting` of that purpose, phases enter and leave; `events!8` has 8 elements |
| `recv<0!`, `send>1.` | `meeting` with one peer; `send>1.=5`: of a vector whose digest is 5 |
| `adopt:chain=5` | `adopted`: the vector by which the rank goes from here on |
| `done:5` | `transfer_done`: the bytes of op 5 have moved; never compared |
| `wrong_page` | the note of a page with other bytes |
| `mispaired:events` | the note of a meeting that meant different things; `{purpose=x}`: what was meant here |
| `state:idle`, `state:backend=7` | `lane_state`: what the lane is at, and with which op |
| `\\|` | the next step |
| `#hung`, `#crashed`, `#stopped`, `#cut` | how the lane ends; `completed` when nothing is said |
| `#killed` | as `#cut`, in a file that was never closed |
| `#config:a` | the header's `config_digest` |
| `#drops:match` | the trailer says that this kind is missing from some point on |

A slot or any other field that is neither compared nor a fact is written like a fact.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from consensus_checker.history import History, MemoryLane
from tracer.record import Kind, Place, header

REPLICA = ("tp", "cp", "pp")
KINDS = (
    Kind("match", "decision", agree=REPLICA, compared=("rid", "tokens"), local=("host_pages_free", "ready")),
    Kind(
        "write_backup",
        "decision",
        agree=REPLICA,
        compared=("node", "pages", "tokens"),
        local=("host_pages_free", "write_queue_len"),
        info=("slot",),
        result="tokens",
        needs={"host_pages_free": "pages"},
    ),
    Kind("evict", "decision", agree=REPLICA, compared=("node", "pages_freed"), local=("host_pages_free",)),
    Kind(
        "put",
        "decision",
        agree=REPLICA,
        compared=("rid", "node", "content", "tokens"),
        given=("rid", "content", "tokens"),
    ),
    Kind("admit", "decision", agree=REPLICA, compared=("rid", "pages"), local=("running_count",)),
    Kind("finish", "event", agree=REPLICA, compared=("rid", "tokens")),
    Kind("abort", "event", agree=REPLICA, compared=("rid", "place")),
    Kind("retract", "decision", agree=REPLICA, compared=("rid", "output_tokens")),
    Kind(
        "insert",
        "decision",
        agree=REPLICA,
        compared=("owned_pages", "nodes_counted"),
        local=("host_pages_free", "writes_in_flight"),
    ),
    Kind(
        "prefetch_submit",
        "decision",
        agree=REPLICA,
        compared=("rid", "tokens"),
        local=("host_pages_free",),
    ),
    Kind("prefetch_hit", "decision", agree=REPLICA, compared=("op", "tokens"), local=("host_pages_free",)),
    Kind(
        "prefetch_poll",
        "decision",
        agree=REPLICA,
        compared=("rid", "verdict"),
        local=("elapsed_ns",),
        leader="pp",
        led=("verdict",),
    ),
    Kind("query", "decision", agree=REPLICA, compared=("op", "agreed_pages"), local=("local_pages",)),
    Kind("read", "event", agree=REPLICA, compared=("op", "pages"), local=("local_tokens",)),
    Kind("progress", "decision", agree=REPLICA, compared=("op", "agreed_tokens"), local=("local_tokens",)),
    Kind(
        "event_round",
        "decision",
        agree=REPLICA,
        compared=("queued", "writes_agreed"),
        local=("writes_done", "loads_done", "hits_ready"),
        leader="pp",
        led=("writes_agreed",),
        feeds={"hits_ready": "queued"},
    ),
    Kind("transfer_done", "transfer", info=("op",)),
    Kind(
        "meeting",
        "meeting",
        agree=("tp", "cp"),
        compared=("axis", "purpose", "op", "numel"),
        info=("group", "group_seq", "peer", "value"),
    ),
    Kind("adopted", "note", info=("purpose", "value")),
    Kind("request", "note", info=("rid",)),
    Kind("wrong_page", "anomaly", info=("page_index",)),
    Kind("mispaired", "anomaly", info=("group", "group_seq", "purpose")),
    Kind("lane_state", "note", info=("state", "op")),
)
ABOUT = {
    "match": ("match", "rid", "tokens"),
    "backup": ("write_backup", "node", "tokens"),
    "evict": ("evict", "node", "pages_freed"),
    "put": ("put", "rid", "node"),
    "admit": ("admit", "rid", "pages"),
    "finish": ("finish", "rid", "tokens"),
    "abort": ("abort", "rid", "place"),
    "adopt": ("adopted", "purpose", "value"),
    "retract": ("retract", "rid", "output_tokens"),
    "submit": ("prefetch_submit", "rid", "tokens"),
    "hit": ("prefetch_hit", "op", "tokens"),
    "poll": ("prefetch_poll", "rid", "verdict"),
    "query": ("query", "op", "agreed_pages"),
    "read": ("read", "op", "pages"),
    "progress": ("progress", "op", "agreed_tokens"),
}
PURPOSES = ("main", "events", "hits", "progress")

DECISION = re.compile(r"(?P<name>[a-z]+):(?P<about>\w+)=(?P<result>\w+)(?:\{(?P<facts>[^}]*)\})?")
CALL = re.compile(r"(?P<name>round|insert)\?(?:\{(?P<facts>[^}]*)\})?")
INSERTED = re.compile(r"insert=(?P<result>\d+)")
STATE = re.compile(r"state:(?P<state>[a-z]+)(?:=(?P<op>\d+))?")
MISPAIRED = re.compile(r"mispaired:(?P<name>[a-z_]+)(?:\{(?P<facts>[^}]*)\})?")
RETURN = re.compile(r"round=(?P<result>\d+)(?::(?P<queued>\d+))?")
MEETING = re.compile(
    r"(?P<purpose>[a-z_]+)(?:[<>](?P<peer>\d+))?(?P<mark>[!.])(?P<numel>\d*)(?:=(?P<value>\d+))?"
)
TOKEN = re.compile(r"\S+\{[^}]*\}|\S+")


def history(
    text: str,
    *,
    pp: int = 1,
    dp: int = 1,
    world_size: int | None = None,
    runs: Mapping[int, str] | None = None,
) -> History:
    """The history that `text` draws.

    Args:
        pp, dp: stages, replicas; ranks are numbered with tp fastest.
        world_size: ranks that the headers promise, when some are not drawn.
        runs: rank -> run id of its log, when it is from another run.
    """
    return History.of(lanes(text, pp=pp, dp=dp, world_size=world_size, runs=runs))


def lanes(
    text: str,
    *,
    pp: int = 1,
    dp: int = 1,
    world_size: int | None = None,
    runs: Mapping[int, str] | None = None,
) -> list[MemoryLane]:
    drawn = [line.split(maxsplit=1) for line in text.strip().splitlines()]
    labels = [row[0].partition("/") for row in drawn]
    size = world_size or len({rank for rank, _, _ in labels})
    sizes = {"dp": dp, "pp": pp, "cp": 1, "tp": size // pp // dp}
    return [
        lane(
            int(rank),
            row[1] if len(row) > 1 else "",
            sizes,
            (runs or {}).get(int(rank), "run-a"),
            name or "scheduler",
        )
        for (rank, _, name), row in zip(labels, drawn, strict=True)
    ]


def lane(rank: int, text: str, sizes: Mapping[str, int], run_id: str, name: str = "scheduler") -> MemoryLane:
    """One line: a rank's, or that of one of its lanes."""
    # Stages are numbered through over the replicas.
    stage, tp_rank = divmod(rank, sizes["tp"])
    dp_rank, pp_rank = divmod(stage, sizes["pp"])
    members = [stage * sizes["tp"] + index for index in range(sizes["tp"])]
    groups: dict[str, Sequence[int]] = {f"tp{stage}/{purpose}": members for purpose in PURPOSES}
    place = Place(rank, {"dp": dp_rank, "pp": pp_rank, "cp": 0, "tp": tp_rank}, sizes, groups)
    digest = next((token[8:] for token in TOKEN.findall(text) if token.startswith("#config:")), "")
    head = header(place, KINDS, lane=name, run_id=run_id, tool_version="test", config_digest=digest)
    outcome: str | None = "completed"
    dropped: dict[str, int] = {}
    entries: list[dict[str, Any]] = []
    step = 0
    group_seqs: dict[str, int] = {}
    for token in TOKEN.findall(text):
        if token == "|":
            step += 1
        elif token.startswith("#drops:"):
            dropped[token[7:]] = 1
        elif token.startswith("#") and not token.startswith("#config:"):
            outcome = None if token in ("#cut", "#killed") else token[1:]
        elif not token.startswith("#"):
            # The header is line 0 of a lane.
            common = {"seq": len(entries) + 1, "step": step, "time_ns": 0}
            entries.append(common | _record(token, rank, stage, group_seqs))
    trailer = {"kind": "trailer", "outcome": outcome, "dropped": dropped} if outcome else None
    kinds = {kind.name: kind for kind in KINDS}
    return MemoryLane(rank, name, head, kinds, entries, trailer, is_unsealed="#killed" in TOKEN.findall(text))


def cut(lanes: Iterable[MemoryLane], counts: Mapping[int, int]) -> list[MemoryLane]:
    """The same lanes with some of them cut after so many records."""
    return [
        MemoryLane(one.rank, one.lane, one.header, one.kinds, one.entries[: counts[one.rank]])
        if one.rank in counts
        else one
        for one in lanes
    ]


def ring(
    lanes: Iterable[MemoryLane], counts: Mapping[int, int], *, is_counted: bool = True
) -> list[MemoryLane]:
    """The same lanes without so many of their oldest records, which the header has counted or not."""
    return [
        replace(
            one,
            entries=one.entries[counts[one.rank] :],
            last_dropped_seq=counts[one.rank],
            counts_before=dict(Counter(str(entry["kind"]) for entry in one.entries[: counts[one.rank]]))
            if is_counted
            else None,
        )
        if counts.get(one.rank)
        else one
        for one in lanes
    ]


def _record(token: str, rank: int, stage: int, group_seqs: dict[str, int]) -> dict[str, Any]:
    if token == "wrong_page":
        return {"kind": "wrong_page", "page_index": 3}
    if token.startswith("done:"):
        return {"kind": "transfer_done", "op": int(token[5:])}
    if match := STATE.fullmatch(token):
        op = int(match["op"]) if match["op"] else None
        return {"kind": "lane_state", "state": match["state"], "op": op}
    if match := MISPAIRED.fullmatch(token):
        group = f"tp{stage}/{match['name']}"
        told = {"group": group, "group_seq": group_seqs.get(group, 1) - 1, "purpose": match["name"]}
        return {"kind": "mispaired", **told, **_facts(match["facts"])}
    if match := CALL.fullmatch(token):
        kind = "event_round" if match["name"] == "round" else "insert"
        return {"kind": kind, "phase": "call", **_facts(match["facts"])}
    if match := INSERTED.fullmatch(token):
        return {"kind": "insert", "phase": "return", "nodes_counted": int(match["result"])}
    if match := RETURN.fullmatch(token):
        queued = {"queued": int(match["queued"])} if match["queued"] else {}
        return {"kind": "event_round", "phase": "return", **queued, "writes_agreed": int(match["result"])}
    if match := DECISION.fullmatch(token):
        kind, about, result = ABOUT[match["name"]]
        pages = {"pages": 1} if kind == "write_backup" else {}
        told = {about: _value(match["about"]), **pages, result: _value(match["result"])}
        return {"kind": kind, **told, **_facts(match["facts"])}
    match = MEETING.fullmatch(token)
    assert match, f"not a token of the history language: {token!r}"
    return _meeting(match, rank, stage, group_seqs)


def _meeting(match: re.Match[str], rank: int, stage: int, group_seqs: dict[str, int]) -> dict[str, Any]:
    peer = int(match["peer"]) if match["peer"] else None
    is_enter = match["mark"] == "!"
    if peer is None:
        group = f"tp{stage}/{match['purpose']}"
        op = "broadcast" if match["purpose"] == "main" else "all_reduce"
    else:
        group = f"pp{min(rank, peer)}"
        op = match["purpose"]
    seq = group_seqs.get(group, 0) if is_enter else group_seqs[group] - 1
    if is_enter:
        group_seqs[group] = seq + 1
    return {
        "kind": "meeting",
        "phase": "enter" if is_enter else "leave",
        "axis": "tp" if peer is None else "pp",
        "purpose": match["purpose"] if peer is None else "chain",
        "op": op,
        "numel": int(match["numel"] or 1),
        "group": group,
        "group_seq": seq,
        "peer": peer,
        **({"value": int(match["value"])} if match["value"] else {}),
    }


def _facts(text: str | None) -> dict[str, Any]:
    pairs = [part.split("=") for part in (text or "").split()]
    return {name: _value(value) for name, value in pairs}


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text == "null":
        return None
    return int(text) if text.lstrip("-").isdigit() else text
