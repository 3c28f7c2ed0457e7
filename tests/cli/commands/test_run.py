from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Hicache

SMALL = ("--agentic", "conversations=2,rounds=2,max-context=512,output=4,shared-prefix=64")
# Raises in the middle of a run, as Ctrl-C does.
INTERRUPTING = """
from hicache.control.agreement import MinThenChain

class Interrupting(MinThenChain):
    rounds = 0

    async def agree(self, local, **more):
        self.rounds += 1
        if self.rounds == 5:
            raise KeyboardInterrupt
        return await super().agree(local, **more)

def wire(parts):
    parts.agreement = lambda transport, pp_rank: Interrupting(transport, pp_rank=pp_rank)
"""


def trace_file(path: Path, lines: int = 3) -> Path:
    """A trace of blocks of 16 tokens; each request has one block more than the one before."""
    rows = [
        {
            "timestamp": 10 * n,
            "input_length": 16 * (n + 1),
            "output_length": 2,
            "hash_ids": list(range(n + 1)),
        }
        for n in range(lines)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_a_run_writes_one_log_a_rank_and_says_what_to_do_next(tmp_path: Path, hicache: Hicache) -> None:
    out = tmp_path / "made" / "here"
    said = hicache("run", *SMALL, "--tp", 2, "--out", out)
    assert (said.code, said.err) == (0, "")
    first, *rest = said.out.splitlines()
    assert first.startswith("COMPLETED  4 requests served in ")
    assert first.endswith("on 2 ranks (dp=1 pp=1 cp=1 tp=2)")
    assert f"  next    hicache check {out}" == rest[-1]
    names = [f"rank000{rank}.{end}" for rank in (0, 1) for end in ("meta.json", "scheduler.000.jsonl")]
    assert sorted([*names, "run.json"]) == sorted(file.name for file in out.iterdir())


def test_a_run_that_hangs_has_done_its_work(runs: Path, tmp_path: Path, hicache: Hicache) -> None:
    plan = json.loads((runs / "hung" / "run.json").read_text())
    bug, fault = plan["bugs"][0], plan["faults"][0]
    said = hicache("run", "--tp", 4, "--bug", bug, "--fault", fault, *SMALL, "--out", tmp_path, "--json")
    assert said.code == 0
    document = json.loads(said.out)
    assert ("hicache.run.v1", [bug], [fault]) == (document["schema"], document["bugs"], document["faults"])


def test_quiet_is_one_line(tmp_path: Path, hicache: Hicache) -> None:
    for number, more in enumerate(((), ("--dp", 2, "--pp", 2, "--device-pages", 5))):
        said = hicache("run", *SMALL, *more, "--quiet", "--out", tmp_path / str(number))
        assert said.out.count("\n") == 1
        assert said.out.endswith(")\n")


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_trace_file_runs_without_its_answers_in_the_tree(
    name: str, tmp_path: Path, hicache: Hicache
) -> None:
    trace = trace_file(tmp_path / name)
    out = tmp_path / "out"
    said = hicache("run", "--workload", trace, "--page-size", 16, "--limit", 2, "--out", out, "--json")
    assert said.code == 0
    assert json.loads(said.out)["requests_served"] == 2
    config = json.loads((out / "run.json").read_text())["config"]
    assert (config["cache_output"], config["decode_steps"]) == (False, "one")


def test_a_trace_file_can_be_decoded_token_by_token(tmp_path: Path, hicache: Hicache) -> None:
    trace = trace_file(tmp_path / "trace.jsonl")
    words = ("run", "--workload", trace, "--page-size", 16, "--decode-steps", "all", "--no-cache-output")
    assert hicache(*words, "--out", tmp_path / "out").code == 0


def test_replicas_share_a_limit(tmp_path: Path, hicache: Hicache) -> None:
    said = hicache("run", *SMALL, "--dp", 2, "--limit", 3, "--out", tmp_path, "--json")
    assert json.loads(said.out)["requests_served"] == 3


def test_equal_options_give_equal_bytes(tmp_path: Path, hicache: Hicache) -> None:
    for name in ("a", "b"):
        assert hicache("run", *SMALL, "--tp", 2, "--seed", 3, "--out", tmp_path / name).code == 0
    for log in sorted((tmp_path / "a").glob("*.jsonl")):
        assert log.read_bytes() == (tmp_path / "b" / log.name).read_bytes()


def test_the_seed_moves_the_conversations_unless_they_have_their_own(
    tmp_path: Path, hicache: Hicache
) -> None:
    def workload(*words: object) -> str:
        said = hicache("run", "--json", "--overwrite", "--out", tmp_path, *words)
        return str(json.loads(said.out)["workload"])

    assert "seed=7" in workload(*SMALL, "--seed", 7)
    assert "seed=3" in workload("--agentic", "conversations=1,rounds=1,seed=3", "--seed", 7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mode", "mpi"], "error: --mode mpi is not known\n  expected  sim, threads or gloo\n"),
        (["--model", "tiny-mha"], "error: --model tiny-mha is not supported yet\n  expected  none\n"),
        (
            ["--hicache-write-policy", "never"],
            "error: --hicache-write-policy never is not known\n"
            "  expected  write_through, write_through_selective or write_back\n",
        ),
        (
            ["--hicache-storage-backend", "redis"],
            "error: --hicache-storage-backend redis is not supported yet\n  expected  none, memory or file\n",
        ),
        (
            ["--hicache-storage-backend", "dynamic"],
            "error: --hicache-storage-backend dynamic is not supported yet\n"
            "  expected  none, memory or file\n",
        ),
        (
            ["--hicache-host-memory-mode", "buffer_only"],
            "error: --hicache-host-memory-mode buffer_only is not supported yet\n  expected  cache\n",
        ),
        (
            ["--side-pools", "draft,swa"],
            "error: --side-pools swa is not supported yet\n  expected  draft, indexer or mamba\n",
        ),
        (
            ["--enable-streaming-session"],
            "error: --enable-streaming-session is not supported yet\n"
            "  try       without --enable-streaming-session\n",
        ),
        (
            ["--external-linker"],
            "error: --enable-unified-cache-external-linker is not supported yet\n"
            "  try       without --enable-unified-cache-external-linker\n",
        ),
        (["--meeting-guard", "maybe"], "error: --meeting-guard maybe is not known\n  expected  on or off\n"),
        (["--trace", "some"], "error: --trace some is not known\n  expected  full, ring or off\n"),
        (
            ["--admin", "attach@3"],
            "error: --admin attach without an external tier\n"
            "  expected  --hicache-storage-backend memory or file\n",
        ),
        (
            ["--workload", "x", "--agentic", "y"],
            "error: --workload and --agentic exclude each other\n  expected  one source of requests\n",
        ),
    ],
)
def test_what_this_version_cannot_do_is_refused(
    words: list[str], message: str, tmp_path: Path, hicache: Hicache
) -> None:
    said = hicache("run", *words, "--out", tmp_path / "out")
    assert (2, "", message) == (said.code, said.out, said.err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--page-size", "0"],
        ["--tp", "0"],
        ["--seed", "-5"],
        ["--bug", "nope"],
        ["--fault", "nope"],
        ["--fault", "alloc_fail:rank=9,pool=host,nth=1"],
        ["--schedule", "nope"],
        ["--agentic", "nope=1"],
        ["--plugin", "nope.py"],
        ["--plugin", "x" * 300],
        ["--limit", "0"],
        ["--decode-steps", "two"],
        ["--chunked-prefill-size", "9"],
        ["--decode-reserve", "101"],
        ["--side-pools", "draft,draft"],
        ["--admin", "nope@1"],
        ["--timeout", "0"],
        ["--trace-limit", "5"],
        ["--trace", "ring", "--trace-age", "0"],
        ["--trace-share", "91"],
        ["--hicache-storage-backend", "file"],
        ["--hicache-storage-backend-extra-config", "{"],
    ],
    ids=" ".join,
)
def test_a_value_that_does_not_fit_is_code_2_and_leaves_no_folder(
    words: list[str], tmp_path: Path, hicache: Hicache
) -> None:
    said = hicache("run", *words, "--out", tmp_path / "out")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: ")
    name = {"--decode-reserve": "decode reserve", "--admin": "nope@1"}.get(words[0], words[0])
    assert name in said.err
    assert not (tmp_path / "out").exists()


