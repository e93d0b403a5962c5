"""Layouts other than [B, T, D]: images of any height and width, and the tokens last."""

from collections.abc import Callable, Mapping

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

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
