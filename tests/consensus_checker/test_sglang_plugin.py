"""The plugin in a server of a few lines: when it arms, what it records, and that it harms nobody."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from consensus_checker import sglang_plugin as plugin
from consensus_checker.check import check
from consensus_checker.sglang_session import CHECKER
from tests.support.fake_server import PAGE, SCHEDULER, FakeServer, Key, request
from tracer.log import LaneLog, find_logs

VARIABLES = (
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER",
    "HICACHE_TRACE",
    "HICACHE_TRACE_DIR",
    "HICACHE_TRACE_LIMIT",
    "HICACHE_CHECKER_POLICY",
    "RANK",
    "WORLD_SIZE",
)


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Nothing is asked for; logs, if any, go to `tmp_path`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        patch.setenv("HICACHE_TRACE_DIR", str(tmp_path))
        patch.setenv("HICACHE_DIGEST_KEY", "of this job")
        yield patch


def records(folder: Path, rank: int = 0, lane: str = "scheduler") -> list[Any]:
    (found,) = [log for log in find_logs(folder).lanes if (log.rank, log.lane) == (rank, lane)]
    return list(found.records())


def outcome(folder: Path, lane: str = "scheduler") -> str:
    (found,) = [log for log in find_logs(folder).lanes if (log.rank, log.lane) == (0, lane)]
    list(found.records())
    assert found.trailer is not None
    return str(found.trailer["outcome"])


def header(folder: Path) -> Any:
    found: LaneLog = find_logs(folder).lanes[0]
    return found.header


def test_installed_alone_it_changes_nothing(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The stock checker would ask for texts.
    with FakeServer(has_checker=False) as server:
        before = dict(vars(server.cache))
        plugin.entry()
        assert before == dict(vars(server.cache))
        server.run(0)
    assert list(tmp_path.iterdir()) == []


def test_off_beats_the_switch(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", "1")
    environment.setenv("HICACHE_TRACE", "off")
    with FakeServer() as server:
        before = dict(vars(server.cache))
        plugin.entry()
        assert before == dict(vars(server.cache))


def test_a_process_without_a_scheduler_is_left_alone(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("HICACHE_TRACE", "full")
    with FakeServer() as server:
        environment.delitem(sys.modules, SCHEDULER)
        before = dict(vars(server.cache))
        plugin.entry()
        assert before == dict(vars(server.cache))


@pytest.mark.parametrize("variable", ["SGLANG_ENABLE_RANK_CONSENSUS_CHECKER=1", "HICACHE_TRACE=full"])
def test_either_variable_arms_it_and_equal_ranks_are_consistent(
    environment: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    environment.setenv(*variable.split("="))
    with FakeServer() as server:
        plugin.entry()
        for rank in (0, 1):
            server.run(rank)
    verdict = check(find_logs(tmp_path))
    assert verdict.kind == "consistent"
    # Per rank 3 rounds of two records, and 3 requests with a match, an allocation, a backup and an insert.
    assert verdict.coverage.compared_calls == 3 * 2 + 3 * 5


def test_a_refused_backup_is_the_first_difference_and_both_values_are_named(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("HICACHE_TRACE", "full")
    with FakeServer() as server:
        plugin.entry()
        for rank in range(3):
            server.run(rank, size=3, refuse_at=2 if rank == 1 else None)
    verdict = check(find_logs(tmp_path))
    assert (verdict.kind, verdict.finding.culprit) == ("divergence", (1,))
    first = verdict.to_json()["first_divergence"]
    assert (first["by_rank"]["0"]["kind"], first["by_rank"]["1"]["kind"]) == ("alloc_host", "write_backup")


def test_a_skipped_event_round_is_found_at_the_round(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("HICACHE_TRACE", "full")
    with FakeServer() as server:
        plugin.entry()
        for rank in range(3):
            server.run(rank, size=3, rounds_skipped=(1,) if rank == 2 else ())
    verdict = check(find_logs(tmp_path))
    assert (verdict.kind, verdict.finding.culprit) == ("divergence", (2,))
    assert verdict.to_json()["first_divergence"]["call"] == "event_round"


def test_the_text_of_a_request_is_never_asked_for(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", "1")
    with FakeServer() as server:
        plugin.entry()
        # Its `repr` raises.
        server.run(0, size=1)
        assert server.told == []
    assert "r0" in {record.get("rid") for record in records(tmp_path)}


def test_no_token_is_in_a_log(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("HICACHE_TRACE", "full")
    with FakeServer() as server:
        plugin.entry()
        plugin.configure([[0, 1]], rank=0, world_size=2)
        secret = request("r0")
        secret.origin_input_ids[:] = type(secret.origin_input_ids)("q", [777_000_111] * 4 * PAGE)
        cache = server.cache(server.pools(), None)
        cache.match_prefix(SimpleNamespace(key=Key(secret.origin_input_ids, "tenant"), req=secret))
        cache.insert(SimpleNamespace(key=Key(secret.origin_input_ids), prev_prefix_len=0))
        plugin.assert_same("prompt %s", "tell nobody")
        plugin.shutdown()
    text = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"r0" in text
    for canary in (b"777000111", b"tell nobody", b"tenant"):
        assert canary not in text


def test_what_the_servers_own_code_asserts_is_compared_by_digest(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", "1")
    with FakeServer():
        plugin.entry()
        checker = sys.modules[CHECKER]
        for rank in (0, 1):
            checker.configure([[0, 1]], rank=rank, world_size=2)
            assert checker.enabled()
            checker.assert_same("admitted %d", 5 + rank)
            checker.shutdown()
            assert not checker.enabled()
    verdict = check(find_logs(tmp_path))
    assert (verdict.kind, verdict.to_json()["first_divergence"]["call"]) == ("divergence", "assert_same")


def test_another_threads_calls_are_not_recorded(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("HICACHE_TRACE", "full")
    with FakeServer() as server:
        plugin.entry()
        plugin.configure([[0, 1]], rank=0, world_size=2)
        cache = server.cache(server.pools(), None)
        thread = threading.Thread(target=cache.evict_host, args=(PAGE,))
        thread.start()
        thread.join()
        cache.evict_host(2 * PAGE)
        plugin.shutdown()
    found = [record for record in records(tmp_path) if record["kind"] == "evict_host"]
    assert [record["pages_wanted"] for record in found] == [2]


def test_a_version_without_the_checker_is_recorded_from_the_end_of_its_start(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("HICACHE_TRACE", "full")
    environment.setenv("RANK", "0")
    with FakeServer(has_checker=False) as server:
        plugin.entry()
        scheduler = server.scheduler.Scheduler(server.cache(server.pools(), None))
        scheduler.serve(request("r0"))
        plugin.shutdown()
    assert "match" in {record["kind"] for record in records(tmp_path)}


def test_what_a_version_lacks_is_listed_and_the_rest_is_recorded(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("HICACHE_TRACE", "full")
    with FakeServer(lacks=("evict_host",)) as server:
        plugin.entry()
        server.run(0, size=1)
        warnings = server.warnings
    assert (
        "mem_cache.unified_radix_cache.UnifiedRadixCache.evict_host"
        in header(tmp_path)["config"]["points_missing"]
    )
    assert any("evict_host" in text for text in warnings)
    assert "match" in {record["kind"] for record in records(tmp_path)}


def test_of_a_version_that_is_hardly_known_nobody_says_that_its_ranks_agree(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("HICACHE_TRACE", "full")
    with FakeServer(has_floor=True) as server:
        plugin.entry()
        for rank in (0, 1):
            server.run(rank)
    verdict = check(find_logs(tmp_path))
    assert verdict.kind == "incomplete"
    assert "decisions of this version" in verdict.finding.summary


def test_a_server_that_cannot_be_recorded_runs_and_says_so_once(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("HICACHE_TRACE", "full")
    with FakeServer() as server:
        plugin.entry()
        # No rank is known, and 5 is in none of the groups.
        plugin.configure([[0, 1]], rank=5, world_size=2)
        cache = server.cache(server.pools(), None)
        cache.insert(SimpleNamespace(key=Key(request("r0").origin_input_ids), prev_prefix_len=0))
        plugin.shutdown()
        (warning,) = [text for text in server.warnings if "not recorded" in text]
    assert cache.nodes == 1
    assert "rank 5" in warning


def test_stages_that_decide_by_turns_are_left_alone(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("HICACHE_TRACE", "full")
    context = SimpleNamespace(hicache_host_memory_mode="buffer_only")
    with FakeServer() as server:
        module = ModuleType("sglang.srt.runtime_context")
        vars(module)["get_server_args"] = lambda: context
        environment.setitem(sys.modules, "sglang.srt.runtime_context", module)
        plugin.entry()
        plugin.configure([[0], [0, 1], [0, 2]], rank=0, world_size=4)
        assert not plugin.enabled()
        (warning,) = server.warnings
    assert "buffer_only" in warning


def test_after_its_end_the_server_goes_on_unrecorded(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("HICACHE_TRACE", "full")
    with FakeServer() as server:
        plugin.entry()
        cache = server.run(0, size=1)
        before = len(records(tmp_path))
        cache.insert(SimpleNamespace(key=Key(request("r9").origin_input_ids), prev_prefix_len=0))
    assert before == len(records(tmp_path))
    assert outcome(tmp_path) == "completed"


def test_a_thread_that_died_is_named_by_its_lane(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("HICACHE_TRACE", "full")
    started, go_on = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        go_on.wait(10)
        raise LookupError("a page that is not there")

    with FakeServer() as server:
        plugin.entry()
        environment.setattr(threading, "excepthook", lambda args: None)
        # The server starts its threads before its scheduler says that it is ready.
        thread = server.threads(work).start()
        started.wait(10)
        plugin.configure([[0, 1]], rank=0, world_size=2)
        go_on.set()
        thread.join()
        (warning,) = [text for text in server.warnings if "died" in text]
        plugin.shutdown()
    states = [record["state"] for record in records(tmp_path, lane="backup") if "state" in record]
    assert (states, outcome(tmp_path, "backup")) == (["ended"], "crashed")
    assert "backup of rank 0 has died: LookupError" in warning


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_a_forked_child_writes_nothing(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("HICACHE_TRACE", "full")
    with FakeServer() as server:
        plugin.entry()
        plugin.configure([[0, 1]], rank=0, world_size=2)
        cache = server.cache(server.pools(), None)
        child = os.fork()
        if not child:
            cache.evict_host(7 * PAGE)
            os._exit(0)
        os.waitpid(child, 0)
        cache.evict_host(2 * PAGE)
        plugin.shutdown()
    found = [record for record in records(tmp_path) if record["kind"] == "evict_host"]
    assert [record["pages_wanted"] for record in found] == [2]


# What msgspec looks for by itself is none of ours.
ALLOWED = {"consensus_checker", "tracer", "msgspec", "xxhash", "typing_extensions"}


def test_what_a_server_loads_is_this_project_and_msgspec() -> None:
    # A server's environment has no duckdb, and torch is the server's own to import.
    code = (
        "import sys; before = set(sys.modules); import consensus_checker.sglang_plugin\n"
        "import consensus_checker.sglang_session, consensus_checker.live\n"
        "found = {name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names\n"
        "print(*sorted(name for name in found if not name.startswith('_')))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert set(done.stdout.split()) <= ALLOWED


def test_a_message_that_cannot_be_made_up_is_said_once(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("HICACHE_TRACE", "full")
    with FakeServer() as server:
        plugin.entry()
        plugin.configure([[0, 1]], rank=0, world_size=2)
        for _ in range(1000):
            plugin.assert_same("%d pages", "none")
        plugin.shutdown()
        (warning,) = [text for text in server.warnings if "message" in text]
    assert "TypeError" in warning


def former_cache() -> ModuleType:
    """The module that a server has imported which makes the former cache."""
    module = ModuleType("sglang.srt.mem_cache.hiradix_cache")

    class HiRadixCache:
        def evict(self, params: Any) -> Any:
            return SimpleNamespace(num_tokens_evicted=params.num_tokens)

        def loading_check(self) -> None:
            pass

    vars(module)["HiRadixCache"] = HiRadixCache
    return module


def test_a_server_with_the_former_cache_is_recorded_by_its_points_and_misses_none_of_the_other(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("HICACHE_TRACE", "full")
    module = former_cache()
    with FakeServer() as server:
        plugin.entry()
        # It is imported where the server makes its cache, which is later.
        environment.setitem(sys.modules, module.__name__, module)
        plugin.configure([[0, 1]], rank=0, world_size=2)
        cache = vars(module)["HiRadixCache"]()
        cache.page_size = PAGE
        cache.evict(SimpleNamespace(num_tokens=3 * PAGE))
        plugin.shutdown()
        assert not [text for text in server.warnings if "not recorded from here on" in text]
    (evicted,) = [record for record in records(tmp_path) if record["kind"] == "evict"]
    assert (evicted["pages_wanted"], evicted["pages_freed"]) == (3, 3)
    missing = header(tmp_path)["config"]["points_missing"]
    assert "mem_cache.hiradix_cache.HiRadixCache.insert" in missing
    # It takes its loads by itself in such a version, as far as anybody knows.
    assert "mem_cache.hiradix_cache.HiRadixCache.loading_check" in missing
    assert not [path for path in missing if "unified_radix_cache" in path]


def test_of_a_server_without_the_former_cache_nothing_of_it_is_missing(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("HICACHE_TRACE", "full")
    with FakeServer() as server:
        plugin.entry()
        server.run(0)
    missing = header(tmp_path)["config"]["points_missing"]
    assert not [path for path in missing if "hiradix" in path or "disaggregation" in path]
