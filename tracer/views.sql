-- The tables that people query. `records`, `lanes` and `kinds` are filled by load.py; every view reads those.
-- The comment above a view says what one of its rows is; ids are those of the log. columns.py says what each
-- column means, docs/trace_store.md how the views join.
-- A view whose kinds no log holds yet has its columns and no rows.

-- One rank. Its outcome is that of the lane that fared worst. It is unknown, like how many records its writer
-- dropped, as long as one of its lanes was cut.
CREATE VIEW ranks AS
SELECT rank, any_value(dp) AS dp, any_value(pp) AS pp, any_value(cp) AS cp, any_value(tp) AS tp,
       any_value(run_id) AS run_id, any_value(host) AS host, any_value(pid) AS pid,
       count(*) AS lanes, sum(records)::BIGINT AS records,
       max(steps) AS steps, CASE WHEN count(outcome) = count(*) THEN arg_max(outcome, CASE outcome
           WHEN 'crashed' THEN 3 WHEN 'hung' THEN 2 WHEN 'stopped' THEN 1 ELSE 0 END) END AS outcome,
       count(*) FILTER (torn IS NOT NULL) AS torn_lanes, min(torn) AS torn,
       count(*) FILTER (len(damage) > 0) AS damaged_lanes,
       CASE WHEN count(dropped) = count(*) THEN sum(dropped)::BIGINT END AS dropped
FROM lanes GROUP BY rank ORDER BY rank;

-- One request, as the first rank of its replica saw it (tp, cp and pp 0). The tokens by tier are those of its
-- first admission; what it computes again after a retraction is not counted.
-- An id that is received again is another request, and what is told of it from then on is that one's.
CREATE VIEW requests AS
WITH own AS (SELECT * FROM records WHERE pp = 0 AND cp = 0 AND tp = 0),
received AS (
    SELECT dp, rid, rank, lane, conversation, input_tokens, arrival_ms, priority, namespace, step AS receive_step,
           time_ns AS receive_ns, seq,
           lead(seq, 1, 9223372036854775807) OVER (PARTITION BY dp, rid ORDER BY seq) AS next_seq
    FROM own WHERE kind = 'request'),
life AS (SELECT dp, rid, seq AS own_seq, next_seq FROM received),
admitted AS (
    SELECT dp, own_seq, arg_min(device_tokens, seq) AS device_tokens, arg_min(host_tokens, seq) AS host_tokens,
           arg_min(storage_tokens, seq) AS storage_tokens, min(step) AS admit_step, min(time_ns) AS admit_ns
    FROM own JOIN life USING (dp, rid)
    WHERE kind = 'admit' AND verdict = 'admitted' AND seq > own_seq AND seq < next_seq GROUP BY dp, own_seq),
retracted AS (
    SELECT dp, own_seq, count(*) AS retractions, min(seq) AS retract_seq
    FROM own JOIN life USING (dp, rid)
    WHERE kind = 'retract' AND seq > own_seq AND seq < next_seq GROUP BY dp, own_seq),
computed AS (
    SELECT dp, own_seq, count(*) AS prefills, sum(extended.tokens)::BIGINT AS computed_tokens
    FROM (SELECT dp, seq, unnest(rids) AS rid, unnest(computed_tokens) AS tokens
          FROM own WHERE kind = 'forward' AND mode = 'extend') AS extended
    JOIN life USING (dp, rid) LEFT JOIN retracted USING (dp, own_seq)
    WHERE seq > own_seq AND seq < next_seq AND (retract_seq IS NULL OR seq < retract_seq) GROUP BY dp, own_seq),
aborted AS (
    SELECT dp, own_seq, min(step) AS abort_step, arg_min(place, seq) AS abort_place
    FROM own JOIN life USING (dp, rid)
    WHERE kind = 'abort' AND place <> '' AND seq > own_seq AND seq < next_seq GROUP BY dp, own_seq),
finished AS (
    SELECT dp, own_seq, arg_max(output_tokens, seq) AS output_tokens, arg_max(reason, seq) AS finish_reason,
           max(step) AS finish_step, max(time_ns) AS finish_ns
    FROM own JOIN life USING (dp, rid)
    WHERE kind = 'finish' AND seq > own_seq AND seq < next_seq GROUP BY dp, own_seq)
