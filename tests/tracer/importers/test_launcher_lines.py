from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.foreign_lines import only, read, told, watchdog
from tracer.importers import launcher_lines, sglang_lines, torch_lines
from tracer.importers.launcher_lines import Text, nanoseconds, taken_apart

DECODE = "Decode batch, #running-req: 2, #token: 7040, token usage: 0.11, cuda graph: True, #queue-req: 0"


def one(line: str) -> Text:
    (text,) = taken_apart(1, line.encode())
    return text


@pytest.mark.parametrize(
    ("line", "rank", "places"),
    [
        (f"[2031-02-03 04:05:08 TP3] {DECODE}", None, {"tp": 3}),
        (
            f"[2031-02-03 04:05:08.123 DP1 PP0 ATTN_CP2 MOE_DP1 TP3 EP4] {DECODE}",
            None,
            {"dp": 1, "pp": 0, "attn_cp": 2, "moe_dp": 1, "tp": 3, "ep": 4},
        ),
        (f"[2031-02-03 04:05:08 EP4 TP3 DP1] {DECODE}", None, {"ep": 4, "tp": 3, "dp": 1}),
        (f"2031-02-03T04:05:08.12Z [PP1 ATTN_CP0 TP0] {DECODE}", None, {"pp": 1, "attn_cp": 0, "tp": 0}),
        (f"[2031-02-03 04:05:08] {DECODE}", None, {}),
        (f"[rank3]:[2031-02-03 04:05:08 TP3] {DECODE}", 3, {"tp": 3}),
        (f"[1,3]<stderr>:{DECODE}", 3, {}),
        (f"(rank 3): {DECODE}", 3, {}),
        (f"[default3]: {DECODE}", 3, {}),
        (f"\x1b[36m(Worker pid=123, ip=10.0.0.3)\x1b[0m [2031-02-03 04:05:08 TP1] {DECODE}", None, {"tp": 1}),
        (f"sglang-0-1  | [2031-02-03 04:05:08 TP1] {DECODE}", None, {"tp": 1}),
        (
            f"[pod/sglang-0/server] 2031-02-03T04:05:08Z stdout F [2031-02-03 04:05:08 TP1] {DECODE}",
            None,
            {"tp": 1},
        ),
    ],
)
def test_a_prefix_says_who_and_is_no_text(line: str, rank: int | None, places: dict[str, int]) -> None:
    text = one(line)
    assert (DECODE, rank, places) == (text.text, text.who.rank, text.who.places)


def test_a_workers_process_and_host_are_told() -> None:
    who = one("(Worker pid=123, ip=10.0.0.3) [2031-02-03 04:05:08 TP1] x").who
    assert (who.pid, who.host) == (123, "10.0.0.3")


def test_a_wall_clock_says_how_far_it_may_be_off() -> None:
    assert nanoseconds("2031-02-03 04:05:08") == (1_927_857_908_000_000_000, 10**9)
    assert nanoseconds("2031-02-03 04:05:08,120") == (1_927_857_908_120_000_000, 10**6)
    assert nanoseconds("2031-02-33 04:05:08") == (0, 0)


def test_two_logs_on_one_line_are_two_texts() -> None:
    line = f"[2031-02-03 04:05:08 TP0] Decode batch, #running-req: 2, #queue-{watchdog(3, 9, 8)}"
    first, second = taken_apart(1, line.encode().rstrip())
    assert (first.text, first.is_cut) == ("Decode batch, #running-req: 2, #queue-", True)
    assert (first.who.places, second.who.rank, second.is_cut) == ({"tp": 0}, 3, False)


def test_a_value_that_another_log_cut_is_left_out(tmp_path: Path) -> None:
    found = read(
        sglang_lines,
        tmp_path,
        f"[2031-02-03 04:05:08 TP0] Decode batch, #running-req: 2, #token: 70{watchdog(3, 9, 8)}40",
    )
    assert only(found, "decode_batch").fields == {"lines": 1, "#running-req": 2}


def test_a_line_that_was_broken_is_put_together(tmp_path: Path) -> None:
    whole = watchdog(1, 5123, 5119)
    at = whole.index("queued NCCL")
    broken = f"{whole[:at]}\n[2031-02-03 04:05:08 TP0] {DECODE}\n{whole[at:]}"
    found = read(torch_lines, tmp_path, broken)
    assert (
        only(found, "watchdog_exception").who.rank,
        *(only(found, "watchdog_exception").fields[name] for name in ("enqueued", "completed")),
    ) == (1, 5123, 5119)


def test_dockers_wrapping_is_taken_off(tmp_path: Path) -> None:
    wrapped = "".join(
        json.dumps({"log": part, "stream": "stderr", "time": "2031-02-03T04:05:08Z"}) + "\n"
        for part in ("something else\n", watchdog(1, 9, 8)[:60], watchdog(1, 9, 8)[60:])
    )
    assert [rank for rank, _event, _fields in told(read(torch_lines, tmp_path, wrapped))] == [1]


def test_lines_are_counted_over_parts_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_lines, "AFTER_BYTES", 64)
    filler = "nothing\n" * 300_000
    found = read(torch_lines, tmp_path, filler + watchdog(1, 9, 8) + filler + watchdog(2, 9, 8))
    assert [line.at.record for line in found.lines] == [300_001, 600_002]
    assert (found.files[0].records, found.files[0].unparsed) == (600_002, 600_000)


def test_a_line_without_an_end_is_looked_at_in_pieces(tmp_path: Path) -> None:
    found = read(torch_lines, tmp_path, "x" * (5 << 20) + watchdog(1, 9, 8))
    assert [line.at.record for line in found.lines] == [1]
    assert found.files[0].notes == ["1 lines of more than 1 MiB were looked at in pieces"]


def test_what_is_said_for_ever_is_not_kept_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_lines, "ROWS_MAX", 3)
    found = read(torch_lines, tmp_path, watchdog(1, 9, 8) * 5)
    assert len(found.lines) == 3
    assert found.files[0].notes == ["watchdog_exception: 5 lines, the first 3 are kept"]


def test_a_word_that_is_on_every_line_is_not_looked_at_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_lines, "HITS_MAX", 3)
    found = read(torch_lines, tmp_path, watchdog(1, 9, 8) * 5)
    assert len(found.lines) == 3
    assert "'ast enqueued ': 5 lines, the first 3 are looked at" in found.files[0].notes
