"""AFT-full in PyTorch; see ``mechanisms.aft_full``."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aftexport.operators.domain import MASKED
from aftexport.operators.numerics import (
    Sums,
    apply_gate,
    biased_mean,
    check_eps,
    check_lengths,
    check_max_tokens,
    check_same_shape,
    denominators,
    key_weights,
    largest,
    long_product,
    mask_keys,
)
from aftexport.operators.torch_ops.torch_op import BiasedCall, register_pair


@dataclass(frozen=True, kw_only=True, eq=False)
class _AftFull(BiasedCall):
    """A call; ``position_bias`` is ``[Tmax, Tmax]``, row for the query, column for the key."""

    position_bias: Tensor

    def check(self) -> None:
        check_same_shape(self.op_type, query=self.query, key=self.key, value=self.value)
        check_lengths(self.op_type, self.query, self.lengths)
        check_eps(self.op_type, self.eps)
        shape = tuple(self.position_bias.shape)
        if len(shape) != 2 or shape[0] != shape[1]:
            raise ValueError(f"{self.op_type}: position_bias must be square, got shape {shape}")
        check_max_tokens(self.op_type, self.query, "position_bias", shape[0])

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return mask_keys(self.key, self.lengths), self.value, self.position_bias

    def means(self, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        tokens = key.shape[1]
        rows = []
        for t in range(tokens):
            end = t + 1 if self.causal else tokens
            rows.append(biased_mean(key[:, :end], bias[t, :end, None], value[:, :end], self.eps))
        return torch.cat(rows, 1)

    def sums(self, key: Tensor, value: Tensor, bias: Tensor) -> Sums:
        """Return the sums as one matrix product."""
        tokens = key.shape[1]
        bias = bias[:tokens, :tokens]
        if self.causal:
            bias = torch.where(torch.ones_like(bias, dtype=torch.bool).tril(), bias, MASKED)
        bias_max = largest(bias)
        key_weight, top = key_weights(key)
        pair = torch.cat((key_weight * value, key_weight), 2)
        numerator, denominator = long_product((bias - bias_max).exp(), pair).chunk(2, 2)
        return numerator, denominators(denominator, top, self.eps, bias_max)


PAIR = register_pair("AftFull", _AftFull)


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
