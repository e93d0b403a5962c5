"""The stock session, and models on which it crashes, refuses or differs."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny_models
import torch
from commands import Capture, run_here
from torch import Tensor, nn

from aftexport.bundle.bundle import Bundle
from aftexport.bundle.golden import Case
from aftexport.capture.capture import capture
from aftexport.errors import EngineError
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.parity import stock_child, stock_session
from aftexport.parity.stock_session import SUBJECT, _run, verify_stock
from aftexport.system.onnx_files import write_model

CRASHING = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
HANGING = "import time; time.sleep(60)"
REFUSING = "import sys; print('a warning', file=sys.stderr); sys.exit('Fail: of the child.')"
WRONG = """
import sys, numpy as np
given = np.load(sys.argv[2])
names = {key.partition("/")[0] for key in given}
wrong = {n + "/logits": np.full((len(given[n + "/input_ids"]), 3), 9, "f") for n in names}
np.savez(sys.argv[3], **wrong)
"""


@pytest.fixture
def child(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "child.py"
    script.write_text(request.param)
    monkeypatch.setattr(stock_child, "__file__", str(script))


def test_short_cases_are_compared(bundle_folder: Path) -> None:
    bundle = Bundle.open(bundle_folder)
    results = verify_stock(bundle, bundle.golden())
    assert all(result.passed for result in results)
    assert {result.subject for result in results} == {SUBJECT}
    assert {result.case for result in results} == {"one token", "seven tokens", "padded batch"}


@pytest.mark.parametrize(
    ("child", "said"),
    [
        (CRASHING, r"crashes on the model \(SIGSEGV\)"),
        (HANGING, r"must run 3 short cases within 1 s"),
        (REFUSING, r"cannot run the model: Fail: of the child\."),
    ],
    indirect=["child"],
    ids=["crash", "timeout", "refusal"],
)
@pytest.mark.usefixtures("child")
def test_failure_is_refused_with_reason(
    said: str, bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_session, "_SECONDS", 1.0 if "within 1 s" in said else 60.0)
    bundle = Bundle.open(bundle_folder)
    with pytest.raises(EngineError, match=f"stock session of ONNX Runtime .* {said}"):
        verify_stock(bundle, bundle.golden())


@pytest.mark.parametrize("child", [CRASHING], indirect=True)
@pytest.mark.usefixtures("child")
def test_crashing_export_writes_nothing(tmp_path: Path, capsys: Capture) -> None:
    words = ["--to", "onnx", "--factory", "tiny_models:Bag", "--out", tmp_path / "out"]
    outcome = run_here(words, capsys)
    assert outcome.code == 2
    assert "crashes on the model (SIGSEGV)" in " ".join(outcome.err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["child.py"]


@pytest.mark.parametrize("child", [WRONG], indirect=True)
@pytest.mark.usefixtures("child")
def test_a_difference_fails_verification(bundle_folder: Path, capsys: Capture) -> None:
    outcome = run_here(["verify", bundle_folder], capsys)
    assert outcome.code == 1
    assert "model in a stock session" in " ".join(outcome.out.split())


class Transformer(tiny_models.Bag):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(input_ids)).mean(1))


def test_float16_transformer_runs_with_external_weights(tmp_path: Path) -> None:
    module = Transformer().eval()
    model = finish(lower(capture(module, dtype=torch.float16)), precision="fp16")
    write_model(tmp_path, model)
    ids = np.arange(21).reshape(3, 7)
    with torch.inference_mode():
        expected = module.double()(torch.from_numpy(ids)).numpy()
    case = Case("short", "model", {"input_ids": ids}, {"logits": expected})
    (outputs,) = _run(tmp_path / "model.onnx", [case], seconds=60)
    np.testing.assert_allclose(outputs["logits"], expected, rtol=0, atol=2e-2)
    assert onnx.load(tmp_path / "model.onnx", load_external_data=False).ir_version == 9


@pytest.mark.parametrize("linked", [("model.onnx", "model.onnx.data"), ("model.onnx.data",)])
def test_weights_behind_links_are_found(linked: tuple[str, ...], tmp_path: Path) -> None:
    """A hub's snapshot has links to blobs of other names."""
    torch.manual_seed(0)
    module = tiny_models.Bag().eval()
    whole, blobs = tmp_path / "whole", tmp_path / "blobs"
    whole.mkdir()
    blobs.mkdir()
    write_model(whole, finish(lower(capture(module))))
    assert {file.name for file in whole.iterdir()} == {"model.onnx", "model.onnx.data"}
    for name in linked:
        (whole / name).rename(blobs / f"blob-{len(name)}")
        (whole / name).symlink_to(f"../blobs/blob-{len(name)}")
    ids = np.arange(10).reshape(2, 5)
    expected = module(torch.from_numpy(ids)).detach().numpy()
    case = Case("a", "model", {"input_ids": ids}, {"logits": expected})
    (outputs,) = _run(whole / "model.onnx", [case], 60)
    np.testing.assert_allclose(outputs["logits"], expected, atol=1e-5)
