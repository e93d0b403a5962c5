"""The environments of ``matrix.toml``."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MATRIX = Path(__file__).with_name("matrix.toml")


@dataclass(frozen=True)
class Known:
    """Tests that fail in an environment.

    Attributes:
        tests: the names of their functions.
        reason: a sentence for users.
    """

    tests: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Environment:
    """Versions to try together.

    Attributes:
        name: the name by which the command chooses it.
        python: the version of Python, such as 3.11.
        packages: requirements that are installed first.
        known: its tests that fail.
    """

    name: str
    python: str
    packages: tuple[str, ...]
    known: tuple[Known, ...]


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
