"""AFT-simple: softmax over the tokens, per channel.

    Y[t] = gate(Q[t]) * sum_u softmax_T(K)[u] V[u]

Zhai et al., An Attention Free Transformer, arXiv 2105.14103, eq. 5.
"""

import torch
from torch import Tensor

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums
from aftexport.operators.mechanism import GATE, Mechanism
from aftexport.operators.mechanisms import _running_sums as running
from aftexport.operators.numerics import (
    Sums,
    apply_gate,
    check_lengths,
    check_same_shape,
    guarded_mean,
    key_weights,
    mask_keys,
    softmax_mean,
)


def _check(
    op_type: str,
    causal: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    gate: str,
) -> None:
    check_same_shape(op_type, query=query, key=key, value=value)
    check_lengths(op_type, query, lengths)


def reference(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, gate: str, causal: bool
) -> Tensor:
    """Compute the definition: a softmax over the valid keys, channel by channel.

    Args:
        query, key, value: ``[B, T, D]``.
        lengths: int64 ``[B]``.
    """
    key = mask_keys(key, lengths)
    if not causal:
        return apply_gate(gate, query, softmax_mean(key, value).expand_as(value))
    return apply_gate(gate, query, _prefix_means(key, value))


def _prefix_means(key: Tensor, value: Tensor) -> Tensor:
    ends = range(1, key.shape[1] + 1)
    return torch.cat([softmax_mean(key[:, :t], value[:, :t]) for t in ends], 1)


def compute(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, gate: str, causal: bool
) -> Tensor:
    """Compute ``reference``; the causal form uses running sums."""
    key = mask_keys(key, lengths)
    if causal:
        return apply_gate(gate, query, guarded_mean(prefix_sums, _prefix_means, key, value))
    return apply_gate(gate, query, softmax_mean(key, value).expand_as(value))


def prefix_sums(logits: Tensor, value: Tensor) -> Sums:
    """Return running sums of ``exp(logits) value`` and ``exp(logits)`` over dim 1, scaled alike."""
    weight, is_none = key_weights(logits)
    return (weight * value).cumsum(1), torch.where(is_none, 1, weight.cumsum(1))


def _body(*, gate: str, causal: bool) -> str:
    lines = text.inputs_as_float("query", "key", "value") + text.mask("key_f", "logits", rank=3)
    lines += _causal_body() if causal else _global_body()
    return lines + text.gate(gate, "query_f", "mean", "result") + text.output("result")


def _causal_body() -> str:
    lines = sums.scan_cut("value_f")
    return lines + running.running_mean("logits", "value_f", "mean", rank=3)


def _global_body() -> str:
    return (
        sums.sum_cut("value_f")
        + sums.split("logits", "logit_blocks", gap="masked")
        + sums.split("value_f", "value_blocks")
        + sums.softmax_weights("logit_blocks", "weight")
        + "weighted = Mul(weight, value_blocks)\n"
        + sums.total("weighted", "numerator")
        + """
        one_mean = Div(numerator, weight_total)
        value_shape = Shape(value_f)
        mean = Expand(one_mean, value_shape)
        """
    )


AFT_SIMPLE, CAUSAL_AFT_SIMPLE = Mechanism(
    op_type="AftSimple",
    stem="aft_simple",
    inputs=("query", "key", "value", "lengths"),
    shapes=("B T D", "B T D", "B T D", "B"),
    exponents=("key",),
    attributes=(GATE,),
    check=_check,
    compute=compute,
    reference=reference,
    body=_body,
    doc="AFT-simple (arXiv 2105.14103, eq. 5): query, key, value [B, T, D].",
).register()
