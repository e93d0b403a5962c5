import pytest
import torch

from aftexport.nn.pooling import AttentionPooling, MeanPooling

from .layers import DIM, documents


def test_mean_takes_only_own_tokens() -> None:
    x, lengths = documents(7, 3, 0)
    pooled = MeanPooling()(x, lengths)
    assert torch.allclose(pooled[0], x[0].mean(0))
    assert torch.allclose(pooled[1], x[1, :3].mean(0))
    assert not pooled[2].any()


def test_attention_pooling_weighs_only_own_tokens() -> None:
    x, lengths = documents(7, 3, 0)
    pooling = AttentionPooling(DIM).double()
    pooled = pooling(x, lengths)
    weight = pooling.score(x[1, :3]).softmax(0)
    assert torch.allclose(pooled[1], (weight * x[1, :3]).sum(0))
    assert pooled[2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "pooling", [MeanPooling(), AttentionPooling(DIM)], ids=["mean", "attention"]
)
def test_long_16_bit_sums_use_float32(pooling: torch.nn.Module, dtype: torch.dtype) -> None:
    x = torch.full((1, 70_000, DIM), 1.5, dtype=dtype)
    pooled = pooling.to(dtype)(x, torch.tensor([70_000]))
    assert pooled.dtype == dtype
    assert (pooled.float() - 1.5).abs().max() < 0.01
