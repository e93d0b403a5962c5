"""AFT-full around a matrix product, in PyTorch; see ``mechanisms.aft_full_product``."""

import torch
from torch import Tensor

from aftexport.operators.numerics import apply_gate, denominators, key_weights, mask_keys


def prepare(key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    """Compute the definition of ``AftFullPrepare`` from ``[B, T, D]``."""
    weight, _ = key_weights(mask_keys(key, lengths))
    return torch.cat((weight * value, weight), 2)


def finish(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor,
    products: Tensor,
    lengths: Tensor,
    *,
    gate: str,
) -> Tensor:
    """Compute the definition of ``AftFullFinish`` from products ``[B, T, 2 D]``."""
    # A mean over no keys is 0. Exact products make the numbers of key, value and bias redundant.
    numerator, total = products.chunk(2, 2)
    _, top = key_weights(mask_keys(key, lengths))
    return apply_gate(gate, query, numerator / denominators(total, top))
