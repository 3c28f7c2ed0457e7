from __future__ import annotations

from pathlib import Path

from consensus_checker.rules.scheduler_watchdog import find
from tests.support.foreign_lines import dossier

WATCHDOG = "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)"


def test_who_has_no_batch_is_silent_and_not_named(tmp_path: Path) -> None:
    text = "".join(f"[2031-02-03 04:05:06 TP{rank}] ready\n" for rank in range(3))
    (claim,) = find(dossier(tmp_path, server=f"{text}[2031-02-03 04:10:08 TP0] {WATCHDOG}\n"))
    found = claim.finding
    assert (found.code, found.culprit, found.victims, found.silent) == (20, (), (0,), (1, 2))
    assert found.summary == (
        "rank 0 made no step for 300 s with a batch in hand; ranks 1-2 printed nothing: "
        "no batch there, or no time left"
    )


def test_another_processs_watchdog_is_no_scheduler(tmp_path: Path) -> None:
    text = "[2031-02-03 04:10:08] Detokenizer watchdog timeout (self.watchdog_timeout=300, self.soft=True)\n"
    assert find(dossier(tmp_path, server=text)) == []