def test_answers_of_a_trace_file_cannot_be_cached(tmp_path: Path, hicache: Hicache) -> None:
    trace = trace_file(tmp_path / "trace.jsonl")
    said = hicache("run", "--workload", trace, "--cache-output", "--out", tmp_path / "out")
    assert said.code == 2
    assert "a trace file does not know the tokens of the answers" in said.err


def test_a_workload_that_cannot_be_read_is_code_3_and_costs_no_logs(tmp_path: Path, hicache: Hicache) -> None:
    out = tmp_path / "out"
    assert hicache("run", *SMALL, "--out", out).code == 0
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    said = hicache("run", "--workload", tmp_path / "nope", "--out", out, "--overwrite")
    assert (3, f"error: {tmp_path / 'nope'}: No such file or directory\n") == (said.code, said.err)
    assert before == {file.name: file.read_bytes() for file in out.iterdir()}


def test_a_workload_that_is_damaged_later_on_is_code_3(tmp_path: Path, hicache: Hicache) -> None:
    trace = trace_file(tmp_path / "trace.jsonl")
    trace.write_text(trace.read_text() + "{cut")
    said = hicache("run", "--workload", trace, "--page-size", 16, "--out", tmp_path / "out")
    assert said.code == 3
    assert f"{trace} line 4" in said.err


