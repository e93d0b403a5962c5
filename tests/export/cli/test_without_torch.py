"""Commands on a machine without torch: those that read an ONNX file run, the others name it."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from calibrations import labelled, write_lines
from clients import http
from commands import Outcome, assert_refused, run_python
from export.recognition.graphs import scripted
from export.recognition.implementations.aft import simple_softmax
from export.recognition.layer import DIM, Layer
from onnx_texts import text_model
from servers import serving

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.system.installation import install_command

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
BLOCKED = """
import sys
sys.modules["torch"] = None
"""
RUN = {
    "inspect": ["inspect", "model.bundle"],
    "verify": ["verify", "model.bundle", "--report", "parity.html", "--output", "parity.json"],
    "bench": ["bench", "model.bundle", "--lengths", "64", "--rounds", "1"],
    "calibrate": ["calibrate", "model.bundle", "--data", "labelled.jsonl", "--dry-run"],
    "fuse": ["fuse", "model.onnx", "fused.onnx", "--report", "fused.json"],
    "unfuse": ["unfuse", "model.bundle", "plain.onnx"],
    "bundle of an ONNX file": ["text.onnx", "--to", "onnx", "--labels", "a,b,c"],
    "triton": ["model.bundle", "--to", "triton", "--out", "model.triton"],
}
"""Commands that need no torch."""
REFUSED = {
    "export": ["model.pt", "--to", "onnx", "--out", "other.bundle"],
    "inspect a model": ["inspect", "model.pt"],
    "verify with a model": ["verify", "model.bundle", "--model", "model.pt"],
    "bench with a model": ["bench", "model.bundle", "--model", "model.pt", "--lengths", "64"],
}
"""Commands that need torch."""


@pytest.fixture(scope="module")
def folder(
    bundle_folder: Path, checkpoint_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with a model, its bundle, labelled documents, and an ONNX file of other code."""
    folder = tmp_path_factory.mktemp("without_torch")
    (folder / "model.bundle").symlink_to(bundle_folder)
    (folder / "model.pt").symlink_to(checkpoint_file)
    write_lines(folder / "labelled.jsonl", labelled(bundle_folder, 200, temperature=1.0))
    onnx.save(scripted(Layer(simple_softmax), torch.randn(2, 12, DIM)), folder / "model.onnx")
    onnx.save(text_model(), folder / "text.onnx")
    blocked = folder / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(BLOCKED)
    return folder


def run(folder: Path, words: list[str], package: str = "aftexport") -> Outcome:
    return run_python("-m", package, *words, cwd=folder, PYTHONPATH=str(folder / "blocked"))


def test_torch_is_blocked(folder: Path) -> None:
    outcome = run_python("-c", "import torch", cwd=folder, PYTHONPATH=str(folder / "blocked"))
    assert "ModuleNotFoundError" in outcome.err


@pytest.mark.parametrize("command", RUN)
def test_command_runs(command: str, folder: Path) -> None:
    outcome = run(folder, RUN[command])
    assert outcome.code == 0, outcome.err


def test_fused_file_has_operator_and_same_outputs(folder: Path) -> None:
    outcome = run(folder, ["fuse", "model.onnx", "same.onnx"])
    assert "AftSimple" in outcome.out, outcome.err
    before, after = (OnnxRuntimeEngine(folder / name) for name in ("model.onnx", "same.onnx"))
    shape = (2, 12, DIM)
    inputs = {before.input_names[0]: np.random.default_rng(0).normal(size=shape).astype("f4")}
    for expected, found in zip(
        before.run(inputs).values(), after.run(inputs).values(), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("command", REFUSED)
def test_command_names_the_extra(command: str, folder: Path) -> None:
    outcome = run(folder, REFUSED[command])
    assert_refused(outcome, "needs torch", f"Run: {install_command('torch')}")


def test_demo_names_its_own_extra(folder: Path) -> None:
    outcome = run(folder, ["demo", "--out", "demo"])
    assert_refused(outcome, "needs torch", f"Run: {install_command('demo')}")


def test_server_answers(folder: Path, tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(folder / 'blocked')!r}); import sitecustomize\n"
    code += BLOCKED + "from aftserve.cli import main\nsys.exit(main())"
    with serving(folder / "model.bundle", tmp_path / "log", program=("-c", code)) as (url, _):
        answer = http.post(f"{url}/infer", json={"text": "a long document"})
    assert answer.json()["label"] in ("invoice", "contract", "letter")


def test_server_with_reference_names_the_extra(folder: Path) -> None:
    outcome = run(folder, ["model.bundle", "--reference", "model.pt", "--port", "0"], "aftserve")
    assert_refused(outcome, "needs torch", f"Run: {install_command('torch')}")


def test_help_of_package_needs_no_torch(folder: Path) -> None:
    code = "import aftexport; help(aftexport)"
    outcome = run_python("-c", code, cwd=folder, PYTHONPATH=str(folder / "blocked"))
    assert (outcome.code, outcome.err) == (0, "")
    assert "class ExportOptions" in outcome.out


def test_modules_that_read_onnx_import_no_torch(folder: Path) -> None:
    """Also where torch is installed: its import takes seconds."""
    code = (
        "import sys, aftexport.pipeline.export, aftexport.recognition.onnx_file, "
        "aftexport.verify.check, "
        "aftexport.deploy.inspection, aftexport.bench.benchmark, aftexport.calibration.calibrate, "
        "aftserve.server, aftserve.app; print('torch' in sys.modules)"
    )
    outcome = run_python("-c", code, cwd=folder)
    assert outcome.out.strip() == "False", outcome.err
