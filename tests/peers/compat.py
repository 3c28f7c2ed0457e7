"""Which functions of the plugin's points each published version of SGLang has: `make compat`.

Reads the wheels and runs nothing of them. They are downloaded once, into a folder outside of the repository.

    python -m tests.peers.compat [VERSION ...]
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from consensus_checker.sglang_hooks import Point
from consensus_checker.sglang_points import POINTS, THREADS
from tests.peers.pages import kept

VERSIONS = ("0.5.12", "0.5.16", "0.5.18", "0.5.20", "0.5.22", "0.5.23")
CHECKER = "sglang/srt/utils/rank_consensus_checker.py"
LOADER = "sglang/srt/plugins/__init__.py"
# What `Hooks.install` takes from its class as it is inherited.
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Found:
    """What one version has.

    Attributes:
        lacking: points whose function is not there.
        changed: points whose function is there, without a parameter that the point can't do without.
        renamed: those that do without one, or know it by its former name.
        blind: points that read an attribute of their object which nothing in the version is called.
    """

    version: str
    present: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    renamed: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()
    threads: int = 0
    has_checker: bool = False
    has_loader: bool = False

    @property
    def working(self) -> int:
        return len(self.present) - len({*self.changed, *self.blind})


class Wheel:
    """The sources of one version."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self._names = frozenset(self._zip.namelist())

    def has(self, name: str) -> bool:
        return name in self._names

    @cache  # noqa: B019  a wheel is read once, and there are few
    def tree(self, module: str) -> ast.Module | None:
        name = module.replace(".", "/")
        path = next((one for one in (f"{name}.py", f"{name}/__init__.py") if one in self._names), None)
        return None if path is None else ast.parse(self._zip.read(path))

    def owner(self, module: str, name: str) -> ast.ClassDef | None:
        tree = self.tree(module)
        body = tree.body if tree is not None else []
        return next((one for one in body if isinstance(one, ast.ClassDef) and one.name == name), None)

    def function(self, module: str, owner: str, name: str) -> Function | None:
        """As the class has it, itself or from a class of the same module."""
        found = self.owner(module, owner)
        if found is None:
            return None
        for part in found.body:
            if isinstance(part, Function) and part.name == name:
                return part
        bases = [base.id for base in found.bases if isinstance(base, ast.Name) and base.id != owner]
        inherited = (self.function(module, base, name) for base in bases)
        return next((one for one in inherited if one is not None), None)

    @cache  # noqa: B019
    def attributes(self) -> frozenset[str]:
        """Whatever is called an attribute, or a function, in the packages that the points are in."""
        found: set[str] = set()
        for name in self._names:
            if not name.endswith(".py") or not name.startswith(
                ("sglang/srt/mem_cache/", "sglang/srt/managers/")
            ):
                continue
            for part in ast.walk(ast.parse(self._zip.read(name))):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    found.add(part.attr)
                elif isinstance(part, Function):
                    found.add(part.name)
                elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    found.add(part.target.id)
        return frozenset(found)


def parameters(function: Function) -> frozenset[str]:
    own = function.args
    return frozenset(one.arg for one in (*own.posonlyargs, *own.args, *own.kwonlyargs))


def attributes_read(point: Point) -> frozenset[str]:
    """Names of attributes that the point's expressions read, of whatever object."""
    texts = [*point.before.values(), *(point.call or {}).values(), *(point.values or {}).values()]
    texts += [*point.after, *([point.when] if point.when else [])]
    parts = [part for text in texts for part in ast.walk(ast.parse(text, mode="eval"))]
    return frozenset(
        part.attr
        for part in parts
        if isinstance(part, ast.Attribute)
        and not (isinstance(part.value, ast.Name) and part.value.id == "_see")
    )


# Of the standard library's own objects.
FOREIGN = frozenset({"qsize"})


def found_in(wheel: Wheel, version: str, points: Sequence[Point] = POINTS) -> Found:
    present, lacking, changed, renamed, blind = [], [], [], [], []
    for point in points:
        function = wheel.function(point.module, point.owner, point.name)
        if function is None:
            lacking.append(point.name)
            continue
        present.append(point.name)
        fitted = point.fitted(parameters(function))
        if fitted is None:
            changed.append(point.name)
        elif fitted is not point:
            renamed.append(point.name)
        if fitted is not None and not attributes_read(fitted) <= wheel.attributes() | FOREIGN:
            blind.append(point.name)
    threads = sum(wheel.function(*one.path.rsplit(".", 2)) is not None for one in THREADS)
    return Found(
        version,
        tuple(present),
        tuple(lacking),
        tuple(changed),
        tuple(renamed),
        tuple(blind),
        threads,
        wheel.has(CHECKER),
        wheel.has(LOADER),
    )


def wheel_of(version: str) -> Path:
    """Downloaded where it is not there yet.

    Raises:
        subprocess.CalledProcessError: pip could not get it.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache")
    folder = base / "hicache-toolkit" / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    if not (found := sorted(folder.glob(f"sglang-{version}-*.whl"))):
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, f"sglang=={version}", "--dest", str(folder)], check=True)
        found = sorted(folder.glob(f"sglang-{version}-*.whl"))
    return found[0]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


def main(arguments: Sequence[str]) -> int:
    rows, all_found = [], []
    for version in arguments or VERSIONS:
        found = found_in(Wheel(wheel_of(version)), version)
        all_found.append(found)
        share = 100 * found.working // len(POINTS)
        row = [
            version,
            "yes" if found.has_loader else "no",
            "yes" if found.has_checker else "no",
            f"{len(found.present)} of {len(POINTS)}",
            f"{found.threads} of {len(THREADS)}",
            *(_listed(names) for names in (found.renamed, found.changed, found.blind)),
            f"{share} %",
        ]
        rows.append(row)
        print(*row, sep=" | ", flush=True)
        print("   lacks", ", ".join(found.lacking) or "nothing")
    lacking = [
        f"- {found.version} lacks {', '.join(f'`{name}`' for name in found.lacking)}."
        for found in all_found
        if found.lacking
    ]
    head = [
        "version",
        "plugin loader",
        "own checker",
        "functions found",
        "threads",
        "parameters differ",
        "too much so",
    ]
    head += ["attribute gone", "recorded"]
    if not arguments:
        kept("versions", head, rows, "\n".join(lacking))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
