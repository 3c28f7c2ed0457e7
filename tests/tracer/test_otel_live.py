"""Spans at a real receiver: the same as in the file, and none that nobody counts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path
from threading import Event, Thread, Timer
from typing import Any

import pytest

from tests.support.logs import lines, write_lane, write_run
from tests.support.otlp_receiver import receiving, spans_of
from tests.support.processes import free_port
from tests.tracer.test_otel import GROUPS, MEETING, WHOLE, simulated
from tracer.errors import LogError, TracerError
from tracer.log import find_logs
from tracer.otel import write_otlp
from tracer.otel_live import BATCH_SPANS, QUEUE_SPANS_MAX, LiveCount, export_live


def offline(place: Path) -> list[dict[str, Any]]:
    out = BytesIO()
    write_otlp(find_logs(place), out)
    return spans_of(out.getvalue())


def many(folder: Path, count: int) -> Path:
    """A log of so many spans."""
    calls = [
        {**MEETING, "group_seq": seq, "phase": phase} for seq in range(count) for phase in ("enter", "leave")
    ]
    write_lane(folder, calls)
    return folder


def test_a_receiver_gets_the_spans_of_the_file(tmp_path: Path) -> None:
    log = simulated(tmp_path / "log")
    with receiving(tmp_path) as receiver:
        count = export_live(log, receiver.endpoint, follow=False, timeout_s=20)
        expected = offline(log)
        assert receiver.spans() == expected
    assert count == LiveCount(sent=len(expected), dropped=0, failed=0)


def test_open_spans_and_events_and_links_arrive(tmp_path: Path) -> None:
    log = write_run(tmp_path / "log", {0: WHOLE, 1: WHOLE[:3]}, groups=GROUPS, outcome=None)
    with receiving(tmp_path) as receiver:
        export_live(log, receiver.endpoint, follow=False, timeout_s=20)
        assert receiver.spans() == offline(log)
        last = [span for span in receiver.spans() if span["attributes"].get("hicache.open")]
    assert {tuple(span["status"]) for span in last} == {(2, "its end is not in the log")}
    assert {span["end"] for span in last} == {0}


def test_two_exports_give_a_receiver_the_same_ids_and_resources(tmp_path: Path) -> None:
    log = many(tmp_path / "log", 3)
    with receiving(tmp_path) as receiver:
        for _ in range(2):
            export_live(log, receiver.endpoint, follow=False, timeout_s=20)
        found = receiver.spans()
    assert found[::2] == found[1::2]
    assert found[0]["resource"]["service.instance.id"] == "rank:0"


@pytest.mark.slow
def test_more_spans_than_the_queue_holds_all_arrive(tmp_path: Path) -> None:
    log = many(tmp_path / "log", QUEUE_SPANS_MAX + BATCH_SPANS + 1)
    with receiving(tmp_path) as receiver:
        count = export_live(log, receiver.endpoint, follow=False, timeout_s=30)
        assert len(receiver.spans()) == QUEUE_SPANS_MAX + BATCH_SPANS + 1
    assert count.dropped == 0


@pytest.mark.slow
def test_a_dead_endpoint_is_counted_and_costs_bounded_time(tmp_path: Path) -> None:
    log = many(tmp_path / "log", 3 * QUEUE_SPANS_MAX)
    start = time.monotonic()
    count = export_live(log, f"http://127.0.0.1:{free_port()}", follow=False, timeout_s=1)
    assert (count.sent, count.dropped) == (0, 3 * QUEUE_SPANS_MAX)
    # The limit is a hundred times what it takes, so that only a wait without an end can break it.
    assert time.monotonic() - start < 300


@pytest.mark.slow
def test_an_endpoint_that_never_answers_is_counted(tmp_path: Path) -> None:
    log = many(tmp_path / "log", 10)
    with receiving(tmp_path, "--mute") as receiver:
        count = export_live(log, receiver.endpoint, follow=False, timeout_s=1)
    assert (count.sent, count.dropped) == (0, 10)


@pytest.mark.slow
def test_a_receiver_that_dies_half_way_leaves_no_span_uncounted(tmp_path: Path) -> None:
    total = 6 * BATCH_SPANS
    log = many(tmp_path / "log", total)
    with receiving(tmp_path, "--requests", "2") as receiver:
        # What it had received is answered by then, also by a busy machine; the rest is tried for so long.
        count = export_live(log, receiver.endpoint, follow=False, timeout_s=6)
        received = len(receiver.spans())
    assert count.sent + count.dropped == total
    assert count.sent == received > 0
    assert 0 < count.failed <= count.dropped


def test_a_log_that_is_written_meanwhile_is_followed_to_its_trailer(tmp_path: Path) -> None:
    whole = lines(WHOLE, sizes={"tp": 1})
    log = tmp_path / "log"
    log.mkdir()
    path = log / "rank0000.scheduler.000.jsonl"
    path.write_bytes(whole[0])
    with receiving(tmp_path) as receiver:

        def write() -> None:
            for line in whole[1:]:
                with path.open("ab") as file:
                    file.write(line)

        writer = Thread(target=write)
        writer.start()
        count = export_live(log, receiver.endpoint, follow=True, timeout_s=20)
        writer.join()
        assert receiver.spans() == offline(log)
    assert (count.dropped, count.notes) == (0, ())


def test_following_ends_when_told_and_sends_what_is_open(tmp_path: Path) -> None:
    log = write_lane(tmp_path / "log", WHOLE[:3], outcome=None).parent
    stop = Event()
    stop.set()
    with receiving(tmp_path) as receiver:
        count = export_live(log, receiver.endpoint, follow=True, timeout_s=20, stop=stop)
        assert receiver.spans() == offline(log)
    assert count.sent == 2


@pytest.mark.slow
def test_following_with_a_dead_endpoint_counts_and_ends_when_told(tmp_path: Path) -> None:
    log = write_lane(tmp_path / "log", [*WHOLE, *WHOLE], outcome=None).parent
    stop = Event()
    timer = Timer(0.5, stop.set)
    timer.start()
    count = export_live(log, f"http://127.0.0.1:{free_port()}", follow=True, timeout_s=0.5, stop=stop)
    timer.join()
    assert (count.sent, count.dropped) == (0, len(offline(log)))


@pytest.mark.slow
def test_following_finds_the_spans_of_a_finished_run(tmp_path: Path) -> None:
    log = simulated(tmp_path / "log")
    with receiving(tmp_path) as receiver:
        export_live(log, receiver.endpoint, follow=True, timeout_s=20)
        assert receiver.spans() == offline(log)


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "localhost:4318", "ftp://host", "http://", "http://h:99999", "http://[", "file:///x"),
        *("http://a b", "http://host:4318/\n", "http://host/\udcff"),
    ],
)
def test_what_is_no_url_is_refused(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(TracerError, match="is no endpoint") as raised:
        export_live(many(tmp_path, 1), endpoint, follow=False, timeout_s=1)
    assert raised.value.expected and raised.value.hint


@pytest.mark.parametrize("timeout_s", [float("nan"), -1.0])
def test_what_is_no_time_is_refused(tmp_path: Path, timeout_s: float) -> None:
    with pytest.raises(TracerError, match="no time to wait"):
        export_live(many(tmp_path, 1), "http://localhost:4318", follow=False, timeout_s=timeout_s)


@pytest.mark.parametrize("timeout_s", [0.0, float("inf")])
def test_the_longest_and_the_shortest_wait_end(tmp_path: Path, timeout_s: float) -> None:
    with receiving(tmp_path) as receiver:
        count = export_live(many(tmp_path, 3), receiver.endpoint, follow=False, timeout_s=timeout_s)
    assert count.sent + count.dropped == 3 and (count.sent == 3 or timeout_s == 0)


def test_a_missing_package_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracerError, match="package that is not there") as raised:
        export_live(many(tmp_path, 1), "http://localhost:4318", follow=False, timeout_s=1)
    assert "hicache-toolkit[otlp]" in raised.value.hint


def test_a_setting_of_the_exporter_that_makes_no_sense_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER", "nobody")
    with pytest.raises(TracerError, match="can't be set up"):
        export_live(many(tmp_path, 1), "http://localhost:4318", follow=False, timeout_s=1)


def test_no_log_is_an_error_and_not_an_empty_export(tmp_path: Path) -> None:
    with pytest.raises(LogError):
        export_live(tmp_path, f"http://127.0.0.1:{free_port()}", follow=False, timeout_s=1)


def test_nothing_of_opentelemetry_is_loaded_before_spans_are_sent() -> None:
    code = (
        "import sys, json, tracer.spans, tracer.otel, tracer.otel_live, tracer.follow, tracer.metrics; "
        "print(json.dumps([name for name in sys.modules if name.startswith('opentelemetry')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout) == []
