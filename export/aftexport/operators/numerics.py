"""PyTorch numerics shared by the mechanisms: masks, gates, and the guard against underflow."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from aftexport.operators.domain import MASKED, MAX_BLOCK

Sums = tuple[Tensor, Tensor]
"""Numerator and denominator of a weighted mean."""


def valid_keys(lengths: Tensor, tokens: int) -> Tensor:
    """Return the mask of valid keys, bool ``[B, T]``, from int64 ``lengths [B]``."""
    return torch.arange(tokens, device=lengths.device) < lengths[:, None]


def mask_keys(key: Tensor, lengths: Tensor) -> Tensor:
    """Return ``key [B, T, ...]`` with the logit ``MASKED`` for padded keys."""
    valid = valid_keys(lengths, key.shape[1])
    return torch.where(valid.reshape(*valid.shape, *[1] * (key.dim() - 2)), key, MASKED)


def apply_gate(gate: str, query: Tensor, mean: Tensor) -> Tensor:
    """Multiply ``mean`` by the gate of the query."""
    functions = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu}
    return mean if gate == "none" else functions[gate](query) * mean


def guarded_mean(
    sums: Callable[..., Sums], reference: Callable[..., Tensor], *tensors: Tensor
) -> Tensor:
    """Return the quotient of ``sums``, in the least precision that keeps every term in range."""
    # Forms that subtract the maxima of keys and biases separately can underflow if the maxima lie
    # at different positions. A denominator far above the smallest normal number proves that the
    # lost terms are negligible. If one is smaller, the sums are computed again in float64, and at
    # last the mean by its definition.
    dtype = tensors[0].dtype
    for wide, smallest in ((torch.float32, 1e-25), (torch.float64, 1e-290)):
        if torch.finfo(wide).bits < torch.finfo(dtype).bits:
            continue
        numerator, denominator = sums(*(t.to(wide) for t in tensors))
        if bool((denominator > smallest).all()):
            return (numerator / denominator).to(dtype)
    return reference(*(t.double() for t in tensors)).to(dtype)


def largest(logits: Tensor, dim: int = 1) -> Tensor:
    """Return the maximum over ``dim``, which is kept; it is finite even if every key is masked."""
    # So no difference to it is NaN. Means do not depend on the maximum: it needs no gradient.
    return logits.detach().amax(dim, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)


def divisor(total: Tensor) -> Tensor:
    """Return ``total`` with 1 for 0, so that the mean is 0 if every key is masked."""
    return torch.where(total == 0, 1, total)


def eps_beside(eps: float, maximum: Tensor) -> Tensor:
    """Return ``eps`` relative to ``exp(maximum)``: the share of it in sums that are so shifted."""
    return torch.zeros_like(maximum) if eps == 0 else (math.log(eps) - maximum).exp()


def softmax(logits: Tensor, eps: float = 0.0, shift: Tensor | None = None) -> Tensor:
    """Return the softmax over dim 1 of ``[B, T, ...]``; it is 0 if every key is masked.

    ``eps`` is added to the sum of ``exp(logits + shift)``; ``shift`` was subtracted from the
    logits.
    """
    # ``sum`` adds in several levels, but ``torch.softmax`` adds one by one.
    top = largest(logits)
    weight = (logits - top).exp()
    total = weight.sum(1, keepdim=True) + eps_beside(eps, top if shift is None else top + shift)
    return weight / divisor(total)


def softmax_mean(logits: Tensor, value: Tensor, eps: float = 0.0) -> Tensor:
    """Return the mean of ``value [B, T, ...]``, weighted by a softmax over dim 1, which is kept."""
    return (softmax(logits, eps) * value).sum(1, keepdim=True)


def biased_mean(key: Tensor, bias: Tensor, value: Tensor, eps: float = 0.0) -> Tensor:
    """Return the mean of ``value [B, T, ...]`` by a softmax of ``key + bias`` over dim 1.

    Dim 1 is kept. ``eps`` is added to the sum of the weights.
    """
    # Keys and biases are taken relative to those of the largest logit before they are added,
    # because a number loses all its digits beside 1e38. Halves of finite numbers do not overflow
    # when they are added.
    half_key, half_bias = 0.5 * key, 0.5 * bias.expand_as(key)
    best = (half_key + half_bias).detach().argmax(1, keepdim=True)
    lowest = torch.finfo(key.dtype).min / 2
    best_key, best_bias = (
        half.detach().gather(1, best).clamp(min=lowest) for half in (half_key, half_bias)
    )
    relative = 2 * ((half_key - best_key) + (half_bias - best_bias))
    weights = softmax(relative, eps, 2 * (best_key + best_bias))
    return (weights * value).sum(1, keepdim=True)


def windowed_means(
    key: Tensor, value: Tensor, bias: Tensor, left: int, causal: bool, eps: float
) -> Tensor:
    """Return the definition of ``mechanisms._windowed``, ``[B, T, C, E]``, row by row."""
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


def key_weights(key: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``exp(key)`` relative to its maximum over dim 1, and that, which may be ``MASKED``."""
    top = key.detach().amax(1, keepdim=True)
    return (key - top.clamp(min=torch.finfo(key.dtype).min)).exp(), top


