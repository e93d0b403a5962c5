import pytest
import torch

from aftexport.nn import AftFull

from .layers import MAX_LENGTH, documents, make_layer


def test_bias_is_product_of_factors() -> None:
    """Its rows are queries."""
    layer = make_layer("aft_full")
    bias = layer.position_bias()
    assert bias.shape == (MAX_LENGTH, MAX_LENGTH)
    assert bias[3, 7].item() == pytest.approx((layer.row_factor[3] @ layer.column_factor[7]).item())


def test_layer_is_projections_around_operator() -> None:
    layer = make_layer("aft_full")
    x, lengths = documents(17, 9)
    logits = layer.key(x)[:, None] + layer.position_bias()[None, :17, :17, None]
    valid = torch.arange(17) < lengths[:, None]
    logits = logits.masked_fill(~valid[:, None, :, None], -torch.inf)
    mean = (logits.softmax(2) * layer.value(x)[:, None]).sum(2)
    expected = layer.output(layer.query(x).sigmoid() * mean)
    assert (layer(x, lengths) - expected)[valid].abs().max() < 1e-9


def test_tokens_over_maximum_are_refused() -> None:
    layer = make_layer("aft_full")
    layer(*documents(MAX_LENGTH))
    with pytest.raises(ValueError, match=r"AftFull: 21 tokens.*position_bias.*20"):
        layer(*documents(MAX_LENGTH + 1))
    layer.fold()
    with pytest.raises(ValueError, match=r"AftFull: 21 tokens"):
        layer(*documents(MAX_LENGTH + 1))


def test_the_factors_start_small() -> None:
    torch.manual_seed(0)
    layer = AftFull(8, 200, bias_rank=64)
    assert layer.row_factor.shape == layer.column_factor.shape == (200, 64)
    assert layer.row_factor.std().item() == pytest.approx(0.01, rel=0.05)
    assert layer.column_factor.std().item() == pytest.approx(0.01, rel=0.05)