def test_a_folder_with_a_run_is_not_written_over(tmp_path: Path, hicache: Hicache) -> None:
    assert hicache("run", *SMALL, "--out", tmp_path).code == 0
    said = hicache("run", *SMALL, "--out", tmp_path)
    assert said.code == 2
    assert said.err == (
        f"error: {tmp_path} holds a run already (3 files, rank0000.meta.json the first)\n"
        "  expected  a folder without logs\n"
        "  try       another --out, or --overwrite to replace that run\n"
    )


def test_overwrite_removes_the_old_run_and_nothing_else(tmp_path: Path, hicache: Hicache) -> None:
    assert hicache("run", *SMALL, "--tp", 2, "--out", tmp_path).code == 0
    kept = ["notes.txt", "rank.jsonl", "rank0001.jsonl", "rank0001.meta.json.bak", "rank0002.scheduler.jsonl"]
    for name in kept:
        (tmp_path / name).write_text("mine")
    (tmp_path / "rank0009.meta.json").mkdir()
    assert hicache("run", *SMALL, "--out", tmp_path, "--overwrite").code == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(
        [*kept, "rank0000.meta.json", "rank0000.scheduler.000.jsonl", "rank0009.meta.json", "run.json"]
    )


def test_out_that_is_a_file_is_refused(tmp_path: Path, hicache: Hicache) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        said = hicache("run", *SMALL, "--out", out)
        assert said.code == 2
        assert "is a file" in said.err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--side-pool-slots", "5"], "--side-pool-slots"),
        (["--host-pages", "5", "--no-hierarchical-cache"], "--host-pages"),
        (["--hicache-write-policy", "write_back", "--no-hierarchical-cache"], "--hicache-write-policy"),
        (["--hicache-storage-prefetch-policy", "timeout"], "--hicache-storage-prefetch-policy"),
        (["--trace-limit", "99999"], "--trace-limit"),
        (["--trace-age", "9"], "--trace-age"),
        (["--trace-share", "9"], "--trace-share"),
        (["--timeout", "5"], "--timeout"),
        (["--seed", "2", "--schedule", "list:0", "--agentic", "seed=1"], "--seed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_that_would_change_nothing_is_refused(
    words: list[str], option: str, tmp_path: Path, hicache: Hicache
) -> None:
    said = hicache("run", *words, "--out", tmp_path / "out")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"error: {option} changes nothing here\n  expected  ")
    assert not (tmp_path / "out").exists()


def test_a_seed_beside_a_schedule_draws_the_conversations(tmp_path: Path, hicache: Hicache) -> None:
    words = (*SMALL, "--seed", 5, "--schedule", "seed:3", "--out", tmp_path, "--json")
    document = json.loads(hicache("run", *words).out)
    assert ("seed=5" in document["workload"], document["schedule"]) == (True, "seed:3")


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--out", ""],
        ["run", "--workload", "", "--out", "x"],
        ["run", "--plugin", "", "--out", "x"],
        ["run", "--plan-out", "", "--out", "x"],
        ["zoo", "run", "skip_collective_when_empty", "--out", ""],
        ["demo", "--out", ""],
        ["check", ""],
        ["hits", ""],
        ["query", "", "SELECT 1"],
        ["query", "x", "SELECT 1", "--out", ""],
    ],
    ids=" ".join,
)
def test_an_empty_path_is_not_the_current_folder(
    words: list[str], tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = hicache(*words)
    assert (said.code, said.out) == (2, "")
    assert "it is empty; expected a path" in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--agentic", "rounds=99999999999"], "rounds=99999999999, expected 1..100000"),
        (["--agentic", "think=x"], "expected a whole number 0..1000"),
        (["--seed", "99999999999"], "invalid value for '--seed'"),
        (["--fault", "delay_done:rank=0,queue=write,op=1,steps=99999999999"], "steps is at most 2000"),
        (["--fault", "alloc_fail:rank=0,pool=host,nth=99999999999"], "nth is at most 999999999"),
    ],
)
def test_a_number_out_of_range_is_told_with_its_range(
    words: list[str], told: str, tmp_path: Path, hicache: Hicache
) -> None:
    said = hicache("run", *words, "--out", tmp_path / "out")
    assert (said.code, told in said.err) == (2, True), said.err


