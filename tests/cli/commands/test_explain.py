from __future__ import annotations

import json

import pytest

from consensus_checker.pages import names
from tests.cli.conftest import Hicache


@pytest.mark.parametrize("name", names())
def test_every_page_is_narrow_and_plain(name: str, hicache: Hicache) -> None:
    said = hicache("explain", name)
    lines = said.out.splitlines()
    assert (said.code, said.err, lines[0]) == (0, "", f"# {name}")
    assert [line for line in lines if len(line) > 80 or line != line.rstrip() or "```" in line] == []


@pytest.mark.parametrize(
    ("typed", "page"), [("hc02", "HC02"), ("HC2", "HC02"), ("FR_Not_Joined", "fr_not_joined")]
)
def test_a_name_may_be_written_as_it_comes_to_hand(typed: str, page: str, hicache: Hicache) -> None:
    assert hicache("explain", typed).out == hicache("explain", page).out


def test_the_list_has_every_page_with_its_first_sentence(hicache: Hicache) -> None:
    said = hicache("explain", "--list")
    assert said.out == hicache("explain").out
    assert [line.split()[0] for line in said.out.splitlines() if not line.startswith(" ")] == names()
    assert [line for line in said.out.splitlines() if len(line) > 80] == []


def test_json_has_the_parts_of_a_page(hicache: Hicache) -> None:
    document = json.loads(hicache("explain", "agreement", "--json").out)
    assert (document["schema"], document["name"]) == ("hicache.explain.v1", "agreement")
    assert list(document["sections"]) == [
        "Equation",
        "Smallest evidence",
        "Looks like",
        "What it can't see",
        "What to do",
    ]
    listed = json.loads(hicache("explain", "--list", "--json").out)
    assert [page["name"] for page in listed["pages"]] == names()


def test_what_is_no_rule_is_a_usage_error_with_names_like_it(hicache: Hicache) -> None:
    said = hicache("explain", "agreemnt")
    assert (said.code, said.out) == (2, "")
    assert said.err == (
        "error: no rule or class agreemnt\n  expected  agreement\n  try       hicache explain --list\n"
    )
