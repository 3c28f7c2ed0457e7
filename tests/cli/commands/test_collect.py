"""`hicache collect`: one bundle of many hosts, and every command that reads it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.app import main
from cli.errors import INTERRUPTED
from hicache.zoo import SCENARIOS
from tests.cli.conftest import Hicache
from tests.support.evidence import STACK, put

REPO = Path(__file__).resolve().parents[3]
# What a server's own log looks like, and what a process dump does.
SERVER_LOG = "[2026-01-01 00:00:00 TP0] Prefill batch. #new-seq: 1, prompt: tell me a secret\n"


def host(folder: Path, run: Path, ranks: Sequence[int]) -> Path:
    """A host's folder with the files of some ranks of a run."""
    folder.mkdir()
    for rank in ranks:
        for file in run.glob(f"rank{rank:04d}.*"):
            shutil.copy(file, folder)
    return folder


@pytest.fixture
def hosts(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's hung run, two ranks a host, below the working directory."""
    monkeypatch.chdir(tmp_path)
    host(tmp_path / "host-0", runs / "hung", (0, 1))
    host(tmp_path / "host-1", runs / "hung", (2, 3))
    return tmp_path


@pytest.mark.parametrize("bundle", ["bundle", "bundle.tar.gz"])
def test_a_bundle_gives_the_verdict_of_the_run(
    hosts: Path, runs: Path, hicache: Hicache, bundle: str
) -> None:
    said = hicache("collect", "host-0", "host-1", "-o", bundle)
    assert (said.code, said.err) == (0, "")
    assert "4 of 4 ranks present" in said.out
    whole, bundled = hicache("check", runs / "hung", "--json"), hicache("check", bundle, "--json")
    assert (bundled.code, bundled.err) == (10, "")
    assert bundled.out == whole.out.replace(str(runs / "hung"), bundle)


def test_other_commands_read_a_bundle(hosts: Path, runs: Path, hicache: Hicache) -> None:
    hicache("collect", "host-0", "host-1", "-o", "b.tar.gz")
    for words in (
        ("query", "{}", "SELECT rank, count(*) FROM decisions GROUP BY rank ORDER BY rank", "--json"),
        ("hits", "{}", "--json"),
        ("hits", "{}", "--why", "c2.t1", "--quiet"),
        ("export", "{}", "--to", "prometheus", "--out", "-", "--quiet"),
    ):
        of_run, of_bundle = (
            hicache(*(word.format(place) for word in words)) for place in (runs / "hung", "b.tar.gz")
        )
        assert of_bundle.code == 0
        assert of_run.out == of_bundle.out


def test_ranks_that_are_not_there_are_told_and_blamed_for_nothing(hosts: Path, hicache: Hicache) -> None:
    said = hicache("collect", "host-0", "-o", "part")
    assert "2 of 4 ranks present: ranks 2-3 are not" in said.out
    checked = hicache("check", "part", "--json")
    assert checked.err == "note: 2 of 4 ranks are in it: ranks 2-3 are not\n"
    ranks = json.loads(checked.out)["ranks"]
    assert not {2, 3} & {*ranks["culprit"], *ranks["victims"], *ranks["unknown"]}


def test_the_json_document_is_the_manifest(hosts: Path, hicache: Hicache) -> None:
    document = json.loads(hicache("collect", "host-0", "-o", "part", "--json").out)
    assert json.loads(Path("part/bundle.json").read_text()) | {"bundle": "part"} == document


def test_an_archive_of_a_host_is_taken_like_its_folder(hosts: Path, hicache: Hicache) -> None:
    with tarfile.open("host-1.tar.gz", "w:gz") as tar:
        tar.add("host-1", "var/log/host-1")
    hicache("collect", "host-0", "host-1", "-o", "one")
    hicache("collect", "host-0", "host-1.tar.gz", "-o", "two")
    one, two = (hicache("check", bundle, "--json").out for bundle in ("one", "two"))
    assert one == two.replace(" two", " one")


def test_of_two_runs_the_newest_is_judged_unless_asked(hosts: Path, runs: Path, hicache: Hicache) -> None:
    # The twin was made behind it, and is the newer one.
    shutil.copytree(runs / "twin", "host-0/later")
    hicache("collect", "host-0", "host-1", "-o", "both")
    assert hicache("check", "both", "--quiet").code == 0
    assert hicache("check", "both", "--run", "run-1", "--quiet").code == 10
    assert "read is run-2" in hicache("check", "both").err
    assert hicache("check", "both", "--run", "run-9").code == 3


def test_run_is_for_a_bundle(runs: Path, hicache: Hicache) -> None:
    assert hicache("check", runs / "hung", "--run", "x").code == 2


def test_server_logs_come_along_only_when_asked(hosts: Path, hicache: Hicache) -> None:
    Path("host-0/server.log").write_text(SERVER_LOG)
    hicache("collect", "host-0", "-o", "without")
    hicache("collect", "host-0", "-o", "with", "--with-logs")
    assert not list(Path("without").rglob("server.log"))
    (left_out,) = json.loads(Path("without/bundle.json").read_text())["left_out"]
    assert left_out["name"] == "host-0/server.log"
    assert [path.read_text() for path in Path("with").rglob("server.log")] == [SERVER_LOG]


def test_names_of_threads_go_with_the_stacks_beside_them(hosts: Path, hicache: Hicache) -> None:
    stacks = STACK.format(func="writing_check", call="all_reduce", line=700)
    files = {"stacks_rank_0.txt": stacks, "stacks_rank_0.threads.json": "{}", "alone.threads.json": "{}"}
    put(Path("host-0"), files)
    said = hicache("collect", "host-0", "-o", "bundle")
    assert sorted(path.name for path in Path("bundle/evidence").rglob("*.*")) == [
        "stacks_rank_0.threads.json",
        "stacks_rank_0.txt",
    ]
    assert "  left    host-0/alone.threads.json: a server's log or unknown" in said.out


def test_nothing_that_was_planted_is_in_an_anonymised_bundle(hosts: Path, hicache: Hicache) -> None:
    # Longer than any that a system has: a short one can stand in a time or a digest by chance.
    pid = 4_711_081_500_471_108
    planted = ("c2.t1", "canary-host", str(pid), "tell me a secret", "host-0", str(hosts))
    for meta in hosts.rglob("*.meta.json"):
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"host": "canary-host", "pid": pid}))
    Path("host-0/server.log").write_text(SERVER_LOG)
    said = hicache("collect", "host-0", "host-1", "-o", "b.tar.gz", "--anonymise", "--mapping", "names.json")
    assert (said.code, said.err) == (0, "")
    with tarfile.open("b.tar.gz") as tar:
        data = b"".join(
            file.read() + member.name.encode() for member in tar if (file := tar.extractfile(member))
        )
    assert [word for word in planted if word.encode() in data] == []
    names = json.loads(Path("names.json").read_text())
    assert "c2.t1" in names["requests"].values()
    assert names["hosts"] == {"host-a": "canary-host"}
    assert Path("names.json").stat().st_mode & 0o777 == 0o600


