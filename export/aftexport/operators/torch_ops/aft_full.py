"""AFT-full in PyTorch; see ``mechanisms.aft_full``."""

from dataclasses import dataclass
from functools import partial

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
    guarded_mean,
    key_weights,
    largest,
    long_product,
    mask_keys,
)
from aftexport.operators.torch_ops.torch_op import TwinCall, register_pair


@dataclass(frozen=True, kw_only=True, eq=False)
class _AftFull(TwinCall):
    """A call; ``position_bias`` is ``[Tmax, Tmax]``, row for the query, column for the key."""

    position_bias: Tensor
    gate: str
    eps: float

    def check(self) -> None:
        check_same_shape(self.op_type, query=self.query, key=self.key, value=self.value)
        check_lengths(self.op_type, self.query, self.lengths)
        check_eps(self.op_type, self.eps)
        shape = tuple(self.position_bias.shape)
        if len(shape) != 2 or shape[0] != shape[1]:
            raise ValueError(f"{self.op_type}: position_bias must be square, got shape {shape}")
        check_max_tokens(self.op_type, self.query, "position_bias", shape[0])

    def reference(self) -> Tensor:
        """Compute the definition, row by row."""
        key = mask_keys(self.key, self.lengths)
        mean = _means(key, self.value, self.position_bias, self.causal, self.eps)
        return apply_gate(self.gate, self.query, mean)

    def compute(self) -> Tensor:
        """Compute ``reference`` as one matrix product; keys and biases have maxima of their own."""
        mean = guarded_mean(
            partial(_sums, causal=self.causal, eps=self.eps),
            partial(_means, causal=self.causal, eps=self.eps),
            mask_keys(self.key, self.lengths),
            self.value,
            self.position_bias,
        )
        return apply_gate(self.gate, self.query, mean)


def _means(key: Tensor, value: Tensor, position_bias: Tensor, causal: bool, eps: float) -> Tensor:
    tokens = key.shape[1]
    rows = []
    for t in range(tokens):
        end = t + 1 if causal else tokens
        bias = position_bias[t, :end, None]
        rows.append(biased_mean(key[:, :end], bias, value[:, :end], eps))
    return torch.cat(rows, 1)


def _sums(key: Tensor, value: Tensor, position_bias: Tensor, causal: bool, eps: float) -> Sums:
    tokens = key.shape[1]
    bias = position_bias[:tokens, :tokens]
    if causal:
        bias = torch.where(torch.ones_like(bias, dtype=torch.bool).tril(), bias, MASKED)
    bias_max = largest(bias)
    bias_weight = (bias - bias_max).exp()
    key_weight, top = key_weights(key)
    sums = long_product(bias_weight, torch.cat((key_weight * value, key_weight), 2))
    numerator, denominator = sums.chunk(2, 2)
    return numerator, denominators(denominator, top, eps, bias_max)


AFT_FULL, CAUSAL_AFT_FULL = register_pair("AftFull", _AftFull)