def test_a_trace_mode_from_the_environment_is_named_by_its_variable(
    tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHE_TRACE", "foo")
    said = hicache("run", *SMALL, "--out", tmp_path / "out")
    assert (said.code, said.err) == (
        2,
        "error: HICACHE_TRACE=foo: foo is not known\n  expected  full, ring or off\n",
    )


def test_trace_off_leaves_only_the_summary(tmp_path: Path, hicache: Hicache) -> None:
    said = hicache("run", *SMALL, "--trace", "off", "--out", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]
    assert "  logs    none;" in said.out
    # Nothing is suggested that would put another run in the place of this one.
    for words in (("check", tmp_path), ("hits", tmp_path), ("query", tmp_path, "--schema")):
        said = hicache(*words)
        assert said.code == 3
        assert "was made with --trace off" in said.err
        assert said.err.endswith(
            "try       the same run again with --trace full, and another --out or --overwrite\n"
        )


def test_more_ranks_than_open_files_are_refused_beforehand(
    tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    said = hicache("run", *SMALL, "--tp", 64, "--out", tmp_path / "out")
    assert (said.code, said.err) == (
        2,
        "error: 64 ranks need 96 open files, one log each; the limit is 64\n"
        "  try       ulimit -n 96, or --trace off\n",
    )
    assert not (tmp_path / "out").exists()


def test_an_interrupted_run_is_code_130_and_its_logs_can_be_read(tmp_path: Path, hicache: Hicache) -> None:
    plugin = tmp_path / "interrupting.py"
    plugin.write_text(INTERRUPTING)
    out = tmp_path / "out"
    said = hicache("run", *SMALL, "--tp", 2, "--plugin", plugin, "--out", out, "--json")
    assert (130, "", f"interrupted; the logs up to here are in {out}\n") == (said.code, said.out, said.err)
    said = hicache("check", out, "--json")
    assert said.code == 4
    assert json.loads(said.out)["coverage"]["compared_calls"] > 0


@pytest.mark.parametrize(("mode", "outcome"), [("sim", "interrupted"), ("threads", "interrupted")])
def test_sigterm_ends_a_run_like_ctrl_c_and_is_code_143(
    mode: str, outcome: str, tmp_path: Path, hicache: Hicache
) -> None:
    plugin = tmp_path / "told.py"
    plugin.write_text(
        INTERRUPTING.replace("raise KeyboardInterrupt", "os.kill(os.getpid(), signal.SIGTERM)").replace(
            "from hicache", "import os, signal\nfrom hicache", 1
        )
    )
    out = tmp_path / "out"
    said = hicache("run", *SMALL, "--tp", 2, "--mode", mode, "--plugin", plugin, "--out", out)
    assert (143, "", f"stopped by SIGTERM; the logs up to here are in {out}\n") == (
        said.code,
        said.out,
        said.err,
    )
    assert json.loads((out / "run.json").read_text())["outcome"] == outcome
    assert not (out / ".hicache.lock").exists()
    assert hicache("check", out).code == 4


def test_a_plugin_is_wired_in_and_named_in_the_summary(tmp_path: Path, hicache: Hicache) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from hicache.sim.bugs import local_host_room_decides_backup\n"
        "def wire(parts):\n    local_host_room_decides_backup(parts)\n"
    )
    fault = "alloc_fail:rank=1,pool=host,nth=2"
    said = hicache("run", *SMALL, "--tp", 3, "--plugin", plugin, "--fault", fault, "--out", tmp_path / "out")
    assert said.code == 0
    assert [f"plugin {plugin}"] == json.loads((tmp_path / "out" / "run.json").read_text())["bugs"]
    said = hicache("check", tmp_path / "out", "--json")
    assert (said.code, json.loads(said.out)["ranks"]["culprit"]) == (10, [1])


def test_a_plugin_that_fails_is_named_with_its_rank_and_leaves_no_log(
    tmp_path: Path, hicache: Hicache
) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text("def wire(parts):\n    1 / 0\n")
    said = hicache("run", *SMALL, "--plugin", plugin, "--out", tmp_path / "out")
    assert said.code == 2
    assert (
        said.err
        == f"error: --plugin {plugin}: wire(parts) failed on rank 0: ZeroDivisionError: division by zero\n"
    )
    assert list((tmp_path / "out").iterdir()) == []


def test_requests_that_never_fit_are_refused_and_not_served(tmp_path: Path, hicache: Hicache) -> None:
    said = hicache("run", *SMALL, "--device-pages", 5, "--out", tmp_path / "out")
    assert said.code == 0
    assert "COMPLETED  2 requests served, 2 refused as too long" in said.out


def test_a_run_in_which_nothing_happens_any_more_hangs_and_does_not_go_on_for_ever(
    tmp_path: Path, hicache: Hicache
) -> None:
    """Every rank waits for a copy that a substitution never lets finish."""
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from hicache.control.agreement import MinThenChain\n"
        "class Never(MinThenChain):\n"
        "    async def agree(self, local, **more):\n"
        "        agreed = await super().agree(local, **more)\n"
        "        return [0, 0, *agreed[2:]] if more['purpose'] == 'event_round' else agreed\n"
        "def wire(parts):\n"
        "    parts.agreement = lambda transport, pp_rank: Never(transport, pp_rank=pp_rank)\n"
    )
    said = hicache("run", *SMALL, "--tp", 2, "--plugin", plugin, "--out", tmp_path / "out")
    assert said.code == 0
    assert said.out.startswith("HUNG")
    assert "nothing for 5000 steps" in " ".join(said.out.split())
    assert hicache("check", tmp_path / "out").code == 15


