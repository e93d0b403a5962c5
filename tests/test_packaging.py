"""Properties of the installed distribution."""

import os
import re
import subprocess
import sys
import venv
from importlib.metadata import distribution, metadata, packages_distributions
from importlib.resources import files
from pathlib import Path

import onnx
import pytest
import torch
from export.recognition.graphs import scripted
from export.recognition.implementations.aft import simple_softmax
from export.recognition.layer import DIM, Layer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import aftexport
from aftexport.system.installation import PACKAGE, install_command, runtime_choice


@pytest.mark.parametrize("package", ["aftexport", "aftplugins", "aftserve"])
def test_package_has_type_marker(package: str) -> None:
    """Without ``py.typed`` (PEP 561) a user's type checker ignores the annotations."""
    assert files(package).joinpath("py.typed").is_file()


def test_metadata_matches_package() -> None:
    installed = metadata("aftexport")
    assert installed["Version"] == aftexport.__version__
    assert installed["License-Expression"] == "Apache-2.0"


TAKEN_ALONG = {"pydantic_core", "transformers"}
"""Modules that pydantic pins exactly, or that the model of a user has imported."""


def test_imported_packages_are_declared() -> None:
    """A package that another one brings today may be missing with its next version."""
    requirements = map(Requirement, distribution("aftexport").requires or ())
    used = {*(metadata("aftexport").get_all("Provides-Extra") or ())}
    declared = {
        canonicalize_name(requirement.name)
        for requirement in requirements
        for extra in used
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    }
    distributions = packages_distributions()
    for package in ("export/aftexport", "plugins/aftplugins", "serve/aftserve"):
        for file in (Path(__file__).parents[1] / package).rglob("*.py"):
            found = re.findall(r"(?m)^ *(?:import|from) (\w+)", file.read_text("utf-8"))
            for module in {*found} - sys.stdlib_module_names - TAKEN_ALONG:
                names = set(map(canonicalize_name, distributions.get(module, ())))
                assert names & {*declared, "aftexport"} or not names, (file, module)


def test_extras_are_for_users() -> None:
    """Tools for the work on the project are in the dependency groups."""
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "install.md").read_text("utf-8")
    for extra in metadata("aftexport").get_all("Provides-Extra") or ():
        assert re.search(rf"pip install '.*[\[,]{extra}[\],]|`{extra}`", page), extra


def needed(name: str, extras: frozenset[str], found: dict[str, frozenset[str]]) -> None:
    """Adds a package with extras, and all that it declares, to ``found``."""
    if extras <= found.get(name, frozenset()) and name in found:
        return
    found[name] = extras | found.get(name, frozenset())
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        chosen = [{"extra": extra} for extra in found[name] or {""}]
        if requirement.marker is None or any(map(requirement.marker.evaluate, chosen)):
            needed(canonicalize_name(requirement.name), frozenset(requirement.extras), found)


