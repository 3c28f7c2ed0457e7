"""Ranks find out over a store who must agree, and go on without it when they can't."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from consensus_checker import configure, enabled, rank_consensus, shutdown
from consensus_checker.check import check
from consensus_checker.consensus_ranks import (
    Agreed,
    Prefixed,
    agree,
    alone,
    lacking,
    own_rank,
    own_store,
    ranks_of,
)
from consensus_checker.consensus_recorder import place_of
from hicache.forks import Forks
from tests.support.consensus import asked_for, lane_of
from tests.support.consensus_job import END_OF_ROUND, SIZE
from tests.support.processes import outputs, start_rank
from tracer.keyed import COMMON_ALGORITHM, FAST_ALGORITHM, KEY_BITS
from tracer.log import find_logs
from tracer.plausible import WORLD_SIZE_MAX

GRID = {0: [[0, 1], [0, 2]], 1: [[0, 1], [1, 3]], 2: [[2, 3], [0, 2]], 3: [[2, 3], [1, 3]]}


class Shelf:
    """The simplest store: threads share it, and what is not there raises."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value

    def get(self, key: str) -> Any:
        return self.values[key]


class TorchLike(Shelf):
    """Blocks for what is not there, so that it must be asked first; has connections."""

    def __init__(self, values: dict[str, Any] | None = None) -> None:
        self.values = values if values is not None else {}
        self.clones: list[TorchLike] = []
        self.timeout: timedelta | None = None

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        assert key in self.values, f"{key} would block"
        value = self.values[key]
        return value if isinstance(value, bytes) else str(value).encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return str(self.values.setdefault(key, desired)).encode()

    def clone(self) -> TorchLike:
        self.clones.append(TorchLike(self.values))
        return self.clones[-1]

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout


def agree_all(store: Any, groups: Mapping[int, list[list[int]]], timeout_s: float = 20) -> dict[int, Agreed]:
    found: dict[int, Agreed] = {}

    def run(rank: int) -> None:
        own = Prefixed(store, "run/")
        found[rank] = agree(own, groups[rank], rank, timeout_s=timeout_s, has_logs=lambda ranks: False)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("store", [Shelf, TorchLike])
def test_ranks_that_share_groups_by_way_of_others_agree(store: type[Shelf]) -> None:
    found = agree_all(store(), GRID)
    assert {one.members for one in found.values()} == {(0, 1, 2, 3)}
    assert len({(one.key, one.algorithm, one.run_id) for one in found.values()}) == 1
    assert 0 < found[0].key < 1 << KEY_BITS


def test_replicas_have_keys_of_their_own_and_one_run() -> None:
    found = agree_all(TorchLike(), {0: [[0, 1]], 1: [[0, 1]], 2: [[2, 3]], 3: [[2, 3]]})
    assert [one.members for _, one in sorted(found.items())] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert found[0].key == found[1].key != found[2].key == found[3].key
    assert len({one.run_id for one in found.values()}) == 1


def test_ranks_with_another_digest_agree_on_the_one_that_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Shelf()
    store.set("run/hello/1", json.dumps({"groups": [[0, 1]], "algorithm": COMMON_ALGORITHM}))
    monkeypatch.setattr("consensus_checker.consensus_ranks.best_algorithm", lambda: FAST_ALGORITHM)
    own = agree(Prefixed(store, "run/"), [[0, 1]], 0, timeout_s=20, has_logs=lambda ranks: True)
    assert (own.algorithm, own.has_logs) == (COMMON_ALGORITHM, True)


def test_somebody_who_does_not_come_is_named_in_time() -> None:
    with pytest.raises(TimeoutError, match="rank 3 has not come to configure"):
        agree(Prefixed(Shelf(), "run/"), [[0, 3]], 0, timeout_s=0, has_logs=lambda ranks: False)


def test_a_connection_of_its_own_is_taken_where_it_can_be_had() -> None:
    store = TorchLike()
    own = own_store(store, "run/")
    own.set("a", "1")
    assert (store.values, own.get("a"), len(store.clones)) == ({"run/a": "1"}, b"1", 1)
    assert store.clones[0].timeout is not None and store.timeout is None
    assert own_store(Shelf(), "run/").check(["a"]) is False


def test_a_part_of_a_store_has_what_a_watcher_asks_for() -> None:
    shelf = Prefixed(Shelf(), "run/")
    shelf.set("a", b"1")
    assert shelf.check(["a"]) and not shelf.check(["a", "b"])
    assert shelf.multi_get(["a", "a"]) == [b"1", b"1"]
    assert shelf.delete_key("a") is False
    assert isinstance(Prefixed(TorchLike(), "run/").clone(), Prefixed)


