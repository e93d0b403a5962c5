"""``python -m versions.lowest``: the lower bounds of ``pyproject.toml`` as constraints for pip.

It writes ``constraints-lowest.txt``. torch is not among them: each environment of
``make test-versions`` downloads gigabytes for it.
"""

import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from versions.matrix import ROOT

LOWEST = ROOT / "constraints-lowest.txt"
_EXTRAS = ("bundle", "calibrate", "client", "cpu", "fuse", "grpc", "serve", "torch")
"""Extras of which the tests of `make test-lower` need the packages."""
_LEFT_OUT = ("aftexport", "torch")


def lower_bounds(project: dict[str, Any]) -> list[str]:
    """Return a line ``name==version`` for each requirement of the project, sorted by name.

    Raises:
        ValueError: if a requirement has no lower bound.
    """
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *(t for name in _EXTRAS for t in extras.get(name, ()))]
    lines = set()
    for requirement in map(Requirement, texts):
        if requirement.name in _LEFT_OUT:
            continue
        bounds = [s.version for s in requirement.specifier if s.operator == ">="]
        if len(bounds) != 1:
            raise ValueError(f"expected one lower bound, got {str(requirement)!r}")
        lines.add(f"{requirement.name}=={bounds[0]}")
    return sorted(lines)


def read_bounds() -> list[str]:
    """Return the lower bounds of this checkout."""
    text = Path(ROOT / "pyproject.toml").read_text("utf-8")
    return lower_bounds(tomllib.loads(text)["project"])


if __name__ == "__main__":
    LOWEST.write_text("\n".join(read_bounds()) + "\n", "utf-8")