def environment_of(folder: Path, *extras: str) -> Path:
    """Makes an environment of what aftexport declares, and nothing else; returns its Python."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    packages: dict[str, frozenset[str]] = {}
    needed("aftexport", frozenset(extras), packages)
    for name in packages:
        for file in distribution(name).files or ():
            top = file.parts[0]
            source = Path(str(distribution(name).locate_file(top)))
            if top not in ("..", "__pycache__") and source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    return folder / "bin" / "python"


def run_in(python: Path, *words: str | Path, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [python, *words], cwd=cwd, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_extra_cpu_needs_no_torch(bundle_folder: Path, tmp_path: Path) -> None:
    """The commands for ONNX files and the server run with the declared packages only."""
    python = environment_of(tmp_path / "environment", "cpu")
    onnx.save(scripted(Layer(simple_softmax), torch.randn(2, 12, DIM)), tmp_path / "model.onnx")
    assert "ModuleNotFoundError" in run_in(python, "-c", "import torch", cwd=tmp_path).stderr
    for words in (
        ("-m", "aftexport", "inspect", bundle_folder),
        ("-m", "aftexport", "verify", bundle_folder),
        ("-m", "aftexport", "fuse", "model.onnx", "fused.onnx"),
        ("-m", "aftserve", "--help"),
        ("-c", "import aftserve.app, aftserve.server"),
    ):
        done = run_in(python, *words, cwd=tmp_path)
        assert done.returncode == 0, (words, done.stderr)
    assert (tmp_path / "fused.onnx").is_file()
    code = f"import aftserve; print(aftserve.Predictor({str(bundle_folder)!r})('a').label)"
    done = run_in(python, "-c", code, cwd=tmp_path)
    assert done.stdout.strip() in ("invoice", "contract", "letter"), done.stderr


def test_client_needs_only_its_library(server: str, tmp_path: Path) -> None:
    """The commands, which need more, name the extra."""
    python = environment_of(tmp_path / "environment", "client")
    code = f"from aftserve.client import Client; print(Client({server!r}).infer('a').label)"
    done = run_in(python, "-c", code, cwd=tmp_path)
    assert done.stdout.strip() in ("invoice", "contract", "letter"), done.stderr
    assert "ModuleNotFoundError" in run_in(python, "-c", "import numpy", cwd=tmp_path).stderr
    for command in ("aftexport", "aftserve"):
        done = run_in(python, "-m", command, "--help", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr == (
            f"error: This command needs rich, which is not installed.\n  Run: {runtime_choice()}\n"
        )


def test_bundle_names_runtime_extra(bundle_folder: Path, tmp_path: Path) -> None:
    python = environment_of(tmp_path / "environment", "bundle")
    code = (
        "from pathlib import Path; from aftexport.bundle.bundle import Bundle; "
        f"print(len(Bundle.open(Path({str(bundle_folder)!r})).golden()))"
    )
    done = run_in(python, "-c", code, cwd=tmp_path)
    assert int(done.stdout) > 0, done.stderr
    done = run_in(python, "-m", "aftexport", "verify", bundle_folder, cwd=tmp_path)
    assert done.returncode == 2
    assert "ONNX Runtime is not installed." in done.stderr
    assert install_command("cpu") in done.stderr


def test_extras_bring_one_runtime() -> None:
    for extra, runtime in (("cpu", "onnxruntime"), ("cuda", "onnxruntime-gpu")):
        found = {
            Requirement(text).name
            for text in distribution("aftexport").requires or ()
            if (marker := Requirement(text).marker) is not None
            and marker.evaluate({"extra": extra})
        }
        assert {name for name in found if name.startswith("onnxruntime")} == {runtime}
    packages: dict[str, frozenset[str]] = {}
    needed("aftexport", frozenset({"demo"}), packages)
    assert {"onnxruntime", "torch", "fastapi"} <= packages.keys()
    assert "onnxruntime-gpu" not in packages


def test_other_licenses_are_named() -> None:
    """install.md names each package whose license is not permissive."""
    packages: dict[str, frozenset[str]] = {}
    extras = {*(metadata("aftexport").get_all("Provides-Extra") or ())}
    needed("aftexport", frozenset(extras - {"cuda", "trt"}), packages)
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "install.md").read_text("utf-8")
    for name in packages:
        fields = metadata(name).get_all("Classifier") or []
        for key in ("License", "License-Expression"):  # some have the whole text
            fields.append((metadata(name).get(key) or "").partition("\n")[0])
        if re.search(r"\b[AL]?GPL|\bMPL|Mozilla|Proprietary", " ".join(fields)):
            parts = name.split("-")
            assert any(f"`{'-'.join(parts[: end + 1])}`" in page for end in range(len(parts))), name


def test_index_readme_has_no_relative_links() -> None:
    """A package index shows the README without the files around it."""
    words = [sys.executable, "-m", "hatch_fancy_pypi_readme"]
    folder = Path(__file__).parents[1]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    assert "## Mechanisms" in done.stdout
    assert re.findall(r"\]\((?!https?://)", done.stdout) == []
    assert f"pip install '{PACKAGE}[cpu]'" in done.stdout
    assert "<!--" not in done.stdout
