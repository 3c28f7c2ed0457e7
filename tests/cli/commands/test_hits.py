from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Hicache
from tests.support.golden import assert_golden
from tests.support.logs import write_lane, write_run
from tracer.hits import hits
from tracer.log import find_logs
from tracer.record import Kind

# Readers go by names; what a kind declares does not matter to the hit analysis.
SMALL = tuple(Kind(name, "note") for name in ("request", "match", "admit", "forward", "finish"))
GROUPINGS = ["request", "tier", "conversation", "prefix", "reason", "time"]


@pytest.mark.parametrize("by", GROUPINGS)
def test_json_is_the_document_of_the_hit_analysis(by: str, inside: Path, hicache: Hicache) -> None:
    said = hicache("hits", "twin", "--by", by, "--json")
    assert (said.code, said.err) == (0, "")
    document = json.loads(said.out)
    assert hits(find_logs("twin"), by=by).to_json() == document
    assert ("hicache.hits.v1", by) == (document["schema"], document["by"])


def test_json_accounts_for_every_token_once(inside: Path, hicache: Hicache) -> None:
    rows = json.loads(hicache("hits", "twin", "--json").out)["rows"]
    parts = ("device", "host", "storage", "computed")
    assert [row["input_tokens"] for row in rows] == [sum(row[part] for part in parts) for row in rows]


@pytest.mark.parametrize("by", GROUPINGS)
def test_tables_fit_the_screen(by: str, inside: Path, hicache: Hicache) -> None:
    said = hicache("hits", "hung", "--by", by)
    assert said.code == 0
    assert [line for line in said.out.splitlines() if len(line) > 80 or "\x1b" in line] == []


def test_steps_choose_the_arrivals_that_count(inside: Path, hicache: Hicache) -> None:
    requests = [
        json.loads(hicache("hits", "twin", "--json", *words).out)["requests"]
        for words in ([], ["--until", "0"], ["--since", "1"])
    ]
    assert requests[0] == requests[1] + requests[2]
    assert requests[1] > 0


def test_one_request_can_be_counted_alone(inside: Path, hicache: Hicache) -> None:
    document = json.loads(hicache("hits", "twin", "--rid", "c0.t2", "--json").out)
    assert (document["requests"], [row["rid"] for row in document["rows"]]) == (1, ["c0.t2"])


def test_why_tells_the_story_of_one_request(inside: Path, hicache: Hicache) -> None:
    said = hicache("hits", "twin", "--why", "c0.t2")
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0].startswith("c0.t2")
    assert "received with" in said.out
    assert "tokens decoded" in said.out
    assert sum("(decode)" in line for line in lines) == 0
    assert [line for line in lines if len(line) > 80] == []


def test_why_as_json_has_the_row_and_every_moment(inside: Path, hicache: Hicache) -> None:
    document = json.loads(hicache("hits", "twin", "--why", "c0.t2", "--json").out)
    assert (document["schema"], document["request"]["rid"]) == ("hicache.why.v1", "c0.t2")
    kinds = [moment["kind"] for moment in document["story"]]
    assert kinds[0] == "request"
    assert {"match", "admit", "forward", "finish"} <= set(kinds)


@pytest.mark.parametrize("option", ["--why", "--rid"])
def test_a_request_that_is_not_there_is_a_usage_error(option: str, inside: Path, hicache: Hicache) -> None:
    said = hicache("hits", "twin", option, "r999")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: no request r999 among the 72 counted in twin\n  expected  c0.t1, ")


def test_an_unknown_grouping_is_a_usage_error(inside: Path, hicache: Hicache) -> None:
    said = hicache("hits", "twin", "--by", "weather")
    assert (said.code, said.out, said.err) == (
        2,
        "",
        "error: --by weather is not known\n  expected  request, tier, conversation, prefix, reason or time\n",
    )


def test_a_run_whose_loads_were_declined_says_so(tmp_path: Path, hicache: Hicache) -> None:
    """Host hits of fewer than 10 tokens are computed again; the runtime says so behind the admission."""
    spec = "conversations=40,rounds=8,max-context=80,output=2,shared-prefix=4"
    sizes = ("--page-size", 4, "--device-pages", 100, "--host-pages", 4000, "--concurrency", 2, "--seed", 3)
    assert hicache("run", "--agentic", spec, *sizes, "--out", tmp_path, "--quiet").code == 0
    logs = "".join(path.read_text() for path in tmp_path.glob("rank0000.*.jsonl"))
    declined = {json.loads(line)["rid"] for line in logs.splitlines() if '"declined":"too_short"' in line}
    rows = json.loads(hicache("hits", tmp_path, "--json").out)["rows"]
    assert declined
    assert declined == {row["rid"] for row in rows if row["reason"] == "declined_too_short"}


