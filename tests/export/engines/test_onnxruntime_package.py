"""Commands refuse two packages of ONNX Runtime, or none, and name the command to install one."""

import sys
from pathlib import Path

import pytest
from commands import assert_refused, run_python

from aftexport.engines.onnxruntime import package
from aftexport.engines.onnxruntime.package import check_package
from aftexport.errors import EngineError
from aftexport.system.installation import install_command

COMMANDS = {
    "aftexport": ["verify", "absent.bundle"],
    "aftserve": ["absent.bundle"],
}


def metadata_of(name: str, folder: Path) -> None:
    """Put the metadata of a package into a folder, as an installer does."""
    info = folder / f"{name.replace('-', '_')}-1.31.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.31.1\n")


def broken_runtime(folder: Path) -> None:
    """Put a module into a folder; its import ends the process, as that of mixed files may."""
    folder.mkdir(exist_ok=True)
    (folder / "onnxruntime.py").write_text("import os; os._exit(99)\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_two_packages_are_refused_before_import(command: str, tmp_path: Path) -> None:
    """This environment has the real package, and the folder has the metadata of a second one."""
    metadata_of("onnxruntime-gpu", tmp_path / "site")
    broken_runtime(tmp_path / "site")
    outcome = run_python(
        "-m", command, *COMMANDS[command], cwd=tmp_path, PYTHONPATH=str(tmp_path / "site")
    )
    assert_refused(
        outcome,
        "got onnxruntime and onnxruntime-gpu",
        f"pip uninstall --yes onnxruntime onnxruntime-gpu; then {install_command('cpu')}",
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_no_package_names_command(command: str, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['onnxruntime'] = None; "
        f"from {command}.cli import main; sys.exit(main())"
    )
    outcome = run_python("-c", code, *COMMANDS[command], cwd=tmp_path)
    assert_refused(outcome, "ONNX Runtime is not installed.", f"Run: {install_command('cpu')}")


def test_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``plugins/onnxruntime`` is such a folder, in the current folder of a checkout."""
    (tmp_path / "onnxruntime").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "onnxruntime")
    monkeypatch.setattr(package, "PACKAGES", ())
    with pytest.raises(EngineError, match="ONNX Runtime is not installed"):
        check_package()
