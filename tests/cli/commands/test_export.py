from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from cli.commands import export as command
from tests.cli.conftest import Hicache
from tests.support.logs import write_lane, write_run
from tracer.log import find_logs
from tracer.record import Kind

STREAMS = ("perfetto", "otlp", "prometheus")
FOLDERS = ("parquet", "fr-json")


def small(folder: Path, **options: Any) -> Path:
    """One rank, two records."""
    write_lane(folder, [{"kind": "note", "text": "a"}] * 2, **options)
    return folder


def events(text: str | bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return found


@pytest.mark.parametrize("to", STREAMS)
def test_a_file_is_written_and_one_line_says_what_is_in_it(
    to: str, inside: Path, tmp_path: Path, hicache: Hicache
) -> None:
    said = hicache("export", "hung", "--to", to, "-o", tmp_path / "out")
    assert (said.code, said.out) == (0, "")
    assert said.err.startswith("exported ")
    assert said.err.count("\n") == 1
    assert (tmp_path / "out").stat().st_size > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("to", FOLDERS)
def test_a_folder_is_written(to: str, inside: Path, tmp_path: Path, hicache: Hicache) -> None:
    said = hicache("export", "hung", "--to", to, "-o", tmp_path / "out")
    assert (said.code, said.out) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("to", STREAMS)
def test_stdout_has_the_same_bytes_as_a_file(to: str, inside: Path, tmp_path: Path, hicache: Hicache) -> None:
    hicache("export", "hung", "--to", to, "-o", tmp_path / "out")
    said = hicache("export", "hung", "--to", to, "-o", "-")
    assert said.code == 0
    assert said.out.encode() == (tmp_path / "out").read_bytes()
    assert "to stdout" in said.err


def test_a_name_that_ends_in_gz_is_packed_the_same_way_every_time(
    inside: Path, tmp_path: Path, hicache: Hicache
) -> None:
    for name in ("a", "b.gz", "c.gz"):
        assert hicache("export", "hung", "--to", "perfetto", "-o", tmp_path / name).code == 0
    assert gzip.decompress((tmp_path / "b.gz").read_bytes()) == (tmp_path / "a").read_bytes()
    assert (tmp_path / "b.gz").read_bytes() == (tmp_path / "c.gz").read_bytes()


def test_json_says_what_was_written(inside: Path, tmp_path: Path, hicache: Hicache) -> None:
    out = tmp_path / "trace.json"
    said = hicache("export", "twin", "--to", "perfetto", "-o", out, "--json")
    run = find_logs("twin")
    records = sum(1 for lane in run.lanes for _ in lane.records())
    assert (said.code, said.err) == (0, "")
    assert json.loads(said.out) == {
        "schema": "hicache.export.v1",
        "format": "perfetto",
        "out": str(out),
        "records": records,
        "events": len(events(out.read_bytes())),
        "bytes": out.stat().st_size,
    }


def test_json_counts_the_bytes_of_a_folder(inside: Path, tmp_path: Path, hicache: Hicache) -> None:
    said = hicache("export", "hung", "--to", "fr-json", "-o", tmp_path / "out", "--json")
    files = list((tmp_path / "out").iterdir())
    assert json.loads(said.out)["bytes"] == sum(file.stat().st_size for file in files)
    assert [file.name for file in sorted(files)] == [f"comm_lib_trace_rank_{rank}" for rank in range(4)]


def test_the_timeline_points_at_the_first_divergence(inside: Path, tmp_path: Path, hicache: Hicache) -> None:
    """At the record that the verdict names, over all ranks."""
    hicache("export", "hung", "--to", "perfetto", "-o", tmp_path / "out")
    verdict = json.loads(hicache("check", "hung", "--json").out)
    (culprit,) = verdict["ranks"]["culprit"]
    named = [each for each in verdict["evidence"] if each["supports"] == f"culprit {culprit}"]
    marks = [each for each in events((tmp_path / "out").read_bytes()) if each.get("cat") == "mark"]
    found = [each for each in marks if each["name"] == "verdict: culprit"]
    assert [(each["pid"], each["args"]["seq"], each["s"]) for each in found] == [
        (culprit, each["record"], "g") for each in named
    ]
    assert found[0]["args"]["why"] == verdict["verdict"]["summary"]


def test_a_healthy_run_has_a_verdict_and_no_marks(inside: Path, tmp_path: Path, hicache: Hicache) -> None:
    hicache("export", "twin", "--to", "perfetto", "-o", tmp_path / "out")
    document = json.loads((tmp_path / "out").read_bytes())
    assert document["otherData"]["verdict"]["kind"] == "consistent"
    assert not [each for each in document["traceEvents"] if each.get("cat") == "mark"]


@pytest.mark.parametrize("to", STREAMS)
def test_a_file_that_is_there_is_kept_unless_it_may_be_replaced(
    to: str, inside: Path, tmp_path: Path, hicache: Hicache
) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    said = hicache("export", "hung", "--to", to, "-o", out)
    assert (said.code, out.read_text()) == (2, "mine")
    assert said.err == (
        f"error: --out {out} is there already\n  try       another --out, or --overwrite to replace it\n"
    )
    assert hicache("export", "hung", "--to", to, "-o", out, "--overwrite").code == 0
    assert out.read_bytes() != b"mine"


@pytest.mark.parametrize("to", FOLDERS)
def test_an_older_export_is_kept_unless_it_may_be_replaced(
    to: str, inside: Path, tmp_path: Path, hicache: Hicache
) -> None:
    words = ("export", "hung", "--to", to, "-o", tmp_path / "out")
    assert hicache(*words).code == 0
    assert "is there already" in hicache(*words).err
    assert hicache(*words).code == 2
    assert hicache(*words, "--overwrite").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_dumps_of_ranks_that_are_not_in_the_run_do_not_stay(
    inside: Path, tmp_path: Path, hicache: Hicache
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "comm_lib_trace_rank_9").write_text("of a larger run")
    assert hicache("export", "hung", "--to", "fr-json", "-o", tmp_path / "out", "--overwrite").code == 0
    assert not (tmp_path / "out" / "comm_lib_trace_rank_9").exists()


@pytest.mark.parametrize("to", FOLDERS)
@pytest.mark.parametrize("name", ["thesis.tex", "records"])
def test_a_folder_with_something_else_in_it_is_never_replaced(
    to: str, name: str, inside: Path, tmp_path: Path, hicache: Hicache
) -> None:
    assert hicache("export", "hung", "--to", to, "-o", tmp_path / "out").code == 0
    mine = tmp_path / "out" / name / "a" if name == "records" else tmp_path / "out" / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    said = hicache("export", "hung", "--to", to, "-o", tmp_path / "out", "--overwrite")
    assert (said.code, mine.read_text()) == (2, "mine")
    assert "which is no export" in said.err


def test_an_empty_folder_is_filled(inside: Path, tmp_path: Path, hicache: Hicache) -> None:
    (tmp_path / "out").mkdir()
    assert hicache("export", "hung", "--to", "fr-json", "-o", tmp_path / "out").code == 0


def test_a_torn_log_is_exported_as_far_as_it_goes_with_a_warning(tmp_path: Path, hicache: Hicache) -> None:
    write_run(
        tmp_path / "run", {0: [{"kind": "note", "text": "a"}] * 3, 1: [{"kind": "note", "text": "a"}] * 3}
    )
    path = tmp_path / "run" / "rank0001.scheduler.000.jsonl"
    path.write_bytes(path.read_bytes()[:-90])
    said = hicache("export", tmp_path / "run", "--to", "perfetto", "-o", tmp_path / "out")
    assert said.code == 0
    first, last = said.err.splitlines()
    assert first.startswith("warning: rank0001.scheduler.000.jsonl: reading stopped before record 3")
    assert last.startswith("exported ")


@pytest.mark.parametrize("to", [*STREAMS, *FOLDERS])
def test_every_format_names_what_is_missing(to: str, tmp_path: Path, hicache: Hicache) -> None:
    small(tmp_path / "run", sizes={"tp": 2}, outcome=None)
    said = hicache("export", tmp_path / "run", "--to", to, "-o", tmp_path / "out", "--json")
    missing = [
        "no log of rank 1",
        "rank0000.scheduler.000.jsonl: cut behind record 2, without a trailer",
    ]
    assert said.code == 0
    assert [line for line in said.err.splitlines() if line.startswith("warning: ")] == [
        f"warning: {sentence}" for sentence in missing
    ]
    assert json.loads(said.out)["missing"] == missing


def test_quiet_is_one_line(tmp_path: Path, hicache: Hicache) -> None:
    small(tmp_path / "run", outcome=None)
    said = hicache("export", tmp_path / "run", "--to", "perfetto", "-o", tmp_path / "out", "--quiet")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("place", ["empty", "nowhere"])
def test_a_place_without_logs_is_code_3(place: str, tmp_path: Path, hicache: Hicache) -> None:
    (tmp_path / "empty").mkdir()
    said = hicache("export", tmp_path / place, "--to", "perfetto", "-o", tmp_path / "out")
    assert (said.code, said.out) == (3, "")
    assert said.err.startswith("error: no ")
    assert not (tmp_path / "out").exists()


def test_logs_in_a_folder_below_are_suggested_as_the_same_command(tmp_path: Path, hicache: Hicache) -> None:
    small(tmp_path / "run")
    said = hicache("export", tmp_path, "--to", "perfetto", "-o", "a{b} c.json")
    assert said.code == 3
    assert f"  try       hicache export {tmp_path / 'run'} --to perfetto --out 'a{{b}} c.json'\n" in said.err


def test_two_runs_in_one_folder_are_refused(tmp_path: Path, hicache: Hicache) -> None:
    small(tmp_path / "run")
    write_lane(tmp_path / "run", [], rank=1, run_id="run-b", sizes={"tp": 2})
    said = hicache("export", tmp_path / "run", "--to", "perfetto", "-o", tmp_path / "out")
    assert said.code == 3
    assert said.err == (
        f"error: {tmp_path / 'run'} holds 2 runs: run-a, run-b\n  try       one folder a run\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--to", "perfetto"), "export needs a place to write to"),
        (("--to", "svg", "-o", "x"), "--to svg is not known"),
        (("--to", "parquet", "-o", "-"), "--to parquet writes a folder"),
        (("--to", "fr-json", "-o", "x.gz"), "which can't be packed"),
        (("--to", "perfetto", "-o", "-", "--json"), "both are for stdout"),
        (("--to", "perfetto", "-o", "no/such/x"), "no folder"),
        (("--to", "fr-json", "-o", "no/such/x"), "no folder"),
        (("--to", "perfetto", "-o", "."), "is a folder"),
        (("--to", "fr-json", "-o", "file"), "is a file"),
        (("--to", "perfetto", "-o", "run.json"), "a run's own file"),
        (("--to", "perfetto", "-o", "x" * 300), "File name too long"),
        (("--to", "fr-json", "-o", "x" * 300), "File name too long"),
        (("--to", "perfetto", "--endpoint", "http://localhost"), "--endpoint sends spans"),
        (("--to", "otlp", "--endpoint", "http://localhost", "-o", "x"), "--endpoint sends spans"),
        (("--to", "otlp", "--endpoint", "nonsense"), "is no endpoint"),
        (("--to", "otlp", "--endpoint", "http://localhost", "--timeout", "inf"), "no number of seconds"),
        (("--to", "otlp", "-o", "x", "--follow"), "are for --endpoint"),
        (("--to", "otlp", "-o", "x", "--timeout", "3"), "are for --endpoint"),
    ],
)
def test_what_can_not_be_meant_is_code_2(
    words: tuple[str, ...], said: str, tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small(tmp_path / "run")
    (tmp_path / "file").touch()
    before = sorted(path.name for path in tmp_path.iterdir())
    answer = hicache("export", "run", *words)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("to", ["perfetto", *FOLDERS])
def test_a_place_that_can_not_be_written_is_code_2(to: str, tmp_path: Path, hicache: Hicache) -> None:
    """Nobody can make a file there, whoever they are."""
    small(tmp_path / "run")
    said = hicache("export", tmp_path / "run", "--to", to, "-o", "/proc/out")
    assert said.code == 2
    assert said.err.startswith("error: /proc/out ")
    assert ".part" not in said.err


def test_a_full_disk_is_code_2(tmp_path: Path, hicache: Hicache) -> None:
    small(tmp_path / "run")
    (tmp_path / "full").symlink_to("/dev/full")
    said = hicache("export", tmp_path / "run", "--to", "perfetto", "-o", tmp_path / "full")
    assert (said.code, said.err) == (
        2,
        f"error: {tmp_path / 'full'} was not written: No space left on device\n",
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("to", ["perfetto", "fr-json"])
def test_nothing_half_is_left_behind(
    to: str, error: BaseException, tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old export is still there as well."""
    small(tmp_path / "run")
    words = ("export", tmp_path / "run", "--to", to, "-o", tmp_path / "out", "--overwrite")
    assert hicache(*words).code == 0

    def content() -> dict[Path, bytes]:
        files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
        return {path: path.read_bytes() for path in files}

    def fail(_run: object, _to: str, where: Any, _progress: object) -> None:
        if to == "fr-json":
            where.mkdir()
            (where / "comm_lib_trace_rank_0").write_text("half")
        else:
            where.write(b"half")
        raise error

    before = content()
    monkeypatch.setattr(command, "write_folder" if to == "fr-json" else "write_stream", fail)
    assert hicache(*words).code == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert content() == before


def test_a_reader_that_goes_away_early_is_no_error(inside: Path) -> None:
    program = [sys.executable, "-m", "cli.app", "export", "hung", "--to", "perfetto", "-o", "-"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(20) == b'{"displayTimeUnit":"'
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


class Collector(BaseHTTPRequestHandler):
    """Takes everything, and says when the first request has come."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
        assert isinstance(self.server, Server)
        self.server.has_come.set()

    def log_message(self, *_: object) -> None:
        pass


class Server(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Collector)
        self.has_come = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def collector() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def two_calls(folder: Path, **options: Any) -> Path:
    """One rank that has met somebody in each of two steps: two spans that have ended."""
    kind = Kind("meeting", "meeting", info=("op", "purpose", "group", "group_seq"))
    call = {"kind": "meeting", "op": "all_reduce", "purpose": "p", "group": "g"}
    records = [
        {**call, "step": step, "phase": phase, "group_seq": step}
        for step in range(2)
        for phase in ("enter", "leave")
    ]
    write_lane(folder, records, kinds=[kind], **options)
    return folder


def test_spans_are_sent_to_a_collector(inside: Path, hicache: Hicache, collector: Server) -> None:
    words = ("export", "hung", "--to", "otlp", "--endpoint", collector.url)
    said = hicache(*words, "--json")
    sent = json.loads(said.out)["sent"]
    assert (said.code, sent > 100) == (0, True)
    assert json.loads(said.out) == {
        "schema": "hicache.export.v1",
        "format": "otlp",
        "endpoint": collector.url,
        "sent": sent,
        "dropped": 0,
        "failed": 0,
    }
    assert hicache(*words).err == f"sent {sent:,} spans to {collector.url}\n"


def test_a_collector_that_is_not_there_is_an_error(tmp_path: Path, hicache: Hicache) -> None:
    two_calls(tmp_path / "run")
    nowhere = ("--endpoint", "http://127.0.0.1:9", "--timeout", "0.2")
    said = hicache("export", tmp_path / "run", "--to", "otlp", *nowhere)
    assert said.code == 2
    assert "did not reach http://127.0.0.1:9" in said.err


@pytest.mark.parametrize(
    "words", [["--to", "perfetto", "-o", "x"], ["--to", "otlp", "--endpoint", "http://a"]]
)
def test_what_was_kept_has_no_logs_to_export(words: list[str], tmp_path: Path, hicache: Hicache) -> None:
    small(tmp_path / "run")
    assert hicache("export", tmp_path / "run", "--to", "parquet", "-o", tmp_path / "kept").code == 0
    said = hicache("export", tmp_path / "kept", *words)
    assert (said.code, said.out) == (2, "")
    assert f"export needs a run's logs, and {tmp_path / 'kept'} is an export" in said.err


def test_a_password_in_an_endpoint_is_not_shown(tmp_path: Path, hicache: Hicache) -> None:
    two_calls(tmp_path / "run")
    said = hicache("export", tmp_path / "run", "--to", "otlp", "--endpoint", "http://me:secret@host:99999")
    assert "'http://***@host:99999' is no endpoint" in said.err
    assert "secret" not in said.err
    words = ("export", tmp_path / "run", "--to", "otlp", "--timeout", "0.1")
    said = hicache(*words, "--endpoint", "http://me:secret@127.0.0.1:9")
    assert "did not reach http://***@127.0.0.1:9\n" in said.err
    assert "secret" not in said.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_following_ends_with_an_interrupt_and_what_was_read_is_sent(
    number: int, code: int, tmp_path: Path, collector: Server
) -> None:
    two_calls(tmp_path / "run", outcome=None)
    program = [sys.executable, "-m", "cli.app", "export", str(tmp_path / "run"), "--to", "otlp"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(
        [*program, "--endpoint", collector.url, "--follow"], stderr=subprocess.PIPE, env=environment
    )
    with process:
        try:
            assert collector.has_come.wait(60)
            process.send_signal(number)
            assert process.stderr is not None
            said = process.stderr.read().decode()
            assert (process.wait(60), said.splitlines()[-1][:7]) == (code, "sent 2 "), said
        finally:
            process.kill()
