"""Values that differ have payloads that differ, equal ones the same everywhere, and no prompt is in any."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from array import array
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from uuid import UUID

import msgspec
import pytest

from consensus_checker import consensus_values
from consensus_checker.payload import DEPTH_MAX, PARTS_MAX, Payloads
from tracer.keyed import COMMON_ALGORITHM, best_algorithm, keyed_digest

ROOT = Path(__file__).resolve().parents[2]
PAYLOADS = Payloads(keyed_digest(COMMON_ALGORITHM, 7))
of = PAYLOADS.of


class Phase(Enum):
    PREFILL = 1
    DECODE = 2


class Mode(Flag):
    READ = 1
    WRITE = 2


Point = namedtuple("Point", "x y")


class Key:
    """As a radix tree has it: shows ten tokens of itself, and compares by identity."""

    __slots__ = ("limit", "token_ids")

    def __init__(self, token_ids: Any, limit: int | None = None) -> None:
        self.token_ids = token_ids
        self.limit = limit

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return f"Key({list(self.token_ids[:10])})"


@dataclass
class Params:
    rid: str
    key: Key
    length: int = 0
    seen_by: list[int] = field(default_factory=list, compare=False)


class Record(msgspec.Struct):
    rid: str
    pages: int


class Request:
    """It has what differs between ranks: a clock, a lock, and much that nobody compares."""

    def __init__(self, rid: str, token_ids: list[int], arrived: float = 0.0) -> None:
        self.rid = rid
        self.origin_input_ids = token_ids
        self.arrived = arrived
        self.lock = threading.Lock()


class TwoIds:
    def __init__(self) -> None:
        self.request_id = "of the connection"
        self.req_id = "of the engine"
        self.rid = "r7"


class Node:
    def __init__(self, size: int, last_access_time: float = 0.0) -> None:
        self.size = size
        self.last_access_time = last_access_time

    @cached_property
    def double(self) -> int:
        return 2 * self.size


class Name(str):
    pass


class Count(int):
    pass


class Unkind:
    """Whoever asks it for anything but its fields is told off."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __repr__(self) -> str:
        raise AssertionError("repr")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("eq")

    def __hash__(self) -> int:
        raise AssertionError("hash")


@pytest.mark.parametrize("value", [0, 1, -5, 2**63 - 1, True, False, None, 0.5, -0.0, 1e300])
def test_numbers_and_truth_are_as_they_are(value: Any) -> None:
    assert (type(of(value)), repr(of(value))) == (type(value), repr(value))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Phase.DECODE, "DECODE"),
        (Count(5), ["Count", 5]),
        (float("nan"), ["float", "nan"]),
        (float("-inf"), ["float", "-inf"]),
        (threading.Lock(), ["lock"]),
        (object(), ["object"]),
        (sys, ["module"]),
        (ValueError("a secret"), ["ValueError"]),
        (partial(print, "a secret"), ["partial"]),
        (len, ["builtin_function_or_method", "builtins.len"]),
        (Key, ["type", f"{__name__}.Key"]),
        (Record("r7", 3), ["Record", {"rid": "r7", "pages": 3}]),
        (Point(1, True), ["Point", {"x": 1, "y": True}]),
    ],
)
def test_what_stands_for_a_value(value: Any, shown: Any) -> None:
    assert of(value) == shown


def test_an_object_is_shown_field_by_field_and_what_is_in_it_by_length_and_digest() -> None:
    name, fields = of(Params("r7", Key([1, 2, 3]), 3))
    assert (name, list(fields)) == ("Params", ["rid", "key", "length"])
    assert (fields["rid"], fields["key"][:2], fields["length"]) == ("r7", ["Key", 3], 3)


