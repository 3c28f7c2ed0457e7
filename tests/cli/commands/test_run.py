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

    async def agree(self, local, *, transfers_in_flight):
        self.rounds += 1
        if self.rounds == 5:
            raise KeyboardInterrupt
        return await super().agree(local, transfers_in_flight=transfers_in_flight)

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
        (["--mode", "gloo"], "error: --mode gloo is not supported yet\n  expected  sim\n"),
        (["--model", "tiny-mha"], "error: --model tiny-mha is not supported yet\n  expected  none\n"),
        (
            ["--hicache-write-policy", "write_back"],
            "error: --hicache-write-policy write_back is not supported yet\n  expected  write_through\n",
        ),
        (
            ["--radix-eviction-policy", "lfu"],
            "error: --radix-eviction-policy lfu is not supported yet\n  expected  lru\n",
        ),
        (
            ["--hicache-storage-backend", "redis"],
            "error: --hicache-storage-backend redis is not supported yet\n  expected  none\n",
        ),
        (["--meeting-guard", "on"], "error: --meeting-guard on is not supported yet\n  expected  off\n"),
        (["--trace", "ring"], "error: --trace ring is not supported yet\n  expected  full or off\n"),
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
    ],
    ids=" ".join,
)
def test_a_value_that_does_not_fit_is_code_2_and_leaves_no_folder(
    words: list[str], tmp_path: Path, hicache: Hicache
) -> None:
    said = hicache("run", *words, "--out", tmp_path / "out")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: ")
    assert words[0] in said.err
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
        assert hicache("run", *SMALL, "--out", out).code == 2
    assert (tmp_path / "file").read_text() == "mine"


def test_trace_off_leaves_only_the_summary(tmp_path: Path, hicache: Hicache) -> None:
    said = hicache("run", *SMALL, "--trace", "off", "--out", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]
    assert "  logs    none;" in said.out
    # What is suggested works in this very folder.
    said = hicache("check", tmp_path)
    assert said.code == 3
    words = said.err.splitlines()[-1].split()
    assert words[:2] == ["try", "hicache"]
    assert hicache(*words[2:]).code == 0


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
        "from hicache.control.agreement import Counts, MinThenChain\n"
        "class Never(MinThenChain):\n"
        "    async def agree(self, local, *, transfers_in_flight):\n"
        "        agreed = await super().agree(local, transfers_in_flight=transfers_in_flight)\n"
        "        return Counts(0, 0, agreed.backups)\n"
        "def wire(parts):\n"
        "    parts.agreement = lambda transport, pp_rank: Never(transport, pp_rank=pp_rank)\n"
    )
    said = hicache("run", *SMALL, "--tp", 2, "--plugin", plugin, "--out", tmp_path / "out")
    assert said.code == 0
    assert said.out.startswith("HUNG")
    assert "nothing for 5000 steps" in " ".join(said.out.split())
    assert hicache("check", tmp_path / "out").code == 15