SELECT dp, rank, lane, received.seq, rid, conversation, input_tokens, output_tokens,
       device_tokens, host_tokens, storage_tokens, coalesce(computed_tokens, 0) AS computed_tokens,
       receive_step, admit_step, finish_step, admit_step - receive_step AS wait_steps,
       receive_ns, admit_ns, finish_ns, admit_ns - receive_ns AS wait_ns, arrival_ms, finish_reason,
       priority, namespace, coalesce(prefills, 0) AS prefills, coalesce(retractions, 0) AS retractions,
       abort_step, abort_place
FROM (SELECT *, seq AS own_seq FROM received) AS received
LEFT JOIN admitted USING (dp, own_seq) LEFT JOIN computed USING (dp, own_seq) LEFT JOIN retracted USING (dp, own_seq)
LEFT JOIN aborted USING (dp, own_seq) LEFT JOIN finished USING (dp, own_seq)
ORDER BY dp, received.seq;

-- One walk of the tree for a request, on one rank: before a prefetch (submit) or for admission (admit).
CREATE VIEW matches AS
SELECT rank, dp, pp, cp, tp, lane, seq, step, time_ns, rid, purpose, node, device_tokens, host_tokens,
       kv_tokens, usable_tokens, miss_digest, device_pages_free, host_pages_free, writes_in_flight
FROM records WHERE kind = 'match' ORDER BY rank, lane, seq;

-- One request and one operation on one rank that was made for it: its prompt was copied back (`load`) or asked
-- for outside (`prefetch`), or what it has left was copied to the host (`write`) and written on (`backup`).
-- `seq` is that of the decision, `operation_seq` that of the record with the `op`.
CREATE VIEW request_transfers AS
-- What a step loads back goes into the next copy; its nodes are whole paths, of which a decision names the last.
WITH loaded AS (
    SELECT asked.dp, asked.rank, asked.lane, asked.seq, asked.step, asked.rid, 'load' AS queue, moved.op, asked.node,
           moved.seq AS operation_seq, moved.step AS operation_step
    FROM (FROM records WHERE kind = 'load_back' AND tokens > 0) AS asked
    ASOF JOIN (FROM records WHERE kind = 'transfer_enqueue' AND queue = 'load') AS moved
        ON moved.rank = asked.rank AND moved.lane = asked.lane AND moved.seq >= asked.seq
    WHERE list_contains(moved.nodes, asked.node)),
-- A backup is made for the request whose insert has begun and is not over.
backed AS (
    SELECT backup.rank, backup.lane, backup.seq, backup.step, backup.node,
           CASE inserted.phase WHEN 'call' THEN inserted.rid END AS rid
    FROM (FROM records WHERE kind = 'write_backup' AND tokens > 0) AS backup
    ASOF JOIN (FROM records WHERE kind = 'insert') AS inserted
        ON inserted.rank = backup.rank AND inserted.lane = backup.lane AND inserted.seq <= backup.seq),
written AS (
    SELECT moved.dp, moved.rank, moved.lane, backed.seq, backed.step, backed.rid, moved.queue, moved.op, moved.node,
           moved.seq AS operation_seq, moved.step AS operation_step
    FROM (SELECT rank, dp, lane, seq, step, queue, op, unnest(nodes) AS node
          FROM records WHERE kind = 'transfer_enqueue' AND queue = 'write'
          UNION ALL
          SELECT rank, dp, lane, seq, step, 'backup', op, node FROM records WHERE kind = 'storage_backup') AS moved
    ASOF JOIN backed
        ON backed.rank = moved.rank AND backed.lane = moved.lane AND backed.node = moved.node
            AND backed.seq <= moved.seq
    WHERE backed.rid IS NOT NULL)
FROM loaded UNION ALL FROM written UNION ALL
SELECT dp, rank, lane, seq, step, rid, 'prefetch', op, node, seq, step
FROM records WHERE kind = 'prefetch_submit' AND outcome = 'issued'
ORDER BY rank, lane, operation_seq, seq;

