"""The manifests of `examples/kubernetes`: what they promise of a pod, and what their scripts do."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from cli.app import app
from consensus_checker.live_policy import POLICIES
from tracer.freeze import FREEZES_MAX

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "kubernetes"
WORKLOADS = ("StatefulSet", "Job")
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}
# What start.sh leaves: the attempt that runs, and two before it.
ATTEMPTS = 3
LOCKED = {
    "allowPrivilegeEscalation": False,
    "privileged": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


# Two pods, of which one can't be asked.
KUBECTL = """
case "$*" in
    "get pods -l app=x -o name") echo pod/a; echo pod/b ;;
    "get pods"*) ;;
    "exec a "*) echo A ;;
    *) exit 1 ;;
esac
"""


@cache
def documents() -> list[Any]:
    return [
        document
        for path in sorted(FOLDER.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]


def one(kind: str, name: str = "sglang") -> Any:
    (found,) = [each for each in documents() if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def pods() -> Iterator[Any]:
    for document in documents():
        if document["kind"] in WORKLOADS:
            yield document["spec"]["template"]["spec"]


def containers(spec: Any) -> list[Any]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def server() -> Any:
    found, _ = one("StatefulSet")["spec"]["template"]["spec"]["containers"]
    return found


def script(name: str) -> str:
    return str(one("ConfigMap", "sglang-hicache")["data"][name])


def size_bytes(text: str) -> int:
    return int(text[:-2]) * UNITS[text[-2:]]


def test_no_container_may_do_more_than_it_must() -> None:
    found = [each["securityContext"] for spec in pods() for each in containers(spec)]
    assert found == [LOCKED] * 4


def test_no_pod_shares_anything_with_its_host_or_between_its_containers() -> None:
    for spec in pods():
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["shareProcessNamespace"] is False
        assert spec["automountServiceAccountToken"] is False
        assert not any(spec.get(name) for name in ("hostPID", "hostIPC", "hostNetwork"))
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]


def test_every_container_says_what_it_needs_and_every_scratch_volume_is_bounded() -> None:
    for spec in pods():
        for each in containers(spec):
            assert {"requests", "limits"} == each["resources"].keys(), each["name"]
        for volume in spec["volumes"]:
            assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"], volume["name"]


def test_every_mount_and_every_variable_is_there() -> None:
    for spec in pods():
        volumes = {volume["name"] for volume in spec["volumes"]}
        for each in containers(spec):
            assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
            defined = {variable["name"] for variable in each.get("env", [])}
            texts = [*each.get("args", []), *(mount.get("subPathExpr", "") for mount in each["volumeMounts"])]
            wanted = {name for text in texts for name in re.findall(r"\$\(([A-Z_]+)\)", text)}
            assert wanted <= defined


def test_the_volume_of_the_records_holds_all_that_they_may_take() -> None:
    """A pod whose emptyDir is over its limit is evicted."""
    variables = {each["name"]: each.get("value") for each in server()["env"]}
    ranks = server()["resources"]["limits"]["nvidia.com/gpu"]
    (volume,) = [
        each
        for each in one("StatefulSet")["spec"]["template"]["spec"]["volumes"]
        if each["name"] == "records"
    ]
    most = ranks * ATTEMPTS * (1 + FREEZES_MAX) * int(variables["HICACHE_TRACE_LIMIT"])
    assert most <= size_bytes(volume["emptyDir"]["sizeLimit"])


def test_the_plugin_is_armed_by_words_that_it_knows() -> None:
    variables = {each["name"]: each.get("value") for each in server()["env"]}
    assert variables["HICACHE_TRACE"] == "ring"
    assert variables["HICACHE_CHECKER_POLICY"] in POLICIES
    # SGLang's own switch would have a host that lacks the plugin make process groups that no other one makes.
    assert "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER" not in variables
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "consensus_checker").glob("*.py"))
    assert not [name for name in variables if name.startswith("HICACHE_") and f'"{name}"' not in sources]


def test_nothing_leaves_the_replica_but_the_question_for_a_name() -> None:
    policy = one("NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    own, names = policy["egress"]
    assert own == {"to": [{"podSelector": {"matchLabels": {"app": "sglang"}}}]}
    assert [port["port"] for port in names["ports"]] == [53, 53]
    job = one("NetworkPolicy", "hicache-collect")["spec"]
    assert (job["policyTypes"], job.get("egress"), job.get("ingress")) == (["Ingress", "Egress"], None, None)


def test_the_snapshot_before_the_end_leaves_the_server_ten_seconds() -> None:
    spec = one("StatefulSet")["spec"]["template"]["spec"]
    (limit,) = re.findall(r"timeout -k (\d+) (\d+)", script("stop.sh"))
    assert spec["terminationGracePeriodSeconds"] == 30
    assert sum(map(int, limit)) <= 20
    assert server()["lifecycle"]["preStop"]["exec"]["command"] == ["/bin/sh", "/etc/hicache/stop.sh"]


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("snapshot", script("stop.sh")),
        ("collect", (FOLDER / "collect.sh").read_text(encoding="utf-8")),
        ("collect", one("Job", "hicache-collect")["spec"]["template"]["spec"]["containers"][0]["args"][0]),
    ],
    ids=["preStop", "collect.sh", "job"],
)
def test_the_commands_that_are_typed_there_have_these_options(command: str, text: str) -> None:
    commands = getattr(typer.main.get_command(app), "commands", {})
    (line,) = re.findall(rf"(?:hicache|cli\.app) {command} (.*)", text)
    known = {name for parameter in commands[command].params for name in parameter.opts}
    assert {word for word in line.split() if re.fullmatch(r"--?[a-z]+", word)} <= known


def run(words: list[str], tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", **environment}
    return subprocess.run(words, capture_output=True, text=True, env=env, timeout=100, check=False)


def program(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_each_start_has_a_folder_of_its_own_and_the_two_before_it_are_kept(tmp_path: Path) -> None:
    root = tmp_path / "records"
    for day in range(1, 5):
        (root / f"attempt-2026010{day}T000000Z").mkdir(parents=True)
        (root / f"attempt-2026010{day}T000000Z" / "rank0000.meta.json").write_text("{}")
    server = ["sh", "-c", 'echo "$HICACHE_TRACE_DIR" "$@"', "sh", "a b"]
    words = ["sh", "-c", script("start.sh"), "start.sh", *server]
    done = run(words, tmp_path, HICACHE_TRACE_DIR=str(root))
    assert (done.returncode, done.stderr) == (0, "")
    folder, _, said = done.stdout.strip().partition(" ")
    assert said == "a b"
    assert re.fullmatch(rf"{root}/attempt-\d{{8}}T\d{{6}}Z", folder)
    assert sorted(path.name for path in root.iterdir()) == [f"attempt-2026010{day}T000000Z" for day in (3, 4)]


def test_a_first_start_finds_nothing_to_remove(tmp_path: Path) -> None:
    words = ["sh", "-c", script("start.sh"), "start.sh", "true"]
    done = run(words, tmp_path, HICACHE_TRACE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_snapshot_that_fails_does_not_fail_the_hook(tmp_path: Path) -> None:
    program(tmp_path, "python3", f'echo "$@" > {tmp_path}/words; exit 3')
    done = run(["sh", "-c", script("stop.sh")], tmp_path)
    assert done.returncode == 0
    assert re.fullmatch(
        r"-m cli\.app snapshot --match sglang::scheduler -o /evidence/snapshot-\d{8}T\d{6}Z --seconds 15\n",
        (tmp_path / "words").read_text(),
    )


def test_pods_are_asked_one_by_one_and_what_has_come_is_collected(tmp_path: Path) -> None:
    program(tmp_path, "kubectl", KUBECTL)
    program(tmp_path, "hicache", f'cat "$2" "$3" > {tmp_path}/got; echo "$@"')
    done = run(["sh", str(FOLDER / "collect.sh"), str(tmp_path / "b.tar.gz"), "app=x"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "b: not all of its records have come\n")
    assert (tmp_path / "got").read_text() == "A\n"
    words = done.stdout.split()
    assert (words[0], [Path(word).name for word in words[1:3]]) == ("collect", ["a.tar", "b.tar"])
    assert words[3:] == ["-o", str(tmp_path / "b.tar.gz")]
    # Nothing of a host stays outside of the bundle.
    assert not Path(words[1]).parent.exists()


def test_no_pod_is_an_error_and_not_an_empty_bundle(tmp_path: Path) -> None:
    program(tmp_path, "kubectl", KUBECTL)
    done = run(["sh", str(FOLDER / "collect.sh"), str(tmp_path / "b.tar.gz"), "app=y"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: no pod has app=y\n")


def test_the_manifests_are_plain_data() -> None:
    """Whatever reads JSON reads them."""
    assert json.loads(json.dumps(documents())) == documents()
