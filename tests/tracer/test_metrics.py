"""A run's numbers in Prometheus' text, read back by Prometheus' own parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from hicache.probes import KINDS
from tests.support.logs import write_lane, write_run
from tests.tracer.test_otel import simulated
from tests.tracer.test_spans import hostile_records
from tracer.hits import hits
from tracer.log import find_logs
from tracer.metric_names import METRICS, UNKNOWN
from tracer.metrics import LABEL_VALUES_MAX, RankMetrics, prometheus_text
from tracer.record import OWN_KINDS

Fields = Mapping[str, Any]
ALL = (*KINDS, *OWN_KINDS)
CONFIG = {"page_size_tokens": 64}


def text_of(folder: Path, records: Sequence[Fields], **options: Any) -> str:
    options = {"kinds": ALL, "config": CONFIG, **options}
    return prometheus_text(find_logs(write_lane(folder, records, **options).parent))


def samples(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def names(text: str) -> set[str]:
    return {sample.name for sample in samples(text)}


def by(text: str, name: str, label: str) -> dict[str, float]:
    """Value of each label of one sample name."""
    return {sample.labels[label]: float(sample.value) for sample in samples(text) if sample.name == name}


def value(text: str, name: str, **labels: str) -> float:
    """The only sample of that name, with these labels of its own."""
    (found,) = [
        sample.value
        for sample in samples(text)
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return float(found)


def admit(rid: str, device: int = 0, host: int = 0, storage: int = 0, extend: int = 0) -> dict[str, Any]:
    tiers = {"device_tokens": device, "host_tokens": host, "storage_tokens": storage}
    return {"kind": "admit", "rid": rid, "verdict": "admitted", **tiers, "extend_tokens": extend}


def copy(event: str, time_ns: int, queue: str = "write", **more: Any) -> dict[str, Any]:
    return {"kind": f"transfer_{event}", "op": 1, "queue": queue, "time_ns": time_ns, **more}


def test_cached_tokens_are_those_of_the_hit_analysis(tmp_path: Path) -> None:
    log = simulated(tmp_path)
    text, told = prometheus_text(find_logs(log)), hits(find_logs(log)).to_json()
    for tier in ("device", "host", "storage"):
        assert (
            value(text, "sglang:cached_tokens_total", cache_source=tier, rank="0")
            == told["cached_tokens"][tier]
        )
    assert value(text, "sglang:cache_hit_rate", rank="0") == told["hit_rate"] > 0


def test_a_retracted_request_is_counted_once(tmp_path: Path) -> None:
    text = text_of(tmp_path, [admit("r0", device=64, extend=64), admit("r0", device=128)])
    assert value(text, "sglang:cached_tokens_total", cache_source="device") == 64
    assert value(text, "sglang:uncached_prompt_tokens_histogram_count") == 1


def test_a_histogram_counts_up_to_all_of_its_observations(tmp_path: Path) -> None:
    text = text_of(tmp_path, [admit(f"r{n}", extend=n) for n in (0, 64, 65, 300_000)])
    buckets = by(text, "sglang:uncached_prompt_tokens_histogram_bucket", "le")
    assert (buckets["0"], buckets["64"], buckets["256"], buckets["262144"], buckets["+Inf"]) == (
        1,
        2,
        3,
        3,
        4,
    )
    assert value(text, "sglang:uncached_prompt_tokens_histogram_sum") == 300_129


def test_a_copy_lasts_until_its_bytes_have_moved(tmp_path: Path) -> None:
    records = [copy("enqueue", 0, pages=3, nodes=[1]), copy("done", 2_000_000), copy("ack", 9_000_000)]
    text = text_of(tmp_path, records)
    assert value(text, "sglang:hicache_backup_duration_seconds_sum") == 0.002
    assert value(text, "sglang:hicache_backup_tokens_total") == 192
    assert value(text, "hicache:transfers_open", queue="write") == 0


def test_what_is_under_way_at_the_end_is_open(tmp_path: Path) -> None:
    enter = {"kind": "meeting", "phase": "enter", "op": "all_reduce", "group": "tp0/main", "group_seq": 1}
    text = text_of(tmp_path, [copy("enqueue", 0, "load", pages=1), enter], outcome="hung")
    assert value(text, "hicache:transfers_open", queue="load") == 1
    assert value(text, "hicache:collectives_open") == 1
    assert value(text, "hicache:collectives_total", op="all_reduce") == 1


def test_dropped_and_unfulfilled_tokens_have_their_reasons(tmp_path: Path) -> None:
    lost = {"kind": "prefetch_outcome", "rid": "r0", "attempt": 0, "outcome": "unfulfilled"}
    records: list[Fields] = [
        {"kind": "evict", "pages_freed": 3, "drop_reason": "host_pressure", "dropped_digests": "a" * 32},
        {**lost, "reason": "deadline", "tokens": 64},
        {**lost, "reason": "device_overlap", "tokens": 128},
    ]
    text = text_of(tmp_path, records)
    assert value(text, "sglang:evicted_tokens_total") == 192
    assert value(text, "sglang:hicache_dropped_tokens_total", reason="host_pressure", pool="kv") == 128
    name = "sglang:storage_prefetch_unfulfilled_tokens_total"
    assert (value(text, name, reason="deadline"), value(text, name, reason="device_overlap")) == (64, 128)


def test_memory_is_as_the_newest_round_has_it(tmp_path: Path) -> None:
    def round_(evictable: int, free: int) -> dict[str, Any]:
        return {"kind": "event_round", "phase": "call", "evictable_pages": evictable, "host_pages_free": free}

    capacity = {"kind": "capacity", "pool": "host", "pages": 10, "own_pages": 12}
    text = text_of(tmp_path, [capacity, round_(1, 9), round_(4, 2)])
    assert value(text, "sglang:hicache_host_total_tokens") == 12 * 64
    assert value(text, "sglang:hicache_host_used_tokens") == 10 * 64
    assert value(text, "sglang:kv_evictable_tokens") == 4 * 64


def test_memory_without_a_limit_is_left_out_and_named(tmp_path: Path) -> None:
    text = text_of(tmp_path, [{"kind": "capacity", "pool": "host", "pages": 0, "own_pages": 0}])
    assert "sglang:hicache_host_total_tokens" not in names(text)
    assert "# left out: sglang:hicache_host_total_tokens: the log does not say\n" in text


def test_a_kind_that_the_log_does_not_declare_makes_no_zero(tmp_path: Path) -> None:
    text = text_of(tmp_path, [], kinds=[kind for kind in ALL if kind.name != "load_back"])
    assert "sglang:load_back_tokens_total" not in names(text)
    assert "# left out: sglang:load_back_tokens_total: the log does not say\n" in text
    assert value(text, "sglang:prefetched_tokens_total") == 0


def test_a_kind_that_the_writer_has_lost_makes_no_number(tmp_path: Path) -> None:
    path = write_lane(tmp_path, [admit("r0", device=64)], kinds=ALL, config=CONFIG, outcome=None)
    with path.open("ab") as file:
        file.write(
            b'{"seq":2,"step":0,"time_ns":0,"kind":"trailer","outcome":"completed","records":2,"dropped":{"admit":7}}\n'
        )
    text = prometheus_text(find_logs(path))
    assert "sglang:cached_tokens_total" not in names(text)
    assert value(text, "hicache:records_dropped_total", kind="admit") == 7


def test_a_rank_that_left_out_steps_counts_nothing_of_them(tmp_path: Path) -> None:
    throttle = {"kind": "throttle", "window": 8, "one_in": 4, "share": 90, "share_max": 50}
    text = text_of(tmp_path, [admit("r0", device=64), throttle])
    assert not [name for name in names(text) if name.startswith("sglang:")]
    assert "# rank 0: its recorder has left out steps to spare the run" in text
    assert value(text, "hicache:records_total", lane="scheduler") == 2


def test_without_the_size_of_a_page_there_are_no_tokens_of_pages(tmp_path: Path) -> None:
    text = text_of(tmp_path, [], config={})
    assert "sglang:evicted_tokens_total" not in names(text)
    assert value(text, "sglang:load_back_tokens_total") == 0


def test_every_name_is_there_or_named_as_left_out(tmp_path: Path) -> None:
    text = prometheus_text(find_logs(simulated(tmp_path)))
    for metric in METRICS:
        assert f"# TYPE {metric.name} {metric.type}\n" in text or f"# left out: {metric.name}: " in text
    for _why, names in UNKNOWN:
        for name in names:
            assert f"# left out: sglang:{name}: " in text


def test_each_rank_has_its_coordinates(tmp_path: Path) -> None:
    write_run(tmp_path, {0: [], 1: []}, sizes={"pp": 2}, kinds=ALL)
    text = prometheus_text(find_logs(tmp_path))
    assert value(text, "hicache:lanes", rank="1", pp_rank="1", tp_rank="0", cp_rank="0", dp_rank="0") == 1


def test_a_log_that_is_cut_or_torn_is_seen(tmp_path: Path) -> None:
    killed = write_lane(tmp_path, [], rank=0, sizes={"tp": 2}, outcome=None)
    killed.write_bytes(killed.read_bytes() + bytes(100))
    path = write_lane(tmp_path, [{"kind": "note"}], rank=1, sizes={"tp": 2})
    path.write_bytes(path.read_bytes().replace(b'"seq":1', b'"seq":7'))
    text = prometheus_text(find_logs(tmp_path))
    assert [value(text, "hicache:lanes_cut", rank=rank) for rank in "01"] == [1, 1]
    assert [value(text, "hicache:lanes_torn", rank=rank) for rank in "01"] == [0, 1]
    assert "# rank 1: rank0001.scheduler.000.jsonl: reading stopped before record 1" in text


def test_idle_steps_are_counted(tmp_path: Path) -> None:
    text = text_of(tmp_path, [{"kind": "idle", "first_step": 3, "count": 40}])
    assert value(text, "hicache:steps_idle_total") == 40


def test_two_runs_in_one_folder_are_told_apart(tmp_path: Path) -> None:
    write_lane(tmp_path, [], rank=0, sizes={"tp": 2}, run_id="a")
    write_lane(tmp_path, [], rank=1, sizes={"tp": 2}, run_id="b")
    text = prometheus_text(find_logs(tmp_path))
    assert value(text, "hicache:lanes", run_id="b", rank="1") == 1


def test_a_label_is_escaped(tmp_path: Path) -> None:
    reason = 'a"b\\c'
    text = text_of(tmp_path, [{"kind": "finish", "rid": "r0", "reason": reason}])
    assert value(text, "hicache:requests_finished_total", reason=reason) == 1


def test_free_text_is_no_label(tmp_path: Path) -> None:
    text = text_of(tmp_path, [{"kind": "finish", "rid": "r0", "reason": "what was typed"}])
    assert "typed" not in text
    assert value(text, "hicache:requests_finished_total", reason="unknown") == 1


def test_a_label_has_only_so_many_values(tmp_path: Path) -> None:
    records = [{"kind": "finish", "rid": "r", "reason": f"x{n}"} for n in range(LABEL_VALUES_MAX + 7)]
    text = text_of(tmp_path, records)
    found = by(text, "hicache:requests_finished_total", "reason")
    assert len(found) == LABEL_VALUES_MAX + 1 and found["other"] == 7


def test_the_trap_stands_at_the_top(tmp_path: Path) -> None:
    assert text_of(tmp_path, []).startswith("# Token counters repeat on every tp rank: ")


def test_equal_logs_give_equal_text(tmp_path: Path) -> None:
    one, other = (prometheus_text(find_logs(simulated(tmp_path / name))) for name in ("a", "b"))
    assert one == other


@given(hostile_records())
@settings(max_examples=60, deadline=None)
def test_no_record_raises(records: list[dict[str, Any]]) -> None:
    lane = _Lane(records)
    rank = RankMetrics(lane, has_run_label=False)  # type: ignore[arg-type]
    rank.read(lane)  # type: ignore[arg-type]
    lines = "\n".join(line for metric in METRICS for line in rank.lines(metric)) + "\n"
    for sample in samples(lines):
        assert sample.value >= 0 or "evictable" in sample.name or "mamba" in sample.name


class _Lane:
    """A lane whose records nobody has looked at."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self._records = records
        self.rank, self.lane, self.run_id = 0, "scheduler", "run-a"
        self.header: dict[str, Any] = {"config": CONFIG}
        self.coordinates: dict[str, int] = {}
        self.kinds = {kind.name: kind for kind in ALL}
        self.count, self.last_dropped_seq = len(records), 0
        self.dropped: dict[str, int] = {}
        self.torn = self.trailer = None
        self.damage, self.is_unsealed = (), False
        self.begin = self.cut = self.loss = ""

    def records(self, *, is_lenient: bool) -> list[dict[str, Any]]:
        return self._records
