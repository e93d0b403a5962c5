"""Every mechanism, not causal, as one would write it in PyTorch: eager, and for torch.compile.

Constants are taken as they would be kept: exponentials of biases are made beforehand. Every
document fills its row, so that nothing is masked.
"""

import torch
from torch import Tensor
from torch.nn import functional as nn


def aft_simple(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query.sigmoid() * (key.softmax(1) * value).sum(1, keepdim=True)


def aft_full(query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    """``weights``: ``exp(bias - its row maxima)``, ``[T, T]``."""
    exponentials = _exponentials(key)
    products = weights @ torch.cat((exponentials * value, exponentials), 2)
    numerator, denominator = products.chunk(2, 2)
    return query.sigmoid() * numerator / denominator


def band_blocks(band: Tensor) -> Tensor:
    """Of a band of biases ``[T, 2s-1]``, T a multiple of s, the exponentials as a dense matrix
    ``[T/s, s, 3s]`` of every s rows and the keys of their own block and those beside it."""
    tokens, width = band.shape
    size = (width + 1) // 2
    blocks = band.new_zeros(tokens // size, size, 3 * size)
    rows = torch.arange(size, device=band.device)[:, None]
    columns = torch.arange(width, device=band.device)[None, :] + rows + 1
    blocks.scatter_(2, columns.expand(len(blocks), -1, -1), band.reshape(-1, size, width))
    return blocks.exp()


def aft_local(query: Tensor, key: Tensor, value: Tensor, blocks: Tensor) -> Tensor:
    """``blocks``: of ``band_blocks``. Keys beyond three blocks come as sums of whole blocks."""
    batch, tokens, channels = query.shape
    size = blocks.shape[1]
    exponentials = _exponentials(key)
    entries = torch.cat((exponentials * value, exponentials), 2)
    padded = nn.pad(entries, (0, 0, size, size)).reshape(batch, -1, size, 2 * channels)
    near = torch.cat((padded[:, :-2], padded[:, 1:-1], padded[:, 2:]), 2)
    sums = padded.sum(2, dtype=torch.float32)
    before, after = sums.cumsum(1), sums.flip(1).cumsum(1).flip(1)
    far = nn.pad(before[:, :-3], (0, 0, 1, 0)) + nn.pad(after[:, 3:], (0, 0, 0, 1))
    products = blocks @ near + far[:, :, None]
    numerator, denominator = products.reshape(batch, tokens, 2 * channels).chunk(2, 2)
    return query.sigmoid() * (numerator / denominator).to(query.dtype)


def aft_conv(query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    """``weights``: ``exp(filter) - 1``, ``[H, s]``, s odd; key ``[B, T, H]``."""
    (heads, taps), width = weights.shape, value.shape[2] // weights.shape[0]
    exponentials = _exponentials(key)
    entries = torch.cat((exponentials.repeat_interleave(width, 2) * value, exponentials), 2)
    filters = torch.cat((weights.repeat_interleave(width, 0), weights))[:, None]
    near = nn.conv1d(entries.mT, filters, padding=taps // 2, groups=len(filters)).mT
    products = near + entries.sum(1, keepdim=True)
    numerator, denominator = products.split((value.shape[2], heads), 2)
    return query.sigmoid() * numerator / denominator.repeat_interleave(width, 2)


def efficient_attention(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    query, key, value = (_heads(x, heads) for x in (query, key, value))
    return _together(query.softmax(3) @ (key.softmax(2).mT @ value))


def linear_attention(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    query, key, value = (_heads(x, heads) for x in (query, key, value))
    query, key = nn.elu(query) + 1, nn.elu(key) + 1
    sums = key.sum(2, keepdim=True)
    return _together(query @ (key.mT @ value) / ((query * sums).sum(3, keepdim=True) + 1e-6))


def fastformer(
    query: Tensor, key: Tensor, value: Tensor, alpha_weight: Tensor, beta_weight: Tensor
) -> Tensor:
    """The weights: ``[D, H]``."""
    scale = (query.shape[2] / alpha_weight.shape[1]) ** -0.5
    products = key * _pooled(query, query @ alpha_weight * scale)
    return _pooled(products, products @ beta_weight * scale) * value


def layer_norm_fastformer(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    query_weight: Tensor,
    query_bias: Tensor,
    key_weight: Tensor,
    key_bias: Tensor,
    alpha_weight: Tensor,
    beta_weight: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> Tensor:
    """The layer with its queries and keys, weights as the operator's."""
    normed = nn.layer_norm(x, x.shape[2:], norm_weight, norm_bias)
    query, key = normed @ query_weight + query_bias, normed @ key_weight + key_bias
    products = key * _pooled(query, normed @ alpha_weight)
    attended = _pooled(products, products @ beta_weight) * query
    return x + attended @ weight + bias + query


def _pooled(x: Tensor, logits: Tensor) -> Tensor:
    """Means of the heads of ``x``, ``[B, 1, D]``, by the softmax over tokens of ``[B, T, H]``."""
    shares = logits.softmax(1).mT[:, :, None]
    return (shares @ _heads(x, logits.shape[2])).reshape(len(x), 1, -1)


def _exponentials(key: Tensor) -> Tensor:
    return (key - key.amax(1, keepdim=True)).exp()


def _heads(x: Tensor, heads: int) -> Tensor:
    """``[B, T, D]`` as ``[B, H, T, D/H]``."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def _together(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)
