"""The import table of ARCHITECTURE.md, held by reading the sources."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("hicache", "tracer", "consensus_checker", "cli")

# Longest prefix wins. What is not listed may not be imported, but for the standard library.
ALLOWED: dict[str, tuple[str, ...]] = {
    "tracer": ("tracer", "msgspec", "xxhash"),
    "tracer.otel_live": ("tracer", "opentelemetry"),
    "tracer.trace_store": ("tracer", "msgspec", "duckdb"),
    "consensus_checker": ("consensus_checker", "tracer", "duckdb", "msgspec"),
    # Text of a test file that runs where the server is; nobody here imports it.
    "consensus_checker.sglang_case.body": ("sglang", "torch"),
    "cli": ("cli", "hicache", "tracer", "consensus_checker", "duckdb", "typer", "rich", "click"),
    "hicache": ("hicache", "tracer"),
    "hicache.transport.gloo": ("hicache", "tracer", "torch"),
    "hicache.worker": ("hicache", "tracer", "msgspec"),
}
# hicache, lowest first: a module imports its own layer and those below it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("hicache.errors", "hicache.plain_values"),
    ("hicache.core",),
    ("hicache.topology",),
    ("hicache.config",),
    ("hicache.ports",),
    ("hicache.loop", "hicache.schedule", "hicache.ledger"),
    ("hicache.probes",),
    ("hicache.control",),
    ("hicache.transport", "hicache.storage"),
    ("hicache.rank", "hicache.workload", "hicache.agentic"),
    # What bends the world, in every mode.
    ("hicache.sim.engine", "hicache.sim.faults", "hicache.sim.bugs", "hicache.sim.storage"),
    ("hicache.job",),
    ("hicache.sim", "hicache.real_time"),
    ("hicache.threads", "hicache.worker"),
    ("hicache.fork_server", "hicache.forks"),
    ("hicache.launch",),
    ("hicache.zoo",),
)
# Below this layer the runtime knows of the tracer only what a record is.
TRACER_FREE_UP_TO = 8
RECORDS_ONLY = ("tracer.record", "tracer.calls")
# What `hicache --help` must not wait for.
LAZY_IN_CLI = ("hicache", "duckdb", "torch", "tracer", "consensus_checker")
# Text helpers without imports of their own.
LIGHT = ("consensus_checker.words",)


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, *, only_at_import: bool = False) -> Iterator[tuple[str, int]]:
    """(imported module, line); with `only_at_import` those that run when the module is imported."""
    tree = tree_of(path)
    stack: list[tuple[ast.AST, bool]] = [(tree, False)]
    while stack:
        node, is_inside = stack.pop()
        is_inside = is_inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        stack.extend((child, is_inside) for child in ast.iter_child_nodes(node))
        if only_at_import and is_inside:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                is_module = (ROOT / Path(*dotted.split("."))).with_suffix(".py").exists()
                yield dotted if is_module else node.module, node.lineno


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer_of(module: str) -> int | None:
    for index, layer in enumerate(LAYERS):
        if any(is_within(module, member) for member in layer):
            return index
    return None


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_imports_what_its_place_allows(path: Path) -> None:
    own = name_of(path)
    allowed = ALLOWED[max((key for key in ALLOWED if is_within(own, key)), key=len)]
    own_layer = layer_of(own)
    for module, line in imports(path):
        where = f"{path.relative_to(ROOT)}:{line} imports {module}"
        if module.split(".")[0] in sys.stdlib_module_names:
            continue
        assert any(is_within(module, package) for package in allowed), where
        other_layer = layer_of(module)
        if own_layer is not None and other_layer is not None:
            assert other_layer <= own_layer, f"{where}, which is above it"
        if own_layer is not None and own_layer < TRACER_FREE_UP_TO and is_within(module, "tracer"):
            assert module in RECORDS_ONLY, f"{where}; only {RECORDS_ONLY} below the ports' implementations"


@pytest.mark.parametrize("path", [path for path in modules() if is_within(name_of(path), "cli")], ids=name_of)
def test_the_command_line_imports_the_rest_inside_functions(path: Path) -> None:
    for module, line in imports(path, only_at_import=True):
        is_lazy = any(is_within(module, package) for package in LAZY_IN_CLI) and module not in LIGHT
        assert not is_lazy, f"{path}:{line}: {module}"


def test_every_module_of_hicache_has_a_layer() -> None:
    missing = [name_of(path) for path in modules() if path.is_relative_to(ROOT / "hicache")]
    assert [name for name in missing if layer_of(name) is None and name != "hicache"] == []


def test_the_packages_are_those_that_are_installed() -> None:
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for package in {name_of(path.parent / "__init__.py") for path in modules()}:
        assert f'"{package}"' in declared, f"{package} is not among the packages of pyproject.toml"


def test_no_module_imports_itself_in_a_circle() -> None:
    """Inside a layer as well; imports inside functions count."""
    edges = {name_of(path): {module for module, _ in imports(path)} for path in modules()}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above[above.index(module) :], module))
        if module in done:
            return
        for other in sorted(edges[module] & set(edges)):
            visit(other, (*above, module))
        done.add(module)

    for module in sorted(edges):
        visit(module, ())