DIFFERENT: list[tuple[Any, Any]] = [
    (1, True),
    (1, 1.0),
    (0, None),
    (0.0, -0.0),
    (0, False),
    (float("nan"), None),
    (float("inf"), float("-inf")),
    (2**64, 2**65),
    (2**64, -(2**64)),
    ([1], [True]),
    ([1], [1.0]),
    ([1], ["1"]),
    ([], ()),
    ([], None),
    ([1, 2], (1, 2)),
    ([1, 2], [2, 1]),
    (["ab", "c"], ["a", "bc"]),
    (["asbb", "c"], ["a", "bsbc"]),
    ([["ab"], "c"], [["ab", "c"]]),
    ([b"ab", b"c"], [b"a", b"bc"]),
    ([[1], [2]], [[1, 2]]),
    ([1, [2]], [[1], 2]),
    ("ab", b"ab"),
    ("ab", "ba"),
    (b"ab", bytearray(b"ab")),
    ([1] * 40 + [2], [1] * 40 + [3]),
    ([1] * 41, [1] * 40),
    ([1] * 40, [1] * 39 + [True]),
    ([1] * 40, [1] * 39 + [1.0]),
    ([2**40] * 40, [2**40] * 39 + [2**40 + 1]),
    ([2**40] * 40 + [1], [2**40] * 40 + [True]),
    ([2**70] * 40, [2**70] * 39 + [2**70 + 1]),
    ([1] * 40, [1] * 39 + [2**32 + 1]),
    (tuple([1] * 40), [1] * 40),
    (array("q", [1, 2]), array("i", [1, 2])),
    (array("q", [1] * 50 + [2]), array("q", [1] * 50 + [3])),
    (array("d", [0.0]), array("d", [-0.0])),
    ({1: 2}, {1: 3}),
    ({1: 2}, {2: 1}),
    ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
    ({1, 2}, {1, 3}),
    ({1}, frozenset({1})),
    ({(1, 2), (3,)}, {(1,), (2, 3)}),
    (Params("r7", Key([1, 2])), Params("r8", Key([1, 2]))),
    (Params("r7", Key([1, 2])), Params("r7", Key([1, 3]))),
    (Params("r7", Key([1, 2])), Params("r7", Key([1, 2], limit=2))),
    (Params("r7", Key(list(range(1000)))), Params("r7", Key([*range(999), 0]))),
    (Params("r7", Key(list(range(20)))), Params("r7", Key(list(range(19))))),
    (Request("r7", [1, 2]), Request("r7", [1, 3])),
    (Request("r7", [1, 2]), Request("r8", [1, 2])),
    ([Request("r7", [1, 2])], [Request("r8", [1, 2])]),
    (Node(1), Node(2)),
    (Unkind(1), Unkind(2)),
    (SimpleNamespace(a=1), SimpleNamespace(b=1)),
    (Phase.PREFILL, Phase.DECODE),
    ([Phase.PREFILL], [Phase.DECODE]),
    (Mode.READ, Mode.READ | Mode.WRITE),
    (Point(1, 2), (1, 2)),
    (Point(1, 2), Point(2, 1)),
    (Name("a"), "a"),
    (Count(1), 1),
    (1j, 2j),
    (range(3), range(4)),
    (slice(1), slice(2)),
    (slice(Key([1])), slice(Key([2]))),
    (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1)),
    (datetime(2026, 1, 1, 0, 0, 0, 1), datetime(2026, 1, 1)),
    (date(2026, 1, 1), datetime(2026, 1, 1)),
    (time(1), time(2)),
    (UUID(int=1), UUID(int=2)),
    (Decimal("1.0"), Decimal("1.00")),
    (Fraction(1, 2), Fraction(1, 3)),
    (timedelta(1), timedelta(2)),
    (Path("a/b"), Path("a/c")),
    (len, max),
    (int, str),
    (deque([1, 2]), deque([2, 1])),
    ("\ud800", "\ud801"),
    ("é", "e\u0301"),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_values_that_differ_have_payloads_that_differ(one: Any, other: Any) -> None:
    assert repr(of(one)) != repr(of(other))
    # And so they do inside of others.
    assert repr(of([one])) != repr(of([other]))
    assert repr(of({"a": one})) != repr(of({"a": other}))


def cycle(length: int) -> list[Any]:
    first: list[Any] = [length]
    inner = first
    for _ in range(length - 1):
        inner.append([])
        inner = inner[-1]
    inner.append(first)
    return first


def inside_itself(length: int) -> list[Any]:
    """A list that holds itself, by way of others."""
    first: list[Any] = []
    inner = first
    for _ in range(length - 1):
        inner.append([])
        inner = inner[0]
    inner.append(first)
    return first


class Zone(tzinfo):
    """Its `repr` is an address."""

    def utcoffset(self, moment: datetime | None) -> timedelta:
        return timedelta(hours=1)

    def dst(self, moment: datetime | None) -> timedelta:
        return timedelta(0)

    def tzname(self, moment: datetime | None) -> str:
        return "zone"


