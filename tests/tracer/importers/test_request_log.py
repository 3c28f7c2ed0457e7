from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tracer.importers.canaries import finished, received, write
from tracer.errors import HitsError
from tracer.importers import request_log
from tracer.importers.sniff import Imported, files_at


def read(folder: Path, *rows: Any) -> Imported:
    return request_log.read(files_at(write(folder / "host_0.log", *rows)))


def test_a_finished_request_is_a_row_at_the_time_it_was_received(tmp_path: Path) -> None:
    details = {"device": 60, "host": 4}
    found = read(tmp_path, received("r1"), finished("r1", 100, 64, cached_tokens_details=details))
    (row,) = found.requests
    assert (row.rid, row.input_tokens, row.device, row.host, row.line) == ("r1", 100, 60, 4, 2)
    assert row.time_ns == 1_795_168_800_250_000_000
    assert (found.source.lines, found.source.unparsed, found.source.notes) == ((2,), (0,), ())


def test_other_lines_of_a_servers_output_are_counted(tmp_path: Path) -> None:
    found = read(tmp_path, "INFO: 10.0.0.1 - POST /generate 200", finished("r1", 100, 64))
    assert (found.source.lines, found.source.unparsed) == ((2,), (1,))


@pytest.mark.parametrize(
    "front",
    [
        "",
        "(Worker pid=123, ip=10.0.0.3) ",
        "[rank3]:",
        "\x1b[32m",
        '{"half a log',
        "2026-11-20T10:00:00Z stdout F ",
    ],
)
def test_whatever_a_launcher_puts_in_front_is_no_part_of_the_event(front: str, tmp_path: Path) -> None:
    found = read(tmp_path, front + finished("r1", 100, 64))
    assert [row.rid for row in found.requests] == ["r1"]


def test_requests_that_never_finished_are_told_and_not_counted(tmp_path: Path) -> None:
    found = read(tmp_path, received("r1"), received("r2"), finished("r2", 10, 0))
    assert [row.rid for row in found.requests] == ["r2"]
    assert found.source.notes == ("1 requests were received and never finished: not counted",)


def test_a_request_of_several_prompts_is_several_rows(tmp_path: Path) -> None:
    outs = [{"meta_info": {"id": f"r{at}", "prompt_tokens": 10, "cached_tokens": at}} for at in range(2)]
    event = {"timestamp": 1_790_000_000.5, "event": "request.finished", "rid": ["r0", "r1"], "out": outs}
    found = read(tmp_path, json.dumps(event))
    assert [(row.rid, row.cached) for row in found.requests] == [("r0", 0), ("r1", 1)]


def test_keys_that_are_not_known_are_counted(tmp_path: Path) -> None:
    text = finished("r1", 10, 0).replace('{"timestamp"', '{"moon": 1, "timestamp"')
    assert read(tmp_path, text).source.unknown_keys == {"moon": 1}


def test_a_prompt_that_is_no_text_breaks_nothing(tmp_path: Path) -> None:
    text = finished("r1", 10, 0).encode().replace(b"CANARY-ANSWER", b"\xff\xfe")
    assert [row.rid for row in read(tmp_path, text).requests] == ["r1"]


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "request.finished", "rid": "r1"}',
        '{"event": "request.finished", "rid": "r1", "out": {"meta_info": {"prompt_tokens": -4}}}',
        '{"event": "request.finished", "rid": {"a": 1}, "out": ' + "[" * 90 + "]" * 90 + "}",
        '{"event": "request.received"',
    ],
)
def test_an_event_that_does_not_say_what_it_should_is_not_parsed(line: str, tmp_path: Path) -> None:
    found = read(tmp_path, line, finished("r2", 10, 0))
    assert (found.source.unparsed, [row.rid for row in found.requests]) == ((1,), ["r2"])


def test_a_log_in_which_nothing_finished_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HitsError, match=r"no request\.finished with meta_info"):
        read(tmp_path, received("r1"))
