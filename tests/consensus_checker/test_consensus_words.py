"""A payload in a few characters, and the fields that an object's payload has."""

from __future__ import annotations

from typing import Any

import pytest

from consensus_checker.consensus_words import fields_of, payload_text

DIGEST = "91aa52c0de123456"


def test_the_fields_of_an_object_have_names_of_their_own() -> None:
    payload = ["MatchParams", {"rid": "r7", "key": ["RadixKey", 4096, DIGEST]}]
    assert fields_of("params", payload) == {
        "params.rid": "r7",
        "params.key": ["RadixKey", 4096, DIGEST],
    }


@pytest.mark.parametrize("value", [5, None, "r7", ["list", 3, DIGEST], ["lock"], [1, {"a": 1}], ["dict", {}]])
def test_what_is_no_object_is_under_its_own_name(value: Any) -> None:
    assert fields_of("params", value) == {"params": value}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "5"),
        (None, "-"),
        (True, "True"),
        ("r7", "r7"),
        ([17, 18], "[17, 18]"),
        (["list", 4096, DIGEST], "list of 4096 91aa52"),
        (["str", 11, DIGEST], "str of 11 91aa52"),
        (["Node", DIGEST], "Node 91aa52"),
        (["Req", "r7", DIGEST], "Req r7 91aa52"),
        (["Tensor", "int64", [17, 2], DIGEST], "Tensor int64 17x2 91aa52"),
        (["Tensor", "int64", [17], "cuda"], "Tensor int64 17 cuda"),
        (["float", "nan"], "float nan"),
        (["lock"], "lock"),
        (["?", "LookupError"], "? LookupError"),
        (["Params", {"rid": "r7", "key": ["Key", 3, DIGEST]}], "Params(rid r7, key Key of 3 91aa52)"),
    ],
)
def test_a_payload_in_a_few_characters(value: Any, text: str) -> None:
    assert payload_text(value) == text


def test_what_would_move_the_cursor_of_a_terminal_is_escaped() -> None:
    assert payload_text("\x1b[31mred\nline é") == "\\x1b[31mred\\nline é"
    assert payload_text(["list", "a\tb"]) == "list a\\tb"