def read_double(node: Node) -> Node:
    assert node.double == 2 * node.size
    return node


EQUAL: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (lambda: {"a": 1, "b": [2]}, lambda: {"b": [2], "a": 1}),
    # As many bytes as so many numbers would have, and yet no numbers.
    (
        lambda: [*range(20), {1: 2, 3: 4}, *[True] * 5, "abc"],
        lambda: [*range(20), {3: 4, 1: 2}, *[True] * 5, "abc"],
    ),
    (lambda: {3, 1, 2}, lambda: {2, 3, 1}),
    (lambda: {"x", "yy", "zzz"}, lambda: {"zzz", "x", "yy"}),
    (lambda: {(1, "a"), None}, lambda: {None, (1, "a")}),
    (lambda: OrderedDict(a=1, b=2), lambda: OrderedDict(b=2, a=1)),
    (lambda: MappingProxyType({1: 2}), lambda: MappingProxyType({1: 2})),
    (lambda: float("nan"), lambda: -float("nan")),
    (lambda: [float("nan")], lambda: [-float("nan")]),
    (lambda: threading.Lock(), lambda: threading.Lock()),
    (lambda: [threading.Lock()], lambda: [threading.Lock()]),
    (lambda: threading.Event(), lambda: threading.Event()),
    (lambda: object(), lambda: object()),
    (lambda: lambda: 1, lambda: lambda: 2),
    (lambda: Node(1, 10.0), lambda: Node(1, 20.0)),
    (lambda: Node(1), lambda: read_double(Node(1))),
    (lambda: Request("r7", [1], 1.0), lambda: Request("r7", [1], 2.0)),
    (lambda: Params("r7", Key([1]), 1, [1]), lambda: Params("r7", Key([1]), 1, [2])),
    (lambda: cycle(3), lambda: cycle(3)),
    (lambda: Path("a") / "b", lambda: Path(str(Path("a/b")))),
    (lambda: SimpleNamespace(a=1, b=2), lambda: SimpleNamespace(b=2, a=1)),
    (lambda: memoryview(b"abc"), lambda: memoryview(bytearray(b"abc"))),
    (lambda: ValueError("at 0x7f01"), lambda: ValueError("at 0x7f02")),
    (lambda: slice(object(), {"x", "yy"}), lambda: slice(object(), {"yy", "x"})),
    (lambda: datetime(2026, 1, 1, tzinfo=Zone()), lambda: datetime(2026, 1, 1, tzinfo=Zone())),
    (lambda: time(1, tzinfo=Zone()), lambda: time(1, tzinfo=Zone())),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_values_have_equal_payloads_wherever_and_whenever_they_were_made(
    one: Callable[[], Any], other: Callable[[], Any]
) -> None:
    assert repr(of(one())) == repr(of(other()))
    assert repr(of([one()])) == repr(of([other()]))


def test_a_process_with_other_hashes_and_addresses_has_the_same_payloads() -> None:
    script = """
from consensus_checker.payload import Payloads
from tracer.keyed import keyed_digest
from tests.consensus_checker.test_payload import Key, Params, Request, TwoIds
of = Payloads(keyed_digest("blake2b-64", 7)).of
values = [{"a", "bb", "ccc", "dddd"}, {str(i): {i, -i} for i in range(50)}, Params("r7", Key([1, 2])),
          [Request("r7", [1, 2])], [object(), print, {Key: 1}], TwoIds()]
print([of(value) for value in values])
"""
    told = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
    assert told[0] == told[1] != ""


def test_a_value_that_holds_itself_is_told_by_how_far_up() -> None:
    told = [str(of(inside_itself(length))) for length in (1, 2, 3)]
    assert len(set(told)) == 3
    many: list[Any] = []
    many += [many] * 1000
    assert of(many)[:2] == ["list", 1000]


CANARY = "the-canary-of-a-prompt"


@pytest.mark.parametrize(
    "value",
    [
        CANARY,
        Name(CANARY),
        CANARY.encode(),
        [CANARY],
        {CANARY: 1},
        {1: CANARY},
        Params(f"{CANARY} {CANARY}", Key([1])),
        Record(f"{CANARY}\n", 1),
        SimpleNamespace(**{CANARY: 1}),
        SimpleNamespace(text=CANARY),
        ValueError(CANARY),
        Path(CANARY),
        partial(print, CANARY),
    ],
)
def test_no_text_is_in_a_payload(value: Any) -> None:
    assert CANARY not in repr(of(value))


