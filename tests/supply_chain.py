"""What an installation consists of, with hashes: `make sbom`, whenever a dependency is to be taken newer.

    python -m tests.supply_chain        writes requirements.lock and docs/sbom.cdx.json

Asks pip what it would install, on the platforms and interpreters below, and keeps the hashes of all of it.
Where a file comes from is not kept: whoever installs has an index of their own. Equal answers, equal bytes.
Licences are what the installed packages say.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
import tomllib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK, SBOM = ROOT / "requirements.lock", ROOT / "docs" / "sbom.cdx.json"
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
LIBRARIES = ("manylinux2014", "manylinux_2_17", "manylinux_2_26", "manylinux_2_27", "manylinux_2_28")
LICENSE_CHARS_MAX = 60
HEAD = """\
# Made by `make sbom`: the core install, and the hashes of its wheels for CPython {pythons} on Linux,
# {machines}.
# pip install --require-hashes -r requirements.lock && pip install --no-deps hicache_toolkit-*.whl
"""


@dataclass(slots=True)
class Package:
    """One distribution; `hashes` are those of each of its files that some platform takes."""

    name: str
    version: str
    needs: tuple[str, ...]
    hashes: set[str] = field(default_factory=set)

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def project() -> Mapping[str, Any]:
    found: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def resolved(requirements: Sequence[str], python: str, machine: str) -> list[Any]:
    """What pip would install into an empty folder of such a machine."""
    platforms = [word for name in LIBRARIES for word in ("--platform", f"{name}_{machine}")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--dry-run",
        ]
        words += ["--ignore-installed", "--only-binary", ":all:", "--target", folder, "--report", str(report)]
        words += ["--python-version", python, "--implementation", "cp", *platforms, *requirements]
        subprocess.run(words, check=True, cwd=folder)
        found: list[Any] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return found


def packages() -> dict[str, Package]:
    """Name -> package. The first platform says which versions, the others are asked for the same."""
    found: dict[str, Package] = {}
    for python in PYTHONS:
        for machine in MACHINES:
            asked = [f"{one.name}=={one.version}" for one in found.values()] or project()["dependencies"]
            for entry in resolved(asked, python, machine):
                package = described(entry["metadata"])
                own = found.setdefault(package.name, package)
                assert own.version == package.version, f"{own.purl} and {package.purl}"
                own.hashes.add(entry["download_info"]["archive_info"]["hashes"]["sha256"])
    return dict(sorted(found.items()))


def described(metadata: Mapping[str, Any]) -> Package:
    needs = (Requirement(text) for text in metadata.get("requires_dist", []))
    names = {canonicalize_name(need.name) for need in needs if need.marker is None or need.marker.evaluate()}
    name, version = canonicalize_name(metadata["name"]), str(metadata["version"])
    return Package(name, version, tuple(sorted(names)))


def license_of(name: str) -> dict[str, Any]:
    """As the package says it, in the newest of the three ways there were."""
    metadata = importlib.metadata.metadata(name)
    if expression := metadata.get("License-Expression"):
        return {"expression": expression}
    text = str(metadata.get("License", "")).strip()
    if not text or len(text) > LICENSE_CHARS_MAX:
        classified = [line for line in metadata.get_all("Classifier") or [] if line.startswith("License :: ")]
        text = classified[0].rpartition(" :: ")[2]
    return {"license": {"name": text}}


def lock(found: Mapping[str, Package]) -> str:
    lines = [HEAD.format(pythons=" to ".join((PYTHONS[0], PYTHONS[-1])), machines=", ".join(MACHINES))]
    for package in found.values():
        hashes = " \\\n    ".join(f"--hash=sha256:{one}" for one in sorted(package.hashes))
        lines.append(f"{package.name}=={package.version} \\\n    {hashes}\n")
    return "".join(lines)


def sbom(found: Mapping[str, Package]) -> str:
    """CycloneDX 1.6: this distribution, and what its core install brings."""
    own = project()
    name, version = str(own["name"]), str(own["version"])
    direct = {canonicalize_name(Requirement(text).name) for text in own["dependencies"]}
    root = f"pkg:pypi/{name}@{version}"
    component = {"type": "application", "bom-ref": root, "name": name, "version": version, "purl": root}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component | {"licenses": [license_of(name)]}},
        "components": [described_component(package) for package in found.values()],
        "dependencies": list(edges(found, root, direct)),
    }
    # Its number is made of what it says, so that it changes when that does.
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))
    return json.dumps({"serialNumber": f"urn:uuid:{number}"} | document, indent=1) + "\n"


def described_component(package: Package) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "purl": package.purl,
        "licenses": [license_of(package.name)],
        "hashes": [{"alg": "SHA-256", "content": one} for one in sorted(package.hashes)],
    }


def edges(found: Mapping[str, Package], root: str, direct: set[str]) -> Iterator[dict[str, Any]]:
    yield {"ref": root, "dependsOn": [one.purl for one in found.values() if one.name in direct]}
    for package in found.values():
        yield {
            "ref": package.purl,
            "dependsOn": [found[need].purl for need in package.needs if need in found],
        }


if __name__ == "__main__":
    every = packages()
    LOCK.write_text(lock(every), encoding="utf-8")
    SBOM.write_text(sbom(every), encoding="utf-8")
    print(f"{len(every)} packages: {LOCK.relative_to(ROOT)}, {SBOM.relative_to(ROOT)}")
