"""Nodes that the kernels of a library do not take run by their bodies."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import pytest
import torch
from sampling import any_case
from torch import Tensor, nn

import aftplugins
from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine, operator_paths
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.operators.portable_bodies import attach_bodies, choose_kernels, takes_form
from aftexport.pipeline.golden_cases import operator_cases

from .mechanisms.wide_forms import Form, error, formula, make_inputs, model_of, node_of

FIRST = Form("NormalizedLinearAttention")
WIDE = [
    Form("NormalizedLinearAttention", (("normalizer", "clamp"),)),
    Form("NormalizedLinearAttention", (("feature_map", "identity"),)),
    Form("CausalEfficientAttention", heads=4, groups=2),
    Form("EfficientAttention", keys=9),
    Form("AftSimple", (("num_heads", 2),)),
    Form("AftSimple", (("gate", "relu"),)),
    Form("AftConv", (("gate", "relu"),)),
    *(Form(op_type, (("eps", 0.5),)) for op_type in ("AftFull", "CausalAftLocal", "AftConv")),
]


class TwoAttentions(nn.Module):
    """A key and a value that four heads share, and an attention to fewer keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.key, self.value = nn.Linear(16, 4), nn.Linear(16, 3)
        self.head = nn.Linear(12, 2)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        key, value = self.key(x).abs(), self.value(x)
        ops = torch.ops.aftexport
        own = ops.normalized_linear_attention(
            x.abs(), key, value, lengths, 4, "identity", 1e-3, "clamp", 1
        )
        other = ops.normalized_linear_attention(
            x.abs(), key, value, lengths, 4, "relu", 1e-3, kv_num_heads=1, key_lengths=lengths - 1
        )
        first = ops.normalized_linear_attention(x, x, x, lengths, 4, "elu", 1e-3)
        return self.head((own + other + first[..., :12])[:, 0])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    module = TwoAttentions().eval()
    path = tmp_path_factory.mktemp("forms") / "model.onnx"
    onnx.save(finish(lower(capture(module))), path)
    return module, path


@pytest.mark.parametrize("library", aftplugins.RUNTIMES)
def test_every_library_takes_common_forms(library: str) -> None:
    node = node_of(Form("AftLocal"))
    assert takes_form(library, node)
    del node.attribute[:]
    assert takes_form(library, node)


@pytest.mark.parametrize("form", WIDE, ids=str)
def test_gpu_libraries_lack_wide_forms(form: Form) -> None:
    assert takes_form("onnxruntime", node_of(form))
    for library in ("onnxruntime_cuda", "tensorrt"):
        assert not takes_form(library, node_of(form))
        model = model_of(form)
        assert choose_kernels(model, library)
        onnx.checker.check_model(model)
        assert {f.name for f in model.functions} == {form.op_type, f"{form.op_type}Portable"}
        assert [node.op_type for node in model.graph.node] == [f"{form.op_type}Portable"]


@pytest.mark.parametrize("form", WIDE, ids=str)
def test_engine_runs_forms_by_kernel_or_body(form: Form, tmp_path: Path) -> None:
    """A node that is renamed has no kernel in any library."""
    path = tmp_path / "model.onnx"
    onnx.save(model_of(form), path)
    renamed = model_of(form)
    choose_kernels(renamed, "tensorrt")
    inputs = make_inputs(form, 40, (40, 7))
    for model in (path, path.read_bytes(), renamed.SerializeToString()):
        found = OnnxRuntimeEngine(model, threads=1).run(inputs)["output"]
        assert error(found, formula(form, inputs), inputs["lengths"]) < 2e-5
    if aftplugins.library("onnxruntime") is not None:
        assert operator_paths(path) == {form.op_type: "fused"}


@pytest.mark.skipif(aftplugins.library("onnxruntime") is None, reason="needs the CPU kernels")
@pytest.mark.parametrize("order", [(0.0, 0.5), (0.5, 0.0), (0.0, 0.0)], ids=str)
def test_form_with_portable_node_is_portable(
    order: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number such as eps decides about the kernel, but is not part of the form's name."""

    def choose(model: onnx.ModelProto, _: str) -> bool:
        return choose_kernels(model, "onnxruntime_cuda")

    for module in ("engine", "sessions"):
        monkeypatch.setattr(f"aftexport.engines.onnxruntime.{module}.choose_kernels", choose)
    model = model_of(Form("AftFull", (("eps", order[0]),)))
    second = node_of(Form("AftFull", (("eps", order[1]),)))
    second.output[0] = "second"
    model.graph.node.append(second)
    output = model.graph.output.add()
    output.CopyFrom(model.graph.output[0])
    output.name = "second"
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert operator_paths(path) == {"AftFull": "portable" if any(order) else "fused"}


def test_exported_forms_equal_pytorch(exported: tuple[nn.Module, Path]) -> None:
    module, path = exported
    ids = np.random.default_rng(0).integers(0, 50, (3, 20))
    inputs = {"input_ids": ids, "lengths": np.array([20, 7, 2])}
    with torch.no_grad():
        expected = module(*map(torch.from_numpy, inputs.values())).numpy()
    for fused in (False, True):
        engine = OnnxRuntimeEngine(path, threads=1, fused=fused)
        np.testing.assert_allclose(engine.run(inputs)["logits"], expected, rtol=1e-5, atol=1e-6)


def test_nodes_without_attributes_get_defaults() -> None:
    """onnx's inliner has no defaults for the attributes that a body reads."""
    model = model_of(FIRST)
    del model.functions[:], model.graph.node[0].attribute[:]
    written = {a.name: a for a in attach_bodies(model).graph.node[0].attribute}
    assert written["normalizer"].s == b"add"
    assert written["kv_num_heads"].i == 0
    inlined = onnx.inliner.inline_local_functions(model)
    inputs = make_inputs(replace(FIRST, heads=1, groups=1), 9, (9, 4))
    found = OnnxRuntimeEngine(inlined.SerializeToString(), threads=1).run(inputs)["output"]
    expected = formula(replace(FIRST, heads=1, groups=1), inputs)
    assert error(found, expected, inputs["lengths"]) < 2e-5


@pytest.mark.table(keep=0.4, by=any_case)
@pytest.mark.parametrize("form", WIDE, ids=str)
def test_parity_cases_of_forms_are_exact(form: Form) -> None:
    """The cases draw features of one sign, so that no divisor cancels."""
    model = model_of(form)
    cases = operator_cases(model, np.dtype(np.float32))
    engine = OnnxRuntimeEngine(model.SerializeToString(), threads=1)
    assert len(cases) == 2
    for case in cases:
        (expected,) = case.outputs.values()
        found = engine.run(case.inputs)["output"]
        counted = np.arange(found.shape[1]) < case.inputs["lengths"][:, None]
        scale = max(1.0, np.abs(expected).max())
        assert np.abs(found - expected)[counted].max() / scale < 2e-5
