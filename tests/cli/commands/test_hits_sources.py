"""`hicache hits` on what other programs write, and on logs: what it says, and what it must never say."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Hicache
from tests.support.logs import write_lane
from tests.tracer.importers import canaries as sample
from tests.tracer.importers.canaries import CANARIES, write

DETAILS = {"device": 64, "host": 32, "storage": 0}
SECRET_KEY = {"moon_phase": sample.API_KEY}
SOURCES: dict[str, list[Any]] = {
    "metrics": [
        sample.metrics(
            "r1", 200, 96, cached_tokens_details=DETAILS, request_received_ts=1.79e9, **SECRET_KEY
        ),
        sample.PROMPT,
        {"prompt_tokens": sample.PROMPT, "request_parameters": sample.API_KEY},
    ],
    "log": [
        sample.received("r1"),
        sample.finished("r1", 100, 64),
        sample.PROMPT,
        '{"event": "request.received"',
    ],
    "bench": [sample.benchmark(cache_report=sample.REPORT, **sample.DETAILS), sample.PROMPT],
    "prefill": [
        sample.prefill(300, 100),
        f"decode of {sample.PROMPT}",
        sample.prefill(1, 2).replace(": 1", ": x"),
    ],
    "events": [{"seq": 3, "ts": 1.0, "events": [sample.stored(1), {"type": sample.PROMPT}]}, sample.PROMPT],
    "tair": [sample.lookup("l1", [1, 2], 1), sample.lookup("l2", [1, 2], 1) | {"type": sample.PROMPT}],
}
FORMATS = ("request", "tier", "prefix", "time")
ASKED: list[list[str]] = [[], ["--json"], ["--quiet"], ["--why", "r1"], ["--rid", "r9"]]
ASKED += [[*more, "--by", by] for by in FORMATS for more in ([], ["--json"])]


@pytest.fixture
def source(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write(Path("file"), *SOURCES[request.param])


@pytest.mark.parametrize("source", SOURCES, indirect=True)
def test_no_prompt_answer_or_key_is_in_any_output(source: Path, hicache: Hicache) -> None:
    assert any(canary in source.read_text() for canary in CANARIES)
    for words in ASKED:
        said = hicache("hits", source, *words)
        assert [canary for canary in CANARIES if canary in said.out + said.err] == [], words
        assert said.code in (0, 2)
        assert "Traceback" not in said.err


@pytest.mark.parametrize("source", SOURCES, indirect=True)
def test_every_screen_says_what_limits_it_and_fits(source: Path, hicache: Hicache) -> None:
    for words in ASKED[1:2] + [["--by", by] for by in FORMATS] + [[]]:
        said = hicache("hits", source, *words)
        if said.code == 0 and "--json" not in words:
            assert "not understood, and not counted" in " ".join(said.out.split())
            assert [line for line in said.out.splitlines() if len(line) > 80] == []


def test_a_prompt_is_not_in_what_is_said_of_own_logs(tmp_path: Path, hicache: Hicache) -> None:
    """Token ids of the runtime's prompts are known here; none of their packed bytes may show."""
    spec = "conversations=3,rounds=3,max-context=400,output=8,shared-prefix=64"
    assert hicache("run", "--agentic", spec, "--out", tmp_path, "--quiet").code == 0
    from hicache.agentic import Agentic, AgenticSpec

    workload = Agentic(AgenticSpec.parse(spec), 0, 1)
    request = workload.next()
    assert request is not None
    tokens = request.tokens.hex()
    for words in (
        [],
        ["--by", "prefix"],
        ["--json"],
        ["--why", request.rid],
        ["--why", request.rid, "--json"],
    ):
        said = hicache("hits", tmp_path, *words)
        assert (said.code, tokens[:32] in said.out) == (0, False)