@pytest.mark.parametrize(
    ("group", "ranks"),
    [
        ([0, 2], (0, 2)),
        (range(3), (0, 1, 2)),
        ((1, 1), (1,)),
        (SimpleNamespace(cpu_group=None, ranks=[4, 5]), (4, 5)),
    ],
)
def test_what_a_group_may_be(group: Any, ranks: tuple[int, ...]) -> None:
    assert ranks_of(group) == ranks


@pytest.mark.parametrize(
    "group", [5, "01", {0: 1}, ["0"], [True], [-1], [WORLD_SIZE_MAX], SimpleNamespace(cpu_group=1)]
)
def test_what_is_no_group_is_a_type_error(group: Any) -> None:
    with pytest.raises(TypeError, match="configure: "):
        ranks_of(group)


def test_a_rank_is_what_is_given_or_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert own_rank(3, [[1, 3]]) == 3
    assert own_rank(None, []) == 0
    with pytest.raises(ValueError, match="which rank is this"):
        own_rank(None, [[0, 1]])
    monkeypatch.setenv("RANK", "1")
    assert own_rank(None, [[0, 1]]) == 1
    with pytest.raises(ValueError, match=r"rank 1 is not in its group \(0, 2\)"):
        own_rank(None, [[0, 1], [0, 2]])


def test_a_rank_that_can_ask_nobody_has_the_key_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HICACHE_DIGEST_KEY", raising=False)
    assert alone([[0, 1], [0, 2]], 0, has_logs=False) == Agreed(
        (0, 1, 2), COMMON_ALGORITHM, 0, "consensus", False
    )
    monkeypatch.setenv("HICACHE_DIGEST_KEY", "correct horse")
    first = alone([[0, 1]], 0, has_logs=False).key
    assert first == alone([[0, 1]], 1, has_logs=False).key != 0
    monkeypatch.setenv("HICACHE_DIGEST_KEY", "7")
    assert alone([[0, 1]], 0, has_logs=False).key not in (0, first)


@pytest.mark.parametrize(
    ("rank", "members", "world", "coordinates", "sizes"),
    [
        (1, (0, 1, 2), 3, {"replica": 0, "member": 1}, {"replica": 1, "member": 3}),
        (5, (4, 5), 8, {"replica": 2, "member": 1}, {"replica": 4, "member": 2}),
        # Every second rank: no number of a replica and member counts to it.
        (3, (1, 3), 4, {"replica": 1, "member": 1}, {}),
        (3, (2, 3, 4), 5, {"replica": 2, "member": 1}, {}),
    ],
)
def test_where_a_rank_stands(
    rank: int, members: tuple[int, ...], world: int, coordinates: dict[str, int], sizes: dict[str, int]
) -> None:
    place = place_of(rank, members, world, {"tp": members})
    assert (place.coordinates, place.sizes) == (coordinates, sizes)


def test_replicas_of_scattered_ranks_are_compared_each_for_itself(tmp_path: Path) -> None:
    @rank_consensus
    def nothing() -> None:
        pass

    with asked_for(tmp_path):

        @rank_consensus(same_params=True)
        def step(number: int) -> None:
            pass

        for rank in range(6):
            configure(
                [[rank % 2, rank % 2 + 2, rank % 2 + 4]],
                rank=rank,
                world_size=6,
                watcher=None,
                warn=_hear_not,
            )
            step(7 if rank == 4 else rank % 2)
            shutdown()
        finding = check(find_logs(tmp_path)).finding
        assert (finding.kind, finding.culprit) == ("divergence", (4,))
        assert finding.first_divergence is not None
        assert finding.first_divergence.scope == "replica0"


def test_without_a_store_there_is_one_warning_and_a_log(tmp_path: Path) -> None:
    warnings: list[str] = []
    with asked_for(tmp_path):
        configure([[0, 1], [0, 1], [0], None], rank=0, warn=warnings.append)
        assert enabled()
        shutdown()
        assert lane_of(tmp_path).header["groups"] == {"group0": [0, 1]}
    told = "no store to meet the other ranks in: decisions are recorded, and compared by nobody"
    assert warnings == [told + lacking()]


def test_when_the_others_do_not_come_there_is_one_warning_and_a_log(tmp_path: Path) -> None:
    warnings: list[str] = []
    with asked_for(tmp_path):
        configure([[0, 1]], rank=0, store=Shelf(), watcher=_never_made, timeout_s=0, warn=warnings.append)
        assert enabled()
        shutdown()
        assert list(lane_of(tmp_path).records()) == []
    (text,) = warnings
    assert "rank 1 has not come to configure" in text


def test_a_store_that_breaks_is_a_warning(tmp_path: Path) -> None:
    class Broken(Shelf):
        def set(self, key: str, value: Any) -> None:
            raise ConnectionError("connection reset")

    warnings: list[str] = []
    with asked_for(tmp_path):
        configure([[0, 1]], rank=0, store=Broken(), watcher=_never_made, warn=warnings.append)
        shutdown()
    (text,) = warnings
    assert "connection reset" in text