def test_defaults_are_those_of_the_configuration(tmp_path: Path, hicache: Hicache) -> None:
    from hicache.config import Config

    assert hicache("run", *SMALL, "--out", tmp_path).code == 0
    assert json.loads((tmp_path / "run.json").read_text())["config"] == json.loads(
        json.dumps(Config().describe())
    )


def test_every_option_of_the_cache_reaches_the_configuration(tmp_path: Path, hicache: Hicache) -> None:
    extra = json.dumps({"prefetch_threshold": 128, "hicache_storage_pass_prefix_keys": True})
    words = (
        *("--hicache-write-policy", "write_through_selective", "--radix-eviction-policy", "slru"),
        *("--hicache-storage-backend", "memory", "--hicache-storage-backend-extra-config", extra),
        *("--hicache-storage-prefetch-policy", "best_effort"),
        *("--hicache-storage-prefetch-retry-poll-interval", 3),
        *("--hicache-storage-prefetch-retry-max-attempts", 5),
        *("--chunked-prefill-size", 128, "--enable-priority-scheduling", "--side-pools", "draft,mamba"),
        *("--side-pool-slots", 40, "--decode-reserve", 70, "--meeting-guard", "on", "--in-band-digest"),
    )
    assert hicache("run", *SMALL, *words, "--tp", 2, "--out", tmp_path).code == 0
    summary = json.loads((tmp_path / "run.json").read_text())
    config = summary["config"]
    storage = config["storage"]
    assert summary["outcome"] == "completed"
    assert (config["write_policy"], config["eviction_policy"]) == ("write_through_selective", "slru")
    assert (config["chunked_prefill_tokens"], config["decode_reserve_percent"]) == (128, 70)
    assert (config["side_pools"], config["side_pool_slots"]) == (["draft", "mamba"], 40)
    assert (config["priority_scheduling"], config["meeting_guard"], config["in_band_digest"]) == (
        True,
        True,
        True,
    )
    assert (storage["backend"], storage["prefetch_policy"], storage["pass_prefix_keys"]) == (
        "memory",
        "best_effort",
        True,
    )
    numbers = ("prefetch_threshold_tokens", "retry_poll_interval", "retry_max_attempts")
    assert [storage[name] for name in numbers] == [128, 3, 5]


