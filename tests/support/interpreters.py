"""The Python interpreters of this machine."""

import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
"""The versions of Python that a wheel is tried with."""


class InterpreterError(Exception):
    """An interpreter is not installed, or its version is unknown."""


def find_python(version: str) -> Path:
    """Return the interpreter of a version, such as 3.11.

    Raises:
        InterpreterError: if there is none on PATH or among those of pyenv.
    """
    for path in _candidates(version):
        if _version_of(path) == version:
            return path
    raise InterpreterError(
        f"Expected a Python {version} on PATH or in pyenv, got none that runs. Install it."
    )


def interpreters(asked: Collection[str] = ()) -> dict[str, Path]:
    """Return the interpreter of each version that is asked for, or of each that is installed.

    Raises:
        InterpreterError: if a version that is asked for is not installed or not in VERSIONS.
    """
    if unknown := set(asked) - set(VERSIONS):
        raise InterpreterError(
            f"Expected versions of {', '.join(VERSIONS)}, got {', '.join(sorted(unknown))}. "
            "Correct PYTHONS."
        )
    found = {}
    for version in VERSIONS:
        if asked and version not in asked:
            continue
        try:
            found[version] = find_python(version)
        except InterpreterError:
            if asked:
                raise
    return found


def _candidates(version: str) -> Iterator[Path]:
    """Yield programs that may be the interpreter; a shim of pyenv may have no version behind it."""
    yield Path(sys._base_executable)  # type: ignore[attr-defined]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield from sorted(pyenv.glob(f"{version}.*/bin/python"))
    for folder in os.get_exec_path():
        if found := shutil.which(f"python{version}", path=folder):
            yield Path(found)


def _version_of(python: Path) -> str | None:
    """Return the minor version that an interpreter reports, or None if it does not run."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