def _never_made(**_given: Any) -> Any:
    raise AssertionError("a watcher without partners")


def _hear_not(_text: str) -> None:
    pass


@dataclass(frozen=True)
class Rounds:
    """What the ranks said on stderr in each round, and the folder that the rounds were in."""

    told: list[list[str]]
    folder: Path


@pytest.fixture(scope="module")
def rounds(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    """Two that are watched, with records in a folder of their own, and two that are not."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    folder = tmp_path_factory.mktemp("rounds")
    asked = [
        (1, "", "live"),
        (-1, "", "live"),
        (1, str(folder / "odd"), None),
        (-1, str(folder / "none"), None),
    ]
    with asked_for(folder) as patch:
        patch.delenv("HICACHE_TRACE_DIR")
        patch.setenv("TMPDIR", str(folder))
        words = ("tests.support.consensus_job", str(folder / "store"), json.dumps(asked))
        ranks = [start_rank(forks, rank, SIZE, *words) for rank in range(SIZE)]
        said = [err for _, err in outputs(ranks, timeout_s=100)]
    assert [rank.returncode for rank in ranks] == [0] * SIZE, said
    by_rank = [text.split(f"{END_OF_ROUND}\n")[: len(asked)] for text in said]
    return Rounds([list(texts) for texts in zip(*by_rank, strict=True)], folder)


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_a_watcher_tells_all_ranks_of_the_call_and_the_logs_of_all_stay(rounds: Rounds) -> None:
    told, quiet, *_ = rounds.told
    # Who hears of it before the third rank has come there sees two sides.
    assert all("DIVERGED" in text and "at call 14, step 0" in text for text in told), told
    # Of the round in which nothing was wrong, nothing is left.
    (folder,) = rounds.folder.glob("hicache-records-*")
    assert all(f"the records of rank {rank} are in {folder}" in told[rank] for rank in range(3))
    assert check(find_logs(folder)).finding.culprit == (1,)
    assert "DIVERGED" not in "".join(quiet)


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(("number", "name"), [(2, "odd"), (3, "none")])
def test_processes_meet_in_the_store_of_torch(rounds: Rounds, number: int, name: str) -> None:
    assert "hicache: warning" not in "".join(rounds.told[number])
    run = find_logs(rounds.folder / name)
    header = run.lanes[0].header
    assert (header["sizes"], header["groups"]) == ({"replica": 1, "member": 3}, {"tp:0": [0, 1, 2]})
    assert len(run.run_ids) == 1 and run.run_id != "consensus"
    finding = check(run).finding
    assert (finding.kind, finding.culprit) == (("divergence", (1,)) if name == "odd" else ("consistent", ()))


@pytest.mark.parametrize(
    ("environment", "run_id", "attempt"),
    [
        ({}, "consensus", 0),
        ({"HICACHE_RUN_ID": "nightly-7", "HICACHE_ATTEMPT": "2"}, "nightly-7", 2),
        ({"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "1"}, "job", 1),
        ({"HICACHE_RUN_ID": "ours", "TORCHELASTIC_RUN_ID": "job"}, "ours", 0),
        ({"TORCHELASTIC_RUN_ID": "none", "HICACHE_ATTEMPT": "soon"}, "consensus", 0),
        ({"HICACHE_RUN_ID": "../elsewhere"}, "1adbeb9e440438f3", 0),
    ],
)
def test_without_a_store_run_and_attempt_are_the_launchers(
    monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], run_id: str, attempt: int
) -> None:
    forget_launcher(monkeypatch)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    agreed = alone([[0, 1]], 0, has_logs=False)
    assert (run_id, attempt) == (agreed.run_id, agreed.attempt)


def test_with_a_store_the_first_ranks_run_and_attempt_are_everybodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget_launcher(monkeypatch)
    monkeypatch.setenv("HICACHE_RUN_ID", "nightly-7")
    monkeypatch.setenv("HICACHE_ATTEMPT", "3")
    found = agree_all(Shelf(), {0: [[0, 1]], 1: [[0, 1]]})
    assert {("nightly-7", 3)} == {(agreed.run_id, agreed.attempt) for agreed in found.values()}


def test_what_ranks_without_a_store_lack_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_launcher(monkeypatch)
    monkeypatch.delenv("HICACHE_DIGEST_KEY", raising=False)
    expected = (
        " (not set: HICACHE_RUN_ID, so that logs of two runs can be taken for one; "
        "HICACHE_DIGEST_KEY, so that digests are under no secret key)"
    )
    assert expected == lacking()
    monkeypatch.setenv("HICACHE_RUN_ID", "nightly-7")
    monkeypatch.setenv("HICACHE_DIGEST_KEY", "secret")
    assert lacking() == ""


def forget_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HICACHE_RUN_ID", "TORCHELASTIC_RUN_ID", "HICACHE_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