def test_the_screen_of_a_metrics_file_reads_as_agreed(
    tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [sample.metrics("r1", 200, 96, cached_tokens_details=DETAILS), sample.metrics("r2", 100, 10), "{"]
    said = hicache("hits", write(Path("m.log"), *rows))
    assert (said.code, said.err) == (0, "")
    assert said.out == (
        "35.3% hit  2 requests, 300 prompt tokens, 106 of them from the cache\n"
        "  source  sglang request metrics: m.log, 3 lines\n"
        "\n"
        "rid  prompt  device  host  storage  cached  uncached  line\n"
        "r1      200      64    32        0       0       104     1\n"
        "r2      100       0     0        0      10        90     2\n"
        "\n"
        "  note    m.log: 1 of 3 lines not understood, and not counted\n"
        "  note    this source does not say what was computed, nor why anything was not\n"
        "          cached\n"
    )


def test_the_document_has_the_schema_of_own_logs_and_says_its_source(
    tmp_path: Path, hicache: Hicache
) -> None:
    path = write(tmp_path / "m.log", sample.metrics("r1", 200, 96, cached_tokens_details=DETAILS))
    document = json.loads(hicache("hits", path, "--json").out)
    assert document == {
        "schema": "hicache.hits.v1",
        "requests": 1,
        "input_tokens": 200,
        "cached_tokens": {"device": 64, "host": 32, "storage": 0, "total": 96, "untiered": 0},
        "hit_rate": 0.48,
        "by": "request",
        "rows": [
            {
                **{"rid": "r1", "input_tokens": 200, "device": 64, "host": 32, "storage": 0},
                **{"untiered": 0, "computed": None, "uncached": 104, "reason": None},
                **{"file": "m.log", "line": 1},
            }
        ],
        "source": {
            **{"format": "sglang_request_metrics", "importer": 1, "row": "request", "count": "tokens"},
            "files": [{"file": "m.log", "lines": 1, "unparsed": 0}],
            "unknown_keys": {},
            "not_told": ["computed", "reason"],
        },
        "notes": ["this source does not say what was computed, nor why anything was not cached"],
    }


def test_equal_files_give_equal_bytes(tmp_path: Path, hicache: Hicache) -> None:
    path = write(tmp_path / "m.log", *SOURCES["metrics"])
    assert hicache("hits", path, "--json").out == hicache("hits", path, "--json").out


def test_a_compressed_file_says_the_same(tmp_path: Path, hicache: Hicache) -> None:
    path = write(tmp_path / "m.log", *SOURCES["metrics"])
    plain = hicache("hits", path, "--json").out
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert hicache("hits", path, "--json").out == plain


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--by", "reason"], "--by reason: sglang_request_metrics does not tell that"),
        (["--by", "prefix"], "--by prefix: sglang_request_metrics does not tell that"),
        (["--since", "3"], "--since counts scheduler steps, and sglang_request_metrics has none"),
        (["--why", "r1"], "--why needs a run's logs: sglang_request_metrics does not tell what happened"),
        (["--rid", "r9"], "no request r9 among the 1 counted in m.log"),
    ],
)
def test_what_a_source_can_not_know_is_a_usage_error(
    words: list[str], message: str, tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = hicache("hits", write(Path("m.log"), sample.metrics("r1", 10)), *words)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"error: {message}")


def test_one_request_of_a_metrics_file_can_be_counted_alone(tmp_path: Path, hicache: Hicache) -> None:
    path = write(tmp_path / "m.log", *(sample.metrics(f"r{at}", 10, at) for at in range(3)))
    document = json.loads(hicache("hits", path, "--rid", "r2", "--json").out)
    assert (document["requests"], document["rows"][0]["line"]) == (1, 3)


def test_a_file_that_nobody_knows_says_what_could_be_read(tmp_path: Path, hicache: Hicache) -> None:
    said = hicache("hits", write(tmp_path / "x", "hello"))
    assert (said.code, said.out) == (3, "")
    assert said.err.splitlines()[0] == f"error: {tmp_path / 'x'} is nothing that hits can read"


def test_a_block_trace_is_sent_to_run(tmp_path: Path, hicache: Hicache) -> None:
    row = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
    said = hicache("hits", write(tmp_path / "t.jsonl", row))
    assert (said.code, said.out) == (3, "")
    assert f"try       hicache run --workload {tmp_path / 't.jsonl'}" in said.err


def test_a_thousand_rows_are_shown_unless_all_are_asked_for(tmp_path: Path, hicache: Hicache) -> None:
    path = write(tmp_path / "m.log", *(sample.metrics(f"r{at}", 10) for at in range(1_002)))
    shown = hicache("hits", path).out
    assert "(the first 1,000 of 1,002 rows; --full shows all)" in shown
    assert "r1001" not in shown
    assert "r1001" in hicache("hits", path, "--full").out


