"""An eps that an exporter dropped, or that float32 rounds to 0, becomes a safe one."""

import numpy as np
import onnx.parser
import pytest
from rich.console import Console

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.operators.mechanisms.linear_attention import MIN_EPS
from aftexport.recognition.report import show_recognition, to_dict

from .graphs import fused, operators

_TEXT = """<ir_version: 9, opset_import: ["": 20]>
linear (float[batch, tokens, 4] q, float[batch, tokens, 4] k, float[batch, tokens, 4] v)
    => (float[batch, tokens, 4] y)
<float eps = {%s}, int64[1] axis = {1}> {
  queries = Relu(q)
  keys = Relu(k)
  keys_last = Transpose <perm = [0, 2, 1]> (keys)
  context = MatMul(keys_last, v)
  numerator = MatMul(queries, context)
  total = ReduceSum(keys, axis)
  total_last = Transpose <perm = [0, 2, 1]> (total)
  dots = MatMul(queries, total_last)
  normalizer = Add(dots, eps)
  y = Div(numerator, normalizer)
}"""


@pytest.mark.parametrize("eps", ["0", "1e-30", "1e-20", "1e-15"])
def test_small_eps_becomes_safe(eps: str) -> None:
    found, model = fused(onnx.parser.parse_model(_TEXT % eps))
    assert operators(found) == ["NormalizedLinearAttention"], found.near_misses
    (match,) = found.matches
    assert match.attributes["eps"] == pytest.approx(max(float(eps), MIN_EPS), rel=1e-6, abs=0.0)
    is_raised = float(eps) < MIN_EPS
    assert (f"eps is {float(eps):g} in the graph; {MIN_EPS:g}" in match.note) == is_raised
    assert to_dict(found)["matches"][0]["note"] == match.note
    console = Console(record=True, width=300)
    show_recognition(found, console)
    assert ("the smallest that is safe" in console.export_text()) == is_raised

    random = np.random.default_rng(0)
    inputs = {name: random.standard_normal((2, 5, 4)).astype(np.float32) for name in "qkv"}
    inputs["q"][0, :3] = -1.0
    inputs["k"][1] = -1.0
    body, kernel = (
        OnnxRuntimeEngine(model.SerializeToString(), threads=1, fused=way).run(inputs)["y"]
        for way in (False, True)
    )
    assert not body[0, :3].any()
    assert not body[1].any()
    np.testing.assert_allclose(kernel, body, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("eps", ["1e-30", "1e-15"])
def test_small_minimum_of_signed_features_stays(eps: str) -> None:
    """A negative sum is divided by the minimum itself, which a larger one would change."""
    text = (_TEXT % eps).replace("Relu", "Identity").replace("Add(", "Max(")
    found, model = fused(onnx.parser.parse_model(text))
    (match,) = found.matches
    is_kept = float(eps) < MIN_EPS
    assert match.attributes["normalizer"] == ("none" if is_kept else "clamp")
    random = np.random.default_rng(0)
    inputs = {name: random.standard_normal((2, 5, 4)).astype(np.float32) for name in "qkv"}
    original = onnx.parser.parse_model(text)
    expected, given = (
        OnnxRuntimeEngine(m.SerializeToString(), threads=1, fused=False).run(inputs)["y"]
        for m in (original, model)
    )
    assert (np.abs(expected) > 1e10).any()
    np.testing.assert_allclose(given, expected, rtol=1e-4)