def test_token_ids_are_in_no_payload() -> None:
    told = repr([of([987654321]), of((987654321,)), of(Params("r", Key([987654321]))), of({987654321})])
    assert "987654321" not in told


@pytest.mark.parametrize("name", ["rid", "req_id", "request_id"])
def test_a_request_id_is_as_it_is_where_it_is_called_so(name: str) -> None:
    assert of("chatcmpl-7f.r7:0", name) == "chatcmpl-7f.r7:0"
    assert of("chatcmpl-7f.r7:0", "text")[:2] == ["str", 16]


@pytest.mark.parametrize("text", ["", "two words", "line\n", "x" * 81, "é", '"quoted"'])
def test_what_does_not_look_like_a_request_id_is_none(text: str) -> None:
    assert of(text, "rid")[:2] == ["str", len(text)]


def test_of_two_ids_it_is_always_the_same_one() -> None:
    assert of(TwoIds()) == ["TwoIds", {"rid": "r7"}]


def test_digests_are_another_under_another_key() -> None:
    one, other = (Payloads(keyed_digest(best_algorithm(), key)).of([1, 2, 3]) for key in (1, 2))
    assert (one[:2], one[2] != other[2], len(one[2])) == (other[:2], True, 16)


def test_what_is_deeper_than_is_looked_at_is_told_by_its_type_only() -> None:
    def nested(depth: int, inmost: Any) -> Any:
        for _ in range(depth):
            inmost = [inmost]
        return inmost

    assert of(nested(DEPTH_MAX - 2, [1])) != of(nested(DEPTH_MAX - 2, [2]))
    assert of(nested(DEPTH_MAX + 2, [1])) == of(nested(DEPTH_MAX + 2, [2]))
    assert of(nested(100_000, [1]))[:2] == ["list", 1]


def test_so_many_parts_are_looked_at_and_no_more() -> None:
    asked: list[int] = []

    class Counted:
        @property
        def __dict__(self) -> dict[str, int]:  # type: ignore[override]
            asked.append(1)
            return {"a": 1}

    assert of([Counted() for _ in range(PARTS_MAX)])[0] == "list"
    assert 1000 < len(asked) <= PARTS_MAX


def test_what_comes_first_does_not_decide_what_is_looked_at_of_a_dictionary() -> None:
    entries = {"long": [str(number) for number in range(PARTS_MAX)], "short": ["a"]}
    assert of(entries) == of(dict(reversed(entries.items())))
    assert of(entries) != of(entries | {"short": ["b"]})


class Raising:
    def __init__(self) -> None:
        self.size = 1

    def __len__(self) -> int:
        raise LookupError("no length")


def test_a_value_that_can_not_be_looked_at_fails_nothing_and_is_told_once() -> None:
    warnings: list[str] = []
    payloads = Payloads(keyed_digest(COMMON_ALGORITHM, 7), warnings.append)
    assert payloads.of([Raising()])[0] == "list"
    assert payloads.of(Raising(), "size") == ["Raising", {"size": 1}]
    of_params = payloads.of(Params("r7", Raising()))  # type: ignore[arg-type]
    assert of_params[1]["key"] == ["?", "LookupError"]
    assert payloads.of(Params("r7", Raising()), "params") == of_params  # type: ignore[arg-type]
    assert warnings == ["a value of key could not be looked at: LookupError"]


def test_a_part_that_can_not_be_looked_at_hides_none_of_the_others() -> None:
    one = Params("r7", Raising(), 1)  # type: ignore[arg-type]
    other = Params("r8", Raising(), 1)  # type: ignore[arg-type]
    assert of(one)[1]["rid"] == "r7"
    assert of([Unreadable(), 1]) != of([Unreadable(), 2])
    assert of([one]) != of([other])


class Unreadable:
    def __getattribute__(self, name: str) -> Any:
        raise LookupError(name)


def test_a_generator_is_not_used_up() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    running = numbers()
    assert of(running) == ["generator"]
    assert list(running) == [1]


