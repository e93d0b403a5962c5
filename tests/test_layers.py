"""Imports go down the layers and never in a ring, and the roots of the packages stay small."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOMES = {"aftexport": "export", "aftserve": "serve", "aftplugins": "plugins"}
"""The folder of each package."""
MAX_ROOT_MODULES = 10
PAGE = ROOT / "docs" / "architecture.md"
"""The page with the layers of each package, in a drawing below its heading."""
ROW = re.compile(r"(?m)^(?: *(\d+) | {3,}) (\w+(?:, \w+)*)(?:  .*)?$")
"""The number of a layer, or none for that of the row before, and the units of a row."""


@dataclass(frozen=True)
class Import:
    """An import of one module by another of the same package.

    Attributes:
        source, target: dotted names.
        line: line of the source.
        for_types: whether only a type checker runs it.
    """

    source: str
    target: str
    line: int
    for_types: bool

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def modules_of(package: str) -> dict[str, Path]:
    home = ROOT / HOMES[package]
    found = {}
    for file in sorted((home / package).rglob("*.py")):
        parts = file.relative_to(home).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports_of(package: str) -> list[Import]:
    modules = modules_of(package)
    found = []
    for source, file in modules.items():
        tree = ast.parse(file.read_text("utf-8"))
        for node, for_types in nodes_of(tree, for_types=False):
            for name in names_of(node):
                target = name if name in modules else name.rpartition(".")[0]
                if target in modules and target != source:
                    line = getattr(node, "lineno", 0)
                    found.append(Import(source, target, line, for_types))
    return found


def nodes_of(node: ast.AST, *, for_types: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the nodes below one, and whether ``if TYPE_CHECKING`` guards them."""
    for child in ast.iter_child_nodes(node):
        yield child, for_types
        guards = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield from nodes_of(child, for_types=for_types or guards)


def names_of(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), names=names, level=0):
            return [f"{module}.{alias.name}" for alias in names]
        case ast.ImportFrom(level=level) if level > 0:
            raise AssertionError(f"relative import: {ast.unparse(node)}")
    return []


def unit_of(module: str) -> str:
    """The subpackage or root module that a module belongs to."""
    return [*module.split("."), "__init__"][1]


def part_of(module: str, package: str) -> str | None:
    """The part of a package that a module lies in; None outside the package, or at its root."""
    inner = module.removeprefix(f"{package}.")
    return None if inner == module else inner.partition(".")[0]


def ring_of(edges: set[tuple[str, str]]) -> list[str]:
    """The nodes of a ring, or none."""
    graph = defaultdict[str, set[str]](set)
    for source, target in edges:
        graph[source].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        ring: list[str] = error.args[1]
        return ring
    return []


def layers_of(package: str) -> dict[str, int]:
    """The layer of each subpackage and root module, as the page draws them."""
    drawing = PAGE.read_text("utf-8").partition(f"## Layers of {package}\n")[2]
    layers, current = dict[str, int](), -1
    for number, units in ROW.findall(drawing.partition("```text\n")[2].partition("```")[0]):
        current = int(number) if number else current
        layers |= dict.fromkeys(units.split(", "), current)
    return layers | {"__main__": max(layers.values()) + 1}


@pytest.mark.parametrize("package", ["aftexport", "aftserve"])
def test_imports_go_down(package: str) -> None:
    layer = layers_of(package)
    units = {unit_of(module) for module in modules_of(package)}
    assert units == layer.keys(), "each unit has a layer, and each layer has units"
    up = [
        str(one)
        for one in imports_of(package)
        if not one.for_types and layer[unit_of(one.target)] > layer[unit_of(one.source)]
    ]
    assert not up


@pytest.mark.parametrize(
    ("package", "above"), [("aftplugins", "aftexport"), ("aftplugins", "aftserve"),
                           ("aftexport", "aftserve")],
)  # fmt: skip
def test_packages_import_down(package: str, above: str) -> None:
    found = [
        f"{module}: {name}"
        for module, file in modules_of(package).items()
        for node, for_types in nodes_of(ast.parse(file.read_text("utf-8")), for_types=False)
        for name in names_of(node)
        if not for_types and name.split(".")[0] == above
    ]
    assert not found


@pytest.mark.parametrize("package", HOMES)
def test_modules_have_no_ring(package: str) -> None:
    assert not ring_of({(one.source, one.target) for one in imports_of(package)})


@pytest.mark.parametrize("package", HOMES)
def test_units_have_no_ring(package: str) -> None:
    edges = {
        (unit_of(one.source), unit_of(one.target))
        for one in imports_of(package)
        if not one.for_types
    }
    assert not ring_of({(source, target) for source, target in edges if source != target})


@pytest.mark.parametrize("package", HOMES)
def test_parts_of_packages_have_no_ring(package: str) -> None:
    imports = [one for one in imports_of(package) if not one.for_types]
    modules = modules_of(package)
    for inner in (name for name, file in modules.items() if file.name == "__init__.py"):
        pairs = {(part_of(one.source, inner), part_of(one.target, inner)) for one in imports}
        edges = {(a, b) for a, b in pairs if a is not None and b is not None and a != b}
        assert not ring_of(edges), inner


@pytest.mark.parametrize("package", HOMES)
def test_private_names_stay_in_their_folder(package: str) -> None:
    outside = []
    for one in imports_of(package):
        parts = one.target.split(".")
        for i, part in enumerate(parts):
            is_private = part.startswith("_") and part != "_version"
            if is_private and not one.source.startswith(".".join(parts[:i]) + "."):
                outside.append(str(one))
    assert not outside


@pytest.mark.parametrize("package", HOMES)
def test_root_is_small(package: str) -> None:
    files = (ROOT / HOMES[package] / package).glob("*.py")
    modules = [file.stem for file in files if file.stem not in ("__init__", "__main__")]
    assert len(modules) <= MAX_ROOT_MODULES, modules


def test_ring_is_found() -> None:
    assert not ring_of({("a", "b"), ("b", "c"), ("a", "c")})
    assert set(ring_of({("a", "b"), ("b", "c"), ("c", "b")})) == {"b", "c"}


def test_type_checking_imports_are_told_apart() -> None:
    tree = ast.parse(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a.b\n"
        "def f():\n    from c import d\n"
    )
    found = {
        name: for_types
        for node, for_types in nodes_of(tree, for_types=False)
        for name in names_of(node)
    }
    assert found == {"typing.TYPE_CHECKING": False, "a.b": True, "c.d": False}
