"""The environments of ``matrix.toml``."""

import ast
import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MATRIX = Path(__file__).with_name("matrix.toml")


@dataclass(frozen=True)
class Known:
    """Tests that fail in an environment, and the reason for users."""

    tests: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Environment:
    """Versions to try together; the packages are installed first."""

    name: str
    python: str
    packages: tuple[str, ...]
    known: tuple[Known, ...]


def digest_tests(files: Mapping[str, str]) -> str:
    """Return a digest of the names of the tests in some files, given by path."""
    names = sorted(
        f"{path}::{node.name}"
        for path, source in files.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    )
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def read_tests(paths: Sequence[str]) -> dict[str, str]:
    """Return the sources of files of tests, by their paths."""
    return {path: (ROOT / path).read_text("utf-8") for path in paths}


def read_matrix() -> tuple[list[str], list[Environment]]:
    """Return the files of tests and the environments."""
    content: dict[str, Any] = tomllib.loads(MATRIX.read_text("utf-8"))
    return content["tests"], [
        Environment(
            name=entry["name"],
            python=entry["python"],
            packages=tuple(entry["packages"]),
            known=tuple(Known(tuple(k["tests"]), k["reason"]) for k in entry.get("known", ())),
        )
        for entry in content["environment"]
    ]
