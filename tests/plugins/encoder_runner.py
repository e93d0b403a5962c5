"""Run one of the encoder's operators in ONNX Runtime with the kernel library."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import ValueInfoProto, helper, numpy_helper

from .runner import LIBRARY

INPUTS = {
    "LayerNormLinear": ["x", "norm_weight", "norm_bias", "weight", "bias"],
    "LayerNormQueryKeyValue": [
        "x",
        "norm_weight",
        "norm_bias",
        "query_weight",
        "query_bias",
        "key_weight",
        "key_bias",
        "value_weight",
        "value_bias",
    ],
    "LayerNormFeedForward": [
        "x",
        "norm_weight",
        "norm_bias",
        "weight_in",
        "bias_in",
        "weight_out",
        "bias_out",
        "weight_up",
        "bias_up",
    ],
    "LinearResidual": ["x", "weight", "bias", "residual"],
    "LayerNormFastformer": [
        "x",
        "norm_weight",
        "norm_bias",
        "query_weight",
        "query_bias",
        "key_weight",
        "key_bias",
        "alpha_weight",
        "beta_weight",
        "weight",
        "bias",
        "lengths",
    ],
}
OUTPUTS = {"LayerNormQueryKeyValue": ["query", "key", "value"]}  # of the others: output
SEQUENCES = ("x", "residual", "lengths")
BOUND = {"fp32": 1e-5, "bf16": 1e-2, "int8": 3e-2}  # largest error, relative to the largest value
HALF_BOUND = 1e-3  # the same of float16 tensors: two roundings of the largest value


def run(
    op: str,
    inputs: dict[str, np.ndarray],
    *,
    constant: bool = True,
    threads: int = 2,
    library: Path | None = LIBRARY,
    **attributes: Any,
) -> np.ndarray:
    """Run `op` on the named inputs; weights and biases are initializers unless not `constant`.

    Inputs without an array are absent.
    Several outputs come side by side along their last axis.
    """
    return np.concatenate(outputs(op, inputs, constant, threads, library, **attributes), axis=-1)


def outputs(
    op: str,
    inputs: dict[str, np.ndarray],
    constant: bool = True,
    threads: int = 2,
    library: Path | None = LIBRARY,
    **attributes: Any,
) -> list[np.ndarray]:
    initial = [name for name in inputs if constant and name not in SEQUENCES]
    session = open_session(op, inputs, initial, threads, library, **attributes)
    return session.run(None, {name: x for name, x in inputs.items() if name not in initial})


def open_session(
    op: str,
    inputs: dict[str, np.ndarray],
    initial: Collection[str],
    threads: int = 2,
    library: Path | None = LIBRARY,
    **attributes: Any,
) -> onnxruntime.InferenceSession:
    """Return a session of `op`, with the inputs named by `initial` as initializers."""
    plugin = {"domain": "ai.aftexport", "plugin_namespace": "", "plugin_version": "1"}
    results = OUTPUTS.get(op, ["output"])
    given = [name if name in inputs else "" for name in INPUTS[op]]
    while not given[-1]:
        given.pop()
    node = helper.make_node(op, given, results, **plugin, **attributes)
    graph = helper.make_graph(
        [node],
        "one_op",
        [declare(name, x) for name, x in inputs.items() if name not in initial],
        [declare(name, inputs["x"]) for name in results],
        [numpy_helper.from_array(inputs[name], name) for name in initial],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.aftexport", 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def declare(name: str, like: np.ndarray) -> ValueInfoProto:
    element = helper.np_dtype_to_tensor_dtype(like.dtype)
    return helper.make_tensor_value_info(name, element, [None] * like.ndim)


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    return np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30)
