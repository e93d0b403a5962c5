"""Means with a bias inside a window, in PyTorch; ``mechanisms._windowed`` has the formula."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from aftexport.operators.numerics import biased_mean


def means(key: Tensor, value: Tensor, bias: Tensor, left: int, causal: bool, eps: float) -> Tensor:
    """Return the definition ``[B, T, C, E]``, computed row by row."""
    tokens, width = key.shape[1], bias.shape[1]
    rows = []
    for t in range(tokens):
        end = t + 1 if causal else tokens
        first, last = max(t - left, 0), min(t - left + width, end)
        row = bias[min(t, bias.shape[0] - 1), first - (t - left) : last - (t - left)]
        biases = pad(row, (0, 0, 0, 0, first, end - last))
        rows.append(biased_mean(key[:, :end], biases, value[:, :end], eps))
    return torch.cat(rows, 1)


def outside_sums(pair: Tensor, left: int, width: int, causal: bool) -> Tensor:
    """Return the sums of ``pair [B, T, ...]`` over the tokens before and after each window."""
    tokens, trailing = pair.shape[1], (0, 0) * (pair.dim() - 2)
    sums = pad(pair.cumsum(1), (*trailing, left + 1, 0))[:, :tokens]
    if not causal:
        right = width - left
        suffix = pair.flip(1).cumsum(1).flip(1)
        sums = sums + pad(suffix, (*trailing, 0, right))[:, right:]
    return sums
