"""Models of one custom node with its portable body, run by ONNX Runtime without our library."""

from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest

from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION
from aftexport.operators.schema import INTEGER_INPUTS

from .cases import Inputs, Variant, run_reference, run_torch


@cache
def body_model(
    variant: Variant, num_heads: int = 2, opset: int = 20, dtype: str = "float32"
) -> onnx.ModelProto:
    """Return a model of one node, every axis dynamic."""
    operator, helper = variant.operator, onnx.helper
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    values = [
        helper.make_tensor_value_info(
            name,
            onnx.TensorProto.INT64 if name in INTEGER_INPUTS else element,
            [f"{name}_{axis}" for axis in range(len(shape.split()))],
        )
        for name, shape in zip(operator.inputs, operator.shapes, strict=True)
        if name in operator.required_inputs
    ]
    node = helper.make_node(
        operator.op_type,
        list(operator.required_inputs),
        ["output"],
        domain=DOMAIN,
        **variant.attributes(num_heads),
        **PLUGIN_ATTRIBUTES,
    )
    output = helper.make_tensor_value_info("output", element, ["batch", "tokens", "channels"])
    return helper.make_model(
        helper.make_graph([node], operator.op_type, values, [output]),
        functions=[operator.function(dict(variant.settings), opset)],
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, VERSION)],
        ir_version=10,
    )


@cache
def _session(
    variant: Variant, num_heads: int, opset: int, dtype: str
) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = False  # it would keep the memory of the longest document
    model = body_model(variant, num_heads, opset, dtype).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run_portable(
    variant: Variant, inputs: Inputs, num_heads: int = 2, opset: int = 20
) -> np.ndarray:
    """Run the body; one session serves every shape."""
    session = _session(variant, num_heads, opset, str(inputs["query"].dtype))
    (output,) = session.run(None, inputs)
    return output


every_form = pytest.mark.parametrize("run", [run_reference, run_torch, run_portable])
"""The definition, the torch op and the portable body."""
