"""The queries that come with the tool. Their names are stable; tables and columns are those of views.sql."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Canned(NamedTuple):
    """A query that comes with the tool."""

    description: str
    sql: str


QUERIES: Mapping[str, Canned] = {
    "slowest_requests": Canned(
        "the 20 requests that waited longest for admission",
        "SELECT rid, conversation, input_tokens, computed_tokens, wait_steps, wait_ns, receive_step, "
        "admit_step, finish_step FROM requests "
        "ORDER BY wait_ns DESC NULLS FIRST, receive_step, rid LIMIT 20",
    ),
    "tier_hits": Canned(
        "prompt tokens by the tier that served them, for each replica",
        "SELECT dp, count(*) AS requests, sum(input_tokens)::BIGINT AS input_tokens, "
        "sum(device_tokens)::BIGINT AS device, sum(host_tokens)::BIGINT AS host, "
        "sum(storage_tokens)::BIGINT AS storage, sum(computed_tokens)::BIGINT AS computed "
        "FROM requests GROUP BY dp ORDER BY dp",
    ),
    "collectives_open": Canned(
        "collectives that a rank entered and never left",
        'SELECT rank, lane, "group", group_seq, purpose, op, numel, enter_step, enter_seq '
        'FROM collectives WHERE NOT "left" ORDER BY "group", group_seq, rank',
    ),
    "evictions_by_step": Canned(
        "pages evicted at each step, by tier and rank",
        "SELECT step, rank, tier, count(*) AS evictions, sum(pages_wanted)::BIGINT AS pages_wanted, "
        "sum(pages_freed)::BIGINT AS pages_freed, sum(demoted_pages)::BIGINT AS demoted_pages, "
        "sum(dropped_pages)::BIGINT AS dropped_pages "
        "FROM evictions GROUP BY step, rank, tier ORDER BY step, rank, tier",
    ),
    "decisions_around": Canned(
        "every rank's decisions in the last steps before the first open collective, or of the run",
        'WITH centre AS (SELECT coalesce((SELECT min(enter_step) FROM collectives WHERE NOT "left"), '
        "(SELECT max(step) FROM decisions)) AS step), "
        # What a record has of its own is put together for those that are shown, not for all.
        "chosen AS MATERIALIZED (SELECT * FROM records "
        "WHERE kind IN (SELECT name FROM kinds WHERE role = 'decision') "
        "AND step BETWEEN (SELECT step - 2 FROM centre) AND (SELECT step FROM centre)) "
        "SELECT step, rank, seq, kind, phase, rid, node, pages, tokens, own_fields(chosen) AS fields "
        "FROM chosen ORDER BY step, lane, seq, rank",
    ),
    "transfers_not_applied": Canned(
        "transfers whose bytes have moved and which were never applied",
        "SELECT rank, queue, op, pages, enqueue_step, done_step FROM transfers "
        "WHERE done_step IS NOT NULL AND ack_step IS NULL ORDER BY rank, queue, op",
    ),
    "queues_open": Canned(
        "operations of any queue that were enqueued and never applied",
        "SELECT rank, queue, op, any_value(pages) AS pages, min(step) AS enqueue_step, "
        "count(*) FILTER (event = 'done') > 0 AS is_done FROM queues GROUP BY rank, queue, op "
        "HAVING count(*) FILTER (event = 'ack') = 0 ORDER BY rank, queue, op",
    ),
    "prefetch_outcomes": Canned(
        "what became of prefetches, on the first rank of each replica, and the tokens that each cost",
        "SELECT dp, coalesce(outcome, 'under way') AS outcome, lost_reasons, count(*) AS prefetches, "
        "sum(tokens)::BIGINT AS asked_tokens, sum(loaded_tokens)::BIGINT AS loaded_tokens, "
        "sum(lost_tokens)::BIGINT AS lost_tokens FROM prefetches WHERE pp = 0 AND cp = 0 AND tp = 0 "
        "GROUP BY ALL ORDER BY dp, prefetches DESC, outcome, lost_reasons",
    ),
    "storage_skew": Canned(
        "ranks whose external store gave less than that of their peers: legal, absorbed by the minimum",
        "SELECT rank, count(*) FILTER (local_pages < most) AS queries_short, "
        "sum(most - local_pages)::BIGINT AS pages_short, "
        "count(*) FILTER (side_pages < most_side) AS side_pools_short, "
        "min(op) FILTER (local_pages < most OR side_pages < most_side) AS first_op, "
        "count(*) FILTER (query_error IS NOT NULL) AS query_errors, sum(read_errors)::BIGINT AS read_errors "
        "FROM (SELECT *, list_min(local_boundaries) AS side_pages, "
        "max(local_pages) OVER same AS most, max(list_min(local_boundaries)) OVER same AS most_side "
        "FROM prefetches WHERE op IS NOT NULL WINDOW same AS (PARTITION BY dp, op)) "
        "GROUP BY rank HAVING first_op IS NOT NULL OR query_errors > 0 OR read_errors > 0 ORDER BY rank",
    ),
    "lanes_at": Canned(
        "what every lane was at when its log ended",
        "SELECT rank, lane, outcome, state, op, step AS since_step, time_ns AS since_ns FROM lanes "
        "LEFT JOIN (SELECT rank, lane, arg_max(state, seq) AS state, arg_max(op, seq) AS op, "
        "max(step) AS step, max(time_ns) AS time_ns FROM heartbeats WHERE kind = 'lane_state' "
        "GROUP BY rank, lane) "
        "USING (rank, lane) ORDER BY rank, lane <> 'scheduler', lane",
    ),
    "lanes_cut": Canned(
        "lanes that were not closed by their writer, and why reading stopped",
        "SELECT rank, lane, records, outcome, torn FROM lanes "
        "WHERE outcome IS NULL OR torn IS NOT NULL ORDER BY rank, lane",
    ),
}
