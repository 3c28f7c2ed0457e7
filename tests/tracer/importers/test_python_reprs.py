from __future__ import annotations

import pytest

from tracer.importers.python_reprs import Digest, Leaf, elements, leaves, normal, value


def fields(payload: str, *, is_result: bool = False) -> dict[str, object]:
    return {leaf.name: value(leaf) for leaf in leaves(payload, is_result=is_result)}


def test_selected_expressions_are_fields_under_their_own_text() -> None:
    assert fields("params.host_hit_length=16 | len(key) == 3=True | max(a, default=0)=7") == {
        "params.host_hit_length": 16,
        "len(key) == 3": True,
        "max(a, default=0)": 7,
    }


def test_an_objects_keyword_arguments_are_fields_of_their_own() -> None:
    assert fields(
        "params=EvictParams(num_tokens=96, tree=Tree(kind='full')) | predicate is not None=False"
    ) == {
        "params": "EvictParams",
        "params.num_tokens": 96,
        "params.tree": "Tree",
        "params.tree.kind": "full",
        "predicate is not None": False,
    }


def test_all_arguments_come_as_a_dict() -> None:
    assert fields("{'request': CacheRequestHandle(rid='r32', attempt_id=0), 'swa': None}") == {
        "request": "CacheRequestHandle",
        "request.rid": "r32",
        "request.attempt_id": 0,
        "swa": "None",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("True", True),
        ("-7", -7),
        ("0.5", 0.5),
        ("None", "None"),
        ("<PrefetchStatus.DONE: 2>", "PrefetchStatus.DONE"),
        ("<sglang.srt.Radix object at 0x7f33aa00>", "<Radix>"),
        ("torch.float16", "torch.float16"),
    ],
)
def test_a_short_result_is_shown_as_it_is(text: str, expected: object) -> None:
    assert fields(text, is_result=True) == {"result": expected}


@pytest.mark.parametrize(
    ("text", "kind", "length"),
    [
        ("[11, 22, 33]", "list", 3),
        ("array('q', [11, 22])", "array", 2),
        ("array('q')", "array", 0),
        ("tensor([11, 22, 33])", "tensor", 3),
        ("(11, (22, 33))", "tuple", 2),
        ("{11, 22}", "set", 2),
        ("{11: 22}", "dict", 1),
        ("'the prompt'", "str", 10),
        ("the prompt", "text", 10),
    ],
)
def test_what_could_be_a_prompt_becomes_type_and_length(text: str, kind: str, length: int) -> None:
    (found,) = fields(text, is_result=True).values()
    assert isinstance(found, Digest)
    assert (found.type, found.length) == (kind, length)
    assert "11" not in repr(found.type)


def test_a_token_is_not_shown_although_it_is_a_number() -> None:
    shown = fields("{'next_token_id': 4403, 'num_tokens': 96}")
    assert isinstance(shown["next_token_id"], Digest)
    assert shown["num_tokens"] == 96


def test_a_word_is_shown_only_under_a_name_that_is_an_id_or_a_state() -> None:
    shown = fields("{'rid': 'r7', 'text': 'hello', 'salt': 'secret'}")
    assert [name for name, one in shown.items() if isinstance(one, Digest)] == ["text", "salt"]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("<A object at 0x7f3301>", "<A object at 0x55aa0000ff>"),
        ("X(a=<A at 0x7f330100>, b=[<B at 0x7f330200>])", "X(a=<A at 0x55aa0000>, b=[<B at 0x55aa0010>])"),
        ("{3, 1, 2}", "{1, 2, 3}"),
        ("frozenset({'b', 'a, c'})", "frozenset({'a, c', 'b'})"),
        ("{'a': {2, 1}, 'b': 0}", "{'b': 0, 'a': {1, 2}}"),
    ],
)
def test_what_differs_legally_between_processes_is_equal(one: str, two: str) -> None:
    assert normal(one) == normal(two)
    assert fields(one, is_result=True) == fields(two, is_result=True)


@pytest.mark.parametrize(
    ("one", "two"), [("[1, 2]", "[2, 1]"), ("{1, 2}", "{1, 3}"), ("'{b, a}'", "'{a, b}'"), ("(1,)", "[1]")]
)
def test_what_differs_otherwise_is_not(one: str, two: str) -> None:
    assert fields(one, is_result=True) != fields(two, is_result=True)


def test_brackets_and_separators_inside_of_quotes_separate_nothing() -> None:
    assert [leaf.name for leaf in leaves("a='x | b=1' | c=\"it's (\" | d=2", is_result=False)] == [
        "a",
        "c",
        "d",
    ]
    assert elements("['a, b', \"c', d\", (1, 2)]") == ["'a, b'", '"c\', d"', "(1, 2)"]


def test_a_list_that_was_elided_says_so() -> None:
    (found,) = fields("array('q', [1, 2, 3])...", is_result=True).values()
    assert isinstance(found, Digest)
    assert (found.type, found.length, found.is_elided) == ("array", 3, True)


@pytest.mark.parametrize(
    "text", ["X(a=1, b=(2", "{'a': 1", "a=[1, 2 | b=)", "'open", "]", "=", "", "X(" * 5000]
)
def test_what_cannot_be_taken_apart_is_one_field_and_no_error(text: str) -> None:
    for is_result in (True, False):
        assert len([value(leaf) for leaf in leaves(text, is_result=is_result)]) <= 3


def test_names_are_short_and_none_is_there_twice() -> None:
    names = [leaf.name for leaf in leaves(f"{'x' * 200}=1 | a=1 | a=2", is_result=False)]
    assert (len(names[0]), names[1:]) == (60, ["a", "a#2"])


def test_more_fields_than_anybody_reads_are_one() -> None:
    found = leaves(" | ".join(f"f{number}={number}" for number in range(500)), is_result=False)
    assert (len(found), found[-1].name) == (97, "rest")
    assert Leaf("f0", "0") == found[0]
