"""Models whose nodes of one operator differ in their settings and optional inputs."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx_runtimes import RUNTIMES
from torch import Tensor, nn

import aftplugins
from aftexport.bundle.golden import join_outputs
from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine, operator_paths
from aftexport.engines.onnxruntime.engine import operator_shares
from aftexport.errors import EngineError
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.operators.domain import DOMAIN, operators_in
from aftexport.operators.portable_bodies import choose_kernels
from aftexport.parity.run_cases import operator_model
from aftexport.pipeline.golden_cases import operator_cases
from aftexport.recognition.standard_file import standard_form

from .mechanisms import recurrent_cases

FORMS = {
    "NormalizedLinearAttention": 2,
    "NormalizedLinearAttention_relu_add_key_lengths": 1,
    "RecurrentLinearAttention": 2,
    "RecurrentLinearAttention_delta_forward_none_head_beta": 1,
    "RecurrentLinearAttention_linear_forward_sum_head": 1,
}
"""The number of nodes by operator and form."""
IDS = np.random.default_rng(0).integers(0, 50, (3, 70))
INPUTS = {"input_ids": IDS, "lengths": np.array([70, 33, 1])}

needs_kernels = pytest.mark.skipif(
    aftplugins.library("onnxruntime") is None, reason="the CPU kernels are not built"
)


class Hybrid(nn.Module):
    """Three update rules, and linear attention with and without lengths of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for rule in ("gated", "linear", "gated", "delta"):
            x = torch.tanh(x + recur(x, lengths, rule))
        attend = torch.ops.aftexport.normalized_linear_attention
        for _ in range(2):
            x = x + attend(x, x, x, lengths, 2, "elu", 1e-3)
        x = x + attend(x, x, x, lengths, 2, "relu", 1e-3, key_lengths=lengths.clamp(max=9))
        return self.head(x[:, 0])


def recur(x: Tensor, lengths: Tensor, rule: str) -> Tensor:
    """Run the recurrent operator; the rule ``linear`` has a normalizer."""
    decay = -x[..., :2].abs() if rule == "gated" else None
    beta = x[..., :1].sigmoid() if rule == "delta" else None
    if rule == "linear":
        query, key, normalizer = x.sigmoid(), x.sigmoid(), "sum"
    else:
        query, key, normalizer = x, nn.functional.normalize(x, dim=2), "none"
    settings = (rule, "forward", normalizer, "head", 2, 2, 0.0, 1e-6)
    y, _ = torch.ops.aftexport.recurrent_linear_attention(
        query, key, x, None, decay, beta, lengths, *settings
    )
    return y


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mixed") / "model.onnx"
    onnx.save(finish(lower(capture(hybrid()))), file)
    return file


@pytest.fixture(scope="module")
def truth() -> np.ndarray:
    with torch.no_grad():
        return hybrid().double()(*map(torch.from_numpy, INPUTS.values())).numpy()


def hybrid() -> nn.Module:
    torch.manual_seed(0)
    return Hybrid().eval()


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_file_names_forms(path: Path) -> None:
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert operators_in(model) == FORMS
    assert Counter(f.name for f in model.functions) == dict.fromkeys(FORMS, 1)


def test_parity_cases_of_every_form_are_exact(path: Path) -> None:
    model = onnx.load(path)
    cases = operator_cases(model, np.dtype(np.float32))
    assert {case.subject for case in cases} == FORMS.keys()
    for case in cases:
        single = operator_model(model, case).SerializeToString()
        found = join_outputs(OnnxRuntimeEngine(single, threads=1).run(case.inputs))
        (expected,) = case.outputs.values()
        counted = np.arange(found.shape[1]) < case.inputs["lengths"][:, None]
        assert error(found[counted], expected[counted]) < 2e-6, case.subject


