"""Erf and Gelu of float64 graphs equal those of the C library."""

import math

import numpy as np
import onnx.parser
import pytest

from aftexport.engines.float64_operators import add_float64_operators
from aftexport.engines.onnxruntime import OnnxRuntimeEngine


@pytest.mark.parametrize(("operator", "opset"), [("Erf", 18), ("Erf", 20), ("Gelu", 20)])
def test_operator_is_exact_in_float64(operator: str, opset: int) -> None:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> '
        f"graph (double[n] x) => (double[n] y) {{ y = {operator} (x) }}"
    )
    add_float64_operators(model)
    x = np.concatenate([np.linspace(-7, 7, 9001), [0.0, 1e-300, -1e-12, 1e3, -1e3]])
    y = OnnxRuntimeEngine(model.SerializeToString(), fused=False).run({"x": x})["y"]
    exact = np.array([math.erf(v if operator == "Erf" else v / math.sqrt(2)) for v in x])
    if operator == "Gelu":
        exact = 0.5 * x * (1 + exact)
    np.testing.assert_allclose(y, exact, rtol=1e-13, atol=2e-15)
