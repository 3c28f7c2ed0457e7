"""The declarations that the checker lives on."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.probes import KINDS, REPLICA, Probes
from tracer.record import Kind
from tracer.sinks import MemorySink
from tracer.tracer import Tracer

DOCS = Path(__file__).parent.parent.parent / "docs" / "log_format.md"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.role == "decision"], ids=lambda k: k.name)
def test_a_decision_declares_who_agrees_on_what_and_at_least_three_local_facts(kind: Kind) -> None:
    assert set(kind.agree) == set(REPLICA)
    assert kind.compared
    assert len(kind.local) >= 3, "naming the right fact must mean something"


def test_every_kind_has_an_emitter() -> None:
    tracer = Tracer(MemorySink(), {}, lambda: 0)
    probes = Probes(tracer)
    # Those with storage, or with a value, carry more fields of the same kind.
    emitters = {name.removesuffix("_storage").removesuffix("_value") for name in Probes.__slots__}
    emitters = {name.removesuffix("_call").removesuffix("_return") for name in emitters}
    emitters = {name.removesuffix("_enter").removesuffix("_leave") for name in emitters} - {"tracer"}
    assert emitters == {kind.name for kind in KINDS}
    assert all(callable(getattr(probes, name)) for name in Probes.__slots__ if name != "tracer")


def test_a_declaration_survives_the_header() -> None:
    for kind in KINDS:
        assert Kind.from_declaration(kind.name, kind.declaration()) == kind


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_is_in_the_documentation(kind: Kind) -> None:
    assert f"`{kind.name}`" in DOCS.read_text(encoding="utf-8")
