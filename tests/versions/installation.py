"""Virtual environments with chosen versions, and a wheel of this checkout in them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from interpreters import find_python

from versions.matrix import ROOT, Environment

EXTRAS = "calibrate,client,cpu,torch"
TOOLS = ("hypothesis", "packaging", "pytest", "pytest-xdist", "scikit-learn")
"""Packages that the tests import beside those of the extras."""
MADE = "made"
"""A file in a finished environment."""


def pip(python: Path, *words: str) -> str:
    """Run pip, and return its standard output."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return done.stdout


def make_environment(environment: Environment, folder: Path, wheel: Path) -> Path:
    """Make an environment with the wheel of this checkout, and return its interpreter.

    A finished environment gets only the wheel.
    """
    python = folder / "bin" / "python"
    if not (folder / MADE).exists():
        shutil.rmtree(folder, ignore_errors=True)
        base = find_python(environment.python)
        subprocess.run([base, "-m", "venv", folder], check=True)
        pip(python, "install", "--quiet", "--no-cache-dir", *environment.packages)
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(free_constraints(installed(python))), "utf-8")
        options = ["--quiet", "--no-cache-dir", "--constraint", str(constraints)]
        pip(python, "install", *options, f"aftexport[{EXTRAS}] @ {wheel.as_uri()}", *TOOLS)
        (folder / MADE).touch()
    pip(python, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel))
    return python


def installed(python: Path) -> dict[str, str]:
    """Return the version of each package of an environment, by lower-case name."""
    packages = json.loads(pip(python, "list", "--format", "json"))
    return {p["name"].lower().replace("_", "-"): p["version"] for p in packages}


def free_constraints(taken: Iterable[str]) -> list[str]:
    """Return the lines of ``constraints.txt`` for packages that are not installed yet."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    names = set(taken)
    return [x for x in lines if x.partition("==")[0].lower().replace("_", "-") not in names]


def make_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout, which fits every interpreter, and return it."""
    shutil.rmtree(folder, ignore_errors=True)
    options = ["--quiet", "--no-deps", "--wheel-dir", str(folder)]
    pip(Path(sys.executable), "wheel", *options, ".")
    (wheel,) = folder.glob("*-py3-none-*.whl")
    return wheel.resolve()
