"""The constraints that ``make pins`` wrote fit ``pyproject.toml``."""

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
GROUPS = PROJECT["dependency-groups"]
OTHER_RUNTIMES = {"cuda", "trt"}  # not in .venv


def read_pins(name: str) -> dict[str, Version]:
    lines = (REPOSITORY / name).read_text("utf-8").splitlines()
    found = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in found}


def requirements(texts: Iterable[str | dict[str, str]]) -> Iterator[Requirement]:
    """The requirements for Python 3.11, without those on extras of this project and on groups."""
    for text in texts:
        if isinstance(text, str):
            requirement = Requirement(text)
            marker = requirement.marker
            if requirement.name != "aftexport" and (
                marker is None or marker.evaluate({"python_version": "3.11"})
            ):
                yield requirement


def test_constraints_fit_requirements() -> None:
    """If it fails, run ``make pins``."""
    pins = read_pins("constraints.txt")
    texts = [text for texts in GROUPS.values() for text in texts]
    texts += [text for name in EXTRAS.keys() - OTHER_RUNTIMES for text in EXTRAS[name]]
    for requirement in requirements(texts):
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement


def test_lowest_constraints_are_lower_bounds() -> None:
    """If it fails, run ``make pins``."""
    pins = read_pins("constraints-lowest.txt")
    extras = ("bundle", "calibrate", "client", "cpu", "fuse", "grpc", "serve", "torch")
    bounds = {
        canonicalize_name(requirement.name): [
            Version(part.version) for part in requirement.specifier if part.operator == ">="
        ]
        for requirement in requirements(text for name in extras for text in EXTRAS[name])
    }
    del bounds["torch"]  # each environment of `make test-versions` downloads gigabytes for it
    assert bounds == {name: [version] for name, version in pins.items()}
