"""Tests that share processes, or what was made once, run one after the other in one worker of the suite."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("together")
def test_a_test_of_a_group_is_told_apart_by_it(request: pytest.FixtureRequest) -> None:
    """Without it nothing is grouped, and nobody says so: what is made once is made in every worker."""
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("nothing is grouped without -n and --dist loadgroup")
    assert request.node.nodeid.endswith("@together")
