-- The tables that people query. `records` and `lanes` are filled by load.py; every view reads those two.
-- The comment above a view says what one of its rows is; ids are those of the log.
-- A view whose kinds no log holds yet has its columns and no rows.

-- One rank. Its outcome, and how many records its writer dropped, are unknown as long as one of its lanes
-- was cut.
CREATE VIEW ranks AS
SELECT rank, any_value(dp) AS dp, any_value(pp) AS pp, any_value(cp) AS cp, any_value(tp) AS tp,
       any_value(run_id) AS run_id, any_value(host) AS host, any_value(pid) AS pid,
       count(*) AS lanes, sum(records)::BIGINT AS records,
       max(steps) AS steps, CASE WHEN count(outcome) = count(*) THEN max(outcome) END AS outcome,
       count(*) FILTER (torn IS NOT NULL) AS torn_lanes, min(torn) AS torn,
       CASE WHEN count(dropped) = count(*) THEN sum(dropped)::BIGINT END AS dropped
FROM lanes GROUP BY rank ORDER BY rank;

-- One request, as the first rank of its replica saw it (tp, cp and pp 0).
CREATE VIEW requests AS
WITH own AS (SELECT * FROM records WHERE pp = 0 AND cp = 0 AND tp = 0),
received AS (
    SELECT dp, rid, arg_min(conversation, seq) AS conversation, arg_min(input_tokens, seq) AS input_tokens,
           arg_min(arrival_ms, seq) AS arrival_ms, min(step) AS receive_step, min(time_ns) AS receive_ns,
           min(seq) AS seq
    FROM own WHERE kind = 'request' GROUP BY dp, rid),
admitted AS (
    SELECT dp, rid, arg_min(device_tokens, seq) AS device_tokens, arg_min(host_tokens, seq) AS host_tokens,
           arg_min(storage_tokens, seq) AS storage_tokens, min(step) AS admit_step, min(time_ns) AS admit_ns
    FROM own WHERE kind = 'admit' AND verdict = 'admitted' GROUP BY dp, rid),
computed AS (
    SELECT dp, rid, sum(tokens)::BIGINT AS computed_tokens
    FROM (SELECT dp, unnest(rids) AS rid, unnest(computed_tokens) AS tokens
          FROM own WHERE kind = 'forward' AND mode = 'extend')
    GROUP BY dp, rid),
finished AS (
    SELECT dp, rid, arg_max(output_tokens, seq) AS output_tokens, arg_max(reason, seq) AS finish_reason,
           max(step) AS finish_step, max(time_ns) AS finish_ns
    FROM own WHERE kind = 'finish' GROUP BY dp, rid)
SELECT dp, rid, conversation, input_tokens, output_tokens,
       device_tokens, host_tokens, storage_tokens, coalesce(computed_tokens, 0) AS computed_tokens,
       receive_step, admit_step, finish_step, admit_step - receive_step AS wait_steps,
       receive_ns, admit_ns, finish_ns, admit_ns - receive_ns AS wait_ns, arrival_ms, finish_reason
FROM received LEFT JOIN admitted USING (dp, rid) LEFT JOIN computed USING (dp, rid)
LEFT JOIN finished USING (dp, rid)
ORDER BY dp, seq;

-- One walk of the tree for a request, on one rank.
CREATE VIEW matches AS
SELECT rank, dp, pp, cp, tp, lane, seq, step, time_ns, rid, node, device_tokens, host_tokens, usable_tokens,
       miss_digest, device_pages_free, host_pages_free, writes_in_flight
FROM records WHERE kind = 'match' ORDER BY rank, lane, seq;

-- One transfer on one rank: when it was enqueued, when its bytes had moved (done), when it was applied (ack).
CREATE VIEW transfers AS
SELECT rank, any_value(dp) AS dp, any_value(pp) AS pp, any_value(cp) AS cp, any_value(tp) AS tp, queue, op,
       any_value(pages) AS pages, any_value(nodes) AS nodes,
       min(step) FILTER (kind = 'transfer_enqueue') AS enqueue_step,
       min(seq) FILTER (kind = 'transfer_enqueue') AS enqueue_seq,
       min(time_ns) FILTER (kind = 'transfer_enqueue') AS enqueue_ns,
       min(step) FILTER (kind = 'transfer_done') AS done_step,
       min(seq) FILTER (kind = 'transfer_done') AS done_seq,
       min(time_ns) FILTER (kind = 'transfer_done') AS done_ns,
       min(step) FILTER (kind = 'transfer_ack') AS ack_step,
       min(seq) FILTER (kind = 'transfer_ack') AS ack_seq,
       min(time_ns) FILTER (kind = 'transfer_ack') AS ack_ns
