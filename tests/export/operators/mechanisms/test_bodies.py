"""The portable ONNX body of every operator against the reference in float64, in every runtime."""

from collections.abc import Iterable
from itertools import product

import numpy as np
import onnx
import pytest
from onnx_runtimes import RUNTIMES

from aftexport.operators.domain import DOMAIN

from .cases import (
    BOUND,
    BY_NAME,
    CASES,
    FEW,
    ONE_GATE,
    PAIRS,
    VARIANTS,
    Case,
    Variant,
    error,
    make_inputs,
    named,
    one_node,
    run_portable,
    truth,
)


@pytest.mark.parametrize("opset", [18, 20, 23])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_body_uses_only_standard_operators(variant: Variant, opset: int) -> None:
    model = one_node(variant, opset=opset).model()
    onnx.checker.check_model(model, full_check=True)
    (function,) = model.functions
    assert (function.domain, function.name) == (DOMAIN, variant.op_type)
    assert {o.domain: o.version for o in function.opset_import} == {"": opset}
    assert all(node.domain == "" for node in function.node)


LOOPS = {
    "AftFull": {"Loop"},
    "CausalAftFull": {"Loop"},
    "AftLocal": {"Loop", "Scan"},
    "CausalAftLocal": {"Loop", "Scan"},
    "AftConv": {"Loop", "Scan"},
    "CausalAftConv": {"Loop", "Scan"},
    "CausalAftSimple": {"Scan"},
    "CausalEfficientAttention": {"Scan"},
    "CausalFastformer": {"Scan"},
}
"""The loops in a body, as docs/operators.md lists them; the other bodies have none."""


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_body_has_documented_loops(variant: Variant) -> None:
    (function,) = one_node(variant).model().functions
    expected = LOOPS.get(variant.op_type, set())
    if ("normalization", "scaling") in variant.settings:
        expected = set()
    assert loops(function.node) == expected


def loops(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """Return the kinds of loops among nodes and in their graphs."""
    found = set()
    for node in nodes:
        found |= {node.op_type} & {"Loop", "Scan"}
        for attribute in node.attribute:
            found |= loops(attribute.g.node)
    return found


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize(**named(PAIRS))
def test_body_equals_the_reference(variant: Variant, case: Case) -> None:
    inputs = make_inputs(variant.operator, case)
    result = run_portable(variant, inputs, case.heads)
    assert result.dtype == np.float32
    assert error(result, truth(variant, case), inputs) < BOUND["float32"]


OTHER_OPSETS = [c for c in CASES if c.tokens <= 65]


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize(**named(list(product(ONE_GATE, OTHER_OPSETS))))
def test_body_is_right_in_every_opset(variant: Variant, case: Case, opset: int) -> None:
    inputs = make_inputs(variant.operator, case)
    result = run_portable(variant, inputs, case.heads, opset)
    assert error(result, truth(variant, case), inputs) < BOUND["float32"]


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize("opset", [18, 20, 23])
@pytest.mark.parametrize(**named(list(product(ONE_GATE, FEW))))
def test_body_reads_and_writes_float16(variant: Variant, case: Case, opset: int) -> None:
    expected = truth(variant, case, "float16")
    if np.abs(expected).max() > np.finfo(np.float16).max:
        pytest.skip("the right answer is beyond float16")
    inputs = make_inputs(variant.operator, case, "float16")
    result = run_portable(variant, inputs, case.heads, opset)
    assert result.dtype == np.float16
    assert error(result, expected, inputs) < BOUND["float16"]
    # Only the last rounding is 16 bits wide.
    assert error(result, expected, inputs) < 2 * 2**-11


IN_RUNTIMES = (
    "1 token",
    "7 tokens",
    "500 tokens",
    "range 100 of 7 tokens",
    "dominating key",
    "opposed keys and biases",
    "late large key",
    "window beyond the tokens",
)
"""The cases that run in every runtime, whose exact form for hard numbers is among them."""


@pytest.mark.table(keep=0.08)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(**named(list(product(ONE_GATE, [BY_NAME[name] for name in IN_RUNTIMES]))))
def test_body_is_right_in_runtime(variant: Variant, case: Case, runtime: str, dtype: str) -> None:
    inputs = make_inputs(variant.operator, case, dtype)
    model = one_node(variant, case.heads, dtype=dtype).model()
    for value in model.graph.input:
        if value.name == "filter":  # OpenVINO convolves only with a filter of a known size
            for axis, size in zip(
                value.type.tensor_type.shape.dim, inputs["filter"].shape, strict=True
            ):
                axis.dim_value = size
    result = RUNTIMES[runtime](model)(inputs)["output"]
    assert result.dtype == dtype
    assert error(result, truth(variant, case, dtype), inputs) < BOUND[dtype]
