"""The encoder operators' portable bodies, and the kernels where built, against the definition."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import aftplugins
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION
from aftexport.operators.encoder import OPERATORS
from aftexport.operators.schema import OnnxOperator
from aftexport.operators.torch_ops import expected_outputs
from aftexport.parity import TOLERANCES

SIZES = [
    {"B": 1, "T": 1, "D": 4, "E": 3, "F": 5, "G": 1, "H": 2},
    {"B": 3, "T": 33, "D": 17, "E": 40, "F": 70, "G": 33, "H": 1},
    {"B": 1, "T": 500, "D": 64, "E": 192, "F": 128, "G": 64, "H": 8},
]


def inputs_of(operator: OnnxOperator, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    inputs = {}
    for name, shape in zip(operator.inputs, operator.shapes, strict=True):
        size = [sizes[axis] for axis in shape.split()]
        if name == "lengths":
            inputs[name] = np.arange(size[0])[::-1] + sizes["T"] - size[0] + 1
            continue
        spread = size[0] ** -0.5 if len(size) == 2 else 1.0
        inputs[name] = (generator.standard_normal(size) * spread).astype(np.float32)
    return inputs


def model_of(
    operator: OnnxOperator,
    inputs: dict[str, np.ndarray],
    outputs: Sequence[torch.Tensor],
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a model of one node, with the portable body."""
    make = onnx.helper
    node = make.make_node(
        operator.op_type, list(inputs), operator.outputs, domain=DOMAIN,
        **attributes, **PLUGIN_ATTRIBUTES,
    )  # fmt: skip
    values = [
        make.make_tensor_value_info(n, make.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in inputs.items()
    ]
    results = [
        make.make_tensor_value_info(name, onnx.TensorProto.FLOAT, tuple(output.shape))
        for name, output in zip(operator.outputs, outputs, strict=True)
    ]
    return make.make_model(
        make.make_graph([node], "one", values, results),
        functions=[operator.function({}, 20)],
        opset_imports=[make.make_opsetid("", 20), make.make_opsetid(DOMAIN, VERSION)],
        ir_version=10,
    )


@pytest.mark.parametrize("fused", [False, True], ids=["portable", "fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"T{s['T']}")
@pytest.mark.parametrize("op_type", OPERATORS)
def test_encoder_operator_equals_definition(
    op_type: str, sizes: dict[str, int], precision: str, fused: bool
) -> None:
    if fused and (why := aftplugins.missing("onnxruntime")):
        pytest.skip(why)
    operator = OPERATORS[op_type]
    inputs = inputs_of(operator, sizes)
    attributes = {a.name: a.default for a in operator.attributes}
    if "num_heads" in attributes:
        attributes["num_heads"] = sizes["H"]
    tensors = [torch.from_numpy(x) for x in inputs.values()]
    expected = expected_outputs(
        operator, *(t.double() if t.is_floating_point() else t for t in tensors), **attributes
    )
    model = model_of(operator, inputs, expected, precision=precision, **attributes)
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    if fused:
        options.register_custom_ops_library(str(aftplugins.library("onnxruntime")))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    for actual, exact in zip(session.run(None, inputs), expected, strict=True):
        error = np.abs(actual - exact.numpy()).max() / max(1.0, exact.abs().max().item())
        assert error <= TOLERANCES[precision].bound