FROM records WHERE kind IN ('transfer_enqueue', 'transfer_done', 'transfer_ack')
GROUP BY rank, queue, op ORDER BY rank, queue, op;

-- One change of a transfer queue on one rank; the counts hold after it. Ordered by the rank's own clock
-- where two lanes write, which is exact only inside a lane.
CREATE VIEW queues AS
SELECT rank, dp, pp, cp, tp, queue, lane, seq, step, time_ns, substr(kind, 10) AS event, op, pages,
       sum(CASE kind WHEN 'transfer_enqueue' THEN 1 WHEN 'transfer_ack' THEN -1 ELSE 0 END) OVER so_far
           ::BIGINT AS in_flight,
       sum(CASE kind WHEN 'transfer_done' THEN 1 WHEN 'transfer_ack' THEN -1 ELSE 0 END) OVER so_far
           ::BIGINT AS done_not_acked
FROM records WHERE kind IN ('transfer_enqueue', 'transfer_done', 'transfer_ack')
WINDOW so_far AS (PARTITION BY rank, queue ORDER BY time_ns, step, lane, seq ROWS UNBOUNDED PRECEDING)
ORDER BY rank, queue, time_ns, step, lane, seq;

-- One call of a collective on one rank. `left` is false when it was entered and never left.
CREATE VIEW collectives AS
SELECT rank, any_value(dp) AS dp, any_value(pp) AS pp, any_value(cp) AS cp, any_value(tp) AS tp, lane,
       "group", group_seq, any_value(axis) AS axis, any_value(purpose) AS purpose, any_value(call_op) AS op,
       any_value(numel) AS numel, any_value(peer) AS peer,
       min(step) FILTER (phase = 'enter') AS enter_step, min(seq) FILTER (phase = 'enter') AS enter_seq,
       min(time_ns) FILTER (phase = 'enter') AS enter_ns,
       min(step) FILTER (phase = 'leave') AS leave_step, min(seq) FILTER (phase = 'leave') AS leave_seq,
       min(time_ns) FILTER (phase = 'leave') AS leave_ns,
       count(*) FILTER (phase = 'leave') > 0 AS "left"
FROM (SELECT *, op_text AS call_op FROM records WHERE kind = 'meeting')
GROUP BY rank, lane, "group", group_seq ORDER BY rank, lane, min(seq);

-- One record of a kind whose role is `decision`; its other fields are in `fields`.
CREATE VIEW decisions AS
SELECT rank, dp, pp, cp, tp, lane, seq, step, time_ns, kind, phase, rid, node, pages, tokens,
       own_fields(records) AS fields
FROM records WHERE kind IN (SELECT name FROM kinds WHERE role = 'decision')
ORDER BY rank, lane, seq;

-- One eviction on one rank, from the device or from the host.
CREATE VIEW evictions AS
SELECT rank, dp, pp, cp, tp, lane, seq, step, time_ns, CASE kind WHEN 'evict' THEN 'device' ELSE 'host' END AS tier,
       pages_wanted, pages_freed, nodes,
       coalesce(length(demoted_digests), 0) // 16 AS demoted_pages,
       coalesce(length(dropped_digests), 0) // 16 AS dropped_pages,
       device_pages_free, device_pages_evictable, host_pages_free, demoted_digests, dropped_digests
FROM records WHERE kind IN ('evict', 'evict_host') ORDER BY rank, lane, seq;

-- One audit of one pool on one rank; `unaccounted` pages are in no set.
CREATE VIEW pools AS
SELECT rank, dp, pp, cp, tp, lane, seq, step, time_ns, pool, available, evictable, protected, total,
       total - available - evictable - protected AS unaccounted
FROM records WHERE kind = 'pool_audit' ORDER BY rank, lane, seq;

-- One prefetch from storage on one rank. No kind of record carries one yet.
CREATE VIEW prefetches AS
SELECT rank, dp, pp, cp, tp, lane, seq, step, time_ns, rid, op, pages, tokens, NULL::BIGINT AS done_step,
       NULL::VARCHAR AS outcome
FROM records WHERE false;

-- One sign of life of one lane. No kind of record carries one yet.
CREATE VIEW heartbeats AS
SELECT rank, dp, pp, cp, tp, lane, seq, step, time_ns, NULL::BIGINT AS "count"
FROM records WHERE false;
