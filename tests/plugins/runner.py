"""Run one operator in ONNX Runtime with the kernel library, and compare it with its definition."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from oracles import mechanisms

import aftplugins

LIBRARY = aftplugins.library("onnxruntime")
if LIBRARY is None:
    pytest.skip(aftplugins.missing("onnxruntime"), allow_module_level=True)

INPUTS = {
    "AftFull": ["query", "key", "value", "position_bias", "lengths"],
    "AftLocal": ["query", "key", "value", "band", "lengths"],
    "AftSimple": ["query", "key", "value", "lengths"],
    "AftConv": ["query", "key", "value", "filter", "lengths"],
    "EfficientAttention": ["query", "key", "value", "lengths"],
    "Fastformer": ["query", "key", "value", "alpha_weight", "beta_weight", "lengths"],
    "NormalizedLinearAttention": ["query", "key", "value", "lengths"],
}


RANK = {
    "position_bias": 2,
    "band": 2,
    "filter": 2,
    "alpha_weight": 2,
    "beta_weight": 2,
    "lengths": 1,
}


@functools.cache
def session(
    op: str,
    dtype: str = "float32",
    threads: int = 2,
    library: Path | None = LIBRARY,
    bfloat16: bool = False,
    **attributes: Any,
) -> onnxruntime.InferenceSession:
    """Return a session over the model of `one_node`."""
    return session_of(one_node(op, dtype, bfloat16, **attributes), threads, library)


def one_node(
    op: str, dtype: str = "float32", bfloat16: bool = False, **attributes: Any
) -> ModelProto:
    """Return a model of one node.

    With `bfloat16` the node's tensors are that, cast from and to `dtype`, as numpy lacks it.
    """
    element = TensorProto.FLOAT if dtype == "float32" else TensorProto.FLOAT16
    names = INPUTS[op.removeprefix("Causal")]
    inner = {name: f"{name}_bfloat16" if bfloat16 and name != "lengths" else name for name in names}
    node = helper.make_node(
        op,
        list(inner.values()),
        ["result"],
        domain="ai.aftexport",
        plugin_namespace="",
        plugin_version="1",
        **attributes,
    )
    casts = [
        helper.make_node("Cast", [name], [to], to=TensorProto.BFLOAT16)
        for name, to in inner.items()
        if name != to
    ]
    inputs = [
        helper.make_tensor_value_info(
            name, TensorProto.INT64 if name == "lengths" else element, [None] * RANK.get(name, 3)
        )
        for name in names
    ]
    back = helper.make_node("Cast", ["result"], ["output"], to=element)
    output = helper.make_tensor_value_info("output", element, [None] * 3)
    graph = helper.make_graph([*casts, node, back], "one_op", inputs, [output])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.aftexport", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def session_of(
    model: ModelProto, threads: int = 2, library: Path | None = LIBRARY
) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run(
    op: str,
    inputs: list[np.ndarray],
    threads: int = 2,
    library: Path | None = LIBRARY,
    bfloat16: bool = False,
    **attributes: Any,
) -> np.ndarray:
    feeds = dict(zip(INPUTS[op.removeprefix("Causal")], inputs, strict=True))
    dtype = str(inputs[0].dtype)
    return session(op, dtype, threads, library, bfloat16, **attributes).run(None, feeds)[0]


def run_with_constant(
    op: str, name: str, inputs: list[np.ndarray], **attributes: Any
) -> np.ndarray:
    """Run the model with the input `name` as an initializer."""
    model = one_node(op, **attributes)
    feeds = dict(zip(INPUTS[op.removeprefix("Causal")], inputs, strict=True))
    model.graph.initializer.append(numpy_helper.from_array(feeds.pop(name), name))
    model.graph.input.remove(next(i for i in model.graph.input if i.name == name))
    return session_of(model).run(None, feeds)[0]


def random_inputs(
    op: str,
    batch: int,
    tokens: int,
    dim: int,
    *,
    heads: int = 1,
    window: int = 3,
    scale: float = 1.0,
    dtype: type[np.floating] = np.float32,
    lengths: list[int] | None = None,
    seed: int = 0,
) -> list[np.ndarray]:
    """Draw inputs of `op`: normal values, keys and biases scaled by `scale`."""
    rng = np.random.default_rng(seed)
    causal, name = op.startswith("Causal"), op.removeprefix("Causal")
    normal = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    q, k, v = (
        normal(batch, tokens, dim),
        normal(batch, tokens, dim) * scale,
        normal(batch, tokens, dim),
    )
    extra = []
    if name == "AftFull":
        extra = [normal(tokens + 2, tokens + 2) * scale]
    elif name == "AftLocal":
        extra = [normal(tokens, window if causal else 2 * window - 1) * scale]
    elif name == "AftConv":
        k, extra = normal(batch, tokens, heads) * scale, [normal(heads, window) * scale]
    elif name == "Fastformer":
        k = k / scale
        extra = [
            normal(dim, heads) * scale / np.sqrt(heads),
            normal(dim, heads) * scale / np.sqrt(heads),
        ]
    lengths = np.full(batch, tokens) if lengths is None else np.asarray(lengths)
    return [x.astype(dtype) for x in (q, k, v, *extra)] + [lengths.astype(np.int64)]


FORMULAS = {
    "AftFull": mechanisms.aft_full,
    "AftLocal": mechanisms.aft_local,
    "AftSimple": mechanisms.aft_simple,
    "AftConv": mechanisms.aft_conv,
    "EfficientAttention": mechanisms.efficient_attention,
    "Fastformer": mechanisms.fastformer,
    "NormalizedLinearAttention": mechanisms.linear_attention,
}
OPS = [prefix + name for name in FORMULAS for prefix in ("", "Causal")]
WITH_HEADS = [
    op
    for op in OPS
    if op.removeprefix("Causal")
    in ("AftConv", "EfficientAttention", "Fastformer", "NormalizedLinearAttention")
]

# Largest error relative to the largest value of the definition and of the input `value`.
BOUND = {np.dtype(np.float32): 3e-5, np.dtype(np.float16): 3e-3}


def definition(op: str, inputs: list[np.ndarray], **attributes: Any) -> np.ndarray:
    """Compute the operator by its formula in float64."""
    name = op.removeprefix("Causal")
    tensors = dict(zip(INPUTS[name], inputs, strict=True))
    return FORMULAS[name](tensors, causal=op.startswith("Causal"), **attributes)


def check(
    op: str,
    inputs: list[np.ndarray],
    bound: float | None = None,
    precision: str | None = None,
    library: Path | None = LIBRARY,
    bfloat16: bool = False,
    **attributes: Any,
) -> np.ndarray:
    """Check that the result is finite, and equals the definition on the rows that count."""
    chosen = {"precision": precision} if precision else {}
    actual = run(op, inputs, library=library, bfloat16=bfloat16, **chosen, **attributes)
    assert np.isfinite(actual).all()
    expected = definition(op, inputs, **attributes)
    scale = max(
        np.abs(expected).max(initial=0), np.abs(inputs[2].astype(np.float64)).max(initial=0), 1e-30
    )
    for b, length in enumerate(inputs[-1]):
        rows = slice(0, max(0, int(length)))
        error = np.abs(actual[b, rows] - expected[b, rows]).max(initial=0) / scale
        assert error <= (bound or BOUND[inputs[0].dtype]), (
            f"document {b} of length {length}: error {error:.1e}"
        )
    return actual


def rounding_effect(op: str, inputs: list[np.ndarray], **attributes: Any) -> float:
    """Return how far the definition moves if each number of the inputs moves by a rounding.

    The largest of eight random changes by at most 2^-23 of each number, in the measure of
    ``check``. No computation in float32 can be expected to be closer than this.
    """
    expected = definition(op, inputs, **attributes)
    scale = max(np.abs(expected).max(initial=0), np.abs(inputs[2]).max(initial=0), 1e-30)
    generator = np.random.default_rng(0)

    def moved(x: np.ndarray) -> np.ndarray:
        return x * (1 + generator.uniform(-1, 1, x.shape) * 2.0**-23)

    changes = [[*map(moved, inputs[:-1]), inputs[-1]] for _ in range(8)]
    results = [definition(op, change, **attributes) for change in changes]
    return max(float(np.abs(result - expected).max(initial=0)) for result in results) / scale


def attributes_of(op: str, heads: int = 1) -> dict[str, Any]:
    return {"num_heads": heads} if op in WITH_HEADS else {}
