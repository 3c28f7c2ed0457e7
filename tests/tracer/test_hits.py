"""Every prompt token is accounted for once, and every miss has a reason that the records prove."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.logs import line, lines, write_lane, write_run
from tracer.errors import HitsError
from tracer.hits import Hits, hits
from tracer.log import find_logs
from tracer.record import Kind
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
                    "unplaced": 0,
                    "unplaced_reason": None,
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
        "unplaced",
        "unplaced_reason",
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


def test_every_token_without_a_place_says_why(tmp_path: Path) -> None:
    records = [
        *refused("r1", 1000),
        *(request("r2", 7), match("r2", A), {**admit("r2"), "verdict": "no_room"}),
        *(request("r3", 100), match("r3", A), *aborted("r3")),
        *(
            request("r4", 100),
            match("r4", A),
            admit("r4", device=40),
            forward(r4=20),
            *aborted("r4", "chunked"),
        ),
        *(request("r5", 50), match("r5", A), admit("r5"), forward(r5=10)),
        *(request("r6", 50), match("r6", A), admit("r6"), forward(r6=40), finish("r6")),
    ]
    found = analyse(tmp_path, records, outcome="hung")
    assert [(row["rid"], row["unplaced"], row["unplaced_reason"]) for row in found.rows] == [
        ("r1", 1000, "refused_too_long"),
        ("r2", 7, "never_admitted"),
        ("r3", 100, "aborted_waiting"),
        ("r4", 40, "aborted_computing"),
        ("r5", 40, "being_computed"),
        ("r6", 10, "unaccounted"),
    ]
    assert found.to_json()["unplaced"] == {
        "total": 1197,
        "by_reason": {
            "aborted_computing": 40,
            "aborted_waiting": 100,
            "being_computed": 40,
            "never_admitted": 7,
            "refused_too_long": 1000,
            "unaccounted": 10,
        },
    }


def test_more_than_the_prompt_is_never_in_its_place(tmp_path: Path) -> None:
    records = [request("r0", 100), match("r0", A), admit("r0", device=64), forward(r0=50), *aborted("r0")]
    found = analyse(tmp_path, records)
    assert [(each.rid, each.accounted_tokens) for each in found.unaccounted] == [("r0", 114)]


def test_what_the_recorder_left_out_to_save_time_is_noted(tmp_path: Path) -> None:
    left_out = {"kind": "throttle", "kinds": ["evict", "pool_audit"], "share": 70, "share_max": 50}
    assert analyse(tmp_path, [*R0, left_out]).notes == ("the recorder left records out to save time: evict",)


def test_kinds_that_this_version_does_not_know_change_nothing(tmp_path: Path) -> None:
    strange = {"kind": "weather", "rid": 7, "new_digests": ["no"], "rids": 3}
    assert analyse(tmp_path / "a", [strange, *R0]).rows == analyse(tmp_path / "b", R0).rows


def test_a_page_that_left_the_host_in_the_eviction_that_brought_it_there_was_evicted(tmp_path: Path) -> None:
    """Under write_back an eviction is recorded behind the ones from the host that it has led to."""
    assert reason(tmp_path, [*R0, BACKUP, evict_host(A + B), evict(demoted=A + B)], NOTHING) == "evicted_host"


def test_a_lane_that_was_cut_is_noted(tmp_path: Path) -> None:
    assert analyse(tmp_path, R0, outcome=None).notes == (
        "rank0000.scheduler.000.jsonl: cut behind record 6, without a trailer",
    )


def prefetch(rid: str, op: int = 1, *, outcome: str = "issued", pages: int = 4) -> list[dict[str, Any]]:
    """What a request does when it asks the external tier, without what comes of it."""
    asked = {"op": op if outcome == "issued" else 0, "pages": pages, "tokens": 64 * pages}
    found = {"device_tokens": 0, "host_tokens": 0, "kv_tokens": 0, "miss_digest": A}
    return [
        {"kind": "match", "rid": rid, "purpose": "submit", **found},
        {"kind": "prefetch_submit", "rid": rid, "attempt": 0, "outcome": outcome, **asked},
    ]


def hit(
    rid: str, tokens: int, outcome: str = "allocated", *, found: int = 256, op: int = 1
) -> dict[str, Any]:
    return {
        "kind": "prefetch_hit",
        "op": op,
        "rid": rid,
        "attempt": 0,
        "consume_seq": op,
        "outcome": outcome,
        "hit_tokens": found,
        "tokens": tokens,
    }


def lost(rid: str, why: str, tokens: int = 64, outcome: str = "unfulfilled") -> dict[str, Any]:
    told = {"outcome": outcome, "reason": why, "tokens": tokens}
    return {"kind": "prefetch_outcome", "rid": rid, "attempt": 0, **told}


def poll(rid: str, verdict: str, policy: str = "timeout") -> dict[str, Any]:
    asked = {"op": 1, "policy": policy, "completed_tokens": 0, "verdict": verdict}
    return {"kind": "prefetch_poll", "rid": rid, "attempt": 0, **asked}


def loaded(rid: str, tokens: int, outcome: str = "loaded", digests: str = "", op: int = 1) -> dict[str, Any]:
    counts = {"completed_tokens": tokens, "matched_tokens": 0, "loaded_tokens": tokens}
    return {
        "kind": "prefetch_insert",
        "op": op,
        "rid": rid,
        "outcome": outcome,
        **counts,
        "new_digests": digests,
    }


SEEN = [*R0, BACKUP, evict(demoted=B + A), evict_host(A + B)]


@pytest.mark.parametrize(
    ("told", "reason_of_it"),
    [
        ([hit("r9", 0, "miss", found=0)], "evicted_host"),
        (
            [hit("r9", 0, "below_threshold", found=64), lost("r9", "below_threshold")],
            "declined_below_threshold",
        ),
        ([hit("r9", 0, "host_capacity"), lost("r9", "host_capacity")], "declined_host_capacity"),
        ([lost("r9", "host_capacity"), hit("r9", 64, "partial"), loaded("r9", 64)], "declined_host_capacity"),
        ([hit("r9", 256), poll("r9", "end"), lost("r9", "deadline"), loaded("r9", 64)], "deadline"),
        ([hit("r9", 256), lost("r9", "storage_transfer"), loaded("r9", 64)], "declined_storage_transfer"),
        ([hit("r9", 256), loaded("r9", 0, "dropped")], "declined_dropped"),
        ([hit("r9", 256), loaded("r9", 0, "hybrid_discard")], "declined_hybrid_discard"),
        ([poll("r9", "end")], "evicted_host"),
    ],
)
def test_a_page_that_storage_had_and_did_not_give_says_why(
    told: Sequence[Mapping[str, Any]], reason_of_it: str, tmp_path: Path
) -> None:
    served = sum(record["loaded_tokens"] for record in told if record["kind"] == "prefetch_insert")
    rest = [match("r9", A), admit("r9", storage=served), forward(r9=128 - served), finish("r9")]
    records = [*SEEN, request("r9"), *prefetch("r9"), *told, *rest]
    (row,) = [row for row in analyse(tmp_path, records, config=PAGES).rows if row["rid"] == "r9"]
    assert (row["reason"], row["storage"]) == (reason_of_it, served)


PAGES = {"page_size_tokens": 64}


def query(op: int, pages: int) -> dict[str, Any]:
    return {"kind": "query", "op": op, "rid": "r9", "attempt": 0, "pages": 4, "agreed_pages": pages}


def test_a_deadline_before_the_hit_is_known_by_the_lane_that_found_it(tmp_path: Path) -> None:
    rest = [match("r9", A), admit("r9"), forward(r9=128), hit("r9", 0, "stale"), finish("r9")]
    late = [*SEEN, request("r9"), *prefetch("r9"), poll("r9", "end"), *rest]
    write_lane(tmp_path, [query(1, 4)], lane="prefetch", config=PAGES)
    assert analyse(tmp_path, late, config=PAGES).rows[-1]["reason"] == "deadline"
    early = [{**record, "policy": "best_effort"} if "policy" in record else record for record in late]
    assert analyse(tmp_path, early, config=PAGES).rows[-1]["reason"] == "declined_not_waited_for"


@pytest.mark.parametrize(
    ("policy", "reason_of_it"), [("timeout", "deadline"), ("best_effort", "declined_not_waited_for")]
)
@pytest.mark.parametrize(
    ("answer", "is_told"),
    [
        # This rank had it, another one no longer asked; then the other way round; then nobody had it.
        ({"local_pages": 4, "error": ""}, True),
        ({"local_pages": 0, "error": "terminated"}, True),
        ({"local_pages": 0, "error": ""}, False),
    ],
)
def test_a_page_that_was_asked_for_and_not_waited_for_says_so(
    policy: str, reason_of_it: str, answer: dict[str, Any], is_told: bool, tmp_path: Path
) -> None:
    rest = [match("r9", A), admit("r9"), forward(r9=128), hit("r9", 0, "stale", found=0), finish("r9")]
    asked = [request("r9"), *prefetch("r9"), poll("r9", "end", policy), *rest]
    write_lane(tmp_path, [query(1, 0) | answer], lane="prefetch", config=PAGES)
    expected = reason_of_it if is_told else "cold"
    assert analyse(tmp_path, asked, config=PAGES).rows[-1]["reason"] == expected


def test_what_the_runtime_calls_a_deadline_is_none_under_best_effort(tmp_path: Path) -> None:
    told = [hit("r9", 256), poll("r9", "end", "best_effort"), lost("r9", "deadline"), loaded("r9", 64)]
    rest = [match("r9", A), admit("r9", storage=64), forward(r9=64), finish("r9")]
    path = write_lane(tmp_path, [*SEEN, request("r9"), *prefetch("r9"), *told, *rest], config=PAGES)
    assert hits(find_logs(path)).rows[-1]["reason"] == "declined_not_waited_for"
    texts = [line.text for line in why(find_logs(path), "r9")]
    assert "64 tokens of its prefetch unfulfilled: not waited for (best_effort)" in texts


def test_a_story_does_not_say_that_storage_has_nothing_when_nobody_asked_it(tmp_path: Path) -> None:
    rest = [admit("r9"), forward(r9=128), hit("r9", 0, "stale", found=0), finish("r9")]
    asked = [request("r9"), *prefetch("r9"), poll("r9", "end", "best_effort"), *rest]
    late = [{**record, "time_ns": time_ns} for time_ns, record in enumerate(asked)]
    cut = query(1, 0) | {"publish_seq": 1, "local_pages": 0, "error": "terminated", "time_ns": 6}
    write_lane(tmp_path, [cut], lane="prefetch", config=PAGES)
    path = write_lane(tmp_path, late, config=PAGES)
    texts = [line.text for line in why(find_logs(path.parent), "r9")]
    assert texts[-4:] == [
        "forward (extend): 128 tokens computed",
        "prefetch 1: its answer came when nobody waited for it any more",
        "prefetch 1: this rank did not ask its storage any more (hit 1)",
        "finished (length) after 1 token",
    ]


def test_a_story_ends_with_its_request_but_for_a_late_abort(tmp_path: Path) -> None:
    after = [hit("r9", 0, "stale", found=0), {"kind": "abort", "rid": "r9", "place": ""}]
    path = write_lane(tmp_path, [request("r9"), *prefetch("r9"), finish("r9"), *after])
    assert [line.text for line in why(find_logs(path), "r9")][-2:] == [
        "finished (length) after 1 token",
        "an abort came after its end",
    ]


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (
            admit("r9")
            | {"verdict": "no_room", "pages": 12}
            | {"device_pages_free": 1, "device_pages_evictable": 4},
            "not admitted (no room): it needs 12 more pages on the device, 1 is free and 4 can be evicted",
        ),
        (
            admit("r9")
            | {"verdict": "no_room", "pages": 5}
            | {"device_pages_free": 2, "device_pages_evictable": 4},
            "not admitted (no room): it needs 5 more pages on the device, 2 are free and 4 can be evicted; "
            "others of its batch have been promised theirs",
        ),
        (admit("r9") | {"verdict": "no_room"}, "not admitted (no room)"),
        (
            {"kind": "prefetch_retry", "rid": "r9", "cause": "miss", "verdict": "cancelled"},
            "retry of its prefetch after miss: cancelled, it is at the head of the queue",
        ),
        (prefetch("r9", outcome="declined_too_short", pages=0)[1], "no prefetch from storage: too short"),
        (
            prefetch("r9", outcome="declined_too_short", pages=2)[1],
            "no prefetch of 2 pages from storage: too short",
        ),
    ],
)
def test_a_story_says_why_something_did_not_happen(record: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = write_lane(tmp_path, [request("r9"), record])
    assert why(find_logs(path), "r9")[-1].text == told


def test_a_page_that_a_prefetch_brought_and_that_was_lost_again_was_evicted(tmp_path: Path) -> None:
    came = [*prefetch("r9", 2), hit("r9", 256, op=2), loaded("r9", 256, digests=A, op=2), evict_host(A)]
    before = [*SEEN, request("r9"), *prefetch("r9"), hit("r9", 0, "host_capacity"), *came]
    records = [*before, match("r9", A), admit("r9"), forward(r9=128), finish("r9")]
    assert analyse(tmp_path, records, config=PAGES).rows[-1]["reason"] == "evicted_host"


@pytest.mark.parametrize(
    ("outcome", "reason_of_it"),
    [("declined_rate_limited", "declined_rate_limited"), ("declined_deadline", "deadline")],
)
def test_a_page_that_nobody_asked_for_where_it_had_been_sent_says_why(
    outcome: str, reason_of_it: str, tmp_path: Path
) -> None:
    rest = [match("r9", A), admit("r9"), forward(r9=128), finish("r9")]
    asked = [request("r9"), *prefetch("r9", outcome=outcome), *rest]
    assert analyse(tmp_path, [*SEEN, *asked]).rows[-1]["reason"] == reason_of_it
    # A page that was never seen is cold, whoever was not asked for it.
    assert analyse(tmp_path, asked).rows[-1]["reason"] == "cold"


def test_a_page_that_came_from_storage_is_there_until_the_host_loses_it(tmp_path: Path) -> None:
    before = [
        *R0[:5],
        BACKUP,
        evict(demoted=B + A),
        evict_host(A),
        loaded("r1", 64, digests=A),
        evict_host(A),
    ]
    assert reason(tmp_path, before, NOTHING) == "evicted_host"
    assert reason(tmp_path, before[:-1], NOTHING) == "unknown"


def test_only_the_return_of_an_insert_brings_pages(tmp_path: Path) -> None:
    call = {"kind": "insert", "phase": "call", "rid": "r0", "owned_pages": 0, "tokens": 64}
    back = {**insert("r0", A), "phase": "return"}
    assert reason(tmp_path, [call, back, evict(dropped=A)], NOTHING) == "evicted_device"


def test_a_page_whose_state_is_missing_says_so(tmp_path: Path) -> None:
    records = [request("r9"), match("r9", A, kv_tokens=64), admit("r9"), forward(r9=128), finish("r9")]
    assert analyse(tmp_path, records).rows[-1]["reason"] == "no_state"


def test_pages_from_before_a_flush_were_flushed(tmp_path: Path) -> None:
    flush = {"kind": "command", "verb": "flush", "reason": "", "verdict": "done"}
    assert reason(tmp_path, [*R0, flush], NOTHING) == "flushed"
    assert reason(tmp_path, [*R0, {**flush, "verdict": "refused"}], NOTHING) == "unknown"


def retract(rid: str) -> dict[str, Any]:
    return {"kind": "retract", "rid": rid, "attempt": 0, "output_tokens": 3, "pages": 2}


def test_what_a_retracted_request_computes_again_does_not_count(tmp_path: Path) -> None:
    first = [
        request("r0", 200),
        match("r0", A, device=64),
        admit("r0", device=64),
        forward(r0=100),
        forward(r0=36),
    ]
    again = [retract("r0"), match("r0", A, device=128), admit("r0", device=128), forward(r0=75), finish("r0")]
    found = analyse(tmp_path, [*first, *again])
    assert [(row["device"], row["computed"]) for row in found.rows] == [(64, 136)]
    assert found.unaccounted == ()


def test_the_passes_of_a_chunked_prompt_add_up(tmp_path: Path) -> None:
    passes = [forward(r0=64), forward(r0=64, r1=10), forward(r0=8)]
    records = [request("r0", 200), match("r0", A, device=64), admit("r0", device=64), *passes, finish("r0")]
    found = analyse(tmp_path, [*records, request("r1", 10)])
    assert [(row["rid"], row["computed"]) for row in found.rows] == [("r0", 136), ("r1", 10)]


def aborted(rid: str, place: str = "waiting") -> list[dict[str, Any]]:
    return [{"kind": "abort", "rid": rid, "place": place}, {**finish(rid), "reason": "abort"}]


def test_aborted_requests_are_told_and_not_unaccounted(tmp_path: Path) -> None:
    records = [
        *(request("r0", 100), match("r0", A), *aborted("r0")),
        *(
            request("r1", 100),
            match("r1", A),
            admit("r1", device=40),
            forward(r1=20),
            *aborted("r1", "chunked"),
        ),
        *(request("r2", 100), match("r2", A), admit("r2"), forward(r2=100), finish("r2")),
        {"kind": "abort", "rid": "r2", "place": ""},
    ]
    found = analyse(tmp_path, records)
    assert found.unaccounted == ()
    assert found.notes == (
        "1 request was aborted before admission (1 more while running): 140 tokens that nobody served",
    )
    assert [row["reason"] for row in found.rows] == [None, "cold", "cold"]


def test_a_log_that_begins_late_calls_no_page_cold_and_counts_no_request_it_has_not_seen(
    tmp_path: Path,
) -> None:
    records = [forward(r7=12), request("r0"), match("r0", A), admit("r0"), forward(r0=128), finish("r0")]
    every = [*records, {"kind": "trailer", "outcome": "completed", "records": 46}]
    head = json.loads(lines([])[0])
    path = tmp_path / "rank0000.scheduler.004.jsonl"
    path.write_bytes(line(40, head) + b"".join(line(40 + at, record) for at, record in enumerate(every)))
    found = hits(find_logs(tmp_path))
    assert [(row["rid"], row["computed"], row["reason"]) for row in found.rows] == [("r0", 128, "unknown")]
    assert found.notes == (
        "rank0000.scheduler.004.jsonl: the oldest records are gone, up to record 39",
        "1 request was received before the log begins: not counted",
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


def test_an_id_that_is_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(HitsError, match="record 1 lacks a count or field"):
        analyse(tmp_path, [{**request("r0"), "rid": 7}])


def test_a_story_goes_on_over_a_field_of_another_type(tmp_path: Path) -> None:
    outcome = {"kind": "prefetch_outcome", "rid": "r0", "attempt": 0, "outcome": 7, "reason": [], "tokens": 1}
    run = find_logs(write_lane(tmp_path, [request("r0"), outcome, finish("r0")]))
    assert why(run, "r0")[1].text == "a record that lacks some of its fields"


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
SUMS |= {"unplaced": 0}


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


def test_an_unknown_grouping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HitsError, match="can't group hits by 'weather'"):
        analyse(tmp_path, TWO, by="weather")


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


def test_a_story_tells_of_a_flush_and_of_an_eviction_told_after_what_it_led_to(tmp_path: Path) -> None:
    flush = {"kind": "command", "verb": "flush", "reason": "", "verdict": "done"}
    refused_one = {**flush, "reason": "not_idle", "verdict": "refused"}
    before = [insert("r0", A), flush, refused_one, insert("r1", A), evict_host(A), evict(demoted=B + A)]
    again = [insert("r2", A), evict(demoted=A)]
    path = write_lane(tmp_path, [*before, *again, request("r9"), match("r9", A), admit("r9"), flush])
    assert [each.text for each in why(find_logs(path), "r9")][:7] == [
        "the page it will miss enters the tree with r0",
        "an operator has the cache flushed, whatever pages it has",
        "the page it will miss enters the tree with r1",
        "the page it will miss is dropped from the host",
        "that was in this eviction, by which the page it will miss has left the device too",
        "the page it will miss enters the tree with r2",
        "the page it will miss leaves the device, its host copy stays",
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


def test_a_story_tells_of_prefetch_chunks_abort_and_retraction(tmp_path: Path) -> None:
    scheduler = [
        request("r9", 400, time_ns=1),
        *({**record, "time_ns": 2} for record in prefetch("r9")),
        poll("r9", "wait") | {"time_ns": 4},
        poll("r9", "wait") | {"time_ns": 5},
        hit("r9", 128, "partial") | {"time_ns": 6},
        lost("r9", "host_capacity", 128) | {"time_ns": 6},
        {
            "kind": "prefetch_ack",
            "op": 1,
            "ack": "progress",
            "consume_seq": 4,
            "is_current": True,
            "tokens": 128,
        }
        | {"time_ns": 9},
        {
            "kind": "prefetch_ack",
            "op": 2,
            "ack": "progress",
            "consume_seq": 5,
            "is_current": True,
            "tokens": 1,
        },
        loaded("r9", 128, digests=B) | {"time_ns": 9},
        match("r9", A, host=128) | {"time_ns": 10},
        {**admit("r9", storage=128), "extend_tokens": 272, "time_ns": 10},
        {
            "kind": "load_back",
            "rid": "r9",
            "node": 3,
            "declined": "",
            "pages": 2,
            "tokens": 128,
            "time_ns": 10,
        },
        forward(r9=256) | {"time_ns": 11},
        {"kind": "insert", "phase": "call", "rid": "r9", "owned_pages": 2, "tokens": 384, "time_ns": 12},
        {"kind": "write_backup", "node": 4, "pages": 4, "tokens": 256, "time_ns": 12},
        {"kind": "write_backup", "node": 5, "pages": 1, "tokens": 0, "time_ns": 12},
        {**insert("r9", A), "phase": "return", "node": 4, "new_tokens": 256, "time_ns": 12},
        {"kind": "write_backup", "node": 6, "pages": 4, "tokens": 256, "time_ns": 12},
        forward(r9=16) | {"time_ns": 13},
        {"kind": "transfer_ack", "op": 3, "queue": "write", "nodes": [4], "pages": 4, "time_ns": 14},
        {"kind": "storage_backup", "op": 8, "node": 4, "pages": 4, "time_ns": 14},
        retract("r9") | {"time_ns": 15},
        {"kind": "abort", "rid": "r9", "place": "waiting", "time_ns": 16},
        finish("r9") | {"reason": "abort", "time_ns": 16},
    ]
    asked = {"kind": "query", "op": 1, "rid": "r9", "publish_seq": 1, "agreed_pages": 4, "local_pages": 5}
    read = {"kind": "read", "op": 1, "batch": 0, "pages": 2, "local_tokens": 128, "error": ""}
    told = {"kind": "progress", "op": 1, "ack": "progress", "publish_seq": 4, "agreed_tokens": 128}
    config = {"page_size_tokens": 64}
    write_lane(tmp_path, [{**asked, "error": "", "time_ns": 3}], lane="prefetch", config=config)
    write_lane(tmp_path, [{**read, "time_ns": 7}], lane="io", config=config)
    write_lane(tmp_path, [{**told, "local_tokens": 128, "time_ns": 8}], lane="sync", config=config)
    write_lane(tmp_path, scheduler, config=config)
    assert [each.text for each in why(find_logs(tmp_path), "r9")] == [
        "received with 400 prompt tokens",
        f"matched 0 tokens on device, 0 on host; first page missed: {A}",
        "prefetch 1 from storage submitted: 256 tokens",
        "prefetch 1: 5 pages in this rank's storage, 4 on every rank (hit 1)",
        "waits for prefetch 1 (timeout)",
        "prefetch 1: every rank's storage gives 256 tokens, host memory for 128 (partial)",
        "128 tokens of its prefetch unfulfilled: host capacity",
        "prefetch 1, batch 0: 128 tokens of 2 pages read",
        "prefetch 1: progress 128 on every rank, 128 here (ack 4)",
        "prefetch 1: progress 128 applied (ack 4)",
        "prefetch 1 loaded: 128 tokens read, 0 were there, 128 entered the tree",
        f"matched 0 tokens on device, 128 on host; first page missed: {A}",
        "admitted: 0 tokens from device, 0 from host, 128 from storage, 272 to compute",
        "load back of 128 tokens from host (node 3)",
        "forward (extend): 256 tokens computed, 16 to go in later chunks",
        "backup of 4 pages to host begins (node 4)",
        "backup of 1 page to host is refused (node 5)",
        "256 new tokens entered the tree (node 4), the other 128 were its cached prefix",
        "forward (extend): 16 tokens computed",
        "transfer 3 (write) applied (node 4)",
        "write 8 to storage begins: 4 pages (node 4)",
        "retracted after 3 tokens: 2 pages given back, it waits again",
        "aborted (waiting)",
        "finished (abort) after 1 token",
    ]


TWICE = [
    *(
        request("r0", 128, step=1),
        match("r0", A),
        admit("r0"),
        insert("r0", A),
        forward(r0=128),
        finish("r0"),
    ),
    *(request("r0", 192, step=5), match("r0", B, device=64, hit_digest=A), admit("r0", device=64)),
    *(forward(r0=128), finish("r0")),
]


def test_an_id_that_is_used_again_is_another_request(tmp_path: Path) -> None:
    found = analyse(tmp_path, TWICE, config=PAGES)
    parts = [[row[name] for name in ("rid", "input_tokens", "device", "computed")] for row in found.rows]
    assert parts == [["r0", 128, 0, 128], ["r0", 192, 64, 128]]
    assert (found.unaccounted, found.notes) == ((), ())


def test_an_id_that_is_used_again_too_early_is_noted(tmp_path: Path) -> None:
    found = analyse(
        tmp_path, [request("r0", 100), admit("r0"), request("r0", 64), forward(r0=64), finish("r0")]
    )
    assert [row["input_tokens"] for row in found.rows] == [100, 64]
    assert found.notes[0].startswith("1 id was received again while in use")


def test_a_request_whose_id_is_used_again_has_its_own_prefix(tmp_path: Path) -> None:
    (row,) = analyse(tmp_path, TWICE, config=PAGES, by="prefix").rows
    assert [row[name] for name in ("prefix", "tokens", "requests", "device", "computed")] == [
        A,
        64,
        2,
        64,
        64,
    ]


@pytest.mark.parametrize("tokens", [2**53, 2**63, 10**30])
def test_a_count_that_no_table_has_room_for_is_named(tokens: int, tmp_path: Path) -> None:
    with pytest.raises(HitsError, match=rf"record 1 .*{tokens} is not a count"):
        analyse(tmp_path, [request("r0", tokens)])
    parts = [forward(r1=2**53 - 1)] * 2
    with pytest.raises(HitsError, match=r"record 2 .* is not a count"):
        analyse(tmp_path, parts)


def test_logs_of_other_calls_of_the_same_names_know_no_requests(tmp_path: Path) -> None:
    kinds = [Kind("admit", "decision", agree=("tp",), compared=("rid",))]
    write_run(tmp_path, {0: [{"kind": "admit", "phase": "call", "rid": "r0"}]}, kinds=kinds)
    with pytest.raises(HitsError, match="know no requests"):
        hits(find_logs(tmp_path))
