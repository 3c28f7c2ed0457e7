"""What a comparison of texts does not see: three ranks name the odd one and its call, two only differ."""

from __future__ import annotations

import gzip
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from consensus_checker import assert_same, rank_consensus
from consensus_checker.check import check
from consensus_checker.history import History
from consensus_checker.screen import first_screen
from tests.support.consensus import asked_for, events, record
from tracer.log import find_logs

CANARY = "the-canary-of-a-prompt"


class RadixKey:
    """As in a radix cache: its text has the first ten tokens."""

    __slots__ = ("extra_key", "token_ids")

    def __init__(self, token_ids: list[int], extra_key: str | None = None) -> None:
        self.token_ids = token_ids
        self.extra_key = extra_key

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return f"RadixKey({self.token_ids[:10]}...)"


@dataclass
class MatchParams:
    key: RadixKey
    rid: str = "r7"


@dataclass
class MatchResult:
    device_hit: int
    host_hit: int


# A function's name, which record of a call differs (0 the call, 1 its outcome), and what calls it.
Spot = tuple[str, int, Callable[[bool], object]]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with asked_for(tmp_path / "run"):
        yield tmp_path / "run"


def differ_behind_the_text() -> Spot:
    @rank_consensus(same_params=["params"])
    def match_prefix(params: MatchParams) -> int:
        return 0

    def call(is_odd: bool) -> object:
        tokens = list(range(1000))
        tokens[500] = 7 if is_odd else 8
        return match_prefix(MatchParams(RadixKey(tokens)))

    return "match_prefix", 0, call


def differ_in_length() -> Spot:
    @rank_consensus(same_params=True)
    def match_prefix(params: MatchParams) -> int:
        return 0

    return "match_prefix", 0, lambda is_odd: match_prefix(MatchParams(RadixKey(list(range(64 - is_odd)))))


def differ_in_tokens_of_equal_number() -> Spot:
    @rank_consensus(same_params=["key", "len(key)"], same_results=True)
    def insert(key: RadixKey) -> int:
        return len(key)

    return "insert", 0, lambda is_odd: insert(RadixKey([1, 2, 3, 5 if is_odd else 4]))


def differ_in_slots() -> Spot:
    import torch

    @rank_consensus(same_params=["slots"])
    def free(slots: Any) -> None:
        pass

    def call(is_odd: bool) -> object:
        slots = torch.arange(4096)
        slots[2048] += int(is_odd)
        return free(slots)

    return "free", 0, call


def differ_in_a_namespace() -> Spot:
    @rank_consensus(same_params=["params"])
    def match_prefix(params: MatchParams) -> int:
        return 0

    return "match_prefix", 0, lambda is_odd: match_prefix(MatchParams(RadixKey([1], "b" if is_odd else "a")))


def differ_in_the_split_of_a_result() -> Spot:
    @rank_consensus(same_results=True)
    def match_prefix(is_odd: bool) -> MatchResult:
        return MatchResult(32, 96) if is_odd else MatchResult(64, 64)

    return "match_prefix", 1, match_prefix


def differ_in_what_is_raised() -> Spot:
    @rank_consensus
    def alloc(is_odd: bool) -> None:
        raise MemoryError if is_odd else LookupError

    def call(is_odd: bool) -> object:
        with pytest.raises((MemoryError, LookupError)):
            alloc(is_odd)
        return None

    return "alloc", 1, call


def one_is_true_and_the_other_is_one() -> Spot:
    @rank_consensus(same_results=True)
    def can_terminate(is_odd: bool) -> object:
        return 1 if is_odd else True

    return "can_terminate", 1, can_terminate


SPOTS = [
    differ_behind_the_text,
    differ_in_length,
    differ_in_tokens_of_equal_number,
    differ_in_slots,
    differ_in_a_namespace,
    differ_in_the_split_of_a_result,
    differ_in_what_is_raised,
    one_is_true_and_the_other_is_one,
]