def test_times_of_other_programs_are_moments(tmp_path: Path, hicache: Hicache) -> None:
    rows = [sample.prefill(10, 30, prefix=f"2026-11-20 10:0{minute}:00 TP0") for minute in range(3)]
    said = hicache("hits", write(tmp_path / "server.log", *rows), "--by", "time")
    assert "2026-11-20 10:00:00  2026-11-20 10:00:10" in said.out
    assert "zone is not in the log" in said.out


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run's logs, an export and a database of it."""
    from tests.cli.commands.test_hits import small_run
    from tracer.log import find_logs
    from tracer.parquet import export_parquet
    from tracer.trace_store import open_store

    folder = tmp_path_factory.mktemp("kept")
    run = find_logs(small_run(folder / "logs"))
    export_parquet(run, folder / "export")
    open_store(run, keep=folder / "run.duckdb").close()
    return {name: folder / name for name in ("logs", "export", "run.duckdb")}


@pytest.mark.parametrize("name", ["export", "run.duckdb"])
@pytest.mark.parametrize(
    "words", [[], ["--by", "tier"], ["--by", "reason"], ["--rid", "r1"], ["--since", "1"]]
)
def test_what_was_kept_reads_as_its_logs(
    name: str, words: list[str], kept: dict[str, Path], hicache: Hicache
) -> None:
    for more in ([], ["--json"], ["--quiet"]):
        said = hicache("hits", kept[name], *words, *more)
        assert (said.code, said.err) == (0, "")
        assert said.out == hicache("hits", kept["logs"], *words, *more).out


@pytest.mark.parametrize("name", ["export", "run.duckdb"])
@pytest.mark.parametrize("words", [["--by", "prefix"], ["--why", "r1"]])
def test_what_was_kept_has_no_pages_and_no_stories(
    name: str, words: list[str], kept: dict[str, Path], hicache: Hicache
) -> None:
    said = hicache("hits", kept[name], *words)
    assert (said.code, said.out) == (2, "")
    assert "needs a run's logs, and" in said.err


HOSTILE = "k\x1b[31m\r\N{RIGHT-TO-LEFT OVERRIDE}"


@pytest.mark.parametrize(
    "rows",
    [
        [sample.metrics(HOSTILE, 10, 20, **{HOSTILE: 1})],
        [sample.finished(HOSTILE, 10, 20).replace('"obj"', json.dumps(HOSTILE))],
        [sample.benchmark(cache_report=sample.REPORT, **{HOSTILE: 1})],
        [sample.prefill(1, 2, more="\x1b[31m\x07: 3, ")],
        [{**sample.lookup(HOSTILE, [1], 1), HOSTILE: 1}],
    ],
)
@pytest.mark.parametrize("words", [[], ["--by", "tier"], ["--rid", "nope"], ["--rid", HOSTILE]])
def test_nothing_in_a_file_or_its_name_moves_the_cursor(
    words: list[str], rows: list[Any], tmp_path: Path, hicache: Hicache
) -> None:
    said = hicache("hits", write(tmp_path / HOSTILE, *rows), *words)
    told = (said.out + said.err).replace(str(tmp_path / HOSTILE), "").replace(f"request {HOSTILE} ", "")
    assert [line for line in told.splitlines() if not line.isprintable()] == []
    assert "internal" not in said.err


def test_a_rid_of_a_log_does_not_move_the_cursor(tmp_path: Path, hicache: Hicache) -> None:
    records = [{"kind": "request", "rid": HOSTILE, "input_tokens": 10}]
    path = write_lane(tmp_path, records)
    for words in ([], ["--why", HOSTILE], ["--why", HOSTILE, "--quiet"], ["--by", "reason"]):
        said = hicache("hits", path, *words)
        assert said.code == 0
        assert [line for line in said.out.splitlines() if not line.isprintable()] == []


def test_a_key_and_a_name_that_are_no_unicode_are_told_all_the_same(tmp_path: Path, hicache: Hicache) -> None:
    text = sample.benchmark(cache_report=sample.REPORT).replace('"tag"', '"\\ud800"')
    path = write(tmp_path / "\udcff.json", text)
    document = json.loads(hicache("hits", path, "--by", "tier", "--json").out)
    assert document["source"]["unknown_keys"] == {"\N{REPLACEMENT CHARACTER}": 1}
    assert document["source"]["files"][0]["file"] == "\N{REPLACEMENT CHARACTER}.json"


def test_a_folder_of_files_that_nobody_knows_says_what_can_be_read(tmp_path: Path, hicache: Hicache) -> None:
    (tmp_path / "notes.txt").write_text("hello\n")
    said = hicache("hits", tmp_path)
    assert said.code == 3
    assert said.err.startswith(
        f"error: {tmp_path} has no file that hits can read\n  expected  a run's logs, "
    )
