"""One request's prompt, every token of it in exactly one place; the same row whatever it was read from.

    0     device     host     storage   [untiered]   computed         input_tokens
    |- on device -|- loaded -|- prefetched -|- cached -|- by forward -|- unplaced -|

Own logs have no `untiered` tokens, and every token of a prompt that was served is cached or computed. What
other programs write often says how much was cached and not where, and hardly ever what was computed.
"""

from __future__ import annotations

from typing import Any

import msgspec

# Columns of a prompt by the tier that served it.
TIERS = ("device", "host", "storage")


class RequestHits(msgspec.Struct, frozen=True, gc=False):
    """One request's prompt, split by the tier that served it.

    A struct and not a dataclass: a million of them are made in a fifth of the time.

    Attributes:
        reason: why the first computed page was not a hit; None when the request was not admitted, or
            where the source can't know.
        step: scheduler iteration at which the request was received.
        time_ns: the same on the rank's clock; wall clock in foreign files.
        is_finished: whether a finish record was seen.
        refused: why it never will be admitted, or "".
        is_aborted: its client had gone before it was served.
        untiered: cached, and nobody says where.
        line: where it stands in the source's file number `file`; 0 in own logs.
    """

    rid: str
    dp: int
    input_tokens: int
    device: int
    host: int
    storage: int
    computed: int
    reason: str | None
    conversation: str | None = None
    step: int = 0
    time_ns: int = 0
    is_finished: bool = False
    refused: str = ""
    is_aborted: bool = False
    untiered: int = 0
    file: int = 0
    line: int = 0

    @property
    def cached(self) -> int:
        return self.device + self.host + self.storage + self.untiered

    @property
    def uncached(self) -> int:
        """Prompt tokens that did not come from the cache, whatever became of them."""
        return max(0, self.input_tokens - self.cached)

    @property
    def is_admitted(self) -> bool:
        return self.reason is not None

    @property
    def unplaced(self) -> int:
        """Prompt tokens that no tier served and nobody computed."""
        return max(0, self.input_tokens - self.cached - self.computed)

    @property
    def unplaced_reason(self) -> str | None:
        """Why those have no place; None where there are none."""
        if not self.unplaced:
            return None
        if not self.is_admitted:
            if self.is_aborted:
                return "aborted_waiting"
            return f"refused_{self.refused}" if self.refused else "never_admitted"
        if self.is_aborted:
            return "aborted_computing"
        return "unaccounted" if self.is_finished else "being_computed"

    @property
    def is_unaccounted(self) -> bool:
        """Whether its parts are more than its prompt, or it was served to its end and they are less."""
        excess = self.cached + self.computed - self.input_tokens
        is_served = self.is_admitted and self.is_finished and not self.is_aborted
        return excess > 0 or (excess < 0 and is_served)


def foreign_row(
    rid: str,
    prompt: int,
    *,
    tiers: tuple[int, int, int] = (0, 0, 0),
    cached: int = 0,
    computed: int = 0,
    time_ns: int = 0,
    is_aborted: bool = False,
    dp: int = 0,
    file: int = 0,
    line: int = 0,
) -> RequestHits:
    """A row of somebody else's file: what was cached and is in none of the tiers told is `untiered`."""
    device, host, storage = tiers
    untiered = max(0, cached - device - host - storage)
    return RequestHits(
        rid,
        dp,
        prompt,
        device,
        host,
        storage,
        computed,
        None,
        None,
        0,
        time_ns,
        True,
        "",
        is_aborted,
        untiered,
        file,
        line,
    )


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """What foreign rows were read from, and what it can't know.

    Attributes:
        format: by the program that writes it, in snake_case.
        files: as they were named, in the order in which they were read.
        lines: lines, batches or objects read, by file.
        unparsed: those of them that were not understood, by file.
        unit: what one row is: `request`; `batch` (of prefill), `run` (of a benchmark), `lookup`; `event`,
            where there are no rows, as nothing tells who was served.
        is_in_blocks: its counts are blocks of a size that it does not say, not tokens.
        tiers_are_told: whether it says which tier cached tokens were in.
        computed_is_told: whether a forward's own count of computed tokens is in it.
        unknown_keys: keys that this version does not know -> how many rows have them.
        notes: what limits the numbers.
    """

    format: str
    files: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()
    unparsed: tuple[int, ...] = ()
    unit: str = "request"
    is_in_blocks: bool = False
    tiers_are_told: bool = True
    computed_is_told: bool = False
    unknown_keys: dict[str, int] = {}
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The `source` of the document."""
        counts = zip(self.files, self.lines, self.unparsed, strict=True)
        return {
            "format": self.format,
            "importer": IMPORTER_VERSION,
            "row": self.unit,
            "count": "blocks" if self.is_in_blocks else "tokens",
            "files": [
                {"file": file, "lines": lines, "unparsed": unparsed} for file, lines, unparsed in counts
            ],
            "unknown_keys": dict(sorted(self.unknown_keys.items())),
            "not_told": [
                *([] if self.tiers_are_told else TIERS),
                *([] if self.computed_is_told else ["computed"]),
                "reason",
            ],
        }


IMPORTER_VERSION = 1
