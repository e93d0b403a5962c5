"""AFT-simple in PyTorch; see ``mechanisms.aft_simple``."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from aftexport.operators.numerics import (
    Sums,
    apply_gate,
    check_eps,
    check_heads,
    check_key_columns,
    check_lengths,
    check_same_shape,
    denominators,
    guarded_mean,
    key_weights,
    mask_keys,
    softmax_mean,
    split_heads,
)
from aftexport.operators.torch_ops.torch_op import TwinCall, register_pair


@dataclass(frozen=True, kw_only=True, eq=False)
class _AftSimple(TwinCall):
    """A call; ``key`` is ``[B, T, D]``, or ``[B, T, num_heads]``."""

    gate: str
    num_heads: int
    eps: float

    def check(self) -> None:
        check_same_shape(self.op_type, query=self.query, value=self.value)
        check_lengths(self.op_type, self.query, self.lengths)
        check_eps(self.op_type, self.eps)
        columns = self.query.shape[2]
        if self.num_heads:
            check_heads(self.op_type, self.query, self.num_heads)
            columns = self.num_heads
        check_key_columns(self.op_type, self.query, self.key, columns)

    def reference(self) -> Tensor:
        """Compute the definition; the causal form computes each prefix separately."""
        return self._run(prefix_means if self.causal else softmax_mean)

    def compute(self) -> Tensor:
        """Compute ``reference``; the causal form uses running sums."""
        return self._run(running_means if self.causal else softmax_mean)

    def _run(self, mean: Callable[[Tensor, Tensor, float], Tensor]) -> Tensor:
        """Multiply the gate by ``mean`` of keys ``[B, T, H, 1]`` and values ``[B, T, H, D/H]``."""
        values = split_heads(self.value, self.key.shape[2])
        means = mean(mask_keys(self.key, self.lengths)[..., None], values, self.eps)
        return apply_gate(self.gate, self.query, means.expand_as(values).flatten(2))


def prefix_means(logits: Tensor, value: Tensor, eps: float = 0.0) -> Tensor:
    """Return ``softmax_mean`` of every prefix of dim 1, each computed separately."""
    ends = range(1, logits.shape[1] + 1)
    return torch.cat([softmax_mean(logits[:, :end], value[:, :end], eps) for end in ends], 1)


def running_means(logits: Tensor, value: Tensor, eps: float = 0.0) -> Tensor:
    """Return ``prefix_means``, computed with running sums."""
    return guarded_mean(
        partial(_prefix_sums, eps=eps), partial(prefix_means, eps=eps), logits, value
    )


def _prefix_sums(logits: Tensor, value: Tensor, eps: float) -> Sums:
    """Return running sums of ``exp(logits) value``, and of ``exp(logits)`` plus eps, over dim 1."""
    weight, top = key_weights(logits)
    return (weight * value).cumsum(1), denominators(weight.cumsum(1), top, eps)


PAIR = register_pair("AftSimple", _AftSimple)
