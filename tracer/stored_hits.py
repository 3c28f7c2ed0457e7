"""Hits of an export or a kept database, a row each, without reading a million rows to show a thousand.

What `--by request` says of a million requests is a few sums, the requests that are not like the others, and
the rows; the database adds up the first, finds the second, and writes the third as text. Every other grouping
reads the rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tracer.errors import HitsError, StoreError
from tracer.hits import UNTIERED, Hits, Rows, grouped_by
from tracer.load import REQUEST_TYPES
from tracer.served import TIERS, RequestHits
from tracer.trace_store import TraceStore, open_store

# As `Hits.odd`.
ODD = (
    "input_tokens <> device + host + storage + untiered + computed OR reason IS NULL OR is_aborted "
    "OR NOT is_finished"
)
COLUMNS = RequestHits.__struct_fields__
# What a row of a store that is whole never is.
COUNTS = ("input_tokens", *TIERS, "computed", UNTIERED)
NO_COUNT = " OR ".join(f"{name} < 0" for name in COUNTS)
MAY_BE_NULL = [name for name, kind in RequestHits.__annotations__.items() if "None" in kind]
NO_VALUE = " OR ".join(f"{name} IS NULL" for name in COLUMNS if name not in MAY_BE_NULL)
PLAIN = ("rid", "input_tokens", *TIERS, "computed", "reason")
# Rows that are one text: the fewer values come out of the database, the faster.
ROWS_A_TEXT = 20_000
# Stands in a text for an odd row; no JSON of a row is this.
LATER = "?"


class StoredHits(Hits):
    """`Hits` by request of what was kept. Its store is closed by whoever has opened it.

    Its `requests` stay empty: nothing here needs them all.
    """

    def __init__(self, store: TraceStore, where: str) -> None:
        super().__init__("request", (), grouped_by("request"), store.facts.hits_notes)
        self._store = store
        self._where = where

    def _requests(self, condition: str = "true", *, limit: int | None = None) -> Iterator[RequestHits]:
        columns = ", ".join(COLUMNS)
        sql = f"SELECT {columns} FROM hits WHERE {self._where} AND ({condition}) ORDER BY number"
        if limit is not None:
            # The database then sorts no more than that.
            sql += f" LIMIT {limit:d}"
        with self._store.answer(sql) as answer:
            for row in answer.rows:
                yield RequestHits(*row)

    @cached_property
    def _sums(self) -> dict[str, int]:
        parts = ("input_tokens", *TIERS, UNTIERED)
        sums = ", ".join(f"coalesce(sum({part}), 0)::BIGINT" for part in parts)
        ((count, *values),) = self._store.query(f"SELECT count(*), {sums} FROM hits WHERE {self._where}").rows
        return {"requests": count, **dict(zip(parts, values, strict=True))}

    @cached_property
    def request_count(self) -> int:
        return self._sums["requests"]

    @property
    def row_count(self) -> int:
        return self.request_count

    @cached_property
    def input_tokens(self) -> int:
        return self._sums["input_tokens"]

    @cached_property
    def cached_tokens(self) -> dict[str, int]:
        return {part: self._sums[part] for part in (*TIERS, UNTIERED)}

    @cached_property
    def odd(self) -> tuple[RequestHits, ...]:
        return tuple(self._requests(ODD))

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        sql = f"SELECT DISTINCT reason FROM hits WHERE {self._where} AND reason IS NOT NULL ORDER BY reason"
        return tuple(row[0] for row in self._store.query(sql).rows)

    @cached_property
    def rows(self) -> Rows:
        return self.make_rows(tuple(self._requests()))

    def first_rows(self, count: int) -> Rows:
        return self.make_rows(tuple(self._requests(limit=count)))

    def first_rids(self, count: int) -> list[str]:
        return [request.rid for request in self._requests(limit=count)]

    def narrowed(self, rid: str) -> Hits:
        requests = tuple(each for each in self._requests() if each.rid == rid)
        return Hits(self.by, requests, self.make_rows, self.limits)

    def rows_text(self) -> Iterator[str]:
        """The rows as JSON, some thousands a time, with commas between them."""
        odd = iter(self.make_rows(self.odd))
        packed = ", ".join(f"{name} := {name}" for name in PLAIN)
        plain = f"to_json(struct_pack({packed}, unplaced := 0, unplaced_reason := NULL))::VARCHAR"
        sql = (
            f"SELECT count(*) FILTER ({ODD}), string_agg(CASE WHEN {ODD} THEN '{LATER}' ELSE {plain} END, "
            f"E',\\n  ' ORDER BY number) FROM hits WHERE {self._where} "
            f"GROUP BY number // {ROWS_A_TEXT} ORDER BY number // {ROWS_A_TEXT}"
        )
        with self._store.answer(sql) as answer:
            for later, text in answer.rows:
                yield _filled(text, odd) if later else text


def _filled(text: str, odd: Iterator[dict[str, Any]]) -> str:
    """The odd rows in their places."""
    rows = text.split(",\n  ")
    return ",\n  ".join(
        json.dumps(next(odd), ensure_ascii=False, separators=(",", ":")) if row == LATER else row
        for row in rows
    )


def stored_hits(
    path: Path, *, by: str = "request", since: int | None = None, until: int | None = None
) -> tuple[Hits, TraceStore]:
    """The hits that were counted when an export or a database was made, and the store to close afterwards.

    Raises:
        HitsError: they could not be counted then, or `by` needs more than the requests.
        StoreError: it is not what it should be.
    """
    if by == "prefix":
        raise HitsError(
            f"can't group by prefix: {path} keeps what was counted of each request, not its pages",
            hint="the run's logs",
        )
    store = open_store(path, is_hits_only=True)
    if store.facts.hits_problem:
        store.close()
        raise HitsError(f"{path} has no hits: {store.facts.hits_problem}")
    try:
        _demand_hits(store, path)
    except BaseException:
        store.close()
        raise
    limits = [f"step >= {since:d}"] if since is not None else []
    limits += [f"step <= {until:d}"] if until is not None else []
    found = StoredHits(store, " AND ".join(limits) or "true")
    if by == "request":
        return found, store
    return _by(by, found._requests(), found.limits), store


def _demand_hits(store: TraceStore, path: Path) -> None:
    """Whoever has kept it, every row must be one that can be counted.

    Raises:
        StoreError: columns are missing or of other types, or rows lack what they must have.
    """
    try:
        with store.answer(f"SELECT {', '.join(COLUMNS)}, number FROM hits LIMIT 0") as answer:
            types = dict(zip(answer.columns, answer.types, strict=True))
        wrong = [name for name, kind in {**REQUEST_TYPES, "number": "BIGINT"}.items() if types[name] != kind]
        why = f"{wrong[0]} is {types[wrong[0]]}" if wrong else ""
        if not wrong:
            ((rows, spoilt),) = store.query(
                f"SELECT count(*), count(*) FILTER ({NO_COUNT} OR {NO_VALUE}) FROM hits"
            ).rows
            why = f"{spoilt:,} of {rows:,} rows lack a count or a name" if spoilt else ""
    except StoreError as error:
        why = error.what.removeprefix("the query failed: ")
    if why:
        raise StoreError(
            f"its hits are not as this tool keeps them: {why}", where=str(path), hint="the logs themselves"
        )


def _by(by: str, requests: Iterable[RequestHits], limits: Sequence[str]) -> Hits:
    return Hits(by, tuple(requests), grouped_by(by), tuple(limits))  # type: ignore[arg-type]  # a grouping
