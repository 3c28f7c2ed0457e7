"""The page about the log names what a log of the runtime has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hicache.probes import KINDS
from tracer.record import LANE_STATE

PAGE = (Path(__file__).parents[2] / "docs" / "log_format.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_of_the_runtime_is_on_the_page(kind: object) -> None:
    name = str(getattr(kind, "name", kind))
    assert re.search(rf"^\|[^|]*`{name}`", PAGE, re.MULTILINE)


def test_the_kind_that_readers_know_by_its_name_is_one_of_the_runtimes() -> None:
    (kind,) = [kind for kind in KINDS if kind.name == LANE_STATE]
    assert {"state", "op"} <= set(kind.fields)