def test_parity_cases_keep_signs_of_state() -> None:
    """Only the last column of a state enters the divisor."""
    form = recurrent_cases.Form("linear", normalizer="sum", has_past=True)
    drawn = recurrent_cases.draw(form, 4, (4,))
    model = recurrent_cases.body_model(recurrent_cases.ATTENTION, drawn, form.attributes)
    (case,) = operator_cases(model, np.dtype(np.float32))
    state = case.inputs["past_state"]
    assert state[..., :-1].min() < -0.5
    assert state[..., -1].min() >= 0
    assert case.inputs["query"].min() >= 0


@needs_kernels
def test_kernels_run_every_form(path: Path, truth: np.ndarray) -> None:
    assert operator_paths(path) == dict.fromkeys(FORMS, "fused")
    for model in (path, path.read_bytes()):
        shares = operator_shares(model, INPUTS, threads=1)
        assert {"NormalizedLinearAttention", "RecurrentLinearAttention"} <= shares.keys()
        assert "Loop" not in shares
        found = OnnxRuntimeEngine(model, threads=1).run(INPUTS)["logits"]
        assert error(found, truth) < 1e-5


def test_engine_without_kernels_runs_bodies(path: Path, truth: np.ndarray) -> None:
    found = OnnxRuntimeEngine(path, threads=1, fused=False).run(INPUTS)["logits"]
    assert error(found, truth) < 1e-5
    assert "Loop" in operator_shares(path, INPUTS, threads=1, fused=False)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_other_runtimes_run_every_form(runtime: str, path: Path, truth: np.ndarray) -> None:
    found = RUNTIMES[runtime](onnx.load(path))(INPUTS)["logits"]
    assert error(found, truth) < 1e-5


def test_missing_kernel_runs_no_other_body(path: Path) -> None:
    """A node that took the name of its operator cannot run the body of the most common form."""
    model = onnx.load(path)
    assert choose_kernels(model, "onnxruntime")
    assert operators_in(model) == {"NormalizedLinearAttention": 3, "RecurrentLinearAttention": 4}
    with pytest.raises(EngineError, match=r"Attention.* is not a registered"):
        OnnxRuntimeEngine(model.SerializeToString(), threads=1, fused=False)


@pytest.mark.parametrize("library", ["onnxruntime_cuda", "tensorrt"])
def test_gpu_libraries_leave_other_forms(library: str, path: Path) -> None:
    """They take neither lengths of keys nor recurrent operators."""
    model = onnx.load(path)
    choose_kernels(model, library)
    kept = {name: count for name, count in FORMS.items() if "_" in name}
    assert operators_in(model) == kept | {
        "NormalizedLinearAttention": 2,
        "RecurrentLinearAttentionPortable": 2,
    }
    assert {node.op_type for node in model.graph.node if node.domain == DOMAIN} <= {
        "NormalizedLinearAttention",
        *(function.name for function in model.functions),
    }


def test_every_form_becomes_standard(path: Path, truth: np.ndarray) -> None:
    form = standard_form(onnx.load(path), None)
    assert number_by_operator(form.bodies) == {
        "NormalizedLinearAttention": 3,
        "RecurrentLinearAttention": 4,
    }
    assert not form.model.functions
    session = onnxruntime.InferenceSession(form.model.SerializeToString())
    assert error(session.run(None, INPUTS)[0], truth) < 1e-5


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < 27, reason="onnx has no opset 27")
def test_every_form_becomes_recurrent_operator_of_onnx(path: Path) -> None:
    form = standard_form(onnx.load(path), 27)
    assert form.standard == {("RecurrentLinearAttention", "LinearAttention"): 3}
    assert number_by_operator(form.bodies) == {
        "NormalizedLinearAttention": 3,
        "RecurrentLinearAttention": 1,
    }


def number_by_operator(counts: Counter[tuple[str, str]]) -> Counter[str]:
    numbers = Counter[str]()
    for (name, _), count in counts.items():
        numbers[name] += count
    return numbers