def denominators(
    total: Tensor, top: Tensor, eps: float = 0.0, shift: Tensor | None = None
) -> Tensor:
    """Return the sums ``total`` of weights plus ``eps``; 1 or more if every key is masked.

    ``total`` is the sum of ``exp(key + bias - top - shift)``: ``top`` is that of ``key_weights``,
    and ``shift`` the maximum of the biases, if there are any.
    """
    sums = torch.where(top == MASKED, 1, total)
    if eps == 0:
        return sums
    finite_top = top.clamp(min=torch.finfo(top.dtype).min)
    return sums + eps_beside(eps, finite_top if shift is None else finite_top + shift)


def context(key: Tensor, value: Tensor) -> Tensor:
    """Return the sum of ``key^T value`` over ``[B, T, H, *]``, in two levels: ``[B, H, d, e]``."""
    tokens = key.shape[1]
    blocks = -(-tokens // MAX_BLOCK)
    size = -(-tokens // blocks)
    key, value = (
        pad(x, (0, 0, 0, 0, 0, blocks * size - tokens)).reshape(
            x.shape[0], blocks, size, *x.shape[2:]
        )
        for x in (key, value)
    )
    of_blocks: Tensor = torch.einsum("bnthc,bnthe->bnhce", key, value)
    return of_blocks.sum(1)


def long_product(weight: Tensor, value: Tensor) -> Tensor:
    """Return ``weight [..., R, T] @ value [..., T, C]``, summed in two levels."""
    pairs = zip(torch.split(weight, MAX_BLOCK, -1), torch.split(value, MAX_BLOCK, -2), strict=True)
    first, *others = (part @ rows for part, rows in pairs)
    total: Tensor = sum(others, first)
    return total


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return ``x [B, T, D]`` as ``[B, T, H, D/H]``."""
    return x.reshape(*x.shape[:2], num_heads, x.shape[2] // num_heads)


def repeat_heads(x: Tensor, count: int, dim: int = 2) -> Tensor:
    """Return ``x`` with each head of ``dim`` repeated, so that there are ``count`` heads."""
    heads = x.shape[dim]
    return x if heads == count else x.repeat_interleave(count // heads, dim)


def causal_product(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return ``sum_{u<=t} (query_t . key_u) value_u`` of ``[B, T, H, *]``, linear in T."""
    # The pairs of a block are multiplied out; earlier blocks enter through the running sum of
    # key^T value.
    block, tokens = 64, query.shape[1]
    padding = -tokens % block
    batch, heads = query.shape[0], query.shape[2]
    query, key, value = (
        pad(x, (0, 0, 0, 0, 0, padding))
        .reshape(batch, -1, block, heads, x.shape[3])
        .transpose(2, 3)
        for x in (query, key, value)
    )  # [B, N, H, block, *]
    within = (query @ key.transpose(-1, -2)).tril() @ value
    contexts = key.transpose(-1, -2) @ value
    before = pad(contexts.cumsum(1)[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
    return (within + query @ before).transpose(2, 3).flatten(1, 2)[:, :tokens]


def check_same_shape(op_type: str, **tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have the same shape ``[B, T, D]``."""
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    (first, expected), *others = shapes.items()
    if len(expected) != 3:
        raise ValueError(
            f"{op_type}: {first} must be [batch, tokens, channels], got shape {expected}"
        )
    for name, shape in others:
        if shape != expected:
            raise ValueError(
                f"{op_type}: {name} must have the shape {expected} of {first}, got {shape}"
            )


def check_lengths(op_type: str, query: Tensor, lengths: Tensor, name: str = "lengths") -> None:
    """Raise ValueError unless ``lengths`` is int64 ``[B]``."""
    if lengths.dim() != 1 or lengths.shape[0] != query.shape[0] or lengths.dtype != torch.int64:
        raise ValueError(
            f"{op_type}: {name} must be int64 [{query.shape[0]}], "
            f"got {lengths.dtype} of shape {tuple(lengths.shape)}"
        )


def check_eps(op_type: str, eps: float) -> None:
    """Raise ValueError unless ``eps`` is finite and at least 0."""
    if not 0 <= eps < math.inf:
        raise ValueError(f"{op_type}: eps must be finite and at least 0, got {eps}")


def check_positive_eps(op_type: str, eps: float) -> None:
    """Raise ValueError unless ``eps`` is finite and positive."""
    if not 0 < eps < math.inf:
        raise ValueError(f"{op_type}: eps must be finite and positive, got {eps}")


def check_key_columns(op_type: str, query: Tensor, key: Tensor, columns: int) -> None:
    """Raise ValueError unless ``key`` is ``[B, T, columns]``."""
    if key.dim() != 3 or key.shape[:2] != query.shape[:2] or key.shape[2] != columns:
        raise ValueError(
            f"{op_type}: key must be [batch, tokens, {columns}], got shape {tuple(key.shape)}"
        )


def check_heads(op_type: str, query: Tensor, num_heads: int) -> None:
    """Raise ValueError unless ``num_heads`` divides the channels."""
    if num_heads < 1 or query.shape[2] % num_heads:
        raise ValueError(
            f"{op_type}: num_heads must divide the {query.shape[2]} channels, got {num_heads}"
        )


def check_max_tokens(op_type: str, query: Tensor, name: str, max_tokens: int) -> None:
    """Raise ValueError if the sequence is longer than the learned bias."""
    if query.shape[1] > max_tokens:
        raise ValueError(
            f"{op_type}: {query.shape[1]} tokens, but {name} was learned for at most {max_tokens}"
        )