def restored(value: Any, names: dict[str, str]) -> Any:
    """A document with the names that it had."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, list):
        return [restored(each, names) for each in value]
    if isinstance(value, dict):
        return {restored(key, names): restored(each, names) for key, each in value.items()}
    return value


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_verdict_is_the_same_but_for_the_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hicache: Hicache, scenario: str
) -> None:
    monkeypatch.chdir(tmp_path)
    hicache("zoo", "run", scenario, "--seed", 1, "--out", "run")
    hicache("collect", "run", "-o", "b", "--anonymise", "--mapping", "names.json")
    named, nameless = (hicache("check", place, "--every-line", "--json") for place in ("run", "b"))
    assert named.code == nameless.code
    mapping = json.loads(Path("names.json").read_text())
    names = {name: text for each in mapping.values() for name, text in each.items()}
    found = restored(json.loads(nameless.out), names)
    found["next"] = json.loads(nameless.out.replace(" b ", " run ").replace(' b"', ' run"'))["next"]
    assert json.loads(named.out) == found


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("gone", "-o", "b"), 3, "no such file or folder: gone"),
        (("empty", "-o", "b"), 3, "no logs and no other evidence in empty"),
        (("host-0/rank0000.meta.json", "-o", "b"), 3, "neither a folder nor an archive"),
        (("host-0", "-o", "host-1"), 2, "is there already"),
        (("host-0", "-o", "host-0/b"), 2, "is in host-0, which is only read"),
        (("host-0", "-o", "gone/b"), 2, "no folder gone"),
        (("host-0", "-o", "b", "--mapping", "m"), 2, "expected  --anonymise as well"),
        (("host-0", "-o", "b", "--anonymise", "--with-logs"), 2, "can't take names out of server logs"),
        (("host-0", "-o", "empty", "--anonymise", "--mapping", "empty/m"), 2, "is in the bundle"),
    ],
)
def test_what_can_not_be_done_is_one_error_and_writes_nothing(
    hosts: Path, hicache: Hicache, words: tuple[str, ...], code: int, told: str
) -> None:
    Path("empty").mkdir()
    before = sorted(path for path in hosts.rglob("*"))
    said = hicache("collect", *words)
    assert (said.code, said.out) == (code, "")
    assert told in said.err
    assert before == sorted(path for path in hosts.rglob("*"))


@pytest.mark.parametrize("bundle", ["bundle", "bundle.tar.gz"])
def test_an_interrupt_leaves_no_half_bundle(
    hosts: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch, bundle: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tracer.bundle._described", interrupted)
    before = sorted(path for path in hosts.rglob("*"))
    assert hicache("collect", "host-0", "-o", bundle).code == INTERRUPTED
    assert before == sorted(path for path in hosts.rglob("*"))


def test_sigterm_leaves_no_half_bundle(hosts: Path) -> None:
    code = (
        "import os, signal, sys, tracer.bundle as bundle; from cli.app import main\n"
        "bundle._described = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(main(['collect', 'host-0', '-o', 'b.tar.gz']))"
    )
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert sorted(path.name for path in hosts.iterdir()) == ["host-0", "host-1"]


def test_a_bundle_is_its_owners_alone(hosts: Path, hicache: Hicache) -> None:
    hicache("collect", "host-0", "-o", "b.tar.gz")
    hicache("collect", "host-0", "-o", "b")
    assert [Path(name).stat().st_mode & 0o777 for name in ("b.tar.gz", "b")] == [0o600, 0o700]


def test_equal_logs_give_equal_bundles(hosts: Path) -> None:
    for bundle in ("one.tar.gz", "two.tar.gz"):
        assert main(["collect", "host-0", "host-1", "--quiet", "-o", bundle]) == 0
    assert Path("one.tar.gz").read_bytes() == Path("two.tar.gz").read_bytes()
