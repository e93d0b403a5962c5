"""Linear attention with a normalizer in PyTorch; see ``mechanisms.linear_attention``."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aftexport.operators.mechanisms.linear_attention import MIN_EPS
from aftexport.operators.numerics import (
    causal_product,
    check_positive_eps,
    context,
    repeat_heads,
    split_heads,
    valid_keys,
)
from aftexport.operators.torch_ops.torch_op import GroupedHeadsCall, TwinCall, register_pair


@dataclass(frozen=True, kw_only=True, eq=False)
class _LinearAttention(GroupedHeadsCall, TwinCall):
    feature_map: str
    normalizer: str
    eps: float

    def check(self) -> None:
        super().check()
        if self.normalizer != "none":
            check_positive_eps(self.op_type, self.eps)

    def reference(self) -> Tensor:
        """Compute the definition, row by row, from the similarities phi(Q[t]) . phi(K[u])."""
        queries, *pairs = self._projected()
        keys, values = (repeat_heads(x, self.num_heads) for x in pairs)
        rows = []
        for t in range(self.query.shape[1]):
            end = t + 1 if self.causal else self.key.shape[1]
            similarity = torch.einsum("bhc,buhc->buh", queries[:, t], keys[:, :end])
            sums = torch.einsum("buh,buhe->bhe", similarity, values[:, :end])
            rows.append(self._normalized(sums))
        return torch.stack(rows, 1).flatten(2)

    def compute(self) -> Tensor:
        """Compute ``reference`` in time linear in T: keys and values are multiplied first."""
        queries, keys, values = self._projected()
        if self.causal:
            keys, values = (repeat_heads(x, self.num_heads) for x in (keys, values))
            sums = causal_product(queries, keys, values)
        else:
            contexts = repeat_heads(context(keys, values), self.num_heads, 1)
            sums = torch.einsum("bthc,bhce->bthe", queries, contexts)
        return self._normalized(sums).flatten(2)

    def _projected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the features by head; with a normalizer the values end in a channel of ones."""
        valid = valid_keys(self.counted, self.key.shape[1])[..., None, None]
        queries = features(split_heads(self.query, self.num_heads), self.feature_map)
        keys = features(split_heads(self.key, self.kv_heads), self.feature_map)
        keys = torch.where(valid, keys, 0)
        values = split_heads(self.value, self.kv_heads)
        if self.normalizer != "none":
            values = torch.cat((values, torch.ones_like(values[..., :1])), 3)
        return queries, keys, values

    def _normalized(self, sums: Tensor) -> Tensor:
        """Divide the sums of values by the last channel, the sum of ones."""
        if self.normalizer == "none":
            return sums
        eps, total = max(self.eps, MIN_EPS), sums[..., -1:]
        return sums[..., :-1] / (
            total.clamp(min=eps) if self.normalizer == "clamp" else total + eps
        )


def features(x: Tensor, feature_map: str) -> Tensor:
    """Return phi(x). Below 0 elu is exp(x), because elu(x) + 1 would lose small values."""
    if feature_map == "identity":
        return x
    if feature_map == "relu":
        return x.relu()
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


PAIR = register_pair("NormalizedLinearAttention", _LinearAttention)
