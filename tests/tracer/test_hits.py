"""Every prompt token is accounted for once, and every miss has a reason that the records prove."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.logs import line, write_lane, write_run
from tracer.errors import HitsError
from tracer.hits import Hits, hits
from tracer.log import find_logs
from tracer.story import why

A, B = "a" * 16, "b" * 16


def request(rid: str, tokens: int = 128, **more: Any) -> dict[str, Any]:
    return {"kind": "request", "rid": rid, "input_tokens": tokens, "output_tokens": 1, **more}


def match(rid: str, miss: str, device: int = 0, host: int = 0, **more: Any) -> dict[str, Any]:
    found = {"device_tokens": device, "host_tokens": host, "miss_digest": miss, "usable_tokens": 64}
    return {"kind": "match", "rid": rid, "node": 1, **found, **more}


def admit(rid: str, device: int = 0, host: int = 0, storage: int = 0, **more: Any) -> dict[str, Any]:
    served = {"device_tokens": device, "host_tokens": host, "storage_tokens": storage, "extend_tokens": 1}
    return {"kind": "admit", "rid": rid, "verdict": "admitted", **served, **more}


def forward(mode: str = "extend", **tokens: int) -> dict[str, Any]:
    return {"kind": "forward", "mode": mode, "rids": list(tokens), "computed_tokens": list(tokens.values())}


def insert(rid: str, digests: str, **more: Any) -> dict[str, Any]:
    counts = {"tokens": 64, "new_tokens": 64, "duplicate_pages": 0}
    return {"kind": "insert", "rid": rid, "node": 17, **counts, "new_digests": digests, **more}


def evict(*, demoted: str = "", dropped: str = "", **more: Any) -> dict[str, Any]:
    freed = {"pages_wanted": 1, "pages_freed": 1, "nodes": [17]}
    return {"kind": "evict", **freed, "demoted_digests": demoted, "dropped_digests": dropped, **more}


def evict_host(dropped: str) -> dict[str, Any]:
    return {
        "kind": "evict_host",
        "pages_wanted": 1,
        "pages_freed": 1,
        "nodes": [17],
        "dropped_digests": dropped,
    }


def finish(rid: str) -> dict[str, Any]:
    return {"kind": "finish", "rid": rid, "reason": "length", "output_tokens": 1}


BACKUP = {"kind": "write_backup", "node": 17, "pages": 1, "tokens": 64}


def analyse(folder: Path, records: Sequence[Mapping[str, Any]], **options: Any) -> Hits:
    by = options.pop("by", "request")
    return hits(find_logs(write_lane(folder, records, **options).parent), by=by)


def reason(
    folder: Path, before: Sequence[Mapping[str, Any]], asked: Mapping[str, Any], **options: Any
) -> Any:
    """The reason of a request `r9` that misses page A after `before`."""
    records = [*before, request("r9"), match("r9", A), asked, admit("r9"), forward(r9=128), finish("r9")]
    (row,) = [row for row in analyse(folder, records, **options).rows if row["rid"] == "r9"]
    return row["reason"]


NOTHING = {"kind": "batch", "mode": "extend", "rids": ["r9"], "tokens": 128}
R0 = [request("r0"), match("r0", A), admit("r0"), forward(r0=128), insert("r0", A + B), finish("r0")]


def test_the_document_has_the_documented_keys_in_their_order(tmp_path: Path) -> None:
    records = [
        request("r0", 6758),
        match("r0", A, device=2048, host=1024),
        admit("r0", device=2048, host=1024),
        forward(r0=3000),
        forward(r0=686),
        forward("decode", r0=1),
        finish("r0"),
    ]
    document = analyse(tmp_path, records).to_json()
    assert list(document.items()) == [
        ("schema", "hicache.hits.v1"),
        ("requests", 1),
        ("input_tokens", 6758),
        ("cached_tokens", {"device": 2048, "host": 1024, "storage": 0, "total": 3072}),
        ("hit_rate", 0.454572),
        ("by", "request"),
        (
            "rows",
            [
                {
                    "rid": "r0",
                    "input_tokens": 6758,
                    "device": 2048,
                    "host": 1024,
                    "storage": 0,
                    "computed": 3686,
                    "reason": "cold",
                }
            ],
        ),
    ]
    assert list(document["rows"][0]) == [
        "rid",
        "input_tokens",
        "device",
        "host",
        "storage",
        "computed",
        "reason",
    ]


def test_a_page_never_seen_before_is_cold(tmp_path: Path) -> None:
    assert reason(tmp_path, [], NOTHING) == "cold"


def test_a_page_dropped_without_a_host_tier_was_evicted_from_the_device(tmp_path: Path) -> None:
    assert reason(tmp_path, [*R0, evict(dropped=A)], NOTHING) == "evicted_device"


def test_a_page_dropped_in_a_run_with_backups_was_not_backed_up(tmp_path: Path) -> None:
    assert reason(tmp_path, [*R0, BACKUP, evict(dropped=A)], NOTHING) == "not_backed_up"


def test_a_page_dropped_in_a_run_configured_with_a_host_tier_was_not_backed_up(tmp_path: Path) -> None:
    config = {"hierarchical_cache": True}
    assert reason(tmp_path, [*R0, evict(dropped=A)], NOTHING, config=config) == "not_backed_up"


def test_a_page_dropped_from_the_host_is_evicted_host(tmp_path: Path) -> None:
    assert reason(tmp_path, [*R0, BACKUP, evict(demoted=B + A), evict_host(A)], NOTHING) == "evicted_host"


def test_a_page_that_came_back_and_went_again_counts_by_its_last_fate(tmp_path: Path) -> None:
    before = [*R0, BACKUP, evict(demoted=A), evict_host(A), insert("r1", A), evict(dropped=A)]
    assert reason(tmp_path, before, NOTHING) == "not_backed_up"


def test_a_page_evicted_after_the_match_does_not_change_the_reason(tmp_path: Path) -> None:
    assert reason(tmp_path, [*R0, evict(dropped=A)], insert("r1", A)) == "evicted_device"


def test_a_page_that_is_still_there_and_was_missed_is_unknown(tmp_path: Path) -> None:
    assert reason(tmp_path, R0, NOTHING) == "unknown"


def test_a_declined_load_back_names_why(tmp_path: Path) -> None:
    declined = {"kind": "load_back", "rid": "r9", "node": 1, "pages": 0, "tokens": 0, "declined": "no_room"}
    assert reason(tmp_path, [], declined) == "declined_no_room"


def load_back(rid: str, declined: str = "") -> dict[str, Any]:
    return {"kind": "load_back", "rid": rid, "node": 1, "pages": 2, "tokens": 0, "declined": declined}


def test_a_load_back_declined_behind_the_admission_names_why(tmp_path: Path) -> None:
    """A decision is recorded before what follows from it: first the admission, then the load."""
    records = [request("r9"), match("r9", A), admit("r9"), load_back("r9", "too_short"), forward(r9=128)]
    assert [row["reason"] for row in analyse(tmp_path, records).rows] == ["declined_too_short"]


def test_a_load_back_of_a_later_admission_does_not_change_the_reason(tmp_path: Path) -> None:
    first = [request("r9"), match("r9", A), admit("r9"), load_back("r9"), forward(r9=128)]
    again = [match("r9", B), admit("r9"), load_back("r9", "too_short"), forward(r9=1)]
    assert [row["reason"] for row in analyse(tmp_path, [*first, *again]).rows] == ["cold"]


def refused(rid: str, tokens: int) -> list[dict[str, Any]]:
    no = {**admit(rid), "verdict": "too_long"}
    return [request(rid, tokens), match(rid, A), no, {**finish(rid), "reason": "too_long"}]


def test_requests_that_nobody_served_are_noted_and_not_unaccounted(tmp_path: Path) -> None:
    waits = [request("r3", 7), match("r3", A), {**admit("r3"), "verdict": "no_room"}]
    served = [request("r4", 100), match("r4", A), admit("r4", device=40), forward(r4=60), finish("r4")]
    found = analyse(tmp_path, [*refused("r1", 1000), *refused("r2", 500), *waits, *served])
    assert found.unaccounted == ()
    assert found.notes == (
        "1 request was never admitted: 7 tokens that nobody served",
        "2 requests were refused (too long): 1,500 tokens that nobody served",
    )
    assert found.to_json()["notes"] == list(found.notes)
    # Over every listed prompt by contract; the served ones are the fairer number.
    assert (found.hit_rate, found.served_hit_rate) == (0.024891, 0.4)


def test_requests_that_were_still_being_computed_are_noted(tmp_path: Path) -> None:
    records = [
        *(request("r0", 600), match("r0", A), admit("r0", device=64), forward(r0=100)),
        *(request("r1", 232), match("r1", A), admit("r1")),
        *(request("r2", 10), match("r2", A), admit("r2"), forward(r2=10)),
    ]
    found = analyse(tmp_path, records, outcome="hung")
    assert found.notes == ("2 requests were still being computed: 668 tokens have no place yet",)


def test_the_shares_of_the_tiers_add_up_whatever_became_of_the_requests(tmp_path: Path) -> None:
    records = [
        *refused("r1", 100),
        request("r0", 100),
        match("r0", A),
        admit("r0", device=64),
        forward(r0=30),
    ]
    rows = analyse(tmp_path, records, by="tier", outcome="hung").rows
    assert rows[-1] == {"tier": "unplaced", "tokens": 106, "share": 0.53, "requests": 2}
    assert sum(row["share"] for row in rows) == 1.0


def test_what_a_writer_dropped_is_noted(tmp_path: Path) -> None:
    path = write_lane(tmp_path, R0, outcome=None)
    end = {"kind": "trailer", "outcome": "completed", "records": 7, "dropped": {"forward": 3}}
    path.write_bytes(path.read_bytes() + line(7, end))
    assert hits(find_logs(tmp_path)).notes == (
        "rank0000.scheduler.000.jsonl: records that could not be written are missing: 3 of forward",
    )


def test_replicas_without_a_log_are_named_up_to_a_few(tmp_path: Path) -> None:
    run = write_run(tmp_path, {1: R0}, sizes={"dp": 100_000})
    assert hits(find_logs(run)).notes == (
        "replica dp0 is not counted: its first rank left no log",
        "replica dp2 is not counted: its first rank left no log",
        "replica dp3 is not counted: its first rank left no log",
        "nor are 99,996 more replicas, for the same reason",
    )


def test_the_last_match_before_admission_decides(tmp_path: Path) -> None:
    assert reason(tmp_path, [], match("r9", "")) == "last_token"


def test_a_request_that_was_never_admitted_is_listed_without_a_reason(tmp_path: Path) -> None:
    waiting = {**admit("r0"), "verdict": "no_room"}
    result = analyse(tmp_path, [request("r0"), match("r0", A), waiting], outcome="hung")
    assert [(row["rid"], row["computed"], row["reason"]) for row in result.rows] == [("r0", 0, None)]


def test_tokens_that_do_not_add_up_are_reported_and_not_patched(tmp_path: Path) -> None:
    records = [request("r0", 100), match("r0", A), admit("r0", device=64), forward(r0=35), finish("r0")]
    document = analyse(tmp_path, records).to_json()
    assert document["unaccounted"] == [{"rid": "r0", "input_tokens": 100, "accounted_tokens": 99}]
    assert document["rows"][0]["computed"] == 35


def test_an_unfinished_request_need_not_add_up_yet(tmp_path: Path) -> None:
    result = analyse(tmp_path, [request("r0", 100), match("r0", A), admit("r0"), forward(r0=35)])
    assert result.unaccounted == ()


def test_a_lane_that_was_cut_is_noted(tmp_path: Path) -> None:
    assert analyse(tmp_path, R0, outcome=None).notes == (
        "rank0000.scheduler.000.jsonl: cut behind record 6, without a trailer",
    )


def test_only_the_first_rank_of_each_replica_counts(tmp_path: Path) -> None:
    run = write_run(
        tmp_path,
        {0: R0, 1: [*R0, request("r7")], 2: [request("r1", 10)], 3: [request("r8")]},
        sizes={"dp": 2, "tp": 2},
    )
    assert [row["rid"] for row in hits(find_logs(run)).rows] == ["r0", "r1"]


def test_a_replica_whose_first_rank_left_no_log_is_noted(tmp_path: Path) -> None:
    run = write_run(tmp_path, {0: R0, 3: R0}, sizes={"dp": 2, "tp": 2})
    assert hits(find_logs(run)).notes == ("replica dp1 is not counted: its first rank left no log",)


def test_a_group_of_logs_without_any_first_rank_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, {1: R0}, sizes={"tp": 2})
    with pytest.raises(HitsError, match="no replica's first rank left a log"):
        hits(find_logs(run))


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    write_lane(tmp_path, R0, rank=0, run_id="a", sizes={"tp": 2})
    write_lane(tmp_path, R0, rank=1, run_id="b", sizes={"tp": 2})
    with pytest.raises(HitsError, match="holds 2 runs"):
        hits(find_logs(tmp_path))


def test_a_record_without_a_field_that_is_needed_is_named(tmp_path: Path) -> None:
    with pytest.raises(HitsError, match="record 1 lacks a count or field"):
        analyse(tmp_path, [{**admit("r0"), "host_tokens": "many"}])


def test_a_story_goes_on_over_a_record_that_lacks_a_field(tmp_path: Path) -> None:
    run = find_logs(write_lane(tmp_path, [{"kind": "request", "rid": "r0"}, finish("r0")]))
    assert [each.text for each in why(run, "r0")] == [
        "a record that lacks some of its fields",
        "finished (length) after 1 token",
    ]


def test_since_and_until_choose_by_the_step_of_arrival(tmp_path: Path) -> None:
    records = [request(f"r{step}", step=step) for step in range(4)]
    run = find_logs(write_lane(tmp_path, records))
    assert [row["rid"] for row in hits(run, since=1, until=2).rows] == ["r1", "r2"]


TWO = [
    request("r0", 100, conversation=4, time_ns=0),
    match("r0", A),
    admit("r0"),
    forward(r0=100),
    finish("r0"),
    request("r1", 300, conversation=4, time_ns=5_000),
    match("r1", "", device=200),
    admit("r1", device=200),
    forward(r1=100),
    finish("r1"),
]


def test_tiers_add_up_to_the_prompts(tmp_path: Path) -> None:
    assert analyse(tmp_path, TWO, by="tier").rows == (
        {"tier": "device", "tokens": 200, "share": 0.5, "requests": 1},
        {"tier": "host", "tokens": 0, "share": 0.0, "requests": 0},
        {"tier": "storage", "tokens": 0, "share": 0.0, "requests": 0},
        {"tier": "computed", "tokens": 200, "share": 0.5, "requests": 2},
    )


SUMS = {"requests": 2, "input_tokens": 400, "device": 200, "host": 0, "storage": 0, "computed": 200}


def test_conversations_are_summed(tmp_path: Path) -> None:
    rows = analyse(tmp_path, TWO, by="conversation").rows
    assert rows == ({"conversation": "4", **SUMS, "hit_rate": 0.5},)


def test_reasons_are_ordered_by_what_they_cost(tmp_path: Path) -> None:
    rows = analyse(tmp_path, TWO, by="reason").rows
    assert [(row["reason"], row["computed"]) for row in rows] == [("cold", 100), ("last_token", 100)]


def test_time_buckets_are_round_and_have_no_holes(tmp_path: Path) -> None:
    rows = analyse(tmp_path, TWO, by="time").rows
    assert [(row["from_ns"], row["to_ns"]) for row in rows] == [(n * 500, n * 500 + 500) for n in range(11)]
    assert [row["requests"] for row in rows] == [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]


def test_grouping_by_prefix_says_that_it_is_not_there_yet(tmp_path: Path) -> None:
    with pytest.raises(HitsError, match="grouping by prefix is not there yet"):
        analyse(tmp_path, TWO, by="prefix")


def test_the_story_of_a_request_goes_back_to_the_page_it_missed(tmp_path: Path) -> None:
    enqueue = {"kind": "transfer_enqueue", "op": 3, "queue": "write", "nodes": [17], "pages": 1}
    records = [
        insert("r0", A, step=1),
        {**BACKUP, "step": 1},
        evict(demoted=A, step=2),
        evict_host(A) | {"step": 3},
        evict_host(B) | {"step": 3},
        request("r9", 128, step=4),
        match("r9", A, step=5),
        admit("r9", step=5, extend_tokens=128),
        forward(r9=128, r8=1) | {"step": 5},
        insert("r9", A, step=6),
        {**BACKUP, "step": 6},
        {**enqueue, "step": 6},
        finish("r9") | {"step": 7},
    ]
    story = why(find_logs(write_lane(tmp_path, records)), "r9")
    assert [f"{each.step} {each.text}" for each in story] == [
        "1 the page it will miss enters the tree with r0",
        "2 the page it will miss leaves the device, its host copy stays",
        "3 the page it will miss is dropped from the host",
        "4 received with 128 prompt tokens",
        f"5 matched 0 tokens on device, 0 on host; first page missed: {A}",
        "5 admitted: 0 tokens from device, 0 from host, 0 from storage, 128 to compute",
        "5 forward (extend): 128 tokens computed",
        "6 64 new tokens entered the tree (node 17)",
        "6 backup of 1 page to host begins (node 17)",
        "6 transfer 3 (write, 1 page) enqueued (node 17)",
        "7 finished (length) after 1 token",
    ]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"tokens": 13824, "new_tokens": 13312, "duplicate_pages": 0},
            "13312 new tokens entered the tree (node 17), the other 512 were its cached prefix",
        ),
        ({"tokens": 1, "new_tokens": 1, "duplicate_pages": 0}, "1 new token entered the tree (node 17)"),
        (
            {"tokens": 64, "new_tokens": 0, "duplicate_pages": 4},
            "0 new tokens entered the tree (node 17), 4 pages were there already",
        ),
        (
            {"tokens": 64, "new_tokens": 32, "duplicate_pages": 1},
            "32 new tokens entered the tree (node 17), 1 page was there already, the other 16 were "
            "its cached prefix",
        ),
    ],
)
def test_an_insert_tells_new_pages_copies_and_the_prefix_apart(
    fields: dict[str, int], told: str, tmp_path: Path
) -> None:
    path = write_lane(tmp_path, [request("r9"), insert("r9", A, **fields)], config={"page_size_tokens": 16})
    assert why(find_logs(path), "r9")[-1].text == told


def test_a_request_that_nobody_saw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HitsError, match="no request r9"):
        why(find_logs(write_lane(tmp_path, R0)), "r9")
