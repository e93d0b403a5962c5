"""Layouts other than [B, T, D]: images of any height and width, and the tokens last."""

from collections.abc import Callable, Mapping

import onnx
import onnx.parser
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from aftexport.operators.domain import opset_of

from .graphs import assert_equal, exported, fused, operators, scripted
from .layer import elu_features

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
CHANNELS, HEADS = 8, 2
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Convolved(nn.Module):
    """Query, key and value by 1x1 convolutions, and by others channel by channel after them."""

    def __init__(self, attend: Attend, dims: int = 2) -> None:
        super().__init__()
        convolution = nn.Conv2d if dims == 2 else nn.Conv1d
        self.attend = attend
        self.qkv = convolution(CHANNELS, 3 * CHANNELS, 1)
        self.near = convolution(3 * CHANNELS, 3 * CHANNELS, 3, padding=1, groups=3 * CHANNELS)
        self.output = convolution(CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.near(self.qkv(x)).chunk(3, 1)
        return x + self.output(self.attend(q, k, v))


class Projected(nn.Module):
    """Query, key and value by linear layers of the tokens, which become an image again."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.norm = attend, nn.LayerNorm(CHANNELS)
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.qkv(self.norm(x.flatten(2).transpose(1, 2)))
        q, k, v = (part.transpose(1, 2).reshape(x.shape) for part in tokens.chunk(3, -1))
        return x + self.attend(q, k, v)


class Given(nn.Module):
    """Query, key and value are the input's, ``[B, 3, H, d, T]``."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*x.unbind(1))


def _heads(x: Tensor) -> Tensor:
    """``[B, D, ...]`` to ``[B, H, d, T]``."""
    return x.flatten(2).reshape(x.shape[0], HEADS, CHANNELS // HEADS, -1)


def simple(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mean = (k.flatten(2).softmax(-1) * v.flatten(2)).sum(-1)
    return q.sigmoid() * mean.reshape(*mean.shape, *[1] * (q.dim() - 2))


def simple_over_height_and_width(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return q.tanh() * (e * v).sum((2, 3), keepdim=True) / e.sum((2, 3), keepdim=True)


def simple_of_one_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return simple(q, k[:, :1], v)


def simple_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return q.sigmoid() * (e * v).cumsum(-1) / e.cumsum(-1)


def efficient_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k.softmax(-1) @ v.transpose(-1, -2)).transpose(-1, -2) @ q.softmax(-2)


def linear_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = elu_features(q), elu_features(k)
    total = (q * k.sum(-1, keepdim=True)).sum(-2, keepdim=True)
    return v @ k.transpose(-1, -2) @ q / (total + 1e-6)


def linear_with_a_row_of_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = elu_features(q), elu_features(k)
    sums = pad(v, (0, 0, 0, 1), value=1.0) @ k.transpose(-1, -2) @ q
    return sums[:, :, :-1] / (sums[:, :, -1:] + 1e-3)


def efficient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return efficient_of_heads(*map(_heads, (q, k, v))).reshape(q.shape)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_of_heads(*map(_heads, (q, k, v))).reshape(q.shape)


def example(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def check(module: nn.Module, model: onnx.ModelProto, expected: str, *examples: Tensor) -> None:
    found, changed = fused(model)
    assert operators(found) == [expected], found.near_misses
    assert_equal(module, changed, *examples)


@pytest.mark.parametrize(
    ("attend", "expected"),
    [
        (simple, "AftSimple"),
        (simple_over_height_and_width, "AftSimple"),
        (simple_of_one_key, "AftSimple"),
        (efficient, "EfficientAttention"),
    ],
)
@pytest.mark.parametrize("layer", [Convolved, Projected])
def test_images_of_any_size(layer: type[nn.Module], attend: Attend, expected: str) -> None:
    module = layer(attend)
    model = scripted(module, example(2, CHANNELS, 4, 6), axes={0: "b", 2: "h", 3: "w"})
    check(module, model, expected, example(2, CHANNELS, 4, 6), example(1, CHANNELS, 5, 1))


@pytest.mark.parametrize("layer", [Convolved, Projected])
def test_image_linear_attention_of_any_width(layer: type[nn.Module]) -> None:
    module = layer(linear)
    model = scripted(module, example(2, CHANNELS, 2, 6), axes={0: "b", 3: "w"})
    check(module, model, "NormalizedLinearAttention", example(3, CHANNELS, 2, 5))


def test_images_by_the_other_exporter() -> None:
    module, dim = Convolved(efficient), torch.export.Dim
    axes = (dim("b"), None, dim("h", max=400), dim("w", max=400))
    model = exported(module, example(2, CHANNELS, 4, 6), axes=axes)
    check(module, model, "EfficientAttention", example(1, CHANNELS, 3, 5))


@pytest.mark.parametrize(
    ("attend", "expected"),
    [
        (simple, "AftSimple"),
        (simple_causal, "CausalAftSimple"),
        (efficient, "EfficientAttention"),
        (linear, "NormalizedLinearAttention"),
    ],
)
def test_sequences_with_the_channels_first(attend: Attend, expected: str) -> None:
    module = Convolved(attend, dims=1)
    model = scripted(module, example(2, CHANNELS, 9), axes={0: "b", 2: "t"})
    check(module, model, expected, example(2, CHANNELS, 9), example(1, CHANNELS, 1))


@pytest.mark.parametrize("axes", [{}, {0: "b"}], ids=["one size", "any batch"])
@pytest.mark.parametrize(
    ("attend", "expected"),
    [
        (efficient_of_heads, "EfficientAttention"),
        (linear_of_heads, "NormalizedLinearAttention"),
        (linear_with_a_row_of_ones, "NormalizedLinearAttention"),
    ],
)
def test_tokens_last_and_always_as_many(
    attend: Attend, expected: str, axes: Mapping[int, str]
) -> None:
    module, x = Given(attend), example(2, 3, HEADS, 5, 7)
    check(module, scripted(module, x, axes=axes), expected, x)


@pytest.mark.parametrize("attend", [simple, efficient, linear])
def test_images_of_one_size(attend: Attend) -> None:
    module, x = Convolved(attend), example(2, CHANNELS, 3, 4)
    found, changed = fused(scripted(module, x, axes={}))
    assert len(operators(found)) == 1, found.near_misses
    assert_equal(module, changed, x)


def test_last_axis_may_be_channels() -> None:
    """Numbers do not tell whether the mean of an unknown tensor is over tokens or channels."""
    x = example(2, 3, HEADS, 5, 7)
    found, _ = fused(
        scripted(Given(lambda q, k, v: q.sigmoid() * (k.softmax(-1) * v).sum(-1, True)), x, axes={})
    )
    assert operators(found) == []
    assert "may be the channels" in found.near_misses[0].reason


_TEXT = """
<ir_version: 9, opset_import: ["" : %d]>
g (float[batch, tokens, 8] q, float[batch, tokens, 8] k, float[batch, tokens, 8] v)
  => (float[batch, tokens, 8] y)
<float tiny = {%s}, int64[1] one = {1}>
{
  e = Exp(k)
  weighted = Mul(e, v)
  numerator = %s
  total = %s
  denominator = Add(total, tiny)
  gate = Sigmoid(q)
  mean = Div(numerator, denominator)
  y = Mul(gate, mean)
}
"""
_SUMS = ("ReduceSum(weighted, one)", "ReduceSum(e, one)")


@pytest.mark.parametrize("tiny", ["1e-8", "1e-30"])
def test_smallest_eps_is_not_dropped(tiny: str) -> None:
    found, _ = fused(onnx.parser.parse_model(_TEXT % (20, tiny, *_SUMS)))
    assert operators(found) == ["AftSimple"]
    assert found.matches[0].attributes["eps"] == pytest.approx(float(tiny), rel=1e-6, abs=0.0)


def test_files_of_older_opsets_are_converted() -> None:
    sums = ("ReduceSum <axes = [1]> (weighted)", "ReduceSum <axes = [1]> (e)")
    found, model = fused(onnx.parser.parse_model(_TEXT % (11, "0", *sums)))
    assert operators(found) == ["AftSimple"]
    assert opset_of(model) >= 18


_PLAIN = _TEXT % (20, "0", *_SUMS)
# A size is squared and its root taken, 40 times: there are 2^40 ways from the last to it.
_DEEP = f"""shape = Shape(q)
  two = Constant <value_int = 2> ()
  size = Gather(shape, two)
  a0 = Cast <to = 1> (size)
  {" ".join(f"b{n} = Mul(a{n}, a{n})  a{n + 1} = Sqrt(b{n})" for n in range(40))}
  scaled = Mul(q, a40)
  gate = Sigmoid(scaled)"""
_SEQUENCES = """whole = Mul(gate, mean)
  parts = SplitToSequence <axis = 2> (whole)
  y = ConcatFromSequence <axis = 2> (parts)"""
_MASK_AND_NEGATION = """not = Not(mask)
  left_out = Cast <to = 9> (not)
  zero = Constant <value_float = 0.0> ()
  some = Where(mask, all, zero)
  e = Where(left_out, zero, some)"""


def _masked(mask: str, weigh: str) -> str:
    text = _PLAIN.replace("8] v)", f"8] v, {mask}[batch, tokens, 1] mask)")
    return text.replace("e = Exp(k)", f"all = Exp(k)\n{weigh}")


@pytest.mark.parametrize(
    "text",
    [
        _PLAIN,
        _PLAIN.replace("tokens, 8] k", "others, 8] k"),
        _PLAIN.replace("y = Mul(gate, mean)", _SEQUENCES),
        _PLAIN.replace("gate = Sigmoid(q)", _DEEP),
        _masked("bool", "ones = Cast <to = 1> (mask)\ne = Mul(all, ones)"),
        _masked("int64", "ones = Cast <to = 1> (mask)\ne = Mul(all, ones)"),
        _masked("bool", _MASK_AND_NEGATION),
    ],
    ids=["plain", "another name", "sequences", "deep size", "bool", "integers", "negation"],
)
def test_graph_of_text_fuses(text: str) -> None:
    found, _ = fused(onnx.parser.parse_model(text))
    assert operators(found) == ["AftSimple"], found.near_misses


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            _PLAIN.replace("tokens, 8] k", "others, 8] k").replace("tokens, 8] v", "others, 8] v"),
            "of different sequences",
        ),
        (_masked("float", "e = Mul(all, mask)"), "the input mask, which may be any number"),
    ],
    ids=["sequences", "float"],
)
def test_graph_of_text_stays(text: str, reason: str) -> None:
    found, _ = fused(onnx.parser.parse_model(text))
    assert operators(found) == []
    assert reason in found.near_misses[0].reason


_MASKED_ROWS = """
<ir_version: 9, opset_import: ["" : 20]>
g (float[batch, tokens, 8] q, float[batch, tokens, 8] k, float[batch, tokens, 8] v,
   %s[batch, tokens, 1] mask) => (float[batch, tokens, 8] y)
<float eps = {1e-3}, int64[1] one = {1}, int64[1] two = {2}>
{
  counts = Cast <to = 1> (mask)
  of_queries = Relu(q)
  rows = Mul(of_queries, counts)
  of_keys = Relu(k)
  columns = Transpose <perm = [0, 2, 1]> (of_keys)
  context = MatMul(columns, v)
  numerator = MatMul(rows, context)
  total = ReduceSum(of_keys, one)
  products = Mul(rows, total)
  sums = ReduceSum(products, two)
  denominator = Add(sums, eps)
  y = Div(numerator, denominator)
}
"""


@pytest.mark.parametrize("kind", ["bool", "int64", "float"])
def test_query_rows_may_be_weighed(kind: str) -> None:
    """Numbers of rows multiply the features of queries; a mask multiplies the result."""
    found, _ = fused(onnx.parser.parse_model(_MASKED_ROWS % kind))
    assert operators(found) == ["NormalizedLinearAttention"], found.near_misses
    feature_map = "identity" if kind == "float" else "relu"
    assert found.matches[0].attributes["feature_map"] == feature_map


def test_sum_over_excess_axes_is_ignored() -> None:
    """No mechanism sums over so many axes."""
    axes = ", ".join(["2"] * 8)
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 18]>
        g (float[b, t, {axes}] x, float[b, t, {axes}] y) => (float[b, t] z) {{
            e = Exp(x)
            p = Mul(e, y)
            z = Einsum <equation = "btcdefghij->bt"> (p)
        }}"""
    )
    found, _ = fused(model)
    assert found.matches == []