-- One transfer on one rank: when it was enqueued, when its bytes had moved (done), when it was applied (ack).
-- `rids` are the requests that it was made for.
CREATE VIEW transfers AS
SELECT rank, any_value(dp) AS dp, any_value(pp) AS pp, any_value(cp) AS cp, any_value(tp) AS tp, any_value(lane) AS lane,
       min(seq) AS seq, min(step) AS step, queue, op,
       any_value(pages) AS pages, any_value(nodes) AS nodes, any_value(rids) AS rids,
       min(step) FILTER (kind = 'transfer_enqueue') AS enqueue_step,
       min(seq) FILTER (kind = 'transfer_enqueue') AS enqueue_seq,
       min(time_ns) FILTER (kind = 'transfer_enqueue') AS enqueue_ns,
       min(step) FILTER (kind = 'transfer_done') AS done_step,
       min(seq) FILTER (kind = 'transfer_done') AS done_seq,
       min(time_ns) FILTER (kind = 'transfer_done') AS done_ns,
       min(step) FILTER (kind = 'transfer_ack') AS ack_step,
       min(seq) FILTER (kind = 'transfer_ack') AS ack_seq,
       min(time_ns) FILTER (kind = 'transfer_ack') AS ack_ns
FROM (FROM records SELECT * EXCLUDE (rids) WHERE kind IN ('transfer_enqueue', 'transfer_done', 'transfer_ack'))
LEFT JOIN (SELECT rank, queue, op, list(DISTINCT rid ORDER BY rid) AS rids FROM request_transfers
           GROUP BY rank, queue, op) USING (rank, queue, op)
GROUP BY rank, queue, op ORDER BY rank, queue, op;

-- One change of a queue on one rank; the counts hold after it. `write` and `load` are copies, `prefetch` asks
-- the external tier what it has, `read` fetches it, `backup` writes on to it. Ordered by the rank's own clock
-- where two lanes write, which is exact only inside a lane.
CREATE VIEW queues AS
WITH moves AS (
    SELECT *, queue AS own_queue, substr(kind, 10) AS event
    FROM records WHERE kind IN ('transfer_enqueue', 'transfer_done', 'transfer_ack')
    UNION ALL
    SELECT *, 'prefetch', CASE kind WHEN 'prefetch_submit' THEN 'enqueue' WHEN 'query' THEN 'done' ELSE 'ack' END
    FROM records WHERE kind IN ('query', 'prefetch_hit') OR (kind = 'prefetch_submit' AND outcome = 'issued')
    UNION ALL
    SELECT *, 'read', CASE kind WHEN 'prefetch_hit' THEN 'enqueue' WHEN 'progress' THEN 'done' ELSE 'ack' END
    FROM records WHERE (kind IN ('progress', 'prefetch_ack') AND ack = 'completed')
                    OR (kind = 'prefetch_hit' AND tokens > 0)
    UNION ALL
    SELECT *, 'backup', CASE kind WHEN 'storage_backup' THEN 'enqueue' WHEN 'storage_write' THEN 'done' ELSE 'ack' END
    FROM records WHERE kind IN ('storage_backup', 'storage_write', 'storage_ack'))
SELECT rank, dp, pp, cp, tp, own_queue AS queue, lane, seq, step, time_ns, event, op, pages,
       sum(CASE event WHEN 'enqueue' THEN 1 WHEN 'ack' THEN -1 ELSE 0 END) OVER so_far::BIGINT AS in_flight,
       sum(CASE event WHEN 'done' THEN 1 WHEN 'ack' THEN -1 ELSE 0 END) OVER so_far::BIGINT AS done_not_acked
FROM moves
WINDOW so_far AS (PARTITION BY rank, own_queue ORDER BY time_ns, step, lane, seq ROWS UNBOUNDED PRECEDING)
ORDER BY rank, own_queue, time_ns, step, lane, seq;

-- One call of a collective on one rank. `left` is false when it was entered and never left.
CREATE VIEW collectives AS
SELECT rank, any_value(dp) AS dp, any_value(pp) AS pp, any_value(cp) AS cp, any_value(tp) AS tp, lane,
       min(seq) AS seq, min(step) AS step, "group", group_seq, any_value(axis) AS axis, any_value(purpose) AS purpose, any_value(call_op) AS op,
       any_value(numel) AS numel, any_value(peer) AS peer,
       min(step) FILTER (phase = 'enter') AS enter_step, min(seq) FILTER (phase = 'enter') AS enter_seq,
       min(time_ns) FILTER (phase = 'enter') AS enter_ns,
       min(step) FILTER (phase = 'leave') AS leave_step, min(seq) FILTER (phase = 'leave') AS leave_seq,
       min(time_ns) FILTER (phase = 'leave') AS leave_ns,
       count(*) FILTER (phase = 'leave') > 0 AS "left"
FROM (SELECT *, op_text AS call_op FROM records WHERE kind = 'meeting')
GROUP BY rank, lane, "group", group_seq ORDER BY rank, lane, min(seq);