@pytest.fixture(scope="session")
def has_torch() -> bool:
    """Imported before anything is decorated: who imports it first is kept alive, with all that it holds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torch  # noqa: F401
        except ImportError:
            return False
    return True


@pytest.fixture(params=SPOTS)
def spot(request: pytest.FixtureRequest, has_torch: bool) -> Spot:
    if request.param is differ_in_slots and not has_torch:
        pytest.skip("could not import torch")
    made: Spot = request.param()
    return made


def run(spot: Spot, ranks: list[int], odd_rank: int | None) -> None:
    """Three rounds on each rank, of which the second is odd on one."""
    _, _, call = spot

    def body(rank: int) -> None:
        for number in range(3):
            assert_same("round %d", number)
            call(number == 1 and rank == odd_rank)

    record(ranks, body)


def test_the_majority_of_three_names_the_odd_rank_and_its_call(folder: Path, spot: Spot) -> None:
    run(spot, [0, 1, 2], odd_rank=2)
    finding = check(find_logs(folder)).finding
    assert (finding.kind, finding.rule, finding.culprit) == ("divergence", "agreement", (2,))
    first = finding.first_divergence
    assert first is not None
    # Behind the three records of the first round, and the second one's own.
    assert (first.call, first.index, first.kind) == (spot[0], 4 + spot[1], "value")


def test_of_two_both_are_shown_and_neither_is_accused(folder: Path, spot: Spot) -> None:
    run(spot, [0, 1], odd_rank=1)
    finding = check(find_logs(folder)).finding
    assert (finding.kind, finding.culprit, finding.unknown) == ("divergence", (), (0, 1))
    assert finding.level == "undetermined"
    first = finding.first_divergence
    assert first is not None
    assert (first.call, first.index, sorted(first.by_rank)) == (spot[0], 4 + spot[1], [0, 1])


def test_healthy_ranks_are_consistent(folder: Path, spot: Spot) -> None:
    run(spot, [0, 1, 2], odd_rank=None)
    assert check(find_logs(folder)).finding.kind == "consistent"


def test_a_last_call_that_one_rank_skips_is_missing_there(folder: Path) -> None:
    @rank_consensus(same_params=True)
    def write_backup(node: int) -> None:
        pass

    def body(rank: int) -> None:
        for node in range(10):
            if (rank, node) != (1, 9):
                write_backup(node)

    record([0, 1, 2], body)
    finding = check(find_logs(folder)).finding
    assert (finding.kind, finding.culprit) == ("divergence", (1,))
    first = finding.first_divergence
    assert first is not None
    assert (first.kind, first.call, first.index) == ("missing", "write_backup", 18)


def test_a_call_too_many_at_the_end_is_seen(folder: Path) -> None:
    @rank_consensus(same_params=True)
    def write_backup(node: int) -> None:
        pass

    record([0, 1, 2], lambda rank: [write_backup(node) for node in range(10 + (rank == 2))])
    finding = check(find_logs(folder)).finding
    assert (finding.kind, finding.culprit) == ("divergence", (2,))
    assert finding.first_divergence is not None
    assert (finding.first_divergence.kind, finding.first_divergence.call) == ("extra", "write_backup")


def test_what_is_in_no_log_is_no_difference(folder: Path) -> None:
    """Addresses, clocks, locks, the order of sets, what is not compared."""

    @rank_consensus(same_params=True, same_results=["len(result)"])
    def settle(nodes: Any, by_name: Any, seen_at_time: float, lock: Any, kind: Any) -> list[object]:
        return [object()]

    class Clocked:
        def __init__(self, at: float) -> None:
            self.last_access_time = at

    def body(rank: int) -> None:
        names = ["a", "bb", "ccc"] if rank else ["ccc", "bb", "a"]
        settle(set(names), dict.fromkeys(names), 0.0, threading.RLock(), [Clocked(float(rank)), body])

    record([0, 1, 2], body)
    assert check(find_logs(folder)).finding.kind == "consistent"


def test_canaries_of_texts_tokens_and_keys_are_in_no_file(folder: Path) -> None:
    token = 987654321

    class Request:
        def __init__(self) -> None:
            self.rid = "r7"
            self.text = CANARY
            self.origin_input_ids = [token] * 20

    @rank_consensus(same_params=True, same_results=True)
    def admit(request: Any, text: str, ids: list[int], more: dict[str, str]) -> Any:
        return {CANARY: [CANARY]}

    @rank_consensus(same_params=["request.text", "request.rid", "f'{request.text}'"])
    def refuse(request: Any) -> None:
        raise ValueError(CANARY)

    def body(rank: int) -> None:
        admit(Request(), CANARY, [token], {CANARY: CANARY})
        with pytest.raises(ValueError, match=CANARY):
            refuse(Request())
        assert_same("%s", CANARY)
        assert_same(CANARY)

    told_of = record([0, 1], body)
    files = [path for path in folder.iterdir() if path.is_file()]
    told = b"".join(
        gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes() for path in files
    )
    assert b'"r7"' in told
    assert CANARY.encode() not in told and str(token).encode() not in told
    assert CANARY not in str(told_of)
    assert events(folder, 1)


def test_the_screen_says_it_on_a_page(folder: Path) -> None:
    run(differ_in_length(), [0, 1, 2], odd_rank=2)
    history = History.of(find_logs(folder))
    lines = first_screen(check(history), history)
    assert lines[0].startswith("DIVERGED  scope replica0: rank 2 left the majority (2 of 3) at call")
    assert max(map(len, lines)) <= 80
