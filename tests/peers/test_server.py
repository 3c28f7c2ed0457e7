"""The plugin in SGLang's own cache, controller and scheduler methods, in processes that meet over gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.peers.matrix import FAULTS, fault_row, options
from tests.peers.rig import LACKING, Ran, has_rig, installed, run, with_faults
from tracer.hits import hits
from tracer.log import find_logs

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_rig(), reason=LACKING)]

STEPS = 150
# Of the functions that are called once a step each is called so often.
RAISING_STEPS = 1050


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("peers"))


@pytest.fixture(scope="module")
def healthy(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    setting = ("tp2 pp2", "timeout", "write_through", "rust", "L3")
    return run(site, tmp_path_factory.mktemp("healthy") / "run", options(setting, STEPS))


def test_healthy_ranks_are_consistent_in_every_lane_and_nobody_was_accused(healthy: Ran) -> None:
    assert healthy.is_healthy
    verdict = healthy.verdict()
    assert (verdict.kind, healthy.told) == ("consistent", ())
    assert verdict.coverage.compared_calls > 5000
    lanes = {log.lane for log in find_logs(healthy.traces).lanes}
    assert lanes == {"scheduler", "prefetch", "io", "sync", "backup", "heart"}


def test_hits_are_those_that_the_servers_driver_counted(healthy: Ran) -> None:
    counted = dict(re.findall(r"'(device_hit|loaded)': (\d+)", healthy.report.split("rank0 ", 1)[1]))
    found = hits(find_logs(healthy.traces)).cached_tokens
    # The driver counts what was brought back from the host among what the device had.
    assert sum(found.values()) == int(counted["device_hit"])
    assert found["host"] + found["storage"] == int(counted["loaded"])


def test_a_refused_host_page_is_found_where_it_was_refused(site: Path, tmp_path: Path) -> None:
    fault = next(one for one in FAULTS if one.name.startswith("host_alloc") and one.topology == "tp3")
    row, is_good = fault_row(fault, run(with_faults(site), tmp_path / "run", fault.options))
    assert is_good, row


def test_a_stage_that_goes_by_another_count_than_it_was_sent_is_named_by_its_own_log(
    site: Path, tmp_path: Path
) -> None:
    fault = next(one for one in FAULTS if (one.name, one.topology) == ("local_counts", "pp2"))
    ran = run(with_faults(site), tmp_path / "run", fault.options, environment=fault.environment)
    row, is_good = fault_row(fault, ran)
    assert is_good, row
    # Of two ranks no count can tell which is wrong.
    assert ran.verdict().finding.culprit == (1,)


def test_hooks_that_raise_at_every_call_change_nothing_of_the_run(site: Path, tmp_path: Path) -> None:
    # Without a store what happens depends on no thread's pace.
    raising = options(("tp2", "wait_complete", "write_through", "rust", "no L3"), RAISING_STEPS)
    raising += ["--limit", "190"]
    ran = run(
        with_faults(site),
        tmp_path / "run",
        raising,
        environment={"TEST_FAULT": "raising_hooks", "TEST_FAULT_AT": "0", "TEST_FAULT_RANK": "0"},
    )
    assert ran.is_healthy, ran.report
    logs = "".join(path.read_text(errors="replace") for path in (tmp_path / "run").glob("rank*.log"))
    told = re.findall(r"TEST (\d+) hooks have raised (\d+) times, (\d+) of them 1000 times", logs)
    hooks, times, often = (max(map(int, column)) for column in zip(*told, strict=True))
    assert (hooks >= 20, times >= 20_000, often >= 8) == (True, True, True), told[-1]
    alone = run(None, tmp_path / "alone", raising, trace="")
    assert alone.outcome == ran.outcome