-- One record of a kind whose role is `decision`; its other fields are in `fields`. `group` and `group_seq` name
-- the collective that it came out of: the lane had left it right before.
CREATE VIEW decisions AS
SELECT decided.rank, dp, pp, cp, tp, decided.lane, decided.seq, step, time_ns, kind, phase, rid, op, node, pages,
       tokens, met."group", met.group_seq, fields
FROM (SELECT rank, dp, pp, cp, tp, lane, seq, step, time_ns, kind, phase, rid, op, node, pages, tokens,
             own_fields(records) AS fields
      FROM records WHERE kind IN (SELECT name FROM kinds WHERE role = 'decision')) AS decided
LEFT JOIN (SELECT rank, lane, seq, "group", group_seq FROM records WHERE kind = 'meeting' AND phase = 'leave') AS met
    ON met.rank = decided.rank AND met.lane = decided.lane AND met.seq = decided.seq - 1
        AND decided.phase IS DISTINCT FROM 'call'
ORDER BY decided.rank, decided.lane, decided.seq;

-- One eviction on one rank, from the device or from the host.
CREATE VIEW evictions AS
SELECT rank, dp, pp, cp, tp, lane, seq, step, time_ns, CASE kind WHEN 'evict' THEN 'device' ELSE 'host' END AS tier,
       pages_wanted, pages_freed, drop_reason, nodes,
       coalesce(length(demoted_digests), 0) // 16 AS demoted_pages,
       coalesce(length(dropped_digests), 0) // 16 AS dropped_pages,
       device_pages_free, device_pages_evictable, host_pages_free, demoted_digests, dropped_digests
FROM records WHERE kind IN ('evict', 'evict_host') ORDER BY rank, lane, seq;

-- One level of one pool on one rank. An audit (kind `pool_audit`) has the whole book; `unaccounted` pages are in
-- no set. Any other record that carries free pages is a row where their number has changed: `available` only.
CREATE VIEW pools AS
WITH told AS (
    SELECT rank, dp, pp, cp, tp, lane, seq, step, time_ns, kind, 'device' AS pool, device_pages_free AS available
    FROM records WHERE device_pages_free IS NOT NULL
    UNION ALL
    SELECT rank, dp, pp, cp, tp, lane, seq, step, time_ns, kind, 'host', host_pages_free
    FROM records WHERE host_pages_free IS NOT NULL),
levels AS (
    SELECT * FROM told
    QUALIFY available IS DISTINCT FROM lag(available) OVER (PARTITION BY rank, lane, pool ORDER BY seq))
SELECT rank, dp, pp, cp, tp, lane, seq, step, time_ns, kind, pool, available, evictable, protected, total,
       total - available - evictable - protected AS unaccounted
FROM records WHERE kind = 'pool_audit'
UNION ALL
SELECT *, NULL, NULL, NULL, NULL FROM levels
ORDER BY rank, lane, seq, pool;

-- One prefetch from the external tier on one rank, from its submission on; declined ones have no `op`.
-- `outcome` is what became of it in the end, null while it is under way; the tokens that were asked for and
-- not given are in `lost_tokens`, why in `lost_reasons`. `tries_before` counts earlier ones of this request.
CREATE VIEW prefetches AS
WITH asked AS (
    SELECT rank, dp, pp, cp, tp, lane, seq, step, time_ns, rid, attempt,
           CASE WHEN outcome = 'issued' THEN op END AS op, node, pages, tokens, outcome AS submit_outcome,
           lead(seq) OVER handle AS next_seq, row_number() OVER handle - 1 AS tries_before
    FROM records WHERE kind = 'prefetch_submit'
    WINDOW handle AS (PARTITION BY rank, rid, attempt ORDER BY seq)),
queried AS (
    SELECT rank, op, any_value(local_pages) AS local_pages, any_value(agreed_pages) AS agreed_pages,
           any_value(local_boundaries) AS local_boundaries, any_value(publish_seq) AS publish_seq,
           any_value(nullif(error, '')) AS query_error, min(step) AS query_step, min(time_ns) AS query_ns
    FROM records WHERE kind = 'query' GROUP BY rank, op),
taken AS (
    SELECT rank, op, any_value(outcome) AS hit_outcome, any_value(consume_seq) AS consume_seq,
           any_value(hit_tokens) AS hit_tokens, any_value(tokens) AS allocated_tokens, min(step) AS hit_step
    FROM records WHERE kind = 'prefetch_hit' GROUP BY rank, op),
