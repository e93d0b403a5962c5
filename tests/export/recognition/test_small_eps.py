"""An eps smaller than the operator's, or none: the division stays as it is."""

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.operators.mechanisms.linear_attention import MIN_EPS
from aftexport.recognition import recognizer
from aftexport.recognition.result import show_recognition, to_dict

from .graphs import fused, operators, scripted
from .layer import DIM, heads, merged

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
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


def _outputs(model: onnx.ModelProto, size: float) -> list[NDArray[np.float32]]:
    """Run a model in a stock session and with the kernels, on queries and keys of a size."""
    random = np.random.default_rng(0)
    inputs = {name: random.standard_normal((2, 5, 4)).astype(np.float32) for name in "qkv"}
    inputs |= {name: np.float32(size) * inputs[name] for name in "qk"}
    inputs["q"][0, :3] = -1.0  # no feature of relu is above 0
    graph = model.SerializeToString()
    return [
        OnnxRuntimeEngine(graph, threads=1, fused=way).run(inputs)["y"] for way in (False, True)
    ]


@pytest.mark.parametrize("size", [1.0, 1e-12, 1e-16])
@pytest.mark.parametrize(
    ("eps", "added"),
    [*((eps, "Add(") for eps in ("0", "1e-35", "1e-30", "1e-20", "1e-15")), ("1e-30", "Max(")],
)
def test_small_eps_is_kept(eps: str, added: str, size: float) -> None:
    original = onnx.parser.parse_model((_TEXT % eps).replace("Add(", added))
    found, model = fused(original)
    assert operators(found) == ["NormalizedLinearAttention"], found.near_misses
    (match,) = found.matches
    is_small = float(eps) < MIN_EPS
    if is_small:
        assert match.attributes["normalizer"] == "none"
    else:
        assert match.attributes["eps"] == pytest.approx(float(eps), rel=1e-6, abs=0.0)
    note = "nodes after the operator divide"
    assert (note in match.note) == is_small
    assert to_dict(found)["matches"][0]["note"] == match.note
    console = Console(record=True, width=300)
    show_recognition(found, console)
    assert (note in console.export_text()) == is_small
    (expected, _), given = _outputs(original, size), _outputs(model, size)
    for result in given:
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("eps", ["1e-30", "1e-15"])
def test_small_minimum_of_signed_features_stays(eps: str) -> None:
    """A negative sum is divided by the minimum itself, which a larger one would change."""
    text = (_TEXT % eps).replace("Relu", "Identity").replace("Add(", "Max(")
    found, model = fused(onnx.parser.parse_model(text))
    (match,) = found.matches
    is_kept = float(eps) < MIN_EPS
    assert match.attributes["normalizer"] == ("none" if is_kept else "clamp")
    assert "nodes after the operator divide" in match.note or not is_kept
    random = np.random.default_rng(0)
    inputs = {name: random.standard_normal((2, 5, 4)).astype(np.float32) for name in "qkv"}
    original = onnx.parser.parse_model(text)
    expected, given = (
        OnnxRuntimeEngine(m.SerializeToString(), threads=1, fused=False).run(inputs)["y"]
        for m in (original, model)
    )
    assert (np.abs(expected) > 1e10).any()
    np.testing.assert_allclose(given, expected, rtol=1e-4)


class _SoftmaxFeatures(nn.Module):
    """Linear attention of softmax features, whose logits have a deviation of 35."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.query, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))
        with torch.no_grad():
            for layer in (self.query, self.key):
                layer.weight.mul_(35 * 3**0.5)  # that of nn.Linear is 1 / sqrt(3)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (heads(f(x)) for f in (self.query, self.key, self.value))
        query, key = query.softmax(-1), key.softmax(-1)
        if self.form == "quadratic":
            weights = query @ key.transpose(2, 3)
            return merged(weights / weights.sum(-1, keepdim=True) @ value)
        total = (query * key.sum(2, keepdim=True)).sum(-1, keepdim=True)
        if self.form == "causal":
            total = (query * key.cumsum(2)).sum(-1, keepdim=True)
            products = (key[..., :, None] * value[..., None, :]).cumsum(2)
            return merged((query[..., None, :] @ products).squeeze(3) / total)
        if self.form == "features first":
            return merged(query / total @ (key.transpose(2, 3) @ value))
        return merged(query @ (key.transpose(2, 3) @ value) / total)


@pytest.mark.parametrize("form", ["linear", "quadratic", "causal", "features first"])
def test_tiny_normalizer_of_softmax_is_exact(form: str) -> None:
    module = _SoftmaxFeatures(form)
    found, model = fused(scripted(module, torch.randn(2, 12, DIM)))
    assert len(operators(found)) == 1, found.near_misses
    for tokens in (1, 3, 12):
        x = torch.randn(4, tokens, DIM, generator=torch.Generator().manual_seed(tokens))
        expected = module(x).detach().numpy()
        for kernels in (False, True):
            engine = OnnxRuntimeEngine(model.SerializeToString(), threads=1, fused=kernels)
            (output,) = engine.run({"x": x.numpy()}).values()
            np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-6)


def test_proof_finds_another_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rewrite with the smallest eps of the operator in the place of none is not proven."""
    prove = recognizer.in_float64
    monkeypatch.setattr(
        recognizer, "in_float64", lambda op, attributes: prove(op, {**attributes, "eps": 2e-20})
    )
    found, _ = fused(onnx.parser.parse_model(_TEXT % "1e-20"))
    assert [miss.reason for miss in found.near_misses if "in float64 it differs" in miss.reason]


def test_untyped_zeros_are_proven_in_float64() -> None:
    """ConstantOfShape is float32 without a value, as ``new_zeros`` is exported."""
    text = (_TEXT % "1e-6").replace(
        "context = MatMul(keys_last, v)",
        """
        product = MatMul(keys_last, v)
        size = Shape(product)
        zeros = ConstantOfShape(size)
        context = Add(zeros, product)""",
    )
    found, _ = fused(onnx.parser.parse_model(text))
    assert operators(found) == ["NormalizedLinearAttention"], found.near_misses
