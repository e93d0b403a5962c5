"""Fastformer's additive attention in PyTorch; see ``mechanisms.fastformer``."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from aftexport.operators.numerics import (
    check_heads,
    check_lengths,
    check_same_shape,
    mask_keys,
    softmax_mean,
    split_heads,
)
from aftexport.operators.torch_ops.aft_simple import prefix_means, running_means
from aftexport.operators.torch_ops.torch_op import TwinCall, register_pair


@dataclass(frozen=True, kw_only=True, eq=False)
class _Fastformer(TwinCall):
    """A call; ``alpha_weight`` and ``beta_weight`` are ``[D, H]``."""

    alpha_weight: Tensor
    beta_weight: Tensor
    num_heads: int

    def check(self) -> None:
        check_same_shape(self.op_type, query=self.query, key=self.key, value=self.value)
        check_lengths(self.op_type, self.query, self.lengths)
        check_heads(self.op_type, self.query, self.num_heads)
        columns = self.query.shape[2]
        for name in ("alpha_weight", "beta_weight"):
            shape = tuple(getattr(self, name).shape)
            if len(shape) != 2 or shape[0] != columns or shape[1] != self.num_heads:
                raise ValueError(
                    f"{self.op_type}: {name} must be [{columns}, {self.num_heads}], "
                    f"got shape {shape}"
                )

    def reference(self) -> Tensor:
        """Compute the definition; the causal form pools each prefix separately."""
        return self._attend(prefix_means if self.causal else softmax_mean)

    def compute(self) -> Tensor:
        """Compute ``reference``; the causal form uses running sums."""
        return self._attend(running_means if self.causal else softmax_mean)

    def _attend(self, pool: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        scale = 1 / math.sqrt(self.query.shape[2] // self.num_heads)
        tensors = (self.query, self.key, self.value)
        queries, keys, values = (split_heads(x, self.num_heads) for x in tensors)
        alpha_logits = mask_keys(self.query @ self.alpha_weight * scale, self.lengths)
        keyed = keys * pool(alpha_logits[..., None], queries)
        beta_logits = mask_keys(keyed.flatten(2) @ self.beta_weight * scale, self.lengths)
        return (values * pool(beta_logits[..., None], keyed)).flatten(2)


PAIR = register_pair("Fastformer", _Fastformer)
