"""The commands that install extras, by the place that this copy came from."""

import json
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from aftexport.system import installation
from aftexport.system.installation import install_command, missing_module_error

REPOSITORY = Path(__file__).parents[3]
_EXTRAS = r"\\*\[(?![^\]]*\] @ )"
"""Extras of a requirement that does not name its URL."""
_BY_NAME = re.compile(
    rf"pip install[^\n#]*['\"\s]aftexport(?:{_EXTRAS}|['\"\s]|$)|['\"`]aftexport{_EXTRAS}"
)
"""A command, or a requirement, that takes aftexport from an index by its name."""


def installed_from(folder: Path, record: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the metadata of aftexport by others with this ``direct_url.json``."""
    info = folder / "aftexport-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: aftexport\nVersion: 0.1.0\n")
    if record is not None:
        (info / "direct_url.json").write_text(json.dumps(record))
    found = metadata.PathDistribution(info)
    monkeypatch.setattr(installation.metadata, "distribution", lambda name: found)


def test_command_names_editable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a folder"
    source.mkdir()
    record = {"url": source.as_uri(), "dir_info": {"editable": True}}
    installed_from(tmp_path, record, monkeypatch)
    assert install_command("cpu") == f"pip install --editable '{source}[cpu]'"


def test_command_names_folder_or_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "aftexport-0.1.0-cp311-cp311-linux_x86_64.whl"
    wheel.touch()
    record = {"url": wheel.as_uri(), "archive_info": {"hashes": {"sha256": "0"}}}
    installed_from(tmp_path, record, monkeypatch)
    assert install_command("cpu", "torch") == f"pip install '{wheel}[cpu,torch]'"


@pytest.mark.parametrize(
    ("record", "target"),
    [
        (
            {"url": "https://example.org/a.whl", "archive_info": {}},
            "aftexport[cpu] @ https://example.org/a.whl",
        ),
        (
            {"url": "https://example.org/a.git", "vcs_info": {"vcs": "git", "commit_id": "0123"}},
            "aftexport[cpu] @ git+https://example.org/a.git@0123",
        ),
        ({"url": "file:///absent/folder", "dir_info": {}}, "FOLDER_OR_WHEEL_OF_AFTEXPORT[cpu]"),
        (None, "FOLDER_OR_WHEEL_OF_AFTEXPORT[cpu]"),
    ],
)
def test_command_names_other_sources(
    record: object, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_from(tmp_path, record, monkeypatch)
    assert install_command("cpu") == f"pip install '{target}'"


def test_command_is_known_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "PACKAGE", "aftexport-that-is-not-installed")
    assert install_command("cpu") == "pip install 'FOLDER_OR_WHEEL_OF_AFTEXPORT[cpu]'"


def test_missing_module_names_its_extra() -> None:
    error = missing_module_error(ModuleNotFoundError(name="torch.nn"))
    assert error is not None
    assert error.problem == "This command needs torch, which is not installed."
    assert error.remedy == f"Run: {install_command('torch')}"
    demo = missing_module_error(ModuleNotFoundError(name="torch"), {"torch": "demo"})
    assert demo is not None
    assert demo.remedy == f"Run: {install_command('demo')}"
    assert missing_module_error(ModuleNotFoundError(name="a_module_of_a_user")) is None
    base = missing_module_error(ModuleNotFoundError(name="onnx"))
    assert base is not None
    assert base.remedy.startswith(f"Run: {install_command('cpu')}, or with cuda in place of cpu")


def brought(extra: str) -> set[str]:
    """Return the distributions that an extra brings, with those of the extras in it."""
    found = set[str]()
    for text in metadata.requires("aftexport") or ():
        requirement = Requirement(text)
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            for inner in requirement.extras:
                found |= brought(inner)
            found.add(canonicalize_name(requirement.name))
    return found


def test_extra_brings_missing_module() -> None:
    distributions = metadata.packages_distributions()
    for module, extra in installation._EXTRAS.items():
        assert set(map(canonicalize_name, distributions[module])) & brought(extra), module


def test_no_command_takes_the_name_from_an_index() -> None:
    """The name is not registered, so that anyone could publish a package under it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    texts = {".md", ".py", ".toml", ".yml", ".yaml", ".html", ".sh", ".txt", ".Dockerfile", ""}
    found = []
    for name in filter(None, listed):
        path = REPOSITORY / name
        if path.suffix not in texts or path.is_symlink() or path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            is_own_extra = name == "pyproject.toml" and "aftexport[" in line
            if _BY_NAME.search(line) and not is_own_extra:
                found.append(f"{name}:{number}: {line.strip()}")
    assert not found
    assert _BY_NAME.search("Run: pip install 'aftexport[torch]'")
    assert _BY_NAME.search("pip install aftexport")
    assert not _BY_NAME.search("pip install '.[cpu]'")
    assert not _BY_NAME.search("pip install 'aftexport[cpu] @ file:///a/wheel.whl'")
