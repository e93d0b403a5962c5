import pytest
import torch

from aftexport.nn import AftConv

from .layers import DIM, HEADS, documents, make_layer


@pytest.mark.parametrize("causal", [False, True], ids=["global", "causal"])
def test_layer_starts_as_aft_simple(causal: bool) -> None:
    """It has one key for each head."""
    torch.manual_seed(0)
    layer = AftConv(DIM, HEADS, 5, causal=causal).double()
    assert not layer.filter().any()
    x, lengths = documents(17, 9)
    ops = torch.ops.aftexport
    aft_simple = ops.causal_aft_simple if causal else ops.aft_simple
    key = layer.key(x).repeat_interleave(DIM // HEADS, 2)
    mixed = aft_simple(layer.query(x), key, layer.value(x), lengths, "sigmoid")
    difference = layer(x, lengths) - layer.output(mixed)
    assert difference[0].abs().max() < 1e-9
    assert difference[1, :9].abs().max() < 1e-9


def test_filter_is_normalized_scaled_and_shifted() -> None:
    """The norm is taken head by head, before the scale and the shift."""
    layer = make_layer("aft_conv")
    taps = layer.filter()
    assert taps.shape == (HEADS, 5)
    assert torch.allclose(taps.mean(1, keepdim=True), layer.beta)
    assert torch.allclose(taps.std(1, keepdim=True, correction=0), layer.gamma.abs())


def test_filter_trains_away_from_start() -> None:
    torch.manual_seed(0)
    layer = AftConv(DIM, HEADS, 5).double()
    x, lengths = documents(17, 9)
    layer(x, lengths).square().sum().backward()
    assert layer.gamma.grad.abs().min() > 0
    assert layer.beta.grad.abs().min() > 0


@pytest.mark.parametrize("window", [1, 2])
def test_window_of_few_taps_has_gradients(window: int) -> None:
    """The gradients are finite."""
    torch.manual_seed(0)
    layer = AftConv(DIM, HEADS, window).double()
    with torch.no_grad():
        layer.beta += 0.5
        layer.gamma += 0.5
    x, lengths = documents(17, 9)
    layer(x, lengths).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name
