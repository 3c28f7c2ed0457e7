"""The test file of a parting: what it is about, the data, and `body` behind them.

It needs nothing but pytest and the server: whoever gets it as a bug report runs it on a laptop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from pprint import pformat
from typing import Any

from consensus_checker.sglang_case.parting import Parting
from consensus_checker.sglang_case.script import Record
from consensus_checker.sglang_see import PAGE_CHARS

NO_CAUSE = "No log says what went otherwise: this fails only if the code itself parts them"
THRESHOLD = "prefetch_threshold_tokens"
# Arguments of the server that its decisions follow from, by their own names.
SETTINGS = (
    "hicache_write_policy",
    "hicache_storage_prefetch_policy",
    "hicache_storage_prefetch_retry_poll_interval",
    "hicache_storage_prefetch_retry_max_attempts",
    "radix_eviction_policy",
)
HEAD = '''\
"""Two ranks of SGLang {version} that part: {call}.

{cause}.

The first {rounds} event rounds of the run {run_id}, as its logs have them: {requests} requests, of which
equal pages have equal tokens (the tokens themselves were not recorded). Needs SGLang and pytest, no GPU:

    pytest {name}              fails at the first call in which ranks {left} and {right} part
    python {name} --shrink     makes it smaller, and writes it anew
"""

'''


@dataclass(frozen=True, slots=True)
class Lanes:
    """Records of the reference rank.

    Attributes:
        config: of its header.
        main: of its scheduler.
        queries: of the thread that asks the store what it has.
    """

    run_id: str
    config: Mapping[str, Any]
    main: Sequence[Record]
    queries: Sequence[Record]


def requests_of(records: Sequence[Record], page_tokens: int) -> dict[str, dict[str, Any]]:
    """Each request: tokens of its prompt and of what it put out, how many were computed, its pages as ranges.

    Pages are numbered as they are first met; equal digests have one number, unless their requests never share
    anything: adapters and tenants have trees of their own.
    """
    found: dict[str, dict[str, Any]] = {}
    pages: dict[str, list[str]] = {}
    spaces: dict[str, str] = {}
    for record in records:
        rid = str(record.get("rid", ""))
        if record["kind"] == "request":
            found[rid] = {"tokens": [int(record["input_tokens"]), 0], "computed": 0, "pages": []}
            spaces[rid] = str(record.get("namespace", ""))
            pages[rid] = _split(record.get("pages"))
        elif record["kind"] == "checkpoint_insert" and rid in found:
            found[rid]["computed"] = int(record["up_to"])
        elif record["kind"] == "finish" and rid in found:
            found[rid]["tokens"][1] = int(record["output_tokens"])
            pages[rid] += _split(record.get("pages"))
    numbers: dict[tuple[str, str], int] = {}
    for rid, own in pages.items():
        whole = sum(found[rid]["tokens"]) // page_tokens
        ids = [numbers.setdefault((spaces[rid], digest), len(numbers)) for digest in own[:whole]]
        found[rid]["pages"] = [list(each) for each in _ranges(ids)]
    return found


def _split(text: Any) -> list[str]:
    whole = text if isinstance(text, str) else ""
    return [whole[at : at + PAGE_CHARS] for at in range(0, len(whole), PAGE_CHARS)]


def _ranges(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Of numbers, the first of each run and how many there are."""
    for _, run in groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], len(members)


def server_of(lanes: Lanes) -> dict[str, Any] | str:
    """What the server was, or what the log does not tell of it."""
    config = lanes.config
    first = next((r for r in lanes.main if r["kind"] == "event_round"), None)
    page = config.get("page_size_tokens")
    if type(page) is not int or page <= 0:
        return "no size of a page in the log's header"
    if odd := [name for name in (*SETTINGS, "version", THRESHOLD) if not _is_plain(config.get(name))]:
        return f"what the log's header has for {odd[0]} is no text and no whole number"
    if first is None or first.get("round") != 1:
        return "the log does not begin with the first event round"
    request = next((r for r in lanes.main if r["kind"] == "request"), None)
    if request is None or not isinstance(request.get("pages"), str):
        return "no digests of pages: they are in logs of HICACHE_TRACE=full, for pages of 16 tokens or more"
    sizes = [first.get(name) for name in ("device_pages_free", "host_pages_free")]
    if not all(type(size) is int and size >= 0 for size in sizes):
        return "no sizes of pools in the first event round"
    return {
        "version": config.get("version", "unknown"),
        "page_tokens": page,
        "device_pages": first["device_pages_free"],
        "host_pages": first["host_pages_free"],
        "has_storage": bool(config.get("hicache_storage_backend")),
        "prefetch_threshold": config.get(THRESHOLD),
        **{name: config[name] for name in SETTINGS if name in config},
    }


def file_text(found: Parting, lanes: Lanes, server: Mapping[str, Any], name: str) -> str:
    """Its text."""
    steps = [dict(step) for step in found.steps]
    rids = {step["rid"] for step in steps if "rid" in step}
    everything = requests_of(lanes.main, server["page_tokens"])
    requests = {rid: about for rid, about in everything.items() if rid in rids}
    left, right = found.reference.rank, found.odd.rank
    calls = dict.fromkeys(call or "no further call" for call in found.call)
    head = HEAD.format(
        version=_plain(str(server["version"])),
        call=_plain(" / ".join(calls)),
        cause=_plain((found.cause[:1].upper() + found.cause[1:]) or NO_CAUSE),
        rounds=sum(step["do"] == "round" for step in steps),
        run_id=_plain(lanes.run_id),
        requests=len(requests),
        name=_plain(name),
        left=left,
        right=right,
    )
    size = server["page_tokens"]
    hits = {_attempt(r): int(r["agreed_pages"]) * size for r in lanes.queries if r["kind"] == "query"}
    completed = {
        _attempt(r): int(r["completed_tokens"]) for r in lanes.main if r["kind"] == "prefetch_insert"
    }
    facts = "\n".join(
        f"{title} = {pformat(value, width=110, compact=True, sort_dicts=False)}"
        for title, value in (
            ("SERVER", dict(server)),
            ("RANKS", (left, right)),
            ("HITS", {key: count for key, count in hits.items() if key.rpartition("/")[0] in rids}),
            ("COMPLETED", {key: count for key, count in completed.items() if key.rpartition("/")[0] in rids}),
        )
    )
    body = files("consensus_checker.sglang_case").joinpath("body.py").read_text(encoding="utf-8")
    return (
        f"{head}{facts}\n# ---- Steps ----\nREQUESTS = {_listed(requests)}\nSTEPS = {_listed(steps)}\n"
        f"# ---- End of steps ----\n\n{body}"
    )


def _is_plain(value: Any) -> bool:
    """Whether an argument of a server is what one can be. A float may have no Python literal: it is none."""
    return value is None or isinstance(value, str | int)


def _plain(text: str) -> str:
    """Text that ends no string and escapes nothing: a log may have been made to be run."""
    return "".join(
        char if char.isascii() and char.isprintable() and char not in '"\\' else "?" for char in text
    )


def _attempt(record: Record) -> str:
    return f"{record.get('rid', '')}/{record.get('attempt', 0)}"


def _listed(values: Mapping[str, Any] | Sequence[Any]) -> str:
    """Python text with one value a line."""
    if isinstance(values, Mapping):
        return "{\n" + "".join(f"    {key!r}: {value!r},\n" for key, value in values.items()) + "}"
    return "[\n" + "".join(f"    {value!r},\n" for value in values) + "]"
