import pytest
import torch

from aftexport.nn import AftFull, AftLocal

from .layers import DIM, MAX_LENGTH, documents, make_layer


@pytest.mark.parametrize("window", [1, 2, 4, 20, 25])
@pytest.mark.parametrize("causal", [False, True], ids=["global", "causal"])
def test_band_is_product_within_window(window: int, causal: bool) -> None:
    """The band of the factors is their whole product within the window."""
    torch.manual_seed(0)
    layer = AftLocal(DIM, window, MAX_LENGTH, bias_rank=5, causal=causal)
    product = layer.row_factor @ layer.column_factor.T
    band = layer.band()
    assert band.shape == (MAX_LENGTH, window if causal else 2 * window - 1)
    for t in range(MAX_LENGTH):
        for j in range(band.shape[1]):
            u = t + j - (window - 1)
            if 0 <= u < MAX_LENGTH:
                assert band[t, j].item() == pytest.approx(product[t, u].item(), abs=1e-9)


@pytest.mark.parametrize("causal", [False, True], ids=["global", "causal"])
def test_layer_is_masked_aft_full(causal: bool) -> None:
    """It is AFT-full with the bias masked to the window."""
    local = make_layer("aft_local factors", causal=causal)
    full = AftFull(DIM, MAX_LENGTH, bias_rank=5, causal=causal).double()
    full.load_state_dict(local.state_dict())
    positions = torch.arange(MAX_LENGTH)
    near = (positions[:, None] - positions).abs() < 4
    full.folded_bias = torch.where(near, full.position_bias(), 0)
    x, lengths = documents(17, 17)
    assert (local(x, lengths) - full(x, lengths)).abs().max() < 1e-9


def test_a_relative_bias_serves_any_length() -> None:
    layer = make_layer("aft_local relative")
    assert layer.band().shape == (1, 7)
    assert layer(*documents(3 * MAX_LENGTH)).shape[1] == 3 * MAX_LENGTH


@pytest.mark.parametrize("max_length", [1, 2, 20])
def test_tokens_over_maximum_are_refused(max_length: int) -> None:
    layer = AftLocal(DIM, 4, max_length, bias_rank=5).double()
    layer(*documents(max_length))
    with pytest.raises(ValueError, match=f"AftLocal: {max_length + 1} tokens.*band.*{max_length}"):
        layer(*documents(max_length + 1))