def test_a_tensor_is_told_by_its_type_its_shape_and_its_content() -> None:
    torch = pytest.importorskip("torch")
    slots = torch.arange(2000)
    assert of(slots)[:3] == ["Tensor", "int64", [2000]]
    other = slots.clone()
    assert of(other) == of(slots)
    # In the middle, where its text has dots.
    other[1000] = 0
    assert of(other) != of(slots)
    assert of([other]) != of([slots])
    assert of(slots.to(torch.int32))[:3] == ["Tensor", "int32", [2000]]
    assert of(slots.view(2, 1000)) != of(slots)
    assert of(torch.arange(4000)[::2]) == of(torch.arange(2000) * 2)
    assert of(torch.zeros(3, dtype=torch.bfloat16)) != of(torch.ones(3, dtype=torch.bfloat16))
    assert of(torch.zeros(0))[:3] == ["Tensor", "float32", [0]]
    assert of(torch.ones(2, requires_grad=True)) == of(torch.ones(2))


def test_of_a_tensor_on_a_device_nothing_is_asked_that_would_wait_for_it() -> None:
    torch = pytest.importorskip("torch")
    there = torch.zeros(3, 4, device="meta")
    assert of(there) == ["Tensor", "float32", [3, 4], "meta"]
    assert of({"slots": there}) == of({"slots": torch.ones(3, 4, device="meta")})


def test_an_array_of_numpy_is_told_by_its_content() -> None:
    numpy = pytest.importorskip("numpy")
    slots = numpy.arange(2000)
    other = slots.copy()
    assert of(other) == of(slots)
    other[1000] = 0
    assert of(other) != of(slots)
    assert of(slots[::2]) == of(slots[::2].copy())
    assert of(numpy.int64(4)) == ["int64", 4]
    assert of(numpy.array([None, "a"], dtype=object)) != of(numpy.array([None, "b"], dtype=object))


def test_what_long_doubles_have_between_them_is_not_looked_at() -> None:
    numpy = pytest.importorskip("numpy")
    for kind in (numpy.longdouble, numpy.clongdouble):
        one, other = numpy.full(4, 1.5, dtype=kind), numpy.full(4, 1.5, dtype=kind)
        if numpy.finfo(kind).nmant == 63:
            other.view("u1").reshape(-1, 16)[:, 10:] = 255
        assert of(one) == of(other)
        assert of(one[0]) == of(other[0])
        other[2] = 1.25
        assert of(one) != of(other)
        assert of(one[2]) != of(other[2])


def test_a_set_without_end_is_not_listed() -> None:
    asked: list[int] = []

    class Endless(set[int]):
        def __iter__(self) -> Iterator[int]:
            asked.append(1)
            return super().__iter__()

    many = Endless(range(PARTS_MAX + 1))
    assert of([many]) == of([Endless(range(1, PARTS_MAX + 2))])
    assert asked == []


def test_an_expanded_tensor_is_not_written_out_and_told_as_its_copy_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    for name in ("CONTENT_BYTES_MAX", "COPIED_BYTES_MAX"):
        monkeypatch.setattr(consensus_values, name, 4 * consensus_values.PLACE_BYTES)
    # 4 TiB, were they copied.
    assert of(torch.ones(1).expand(1 << 40))[:3] == ["Tensor", "float32", [1 << 40]]
    plain = torch.arange(3 << 20, dtype=torch.int32).view(3, 1 << 20)
    turned = plain.T.contiguous().T
    assert not turned.is_contiguous()
    assert of(turned) == of(plain)


def test_tokens_that_a_key_and_its_request_share_are_told_as_those_that_are_equal() -> None:
    tokens = list(range(5000))
    for make in (list, lambda given: array("q", given), lambda given: [str(one) for one in given]):
        one = make(tokens)
        shared, apart = [Key(one), Request("r7", one)], [Key(one), Request("r7", make(tokens))]
        assert of(shared) == of(apart)
        changed = make([*tokens[:-1], 0])
        assert of([Key(one), Request("r7", changed)]) != of(shared)
    tokens.append(1)
    assert of(tokens) != of(tokens[:-1])


def test_of_content_without_end_places_at_equal_distances_are_looked_at() -> None:
    size = 20 << 20
    content = bytearray(size)
    before = of(content)
    content[0] = 1
    first = of(content)
    content[-1] = 1
    last = of(content)
    assert len({str(one) for one in (before, first, last)}) == 3
