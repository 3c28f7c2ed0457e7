"""A run's records as Prometheus text: SGLang's names for its cache, and a few of our own.

Owns which record makes which number, and which numbers no log can know: those are left out and named in a
comment, for a zero would be a claim. A metric is also left out for a rank whose log does not declare the
kinds that it is made of, or says that it has lost some of them or left out whole steps.

**Trap.** The ranks of a replica decide alike, so that token counters repeat on every tp rank: read one rank,
do not add them up. Where one differs between tp ranks, the ranks have come apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracer.log import LaneLog, Run
from tracer.metric_names import LABELLED, METRICS, UNKNOWN, Metric, Number
from tracer.record import IDLE_STEPS, THROTTLE, Record
from tracer.span import AXES, integer, page_tokens, word

NS_PER_S = 1_000_000_000
# Of one metric on one rank: whoever writes a log must not fill the memory of whoever scrapes it.
LABEL_VALUES_MAX = 50
OTHER = "other"

Labels = tuple[tuple[str, str], ...]


TRAP = (
    "Token counters repeat on every tp rank: read one rank of a replica, do not add them up.",
    "A token counter that differs between tp ranks means that they have come apart.",
)


def prometheus_text(run: Run) -> str:
    """The text exposition of all ranks of a run; equal logs give equal text."""
    ranks: dict[tuple[str, int], RankMetrics] = {}
    for lane in run.lanes:
        key = lane.run_id, lane.rank
        if key not in ranks:
            ranks[key] = RankMetrics(lane, has_run_label=len(run.run_ids) > 1)
        ranks[key].read(lane)
    every = [ranks[key] for key in sorted(ranks)]
    lines = [f"# {text}" for text in TRAP]
    missing = []
    for metric in METRICS:
        found = [line for rank in every if rank.knows(metric) for line in rank.lines(metric)]
        if found:
            lines += [
                f"# HELP {metric.name} {_escaped_help(metric.help)}",
                f"# TYPE {metric.name} {metric.type}",
            ]
            lines += found
        else:
            knows = metric.name in LABELLED and any(rank.knows(metric) for rank in every)
            missing.append((metric.name, "nothing of it has happened" if knows else "the log does not say"))
    lines += [f"# left out: {name}: {why}" for name, why in missing]
    lines += [f"# left out: sglang:{name}: {why}" for why, names in UNKNOWN for name in names]
    lines += ["# " + note.replace("\n", " ") for rank in every for note in rank.notes]
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class Histogram:
    """Observations by bucket; the last one is of all that are larger."""

    bounds: Sequence[Number]
    counts: list[int]
    total: Number = 0

    def add(self, value: Number) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class _Copy:
    """A copy that was enqueued."""

    pages: int
    time_ns: int
    is_done: bool = False


@dataclass(slots=True)
class _Values:
    """What has been counted so far, by metric and own labels."""

    numbers: Counter[tuple[str, Labels]] = field(default_factory=Counter)
    gauges: dict[tuple[str, Labels], Number] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)


class RankMetrics:
    """One rank's numbers, added up lane by lane.

    Attributes:
        notes: why a number of this rank is not the whole truth, each as a sentence.
    """

    def __init__(self, lane: LaneLog, *, has_run_label: bool) -> None:
        self.notes: list[str] = []
        self._labels: Labels = (
            *((("run_id", lane.run_id),) if has_run_label else ()),
            ("rank", str(lane.rank)),
            *((f"{axis}_rank", str(lane.coordinates[axis])) for axis in AXES if axis in lane.coordinates),
        )
        self._rank = lane.rank
        self._page_tokens = page_tokens(lane)
        self._kinds: set[str] = set()
        self._lost_kinds: set[str] = set()
        self._values = _Values()
        self._series: Counter[str] = Counter()
        for metric in METRICS:
            if metric.type == "histogram":
                empty = [0] * (len(metric.buckets) + 1)
                self._values.histograms[metric.name] = Histogram(metric.buckets, empty)
        # Counters that are known from the first record on start at zero, so that a rate can be taken.
        for tier in ("device", "host", "storage"):
            self._add("sglang:cached_tokens_total", 0, cache_source=tier)
        for metric in METRICS:
            if metric.type == "counter" and metric.name not in LABELLED:
                self._add(metric.name, 0)
        self._has_left_out_steps = False
        self._admitted: set[str] = set()
        self._host_pages = 0
        self._calls: set[tuple[str, int]] = set()
        self._copies: dict[tuple[str, int], _Copy] = {}
        self._find: dict[str, Callable[[Record], None]] = {
            "admit": self._admit,
            "request": self._request,
            "finish": self._finish,
            "event_round": self._event_round,
            "capacity": self._capacity,
            "pool_audit": self._pool_audit,
            "evict": self._evict,
            "load_back": self._load_back,
            "transfer_enqueue": self._transfer_enqueue,
            "transfer_done": self._transfer_done,
            "transfer_ack": self._transfer_ack,
            "prefetch_hit": self._prefetch_hit,
            "prefetch_insert": self._prefetch_insert,
            "prefetch_outcome": self._prefetch_outcome,
            "read": self._read,
            "storage_write": self._storage_write,
            "storage_ack": self._storage_ack,
            "meeting": self._meeting,
            IDLE_STEPS.name: self._idle,
            THROTTLE.name: self._throttle,
        }

    def read(self, lane: LaneLog) -> None:
        """Add one lane; what its records hold never raises."""
        find = self._find.get
        for record in lane.records(is_lenient=True):
            if handler := find(record["kind"]):
                handler(record)
        self._kinds |= set(lane.kinds)
        self._lost_kinds |= set(lane.dropped)
        self._add("hicache:records_total", lane.count, lane=word(lane.lane) or "unknown")
        for kind, lost in lane.dropped.items():
            self._add("hicache:records_dropped_total", lost, kind=word(kind) or "unknown")
        self._add("hicache:records_gone_total", lane.last_dropped_seq)
        self._gauge_more("hicache:lanes", 1)
        # A process that was killed leaves zero bytes behind its last line, which is no damage.
        is_torn = bool(lane.damage or (lane.torn and not lane.is_unsealed))
        self._gauge_more("hicache:lanes_torn", int(is_torn))
        self._gauge_more("hicache:lanes_cut", int(lane.trailer is None))
        self.notes += [f"rank {self._rank}: {note}" for note in (lane.begin, lane.cut, lane.loss) if note]

    def knows(self, metric: Metric) -> bool:
        """Whether the log declares what the metric is made of, and has lost none of it."""
        if metric.needs_page and not self._page_tokens:
            return False
        if metric.kinds and self._has_left_out_steps:
            return False
        return set(metric.kinds) <= self._kinds and not set(metric.kinds) & self._lost_kinds

    def lines(self, metric: Metric) -> Iterator[str]:
        self._end()
        if metric.type == "histogram":
            yield from self._histogram_lines(metric)
            return
        values = self._values.gauges if metric.type == "gauge" else self._values.numbers
        for (name, labels), value in sorted(values.items()):
            if name == metric.name:
                yield f"{name}{_told((*self._labels, *labels))} {_number(value)}"

    def _histogram_lines(self, metric: Metric) -> Iterator[str]:
        histogram = self._values.histograms[metric.name]
        so_far = 0
        for bound, count in zip((*map(_number, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            so_far += count
            yield f"{metric.name}_bucket{_told((*self._labels, ('le', bound)))} {so_far}"
        yield f"{metric.name}_sum{_told(self._labels)} {_number(histogram.total)}"
        yield f"{metric.name}_count{_told(self._labels)} {so_far}"

    def _end(self) -> None:
        """The gauges of what is open, as far as lanes have been read."""
        self._values.gauges["hicache:collectives_open", ()] = len(self._calls)
        open_copies = Counter(queue for queue, _op in self._copies)
        for queue in {"write", "load", *open_copies}:
            self._values.gauges["hicache:transfers_open", (("queue", queue),)] = open_copies[queue]
        cached = sum(
            value
            for (name, _labels), value in self._values.numbers.items()
            if name == "sglang:cached_tokens_total"
        )
        total = cached + self._values.histograms["sglang:uncached_prompt_tokens_histogram"].total
        self._values.gauges["sglang:cache_hit_rate", ()] = round(cached / total, 6) if total else 0

    def _add(self, name: str, value: int, **labels: str) -> None:
        key = name, tuple(labels.items())
        if labels and key not in self._values.numbers:
            self._series[name] += 1
            if self._series[name] > LABEL_VALUES_MAX:
                key = name, tuple((label, OTHER) for label in labels)
        self._values.numbers[key] += value

    def _gauge(self, name: str, value: Number) -> None:
        self._values.gauges[name, ()] = value

    def _gauge_more(self, name: str, value: int) -> None:
        self._values.gauges[name, ()] = self._values.gauges.get((name, ()), 0) + value

    def _observe(self, name: str, value: Number) -> None:
        self._values.histograms[name].add(value)

    # Requests.

    def _request(self, record: Record) -> None:
        self._add("hicache:requests_total", 1)

    def _admit(self, record: Record) -> None:
        rid = record.get("rid")
        if record.get("verdict") != "admitted" or type(rid) is not str or rid in self._admitted:
            return
        self._admitted.add(rid)
        for tier in ("device", "host", "storage"):
            self._add("sglang:cached_tokens_total", _count(record, f"{tier}_tokens"), cache_source=tier)
        self._observe("sglang:uncached_prompt_tokens_histogram", _count(record, "extend_tokens"))

    def _finish(self, record: Record) -> None:
        rid = record.get("rid")
        if type(rid) is str:
            self._admitted.discard(rid)
        self._add("hicache:requests_finished_total", 1, reason=_reason(record, "reason"))

    # Memory.

    def _capacity(self, record: Record) -> None:
        pool, pages = record.get("pool"), _count(record, "pages")
        # 0 is no limit.
        if pool == "host" and pages:
            self._host_pages = _count(record, "own_pages") or pages
            self._gauge("sglang:hicache_host_total_tokens", self._host_pages * self._page_tokens)
        elif pool == "mamba" and pages:
            self._gauge("sglang:hicache_host_mamba_total_states", pages)

    def _event_round(self, record: Record) -> None:
        evictable, free = integer(record.get("evictable_pages")), integer(record.get("host_pages_free"))
        if evictable is not None:
            self._gauge("sglang:kv_evictable_tokens", evictable * self._page_tokens)
        if free is not None and 0 <= free <= self._host_pages:
            self._gauge("sglang:hicache_host_used_tokens", (self._host_pages - free) * self._page_tokens)

    def _pool_audit(self, record: Record) -> None:
        pool, evictable = record.get("pool"), integer(record.get("evictable"))
        available, total = integer(record.get("available")), integer(record.get("total"))
        if pool == "device" and evictable is not None:
            self._gauge("sglang:kv_evictable_tokens", evictable * self._page_tokens)
        if pool == "mamba" and available is not None and total is not None:
            self._gauge("sglang:hicache_host_mamba_used_states", total - available)

    def _evict(self, record: Record) -> None:
        self._add("sglang:evicted_tokens_total", _count(record, "pages_freed") * self._page_tokens)
        dropped = record.get("dropped_digests")
        if type(dropped) is str and dropped:
            tokens = len(dropped) // DIGEST_CHARS * self._page_tokens
            reason = _reason(record, "drop_reason")
            self._add("sglang:hicache_dropped_tokens_total", tokens, pool="kv", reason=reason)

    # Copies.

    def _load_back(self, record: Record) -> None:
        self._add("sglang:load_back_tokens_total", _count(record, "tokens"))

    def _transfer_enqueue(self, record: Record) -> None:
        queue, op, time_ns = word(record.get("queue")), integer(record.get("op")), record.get("time_ns")
        if queue is not None and op is not None and type(time_ns) is int:
            self._copies[queue, op] = _Copy(_count(record, "pages"), time_ns)

    def _transfer_done(self, record: Record) -> None:
        queue, time_ns = word(record.get("queue")) or "", record.get("time_ns")
        copy = self._copies.get((queue, integer(record.get("op")) or 0))
        if copy is None or copy.is_done or type(time_ns) is not int:
            return
        copy.is_done = True
        name = DURATIONS.get(queue)
        if name is not None and time_ns >= copy.time_ns:
            self._observe(name, (time_ns - copy.time_ns) / NS_PER_S)
        if queue == "write":
            self._add("sglang:hicache_backup_tokens_total", copy.pages * self._page_tokens)

    def _transfer_ack(self, record: Record) -> None:
        self._copies.pop((word(record.get("queue")) or "", integer(record.get("op")) or 0), None)

    # The external tier.

    def _prefetch_hit(self, record: Record) -> None:
        self._add("sglang:storage_prefetch_hit_tokens_total", _count(record, "hit_tokens"))

    def _prefetch_insert(self, record: Record) -> None:
        self._add("sglang:prefetched_tokens_total", _count(record, "completed_tokens"))

    def _prefetch_outcome(self, record: Record) -> None:
        if record.get("outcome") == "unfulfilled":
            name = "sglang:storage_prefetch_unfulfilled_tokens_total"
            self._add(name, _count(record, "tokens"), reason=_reason(record, "reason"))

    def _read(self, record: Record) -> None:
        self._observe("sglang:prefetch_pgs", _count(record, "pages"))

    def _storage_write(self, record: Record) -> None:
        self._observe("sglang:backup_pgs", _count(record, "pages"))

    def _storage_ack(self, record: Record) -> None:
        self._add("sglang:backuped_tokens_total", _count(record, "written_pages") * self._page_tokens)

    # Lanes.

    def _meeting(self, record: Record) -> None:
        group, number = record.get("group"), integer(record.get("group_seq"))
        if type(group) is not str or number is None:
            return
        if record.get("phase") == "enter":
            self._calls.add((group, number))
            self._add("hicache:collectives_total", 1, op=_reason(record, "op"))
        else:
            self._calls.discard((group, number))

    def _idle(self, record: Record) -> None:
        self._add("hicache:steps_idle_total", _count(record, "count"))

    def _throttle(self, record: Record) -> None:
        if _count(record, "one_in") > 1 and not self._has_left_out_steps:
            self._has_left_out_steps = True
            self.notes.append(
                f"rank {self._rank}: its recorder has left out steps to spare the run, so that what happened "
                "in them is not counted"
            )


# One digest a page, in 16 characters.
DIGEST_CHARS = 16
DURATIONS = {
    "write": "sglang:hicache_backup_duration_seconds",
    "load": "sglang:load_back_duration_seconds",
}


def _count(record: Record, name: str) -> int:
    """A field that counts something; 0 where it does not."""
    return max(0, integer(record.get(name)) or 0)


def _reason(record: Record, name: str) -> str:
    return word(record.get(name)) or "unknown"


def _told(labels: Iterable[tuple[str, str]]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _escaped_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: Any) -> str:
    return repr(value)
