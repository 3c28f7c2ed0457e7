"""`hicache doctor`: what it says of a machine, and that it says no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Hicache


def checks(hicache: Hicache) -> dict[str, dict[str, str]]:
    said = hicache("doctor", "--json")
    assert (said.code, said.err) == (0, "")
    document = json.loads(said.out)
    assert document["schema"] == "hicache.doctor.v1"
    return {check["name"]: check for check in document["checks"]}


def test_versions_and_what_is_importable_are_told(hicache: Hicache) -> None:
    found = checks(hicache)
    assert {"ok"} == {found[name]["state"] for name in ("hicache-toolkit", "python", "msgspec", "duckdb")}


def test_a_package_that_is_missing_is_told_with_what_needs_it(
    hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.commands.doctor.find_spec", lambda module: None)
    said = hicache("doctor")
    assert said.code == 0
    assert "! duckdb             not installed  (needed for query, and Parquet)" in said.out
    assert "- torch              not installed  (needed for run --mode gloo)" in said.out


def test_a_switch_is_shown_and_a_key_is_not(hicache: Hicache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_TRACE", "full")
    monkeypatch.setenv("HICACHE_DIGEST_KEY", "canary-key")
    found = checks(hicache)
    assert (found["HICACHE_TRACE"]["found"], found["HICACHE_DIGEST_KEY"]["found"]) == ("full", "set")
    assert "canary-key" not in hicache("doctor").out


def test_a_setting_that_has_no_effect_is_lacking(hicache: Hicache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_TRACE_LIMIT", "lots")
    assert "HICACHE_TRACE_LIMIT is 'lots'" in checks(hicache)["settings"]["found"]
    assert hicache("doctor", "--quiet").out == "LACKING   settings\n"


@pytest.mark.parametrize(("name", "state"), [("new/below", "ok"), ("file/below", "lacking")])
def test_a_folder_for_logs_must_be_one_that_can_be_made(
    tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch, name: str, state: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HICACHE_TRACE_DIR", str(tmp_path / name))
    assert state == checks(hicache)["folder"]["state"]
    assert not (tmp_path / "new").exists()


def test_no_line_is_wider_than_a_terminal(hicache: Hicache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HICACHE_TRACE_DIR", raising=False)
    assert [line for line in hicache("doctor").out.splitlines() if len(line) > 80] == []
