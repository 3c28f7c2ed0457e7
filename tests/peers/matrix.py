"""Healthy runs of a real server over a pairwise cover of its settings, and the handed faults: `make peers`.

    HICACHE_PEERS=VENV HICACHE_RIG=KIT python -m tests.peers.matrix [--full] [--steps N] [--only faults]

Prints a line for each run, and keeps the table in docs/sglang.md. A healthy run in which a rank is accused is
an error, and so is a fault that is not found where it was made. With `--rows FILE` each healthy run is noted
there, and none that is noted is made again: the full matrix takes an hour, and goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

from tests.peers.pages import FULL_PAGE, PAGE, kept
from tests.peers.rig import LACKING, Ran, has_rig, installed, run, with_faults

TOPOLOGIES = ("tp2", "tp3", "tp4", "pp2", "pp3", "tp2 pp2")
POLICIES = ("wait_complete", "best_effort", "timeout")
WRITES = ("write_through", "write_through_selective", "write_back")
CORES = ("rust", "python")
STORES = ("L3", "no L3")
FACTORS = (TOPOLOGIES, POLICIES, WRITES, CORES, STORES)
Setting = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes otherwise on one rank.

    Attributes:
        calls: any of which may be the first that differs, as most ranks or as the odd one has it; or, where
            no decision differs, words of what is told.
        at: which call of the fault's function, or which step.
        is_own: made by `fault_plugin`, not by the rig.
    """

    name: str
    topology: str
    calls: tuple[str, ...]
    rank: int = 1
    policy: str = "wait_complete"
    at: int = 40
    steps: int = 150
    is_own: bool = True

    @property
    def options(self) -> list[str]:
        found = [*topology_options(self.topology), "--policy", self.policy, "--steps", str(self.steps)]
        scenario = "healthy" if self.is_own else self.name
        own = ["--at", str(self.at), "--fault-rank", str(self.rank)] if not self.is_own else []
        return [*found, "--scenario", scenario, *own, "--limit", str(FAULT_LIMIT_S)]

    @property
    def environment(self) -> dict[str, str]:
        names = {"TEST_FAULT": self.name, "TEST_FAULT_AT": self.at, "TEST_FAULT_RANK": self.rank}
        return {name: str(value) for name, value in names.items()} if self.is_own else {}


FAULT_LIMIT_S = 80
# A busy machine may not get through a server's imports within the limit of a run.
TRIES = 3
REFUSED, SKIPPED, STALLED = "host_alloc_fails_on_one_rank", "skip_event_round", "stall"
FAULTS: Sequence[Fault] = (
    Fault(REFUSED, "tp2", ("alloc_host",), is_own=False),
    Fault(REFUSED, "tp3", ("alloc_host",), is_own=False),
    Fault(REFUSED, "tp2 pp2", ("alloc_host",), rank=3, is_own=False),
    Fault(SKIPPED, "tp2", ("event_round",), is_own=False),
    Fault(SKIPPED, "tp3", ("event_round",), is_own=False),
    Fault(SKIPPED, "tp4", ("event_round",), rank=2, policy="timeout", is_own=False),
    Fault(STALLED, "tp2", ("STALLED",), is_own=False),
    Fault(STALLED, "tp3", ("STALLED",), rank=2, policy="timeout", is_own=False),
    Fault("extra_touch", "tp3", ("evict_node",), at=60),
    Fault("leaked_page", "tp3", ("evict", "evict_node", "alloc", "evict_for_alloc"), at=30),
    Fault("early_flush", "tp3", ("write_backup", "transfer_enqueue"), at=15),
    Fault("local_counts", "tp3", ("event_round",), at=10),
    # Of two stages the second goes by another value than it was sent: its own log says so.
    Fault("local_counts", "pp2", ("event_round",), at=10),
    Fault("skipped_prefetch", "tp3", ("prefetch_submit",), at=20),
    Fault("skipped_prefetch", "tp2", ("prefetch_submit",), at=20),
    Fault("reordered_queue", "tp3", ("match", "prefetch_poll", "prefetch_vote"), at=20),
    Fault("other_tokens", "tp3", ("insert",), at=30),
    Fault("hung_read", "tp3", ("its io lane",), at=5, steps=3000),
    Fault("dead_sync_thread", "tp3", ("thread sync of rank 1 has died",), at=5),
)


def pairwise(factors: Sequence[Sequence[str]]) -> Iterator[Setting]:
    """Settings in which each two values of two factors come together at least once; always the same ones."""
    everything = list(product(*factors))
    due = {pair for setting in everything for pair in _pairs(setting)}
    while due:
        best = max(everything, key=lambda setting: (len(due & _pairs(setting)), -everything.index(setting)))
        due -= _pairs(best)
        yield best


def _pairs(setting: Setting) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    return set(combinations(enumerate(setting), 2))


def topology_options(text: str) -> list[str]:
    sizes = {part[:2]: int(part[2:]) for part in text.split()}
    stages = sizes.get("pp", 1)
    return ["--ranks", str(sizes.get("tp", 1) * stages), "--pp", str(stages)]


