"""Efficient Attention in PyTorch; see ``mechanisms.efficient_attention``."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aftexport.operators.numerics import (
    Sums,
    causal_product,
    context,
    denominators,
    divisor,
    guarded_mean,
    key_weights,
    largest,
    mask_keys,
    repeat_heads,
    softmax,
    split_heads,
    valid_keys,
)
from aftexport.operators.torch_ops.torch_op import GroupedHeadsCall, TwinCall, register_pair


@dataclass(frozen=True, kw_only=True, eq=False)
class _EfficientAttention(GroupedHeadsCall, TwinCall):
    normalization: str
    scale: float

    def reference(self) -> Tensor:
        """Compute the definition; the causal form row by row."""
        if self.normalization == "scaling":
            return self.compute()
        queries = split_heads(self.query, self.num_heads).softmax(3)
        pairs = (mask_keys(self.key, self.counted), self.value)
        keys, values = (repeat_heads(split_heads(x, self.kv_heads), self.num_heads) for x in pairs)
        count = self.key.shape[1]
        ends = range(1, count + 1) if self.causal else [count]
        rows = [_attend(queries, keys, values, end, self.causal) for end in ends]
        return self.scale * torch.cat(rows, 1).flatten(2)

    def compute(self) -> Tensor:
        """Compute ``reference`` in time linear in T, also for the causal form."""
        queries = split_heads(self.query, self.num_heads)
        values = split_heads(self.value, self.kv_heads)
        if self.normalization == "scaling":
            keys = split_heads(self.key, self.kv_heads)
            result = _scaled(queries, keys, values, self.counted, self.causal)
            return self.scale * result.flatten(2)
        keys = split_heads(mask_keys(self.key, self.counted), self.kv_heads)
        asking = queries.softmax(3)
        if self.causal:
            keys, values = (repeat_heads(x, self.num_heads) for x in (keys, values))
            result = guarded_mean(_causal_sums, _causal_rows, asking, keys, values)
        else:
            weight = (keys - largest(keys)).exp()
            means = context(weight, values) / divisor(weight.sum(1))[..., None]
            contexts = repeat_heads(means, self.num_heads, 1)
            result = torch.einsum("bthc,bhce->bthe", asking, contexts)
        return self.scale * result.flatten(2)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, end: int, causal: bool) -> Tensor:
    context = torch.einsum("bthc,bthe->bhce", softmax(keys[:, :end]), values[:, :end])
    asking = queries[:, end - 1 : end] if causal else queries
    return torch.einsum("bthc,bhce->bthe", asking, context)


def _scaled(queries: Tensor, keys: Tensor, values: Tensor, counted: Tensor, causal: bool) -> Tensor:
    """Return the products ``Q K^T V`` over the number of keys, by head."""
    num_heads = queries.shape[2]
    valid = valid_keys(counted, keys.shape[1])
    keys = torch.where(valid[..., None, None], keys, 0)
    if causal:
        count = valid.to(queries.dtype).cumsum(1).clamp(min=1)
        keys, values = (repeat_heads(x, num_heads) for x in (keys, values))
        return causal_product(queries, keys, values) / count[..., None, None]
    count = counted.clamp(1, keys.shape[1])[:, None, None, None]
    contexts = repeat_heads(context(keys, values) / count, num_heads, 1)
    product: Tensor = torch.einsum("bthc,bhce->bthe", queries, contexts)
    return product


def _causal_sums(queries: Tensor, keys: Tensor, values: Tensor) -> Sums:
    # Each key channel has its own denominator, so the queries are divided by channel.
    # The guard only tests the smallest denominator of each row.
    weight, top = key_weights(keys)
    total = denominators(weight.cumsum(1), top)
    least = total.amin(3, keepdim=True)
    return causal_product(queries * (least / total), weight, values), least


def _causal_rows(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    ends = range(1, keys.shape[1] + 1)
    return torch.cat([_attend(queries, keys, values, end, True) for end in ends], 1)


PAIR = register_pair("EfficientAttention", _EfficientAttention)
