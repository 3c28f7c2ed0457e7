"""The test file: its data say what the logs say, and it is Python that needs nothing of ours."""

from __future__ import annotations

import ast
import sys
from typing import Any

import pytest

from consensus_checker.sglang_case.parting import parting
from consensus_checker.sglang_case.write import Lanes, file_text, requests_of, server_of
from tests.consensus_checker.sglang_case.test_parting import COMPARED
from tests.support.server_log import (
    CONFIG,
    OTHER_PAGES,
    PAGES,
    Record,
    arrival,
    event_round,
    joined,
    match,
    prefill,
    run_of_two,
)

QUERIES: list[Record] = [{"kind": "query", "rid": "r1", "attempt": 0, "agreed_pages": 2}]


def lanes(records: list[Record], **config: Any) -> Lanes:
    return Lanes("run-a", {**CONFIG, **config}, records, QUERIES)


def written(**config: Any) -> str:
    before = joined(event_round(1), arrival("r1", 0), match("r1"))
    ours = joined(before, prefill("r1"))
    found = parting((0, ours), (1, joined(before, prefill("r1", pages=0))), COMPARED, has_storage=True)
    assert found is not None
    own = lanes(ours, **config)
    server = server_of(own)
    assert not isinstance(server, str), server
    return file_text(found, own, server, "test_it.py")


def data_of(text: str) -> dict[str, Any]:
    """What it assigns ahead of its functions."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def test_equal_pages_of_requests_have_equal_numbers() -> None:
    found = requests_of(run_of_two(), 16)
    # Two whole pages of the prompt, and one of the end of it with what was put out.
    assert found == {
        "r1": {"tokens": [40, 8], "computed": 47, "pages": [[0, 3]]},
        "r2": {"tokens": [40, 0], "computed": 0, "pages": [[0, 1], [3, 1]]},
    }
    assert (PAGES[:12], PAGES[12:]) != (OTHER_PAGES[:12], OTHER_PAGES[12:])


def test_requests_of_two_tenants_share_no_page() -> None:
    one, *_ = arrival("r1", 0)
    other, *_ = arrival("r2", 1)
    found = requests_of([one, {**other, "namespace": "salted"}], 16)
    assert [about["pages"] for about in found.values()] == [[[0, 2]], [[2, 2]]]


def test_the_file_has_the_server_the_requests_and_the_steps() -> None:
    data = data_of(written())
    assert data["SERVER"]["page_tokens"] == 16
    assert (data["SERVER"]["device_pages"], data["SERVER"]["host_pages"]) == (80, 97)
    assert data["RANKS"] == (0, 1)
    assert data["HITS"] == {"r1/0": 32}
    assert data["REQUESTS"] == {"r1": {"tokens": [40, 0], "computed": 40, "pages": [[0, 2]]}}
    assert [step["do"] for step in data["STEPS"]] == ["round", "arrive", "match", "prefill"]
    assert data["STEPS"][-1]["odd"] == {"1": {"refuse_host_alloc": 0}}


def test_the_file_says_what_it_is_about() -> None:
    doc = ast.get_docstring(ast.parse(written()))
    assert doc is not None
    assert doc.splitlines()[:3] == [
        "Two ranks of SGLang 0.5.23 that part: alloc_host.",
        "",
        "Rank 1: the host pool refused 2 pages.",
    ]


def test_the_file_imports_nothing_but_the_server() -> None:
    roots = set()
    for node in ast.walk(ast.parse(written())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add(str(node.module).partition(".")[0])
    assert roots - sys.stdlib_module_names == {"sglang", "torch"}


def test_text_of_a_log_that_was_made_to_be_run_is_text() -> None:
    evil = '"""\nimport os; os.abort()\n"""\\'
    plain, text = written(), written(version=evil, radix_eviction_policy=evil)
    assert [type(node) for node in ast.parse(text).body] == [type(node) for node in ast.parse(plain).body]
    assert data_of(text)["SERVER"]["radix_eviction_policy"] == evil


def test_what_a_log_lacks_is_told() -> None:
    no_digests = joined(event_round(1), arrival("r1", 0, None))
    assert str(server_of(lanes(no_digests))).startswith("no digests of pages")
    late = joined(event_round(7), arrival("r1", 0))
    assert server_of(lanes(late)) == "the log does not begin with the first event round"
    assert server_of(lanes(run_of_two(), page_size_tokens=None)) == "no size of a page in the log's header"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("page_size_tokens", 0, "no size of a page in the log's header"),
        ("page_size_tokens", True, "no size of a page in the log's header"),
        ("version", float("inf"), "what the log's header has for version is no text and no whole number"),
        (
            "hicache_write_policy",
            ["write_through"],
            "what the log's header has for hicache_write_policy is no text and no whole number",
        ),
    ],
)
def test_a_header_that_no_server_writes_makes_no_server(name: str, value: Any, why: str) -> None:
    assert server_of(lanes(run_of_two(), **{name: value})) == why


def test_a_pool_of_less_than_nothing_makes_none_either() -> None:
    records = run_of_two()
    records[0] = {**records[0], "host_pages_free": -1}
    assert server_of(lanes(records)) == "no sizes of pools in the first event round"