def options(setting: Setting, steps: int) -> list[str]:
    topology, policy, write, core, store = setting
    found = [*topology_options(topology), "--policy", policy, "--write-policy", write, "--core", core]
    found += ["--steps", str(steps), "--scenario", "healthy", "--timeout-base", "0.05"]
    return [*found, *(["--no-l3"] if store == "no L3" else [])]


def started(site: Path, out: Path, setting: Setting, steps: int) -> Ran | None:
    """One healthy run; None where no rank came as far as its first record: the machine is too busy for it."""
    for _ in range(TRIES):
        ran = run(site, out, options(setting, steps))
        if next(ran.traces.glob("rank*"), None) is not None:
            return ran
    return None


def healthy_row(setting: Setting, ran: Ran) -> tuple[list[str], bool, int]:
    """A row of the table, whether it is as it must be, and how many calls were compared."""
    verdict = ran.verdict()
    compared = verdict.coverage.compared_calls
    is_good = ran.is_healthy and verdict.finding.kind == "consistent" and not ran.told
    told = verdict.finding.kind if not ran.told else f"accused: {ran.told[0]}"
    if not ran.is_healthy:
        told += ", and the rig is not healthy"
    return [*setting, f"{compared:,}", told], is_good, compared


def rows_in(file: Path | None) -> dict[Setting, tuple[list[str], bool, int]]:
    """The healthy runs that a file has, by their settings; those that went well."""
    if file is None or not file.exists():
        return {}
    read = [json.loads(line) for line in file.read_text().splitlines()]
    return {tuple(row[: len(FACTORS)]): (row, good, compared) for row, good, compared in read if good}


def note(file: Path | None, row: tuple[list[str], bool, int]) -> None:
    if file is not None:
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def fault_row(fault: Fault, ran: Ran) -> tuple[list[str], bool]:
    verdict = ran.verdict()
    first = verdict.finding.first_divergence
    told = [text for text in ran.told if any(word in text for word in fault.calls)]
    kinds = (
        {str(own.get("kind", first.call)) for own in first.by_rank.values()} if first is not None else set()
    )
    around = verdict.finding.trigger.call if verdict.finding.trigger is not None else ""
    found = " / ".join(sorted({str(first.call), *kinds})) if first is not None else "no decision"
    if first is not None and around not in ("", first.call):
        # What the call did differs first, and its record says what it was given.
        found += f", in {around}"
    is_found = bool(told) if first is None else bool({str(first.call), *kinds, around} & set(fault.calls))
    named = [f"rank {one}" for one in verdict.finding.culprit]
    if not named and f"rank {fault.rank}" in " ".join(told).partition(";")[0]:
        # A silence has no end in a killed process's log: what was told while it ran is what there is.
        named = [f"rank {fault.rank}"]
    is_right = set(named) <= {f"rank {fault.rank}"}
    live = " ".join((told or list(ran.told) or ["-"])[0].split())
    row = [f"`{fault.name}`", fault.topology, fault.policy, str(fault.rank), found]
    return [*row, ", ".join(named) or "undetermined", live[:90]], is_found and is_right


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="every combination of settings")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", choices=("healthy", "faults"))
    parser.add_argument("--fault", help="of the faults only this one")
    parser.add_argument("--rows", type=Path, help="file of the healthy runs that need not be made again")
    given = parser.parse_args(arguments)
    if not has_rig():
        print(f"error: {LACKING}", file=sys.stderr)
        return 3
    bad = 0
    with tempfile.TemporaryDirectory(prefix="hicache-peers-") as folder:
        site = installed(Path(folder))
        out = Path(folder) / "run"
        if given.only != "faults":
            settings = list(product(*FACTORS)) if given.full else list(pairwise(FACTORS))
            rows, total = [], 0
            done = rows_in(given.rows)
            for setting in settings:
                if setting not in done:
                    ran = started(site, out, setting, given.steps)
                    if ran is None:
                        print("did not start", *setting, sep=" | ", flush=True)
                        bad += 1
                        continue
                    done[setting] = healthy_row(setting, ran)
                    note(given.rows, done[setting])
                    if not done[setting][1]:
                        # What it left is all there is to find out why.
                        shutil.copytree(out, Path(tempfile.mkdtemp(prefix="hicache-bad-")) / "run")
                row, is_good, compared = done[setting]
                rows.append(row)
                total += compared
                bad += not is_good
                print("ok " if is_good else "BAD", *row, sep=" | ", flush=True)
            head = ["topology", "policy", "writes", "core", "store", "calls compared", "verdict"]
            kept(
                "healthy",
                head,
                rows,
                f"{len(rows)} runs, {total:,} calls compared, {bad} not as they must be.",
                FULL_PAGE if given.full else PAGE,
            )
        if given.only != "healthy":
            rows = []
            both = with_faults(site)
            for fault in FAULTS:
                if given.fault and fault.name != given.fault:
                    continue
                ran = run(both, out, fault.options, environment=fault.environment)
                row, is_good = fault_row(fault, ran)
                rows.append(row)
                bad += not is_good
                print("ok " if is_good else "BAD", *row, sep=" | ", flush=True)
            head = ["fault", "topology", "policy", "on", "first difference", "named", "told while it ran"]
            if not given.fault:
                kept("faults", head, rows, "")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
