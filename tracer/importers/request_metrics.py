"""SGLang's request metrics (`--export-metrics-to-file`): one JSON object for each request that ended.

`request_parameters` may hold prompts and is never looked into. Lines are decoded a block at a time into a
structure that refuses keys it does not know; those are then added to it and counted, so that a newer server's
file costs no more than its keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from tracer.errors import HitsError
from tracer.importers.sniff import COUNT_MAX, File, Imported, Tally, is_too_deep
from tracer.served import RequestHits, foreign_row

FORMAT = "sglang_request_metrics"
ABORT = "abort"
# Keys of a newer server that the structure is made longer for; further ones are counted line by line.
EXTRA_MAX = 64
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
# Read by nobody here; kept undecoded.
UNREAD = (
    *("request_parameters", "completion_tokens", "e2e_latency", "queue_time", "storage_prefetch_wait"),
    *("storage_staging_wait", "forward_entry_time", "prefill_finished_time", "first_token_latency"),
    *("decode_throughput", "num_retractions", "weight_version", "total_retractions", "response_sent_ts"),
    *("request_sent_to_scheduler_ts", "prefill_launch_delay", "prefill_launch_latency", "inference_time"),
)


class Details(msgspec.Struct, gc=False):
    """`cached_tokens_details`: by tier; `storage` only where there is one."""

    device: Count = 0
    host: Count = 0
    storage: Count | None = None
    storage_backend: str | None = None


class FinishReason(msgspec.Struct, gc=False):
    """How a request ended; newer servers say more about it."""

    type: str = ""


class Line(msgspec.Struct, gc=False):
    """What is read of a line; the decoder's structure has the other keys as well."""

    prompt_tokens: Count
    id: str = ""
    cached_tokens: Count | None = None
    cached_tokens_details: Details | None = None
    finish_reason: FinishReason | str | None = None
    request_received_ts: float | None = None


def is_mine(line: bytes) -> bool:
    head = line.lstrip()[:1] == b"{" and b'"prompt_tokens"' in line
    return head and (b'"request_parameters"' in line or b'"cached_tokens"' in line)


def read(files: Sequence[File]) -> Imported:
    tally = Tally()
    lines = _Lines(tally)
    requests: list[RequestHits] = []
    contradicted = untold = 0
    for file in files:
        index = tally.begin(file)
        for number, line in lines.of(file, index):
            row = hits_row(line, index, number)
            cached = line.cached_tokens
            untold += cached is None
            contradicted += row.device + row.host + row.storage > (cached or 0)
            requests.append(row)
    if not requests:
        raise HitsError("no line with prompt_tokens in the request metrics", where=", ".join(tally.files))
    source = tally.source(FORMAT, notes=list(cached_notes(untold, contradicted)))
    has_times = all(request.time_ns for request in requests)
    return Imported(source, tuple(requests), ("request", "tier", *(["time"] if has_times else [])))


def hits_row(line: Any, file: int, number: int, *, rid: str = "", time_ns: int = 0) -> RequestHits:
    """A line, or a response's meta info, as a row; what no tier is said to have given is `untiered`."""
    details = line.cached_tokens_details
    device, host, storage = (
        (details.device, details.host, details.storage or 0) if details is not None else (0, 0, 0)
    )
    reason = line.finish_reason
    return foreign_row(
        rid or line.id,
        line.prompt_tokens,
        tiers=(device, host, storage),
        cached=line.cached_tokens or 0,
        time_ns=time_ns or _nanoseconds(getattr(line, "request_received_ts", None)),
        is_aborted=(reason if isinstance(reason, str) or reason is None else reason.type) == ABORT,
        file=file,
        line=number,
    )


def cached_notes(untold: int, contradicted: int) -> Iterator[str]:
    """What requests say, or don't, of their cached tokens."""
    if untold:
        yield f"{untold:,} without cached_tokens: taken as not cached"
    if contradicted:
        yield f"{contradicted:,} whose tiers have more than their cached_tokens: the tiers were taken"


def _nanoseconds(seconds: float | None) -> int:
    # Neither a moment before 1970 nor one that no integer of 64 bits can hold is one.
    return round(seconds * 1e6) * 1000 if seconds is not None and 0 < seconds < 9e9 else 0


@dataclass(slots=True)
class _Lines:
    """Decodes blocks of lines, and learns the keys that it meets."""

    tally: Tally
    extra: list[str] = field(default_factory=list)
    decoder: msgspec.json.Decoder[Line] = field(default_factory=lambda: _decoder(()))

    def of(self, file: File, index: int) -> Iterator[tuple[int, Line]]:
        first = 1
        for block in file.blocks():
            count = block.count(b"\n") + (not block.endswith(b"\n"))
            try:
                found = self.decoder.decode_lines(block)
                numbered = zip(range(first, first + count), found, strict=True)
                pairs = list(numbered)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                found, pairs = [], list(self._careful(block, first, index))
                found = [line for _number, line in pairs]
            self.tally.lines[index] += count
            for position, key in enumerate(self.extra):
                name = f"x{position}"
                # A line of an older decoder lacks the field.
                rows = sum(getattr(line, name, msgspec.UNSET) is not msgspec.UNSET for line in found)
                if rows:
                    self.tally.unknown([key], rows)
            yield from pairs
            first += count

    def _careful(self, block: bytes, first: int, index: int) -> Iterator[tuple[int, Line]]:
        for number, text in enumerate(block.splitlines(), first):
            if not text.strip():
                continue
            line = self._line(text)
            if line is None:
                self.tally.unparsed[index] += 1
            else:
                yield number, line

    def _line(self, text: bytes) -> Line | None:
        """One line, its unknown keys learnt; None where it is not one."""
        if is_too_deep(text):
            return None
        try:
            return self.decoder.decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass
        try:
            keys = set(msgspec.json.decode(text, type=dict[str, msgspec.Raw]))
            unknown = sorted(keys - set(Line.__struct_fields__) - set(UNREAD) - set(self.extra))
            if unknown and len(self.extra) + len(unknown) <= EXTRA_MAX:
                self.extra += unknown
                self.decoder = _decoder(self.extra)
                return self.decoder.decode(text)
            line = LOOSE.decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        self.tally.unknown(unknown)
        return line


LOOSE = msgspec.json.Decoder(Line)


def _decoder(extra: Sequence[str]) -> msgspec.json.Decoder[Line]:
    """A decoder that knows these keys too, and refuses any other."""
    unset = msgspec.Raw | msgspec.UnsetType
    unread = [(name, unset, msgspec.UNSET) for name in UNREAD]
    more = [(f"x{position}", unset, msgspec.UNSET) for position in range(len(extra))]
    names = {f"x{position}": key for position, key in enumerate(extra)}
    longer = msgspec.defstruct(
        "LongLine", [*unread, *more], bases=(Line,), rename=names, forbid_unknown_fields=True, gc=False
    )
    return msgspec.json.Decoder(longer)
