"""AFT-full around a matrix product: the two operators one by one, and a graph of one AFT-full."""

from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from one_node import open_session
from onnx import TensorProto, helper, numpy_helper

from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION
from aftexport.operators.portable_bodies import attach_bodies
from aftexport.operators.registry import ALL_OPERATORS

Array = NDArray[np.generic]

DTYPES = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
"""Precision to the type of the tensors."""
_ELEMENTS = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
}
_RANKS = {"position_bias": 2, "lengths": 1}


def rounded(array: Array, precision: str) -> Array:
    """Round floating-point numbers to a precision; the result is float32."""
    return array.astype(DTYPES[precision]).astype(np.float32)


def run_around_product(
    inputs: dict[str, Array], precision: str, gate: str = "sigmoid", library: Path | None = None
) -> Array:
    """Run both operators around a product in NumPy, which rounds as a library of a GPU does.

    Args:
        inputs: query, key, value, position_bias and lengths, in the numbers of the precision.
        precision: the type of all tensors.
        gate: the gate of ``AftFullFinish``.
        library: the kernel library; None for the portable bodies.
    """
    bias = inputs["position_bias"]
    tokens = inputs["query"].shape[1]
    weights = rounded(np.exp(bias - bias.max(1, keepdims=True)), precision)[:tokens, :tokens]
    entries = run_operator("AftFullPrepare", inputs, precision, library)
    with np.errstate(over="ignore"):  # float16
        products = rounded(weights @ entries, precision)
    return run_operator(
        "AftFullFinish", inputs | {"products": products}, precision, library, gate=gate
    )


def run_operator(
    op_type: str, inputs: dict[str, Array], precision: str, library: Path | None, **attributes: str
) -> Array:
    """Run one of the two operators in ONNX Runtime; see ``run_around_product``."""
    operator = ALL_OPERATORS[op_type]
    session = _session(op_type, precision, library, **attributes)
    result: Array = session.run(None, {name: inputs[name] for name in operator.inputs})[0]
    return result


@cache
def _session(
    op_type: str, precision: str, library: Path | None, **attributes: str
) -> onnxruntime.InferenceSession:
    """Return a session of one node, whose inputs and outputs are float32 for NumPy."""
    operator, element = ALL_OPERATORS[op_type], _ELEMENTS[precision]
    floats = [name for name in operator.inputs if name != "lengths"]
    nodes = [helper.make_node("Cast", [name], [f"{name}_cast"], to=element) for name in floats]
    names = [name if name == "lengths" else f"{name}_cast" for name in operator.inputs]
    nodes.append(
        helper.make_node(
            op_type, names, ["result"], domain=DOMAIN, **attributes, **PLUGIN_ATTRIBUTES
        )
    )
    nodes.append(helper.make_node("Cast", ["result"], ["output"], to=TensorProto.FLOAT))
    values = [_declared(n, TensorProto.FLOAT, _RANKS.get(n, 3)) for n in floats]
    values.append(_declared("lengths", TensorProto.INT64, 1))
    graph = helper.make_graph(nodes, op_type, values, [_declared("output", TensorProto.FLOAT, 3)])
    return open_session(_model(graph), library)


def aft_full_model(
    tensors: str, bias: Array, op_type: str = "AftFull", **attributes: str | float
) -> onnx.ModelProto:
    """Return a graph of one AFT-full of 16 channels, with a constant bias and its body.

    Args:
        tensors: the precision of the tensors, and of the exponentials without the attribute.
        bias: the position bias.
        op_type: the operator.
        attributes: attributes of the node.
    """
    sequence, element = ["batch", "tokens", 16], _ELEMENTS[tensors]
    inputs = [
        helper.make_tensor_value_info(name, element, sequence) for name in ("query", "key", "value")
    ]
    inputs.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, ["batch"]))
    node = helper.make_node(
        op_type,
        ["query", "key", "value", "position_bias", "lengths"],
        ["output"],
        name="attention",
        domain=DOMAIN,
        **({"precision": tensors} | attributes),
    )
    output = helper.make_tensor_value_info("output", element, sequence)
    weight = numpy_helper.from_array(bias.astype(DTYPES[tensors]), "position_bias")
    graph = helper.make_graph([node], "one", inputs, [output], [weight])
    return _model(graph)


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, VERSION)]
    return attach_bodies(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def _declared(name: str, element: int, rank: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element, [f"{name}_{i}" for i in range(rank)])
