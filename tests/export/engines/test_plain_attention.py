"""Softmax attention as GPU runtimes get it."""

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx_runtimes import RUNTIMES
from torch import Tensor, nn

from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime.providers import PROVIDERS
from aftexport.engines.plain_attention import write_attention
from aftexport.engines.tensorrt.builder import build
from aftexport.engines.tensorrt.graph_rewrites import prepare_graph
from aftexport.engines.tensorrt.runtimes import load
from aftexport.engines.tensorrt.settings import build_settings
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.operators.domain import operators_in
from aftexport.options import EngineOptions

from ..operators.mechanisms.test_softmax_attention import (
    BOUND,
    FORMS,
    Form,
    counted_error,
    draw,
    every_form,
    expected,
    model_of,
)


def sized(given: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Return a copy in which the channels of some inputs are known, as in an exported graph."""
    model = onnx.ModelProto()
    model.CopyFrom(given)
    for value in model.graph.input:
        if value.name in inputs:
            value.type.tensor_type.shape.dim[-1].dim_value = inputs[value.name].shape[-1]
    return model


def plain(form: Form, inputs: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Return a model of one node, written as plain nodes."""
    model = sized(model_of(form, inputs, log_sum=False), inputs)
    assert write_attention(model)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.table(keep=0.5, by=lambda form, **_: (str(form),))
@pytest.mark.parametrize(
    ("tokens", "dtype", "runtime"),
    [
        (1, "float32", "onnxruntime"),
        (40, "float32", "onnxruntime"),
        (40, "float16", "onnxruntime"),
        (7, "float32", "evaluator"),
    ],
)
@every_form
def test_plain_nodes_equal_formula(form: Form, tokens: int, dtype: str, runtime: str) -> None:
    inputs = draw(form, tokens, dtype)
    results = tuple(RUNTIMES[runtime](plain(form, inputs))(inputs).values())
    assert counted_error(results, expected(form, inputs)[:1], inputs["lengths"]) < BOUND[dtype]


class Layers(nn.Module):
    """Layers of rotated attention with shared key heads, each with a window."""

    def __init__(self, *windows: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.windows = windows
        self.embedding = nn.Embedding(50, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in windows)
        self.products = nn.ModuleList(nn.Linear(32, 64) for _ in windows)
        self.residuals = nn.ModuleList(nn.Linear(32, 32) for _ in windows)
        self.head = nn.Linear(32, 3)
        angles = torch.arange(300)[:, None] * 0.7 ** torch.arange(4)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for (left, right), norm, product, residual in zip(
            self.windows, self.norms, self.products, self.residuals, strict=True
        ):
            query, key, value = product(norm(x)).split((32, 16, 16), -1)
            rows, _ = torch.ops.aftexport.softmax_attention(
                query, key, value, None, None, lengths, 4, 0.0, left, right, 0.0, 2,
                cos_cache=self.cos, sin_cache=self.sin,
            )  # fmt: skip
            x = x + residual(rows)
        padding = torch.arange(x.shape[1]) >= lengths[:, None]
        return self.head(x.masked_fill(padding[..., None], -9).amax(1))


WINDOWS = ((8, 8), (-1, -1), (8, 8), (-1, -1), (-1, 0))
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@cache
def lowered(precision: str) -> onnx.ModelProto:
    dtype = PRECISIONS[precision]
    return lower(capture(Layers(*WINDOWS).to(dtype).eval(), dtype=dtype))


def exported(precision: str, *, fuse: bool) -> onnx.ModelProto:
    return finish(lowered(precision), precision=precision, fuse=fuse)


def logits(model: onnx.ModelProto) -> np.ndarray:
    ids, lengths = np.arange(80).reshape(2, 40) % 50, np.array([40, 13])
    return RUNTIMES["onnxruntime"](model)({"input_ids": ids, "lengths": lengths})["logits"]


def check_counts(model: onnx.ModelProto, forms: int) -> None:
    """Check for the fused pattern, and for one mask of each form and pair of rotary tables."""
    counts = Counter(node.op_type for node in model.graph.node)
    assert "SoftmaxAttention" not in operators_in(model)
    assert not {"Scan", "Loop", "If"} & counts.keys()
    assert not {f.name for f in model.functions} & {"SoftmaxAttention"}
    producers = {node.output[0]: node for node in model.graph.node}
    softmaxes = [node for node in model.graph.node if node.op_type == "Softmax"]
    assert len(softmaxes) == len(WINDOWS)
    sums = [producers[node.input[0]] for node in softmaxes]
    assert {(one.op_type, producers[one.input[0]].op_type) for one in sums} == {("Add", "MatMul")}
    masks = [producers[one.input[1]] for one in sums]
    assert {mask.op_type for mask in masks} == {"Where"}
    assert len({mask.output[0] for mask in masks}) == forms
    tables = [n.input[0] for n in model.graph.node if n.op_type == "Gather"]
    assert (tables.count("cos"), tables.count("sin")) == (1, 1)
    read = {name for node in softmaxes for name in node.output}
    products = [n for n in model.graph.node if n.op_type == "MatMul" and read & {*n.input}]
    assert len(products) == len(WINDOWS)


def test_prepared_layers_share_masks() -> None:
    model = exported("fp32", fuse=False)
    exact = logits(model)
    prepared = prepare_graph(model, has_plugins=False)
    check_counts(prepared, forms=3)
    np.testing.assert_allclose(logits(prepared), exact, rtol=0, atol=1e-5)


def test_cuda_provider_gets_plain_layers() -> None:
    """The operators around the attention keep their nodes, through which shapes are inferred."""
    model = exported("fp32", fuse=True)
    exact = logits(model)
    assert PROVIDERS["cuda"].adapt(model)
    check_counts(model, forms=3)
    assert {"LayerNormQueryKeyValue", "LinearResidual"} <= operators_in(model).keys()
    np.testing.assert_allclose(logits(model), exact, rtol=0, atol=1e-5)


def test_unknown_width_and_log_sum_keep_body() -> None:
    form = FORMS[0]
    inputs = draw(form, 7)
    for log_sum in (False, True):
        model = sized(model_of(form, inputs, log_sum=log_sum), inputs if log_sum else {})
        before = model.SerializeToString(deterministic=True)
        assert not write_attention(model)
        assert model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    ("precision", "capabilities"), [("fp32", ()), ("fp16", (75, 86)), ("bf16", ())]
)
def test_builder_takes_plain_layers(
    precision: str, capabilities: tuple[int, ...], tmp_path: Path
) -> None:
    """Also for compute capability 75, for which TensorRT-RTX has no products in float32."""
    onnx.save(exported(precision, fuse=False), tmp_path / "model.onnx")
    options = EngineOptions(compute_capabilities=capabilities)
    settings = build_settings("trt-rtx", options, precision=precision, max_tokens=300)
    built = build(load("tensorrt_rtx"), tmp_path / "model.onnx", settings, precision=precision)
    assert built.operators == {"SoftmaxAttention": "portable"}
    assert len(built.engine) > 10_000


@every_form
def test_parser_takes_every_form(form: Form) -> None:
    rtx = load("tensorrt_rtx")
    network = rtx.module.Builder(rtx.logger).create_network(0)
    parser = rtx.module.OnnxParser(network, rtx.logger)
    model = prepare_graph(plain(form, draw(form, 7, "float16")), has_plugins=False)
    assert parser.parse(model.SerializeToString()), parser.get_error(0).desc()