def test_the_headline_has_both_rates_when_some_were_not_served(tmp_path: Path, hicache: Hicache) -> None:
    assert hicache("run", *SMALL_RUN, "--device-pages", 5, "--out", tmp_path, "--quiet").code == 0
    said = " ".join(hicache("hits", tmp_path, "--by", "tier").out.split())
    assert "over the served prompts alone" in said
    assert "2 requests were refused (too long)" in said
    document = json.loads(hicache("hits", tmp_path, "--by", "tier", "--json").out)
    assert "unaccounted" not in document
    assert sum(row["share"] for row in document["rows"]) == pytest.approx(1, abs=1e-5)


SMALL_RUN = ("--agentic", "conversations=2,rounds=2,max-context=512,output=4,shared-prefix=64")

# rid, prompt, device, host, computed tokens, digit of the digest of the first page missed
REQUESTS = (("r0", 200, 0, 0, 200, "a"), ("r1", 264, 128, 64, 72, "c"), ("r2", 128, 64, 0, 64, ""))


def small_run(folder: Path) -> Path:
    """Three requests of literal numbers; the last one is never admitted."""
    records: list[dict[str, object]] = []
    for step, (rid, tokens, device, host, computed, missed) in enumerate(REQUESTS):
        digest = missed * 16
        records += [
            {"step": step, "kind": "request", "rid": rid, "input_tokens": tokens, "conversation": "c0"},
            {"step": step, "kind": "match", "rid": rid, "device_tokens": device, "host_tokens": host}
            | {"miss_digest": digest},
        ]
        if rid != "r2":
            records += [
                {"step": step, "kind": "admit", "rid": rid, "verdict": "admitted", "device_tokens": device}
                | {"host_tokens": host, "storage_tokens": 0, "extend_tokens": computed},
                {
                    "step": step,
                    "kind": "forward",
                    "mode": "extend",
                    "rids": [rid],
                    "computed_tokens": [computed],
                },
                {"step": step, "kind": "finish", "rid": rid, "output_tokens": 8, "reason": "stop"},
            ]
    return write_run(folder, {0: records}, kinds=SMALL)


@pytest.mark.parametrize(
    "words", [["--by", "request"], ["--by", "tier"], ["--why", "r1"]], ids=lambda words: words[1]
)
def test_the_screen_reads_as_agreed(
    words: list[str], tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = hicache("hits", small_run(Path("last")), *words)
    assert (said.code, said.err) == (0, "")
    assert_golden(f"cli_hits_{words[1]}.txt", said.out)


def test_quiet_is_one_line(inside: Path, hicache: Hicache) -> None:
    for words in ((), ("--by", "tier"), ("--why", "c0.t2")):
        said = hicache("hits", "twin", "--quiet", *words)
        assert (said.code, said.out.count("\n"), said.err) == (0, 1, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--why", "c0.t2", "--by", "tier"], "--why and --by exclude each other"),
        (["--why", "c0.t2", "--since", "1"], "--why and --since exclude each other"),
        (["--rid", "c0.t2", "--by", "prefix"], "--rid and --by prefix exclude each other"),
        (["--since", "10", "--until", "5"], "--since 10 is behind --until 5"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    words: list[str], message: str, inside: Path, hicache: Hicache
) -> None:
    said = hicache("hits", "twin", *words)
    assert (said.code, said.out, said.err.splitlines()[0]) == (2, "", f"error: {message}")


def test_a_folder_of_runs_suggests_this_command(inside: Path, hicache: Hicache) -> None:
    assert hicache("hits", ".").err.endswith("try       hicache hits hung\n")
    assert hicache("hits", "twin/run.json").err.endswith("try       hicache hits twin\n")
    assert hicache("query", ".", "SELECT 1").err.endswith("try       hicache query hung --schema\n")


def test_a_story_with_records_that_make_no_sense_is_told(tmp_path: Path, hicache: Hicache) -> None:
    strange = [{"kind": "forward", "mode": "decode", "rids": 7, "computed_tokens": [1]}] * 3
    silent = [{"kind": "forward", "mode": "decode", "rids": ["r1", "r0"]} for _ in range(2)]
    short = {"kind": "forward", "mode": "decode", "rids": ["r1", "r0"], "computed_tokens": [5, 1]}
    request = {"kind": "request", "rid": "r0", "input_tokens": 10}
    said = hicache("hits", write_lane(tmp_path, [request, *strange, *silent, short]), "--why", "r0")
    assert (said.code, said.out.count("a record that lacks some of its fields")) == (0, 3)
    assert "1 token decoded" in said.out