def test_with_an_external_tier_each_lane_of_a_rank_has_a_log(tmp_path: Path, hicache: Hicache) -> None:
    said = hicache("run", *SMALL, "--hicache-storage-backend", "memory", "--out", tmp_path)
    assert said.code == 0
    assert "(one for each lane of a rank, and run.json)" in " ".join(said.out.split())
    lanes = {file.name.split(".")[1] for file in tmp_path.glob("rank0000.*.jsonl")}
    assert lanes == {"scheduler", "prefetch", "io", "sync", "backup"}


def test_the_folder_of_a_file_store_comes_from_the_extra_config_or_the_environment(
    tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def directory(name: str, *words: object) -> str:
        said = hicache("run", *SMALL, "--hicache-storage-backend", "file", *words, "--out", tmp_path / name)
        assert (said.code, said.err) == (0, "")
        summary = json.loads((tmp_path / name / "run.json").read_text())
        return str(summary["config"]["storage"]["directory"])

    extra = ("--hicache-storage-backend-extra-config", json.dumps({"file_storage_path": str(tmp_path / "s")}))
    assert directory("a", *extra) == str(tmp_path / "s")
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "e"))
    assert directory("b", *extra) == str(tmp_path / "e")


def test_the_environment_sets_how_much_is_traced_and_the_option_wins(
    tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHE_TRACE", "off")
    assert hicache("run", *SMALL, "--out", tmp_path / "a").code == 0
    assert list((tmp_path / "a").glob("*.jsonl")) == []
    assert hicache("run", *SMALL, "--trace", "full", "--out", tmp_path / "b").code == 0
    assert list((tmp_path / "b").glob("*.jsonl")) != []


def test_a_ring_keeps_the_newest_within_its_limit(tmp_path: Path, hicache: Hicache) -> None:
    long = ("--agentic", "conversations=6,rounds=20,max-context=3000,output=32")
    words = (*long, "--tp", 2, "--trace", "ring", "--trace-limit", 1 << 17)
    said = hicache("run", *words, "--out", tmp_path)
    assert said.code == 0
    for rank in (0, 1):
        sizes = [file.stat().st_size for file in tmp_path.glob(f"rank000{rank}.*.jsonl*")]
        assert 0 < sum(sizes) <= 1 << 17


def test_an_operator_can_attach_the_external_tier_later(tmp_path: Path, hicache: Hicache) -> None:
    words = ("--hicache-storage-backend", "memory", "--admin", "attach@2,flush@40")
    said = hicache("run", *SMALL, "--tp", 2, *words, "--out", tmp_path)
    assert said.code == 0
    summary = json.loads((tmp_path / "run.json").read_text())
    assert (summary["outcome"], summary["commands"]) == ("completed", ["attach@2", "flush@40"])
    assert summary["config"]["storage"]["attached"] is False


def test_ranks_can_be_threads(tmp_path: Path, hicache: Hicache) -> None:
    said = hicache("run", *SMALL, "--tp", 2, "--mode", "threads", "--out", tmp_path, "--json")
    document = json.loads(said.out)
    assert (said.code, document["mode"], document["outcome"]) == (0, "threads", "completed")
    assert hicache("check", tmp_path, "--quiet").code == 0


def test_a_plan_for_torchrun_is_written_and_nothing_is_run(tmp_path: Path, hicache: Hicache) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    said = hicache("run", *SMALL, "--tp", 2, "--pp", 2, "--plan-out", plan, "--out", out)
    assert (said.code, said.out) == (
        0,
        f"torchrun --nproc-per-node 4 -m hicache.worker --plan {plan} --out {out} --trace full "
        "--timeout 60\n",
    )
    assert json.loads(plan.read_text())["config"]["topology"] == {"dp": 1, "pp": 2, "cp": 1, "tp": 2}
    assert not out.exists()


def test_processes_without_torch_are_one_error_that_says_how_to_get_it(
    tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = hicache("run", *SMALL, "--mode", "gloo", "--tp", 2, "--out", tmp_path / "out")
    assert (said.code, said.out, said.err) == (
        2,
        "",
        "error: --mode gloo needs torch, which is not installed; pip install 'hicache-toolkit[runtime]'\n",
    )


def test_the_help_shows_options_by_what_they_are_about(hicache: Hicache) -> None:
    said = hicache("run", "--help").out
    heads = ["Options:", "Requests:", "Ranks:", "Device and host:", "External tier:", "Scheduling:"]
    heads += ["Chance, and what goes wrong:", "Recording:"]
    assert [line for line in said.splitlines() if line in heads] == heads
    assert "--enable-streaming-session" not in said, "what is only there to be refused"
