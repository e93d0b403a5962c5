"""Properties of every layer, with and without the causal flag."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from aftexport.nn import (
    AftConv,
    AftFull,
    AftLocal,
    DotProductAttention,
    EfficientAttention,
    Fastformer,
    LinearAttention,
)

from .layers import DIM, MAKERS, documents, make_layer

every_layer = pytest.mark.parametrize("name", MAKERS)
either_direction = pytest.mark.parametrize("causal", [False, True], ids=["global", "causal"])


@every_layer
@either_direction
def test_layer_keeps_width_of_every_token(name: str, causal: bool) -> None:
    x, lengths = documents(17, 9, 1, 0)
    result = make_layer(name, causal=causal)(x, lengths)
    assert result.shape == x.shape
    assert result.dtype == x.dtype
    assert result.isfinite().all()


@every_layer
def test_only_causal_layer_hides_later_tokens(name: str) -> None:
    x, lengths = documents(17, 17)
    changed = torch.cat((x[:, :10], 3 * x[:, 10:]), 1)
    for causal in (False, True):
        layer = make_layer(name, causal=causal)
        difference = (layer(changed, lengths) - layer(x, lengths))[:, :10].abs().max()
        assert (difference < 1e-9) == causal


@every_layer
@either_direction
def test_padding_does_not_change_a_document(name: str, causal: bool) -> None:
    x, lengths = documents(17, 9, 1)
    layer = make_layer(name, causal=causal)
    together = layer(x, lengths)
    for document, length in enumerate(lengths.tolist()):
        own = slice(document, document + 1)
        alone = layer(x[own, :length], lengths[own])
        assert (together[own, :length] - alone).abs().max() < 1e-9


def used_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters, without the query of a layer whose gate ignores the query."""
    gate = getattr(layer, "gate", "sigmoid")
    return {
        name: parameter
        for name, parameter in layer.named_parameters()
        if gate != "none" or not name.startswith("query.")
    }


@every_layer
@either_direction
def test_gradients_reach_every_parameter(name: str, causal: bool) -> None:
    x, lengths = documents(17, 9)
    layer = make_layer(name, causal=causal)
    x.requires_grad_()
    layer(x, lengths)[1, :9].square().sum().backward()
    for parameter_name, parameter in used_parameters(layer).items():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        # A softmax does not see what is added to every key.
        if parameter_name != "key.bias":
            assert parameter.grad.abs().max() > 1e-9, parameter_name
    assert x.grad is not None
    assert x.grad[1, :9].abs().min() > 0
    assert x.grad[1, 9:].abs().max() < 1e-12


@every_layer
@either_direction
def test_initial_gradients_are_finite(name: str, causal: bool) -> None:
    torch.manual_seed(0)
    layer = MAKERS[name](causal=causal)
    x, lengths = documents(17, 0)
    layer(x.float(), lengths).sum().backward()
    for parameter_name, parameter in used_parameters(layer).items():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


@every_layer
@either_direction
def test_folding_keeps_output_and_state_dict(name: str, causal: bool) -> None:
    layer = make_layer(name, causal=causal)
    if not hasattr(layer, "fold"):
        return
    x, lengths = documents(17, 9)
    before, saved = layer(x, lengths), set(layer.state_dict())
    fresh = copy.deepcopy(layer)
    layer.fold()
    assert (layer(x, lengths) - before).abs().max() < 1e-12
    assert set(layer.state_dict()) == saved
    fresh.load_state_dict(layer.state_dict())
    assert (fresh(x, lengths) - before).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["aft_full", "aft_local factors", "aft_conv"])
def test_a_folded_bias_is_a_constant(name: str) -> None:
    layer = make_layer(name)
    layer.fold()
    x, lengths = documents(17, 9)
    layer(x, lengths).sum().backward()
    learned = {"row_factor", "column_factor", "weight", "gamma", "beta"}
    for parameter_name, parameter in layer.named_parameters():
        assert (parameter.grad is None) == (parameter_name in learned)


@pytest.mark.parametrize(("left", "right"), [(7, 7), (7, 0), (2, 1), (0, 3)])
def test_dot_product_attention_is_the_transformers(left: int, right: int) -> None:
    layer = make_layer("dot_product_attention", causal=not right)
    assert isinstance(layer, DotProductAttention)
    layer.window_left, layer.window_right = (n if n < 7 else None for n in (left, right))
    x, lengths = documents(8, 8)
    heads = []
    for own in (slice(h, h + DIM // 3) for h in range(0, DIM, DIM // 3)):
        query, key, value = (f(x)[..., own] for f in (layer.query, layer.key, layer.value))
        logits = query @ key.transpose(1, 2) / (DIM // 3) ** 0.5
        outside = torch.ones(8, 8).tril(-left - 1) + torch.ones(8, 8).triu(right + 1)
        logits = logits.masked_fill(outside.bool(), -torch.inf)
        heads.append(logits.softmax(2) @ value)
    expected = layer.output(torch.cat(heads, 2))
    assert (layer(x, lengths) - expected).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: AftLocal(8, 0), "window must be at least 1, got 0"),
        (lambda: AftLocal(8, 0, 16), "window must be at least 1, got 0"),
        (lambda: AftLocal(8, 3, 16, bias_rank=0), "bias_rank must be at least 1, got 0"),
        (lambda: AftFull(8, -1), "max_length must be at least 1, got -1"),
        (lambda: AftConv(8, 2, 0), "window must be at least 1, got 0"),
        (lambda: AftConv(8, 0, 3), "num_heads must be at least 1, got 0"),
        (lambda: DotProductAttention(8, 2, window_left=-1), "window_left must be at least 0"),
        (lambda: Fastformer(8, 0), "num_heads must be at least 1, got 0"),
    ],
)
def test_a_count_below_one_is_refused(make: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: AftConv(8, 3, 5),
        lambda: DotProductAttention(8, 3),
        lambda: EfficientAttention(8, 3),
        lambda: Fastformer(8, 3),
        lambda: LinearAttention(8, 3),
    ],
)
def test_heads_must_divide_channels(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match="num_heads must divide dim 8, got 3; choose one of 1, 2"):
        make()