was_read AS (
    SELECT rank, op, count(*) AS reads, sum(local_tokens)::BIGINT AS local_tokens,
           count(nullif(error, '')) AS read_errors
    FROM records WHERE kind = 'read' GROUP BY rank, op),
published AS (
    SELECT rank, op, count(*) AS acks_published, max(agreed_tokens) FILTER (ack = 'progress') AS agreed_tokens
    FROM records WHERE kind = 'progress' GROUP BY rank, op),
consumed AS (
    SELECT rank, op, count(*) AS acks_consumed FROM records WHERE kind = 'prefetch_ack' GROUP BY rank, op),
inserted AS (
    SELECT rank, op, any_value(outcome) AS insert_outcome, any_value(completed_tokens) AS completed_tokens,
           any_value(matched_tokens) AS matched_tokens, any_value(loaded_tokens) AS loaded_tokens,
           min(step) AS insert_step
    FROM records WHERE kind = 'prefetch_insert' GROUP BY rank, op),
lost AS (
    SELECT asked.rank, asked.seq, max(told.outcome) FILTER (told.outcome = 'cancelled') AS cancelled,
           min(told.step) FILTER (told.outcome = 'cancelled') AS cancel_step,
           sum(told.tokens)::BIGINT AS lost_tokens, string_agg(DISTINCT nullif(told.reason, ''), ', '
               ORDER BY nullif(told.reason, '')) AS lost_reasons
    FROM asked JOIN records AS told ON told.kind = 'prefetch_outcome' AND told.rank = asked.rank
        AND told.rid = asked.rid AND told.attempt = asked.attempt
        AND told.seq > asked.seq AND (asked.next_seq IS NULL OR told.seq < asked.next_seq)
    GROUP BY asked.rank, asked.seq),
retried AS (
    SELECT rank, rid, attempt, count(*) AS retry_records
    FROM records WHERE kind = 'prefetch_retry' GROUP BY rank, rid, attempt)
SELECT rank, dp, pp, cp, tp, lane, seq, step, time_ns, rid, attempt, op, node, pages, tokens, submit_outcome,
       query_step, query_ns, local_pages, agreed_pages, local_boundaries, publish_seq, query_error,
       hit_step, consume_seq, hit_outcome, hit_tokens, allocated_tokens, reads, local_tokens, read_errors,
       acks_published, agreed_tokens, acks_consumed, completed_tokens, matched_tokens, loaded_tokens,
       coalesce(insert_step, cancel_step, CASE WHEN allocated_tokens = 0 THEN hit_step END) AS done_step,
       coalesce(insert_outcome, cancelled, CASE WHEN allocated_tokens = 0 THEN hit_outcome END,
                nullif(submit_outcome, 'issued')) AS outcome,
       lost_tokens, lost_reasons, tries_before, coalesce(retry_records, 0) AS retry_records
FROM asked LEFT JOIN queried USING (rank, op) LEFT JOIN taken USING (rank, op)
LEFT JOIN was_read USING (rank, op) LEFT JOIN published USING (rank, op)
LEFT JOIN consumed USING (rank, op) LEFT JOIN inserted USING (rank, op)
LEFT JOIN lost USING (rank, seq) LEFT JOIN retried USING (rank, rid, attempt)
ORDER BY rank, seq;

-- One sign of life of one lane. A `lane_state` is what it was at from then on (`state`) and for how long (null
-- for the last one), and `count` numbers them. An `idle` period is over at its `step`: `idle_steps` steps from
-- `first_step` on, in which nothing happened, were not written. A `heartbeat` says that the writer was alive.
CREATE VIEW heartbeats AS
SELECT rank, dp, pp, cp, tp, lane, seq, step, time_ns, kind,
       CASE kind WHEN 'idle' THEN 'idle' WHEN 'heartbeat' THEN 'alive' ELSE state END AS state, op,
       row_number() OVER of_kind AS "count",
       CASE kind WHEN 'lane_state' THEN lead(time_ns) OVER of_kind - time_ns END AS lasted_ns,
       first_step, CASE kind WHEN 'idle' THEN "count" END AS idle_steps
FROM records WHERE kind IN ('lane_state', 'idle', 'heartbeat')
WINDOW of_kind AS (PARTITION BY rank, lane, kind ORDER BY seq)
ORDER BY rank, lane, seq;
