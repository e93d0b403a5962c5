"""Every portable body in every ONNX runtime, its exact form for hard numbers included."""

from itertools import product

import onnx
import pytest
from onnx_runtimes import RUNTIMES

from .cases import (
    BOUND,
    BY_NAME,
    ONE_GATE,
    Case,
    Variant,
    error,
    make_inputs,
    named,
    truth,
)
from .portable import body_model

NAMES = (
    "1 token",
    "7 tokens",
    "500 tokens",
    "range 100 of 7 tokens",
    "dominating key",
    "opposed keys and biases",
    "late large key",
    "window beyond the tokens",
)


@pytest.mark.table(keep=0.08)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(**named(list(product(ONE_GATE, [BY_NAME[name] for name in NAMES]))))
def test_body_is_right_in_runtime(variant: Variant, case: Case, runtime: str, dtype: str) -> None:
    inputs = make_inputs(variant.operator, case, dtype)
    model = onnx.ModelProto()
    model.CopyFrom(body_model(variant, case.heads, dtype=dtype))
    for value in model.graph.input:
        if value.name == "filter":  # OpenVINO convolves only with a filter of a known size
            for axis, size in zip(
                value.type.tensor_type.shape.dim, inputs["filter"].shape, strict=True
            ):
                axis.dim_value = size
    result = RUNTIMES[runtime](model)(inputs)["output"]
    assert result.dtype == dtype
    assert error(result, truth(variant, case, dtype), inputs) < BOUND[dtype]
