"""The files of ``make pins`` against pyproject.toml, and against each other."""

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
PYTHON = {"python_version": "3.12", "python_full_version": "3.12.0", "extra": ""}
"""The version that the requirements were made for."""


def pinned(path: Path) -> dict[str, str]:
    lines = re.findall(r"^([\w.-]+)==([\w.]+)", path.read_text("utf-8"), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


def test_declared_dependencies_are_pinned_with_hashes() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    found = pinned(REPOSITORY / "docker" / "requirements.txt")
    texts = [text for name in ("bundle", "serve", "grpc", "cpu") for text in extras[name]]
    texts += [text for name in found for text in requires(name) or ()]
    for requirement in map(Requirement, texts):
        if requirement.name == "aftexport":  # one of these extras
            continue
        if requirement.marker is None or requirement.marker.evaluate(PYTHON):
            version = found[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), requirement
    for name in ("requirements.txt", "requirements-gpu.txt"):
        text = (REPOSITORY / "docker" / name).read_text("utf-8")
        blocks = re.split(r"^(?=[\w-]+==)", text, flags=re.MULTILINE)[1:]
        assert all("--hash=sha256:" in block for block in blocks)


def test_pins_match_tested_constraints() -> None:
    tested = pinned(REPOSITORY / "constraints.txt")
    for name in ("requirements.txt", "requirements-gpu.txt"):
        found = pinned(REPOSITORY / "docker" / name)
        assert found
        assert {n: v for n, v in found.items() if n in tested} == {
            n: tested[n] for n in found if n in tested
        }
        assert not {"torch", "onnxscript", "pip", "setuptools"} & found.keys()


def test_gpu_image_has_packages_of_builder() -> None:
    """TensorRT itself is in the base image."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    found = pinned(REPOSITORY / "docker" / "requirements-gpu.txt")
    for requirement in map(Requirement, project["optional-dependencies"]["trt"]):
        if requirement.name not in ("aftexport", "tensorrt"):
            assert requirement.specifier.contains(found[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("image", ["cpu", "gpu"])
def test_image_has_version_of_package(image: str) -> None:
    """The build fails with another one, as it installs the wheel by this version."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    text = (REPOSITORY / "docker" / f"{image}.Dockerfile").read_text("utf-8")
    assert f"\nARG VERSION={project['version']}\n" in text
