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
from consensus_checker.sglang_paths import EXTRA, FORMER, FORMER_CACHE, UNIFIED
from consensus_checker.sglang_points import POINTS, THREADS
from tests.peers.pages import kept

VERSIONS = ("0.5.12", "0.5.16", "0.5.18", "0.5.20", "0.5.22", "0.5.23")
CHECKER = "sglang/srt/utils/rank_consensus_checker.py"
LOADER = "sglang/srt/plugins/__init__.py"
# Where the points are.
PACKAGES = ("mem_cache", "managers", "disaggregation", "speculative")
# What makes a server's cache, in one version or another.
MAKERS = ("sglang/srt/managers/scheduler.py", "sglang/srt/mem_cache/registry.py")
CACHES = {UNIFIED: "UnifiedRadixCache", FORMER: FORMER_CACHE.split(".")[-2]}
# What `Hooks.install` takes from its class as it is inherited.
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Found:
    """What one version has of some points.

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

    @property
    def count(self) -> int:
        return len(self.present) + len(self.lacking)

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

    def makes(self, cache: str) -> bool:
        """Whether a server of this version can have such a cache."""
        texts = (self._zip.read(name).decode() for name in MAKERS if name in self._names)
        return any(f"{cache}(" in text for text in texts)

    def function(self, module: str, owner: str, name: str) -> Function | None:
        """As the class has it, itself or from the classes below it; or as a module has it."""
        found = self.owner(module, owner)
        if found is None:
            tree = self.tree(f"{module}.{owner}")
            body = tree.body if tree is not None else []
            return next((one for one in body if isinstance(one, Function) and one.name == name), None)
        for part in found.body:
            if isinstance(part, Function) and part.name == name:
                return part
        bases = [base.id for base in found.bases if isinstance(base, ast.Name) and base.id != owner]
        inherited = (self.function(self._home(module, base), base, name) for base in bases)
        return next((one for one in inherited if one is not None), None)

    def _home(self, module: str, name: str) -> str:
        """Where a class comes from that a module has under that name."""
        tree = self.tree(module)
        for part in tree.body if tree is not None else []:
            if isinstance(part, ast.ImportFrom) and any(one.name == name for one in part.names):
                return part.module or module
        return module

    @cache  # noqa: B019
    def attributes(self) -> frozenset[str]:
        """Whatever is called an attribute, or a function, in the packages that the points are in."""
        found: set[str] = set()
        for name in self._names:
            if not name.endswith(".py") or not name.startswith(
                tuple(f"sglang/srt/{name}/" for name in PACKAGES)
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
    others = [one for one in (own.vararg, own.kwarg) if one is not None]
    return frozenset(one.arg for one in (*own.posonlyargs, *own.args, *own.kwonlyargs, *others))


def attributes_read(point: Point) -> frozenset[str]:
    """Names of attributes that the point's expressions read, of whatever object."""
    texts = [*point.before.values(), *(point.call or {}).values(), *(point.values or {}).values()]
    texts += [*point.after, *([point.when] if point.when else [])]
    parts = [part for text in texts for part in ast.walk(ast.parse(text, mode="eval"))]
    return frozenset(
        part.attr
        for part in parts
        if isinstance(part, ast.Attribute) and not ast.unparse(part).startswith("_see.")
    )


# Of the standard library's own objects.
FOREIGN = frozenset({"qsize", "get", "numel"})


def found_in(wheel: Wheel, version: str, points: Sequence[Point]) -> Found:
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
    return Found(version, tuple(present), tuple(lacking), tuple(changed), tuple(renamed), tuple(blind))


def of(part: str) -> tuple[Point, ...]:
    """Points that each server with such a cache must have."""
    return tuple(point for point in POINTS if point.part in ("", part))


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


def _said(found: Found) -> str:
    return f"{len(found.present)} of {found.count}, {100 * found.working // found.count} %"


def main(arguments: Sequence[str]) -> int:
    rows, lines = [], []
    for version in arguments or VERSIONS:
        wheel = Wheel(wheel_of(version))
        made = [part for part, name in CACHES.items() if wheel.makes(name)]
        caches = {part: found_in(wheel, version, of(part)) for part in made}
        others = found_in(wheel, version, [point for point in POINTS if point.part in EXTRA])
        threads = sum(wheel.function(*one.path.rsplit(".", 2)) is not None for one in THREADS)
        every = [*caches.values(), others]
        row = [
            version,
            "yes" if wheel.has(LOADER) else "no",
            "yes" if wheel.has(CHECKER) else "no",
            *(_said(caches[part]) if part in caches else "makes none" for part in CACHES),
            _said(others),
            f"{threads} of {len(THREADS)}",
            *(
                _listed(list(dict.fromkeys(name for one in every for name in names(one))))
                for names in (lambda one: one.renamed, lambda one: one.changed, lambda one: one.blind)
            ),
        ]
        rows.append(row)
        print(*row, sep=" | ", flush=True)
        for part, found in caches.items():
            if found.lacking:
                lines.append(f"- {version} with `{CACHES[part]}` lacks {_listed(found.lacking)}.")
        if others.lacking:
            lines.append(f"- {version} lacks, of what few run, {_listed(others.lacking)}.")
    print("\n".join(lines))
    head = [
        "version",
        "plugin loader",
        "own checker",
        *(f"`{name}`" for name in CACHES.values()),
        "other parts",
    ]
    head += ["threads", "parameters differ", "too much so", "attribute gone"]
    if not arguments:
        kept("versions", head, rows, "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
