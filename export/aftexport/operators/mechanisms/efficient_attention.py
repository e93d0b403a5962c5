"""Efficient Attention: the keys and values are multiplied first.

    Y = scale * rho_q(Q) (rho_k(K)^T V)      per head

Shen et al., Efficient Attention: Attention with Linear Complexities, arXiv
1812.01243. ``softmax``: rho_q over the channels of each query, rho_k over the
tokens of each key channel; other axes would give another function. ``scaling``:
both divide by sqrt(n), n the number of keys, which equals dot-product attention
with scaling. The authors do not use 1/sqrt(d); ``scale`` allows it. Causal (a
prefix form, not in the paper): rho_k over the tokens up to the query's.
"""

import torch
from torch import Tensor

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums
from aftexport.operators.mechanism import NUM_HEADS, Mechanism
from aftexport.operators.mechanisms._causal_product import causal_product_body
from aftexport.operators.mechanisms._causal_softmax import causal_softmax_body
from aftexport.operators.numerics import (
    Sums,
    causal_product,
    check_heads,
    check_lengths,
    check_same_shape,
    context,
    divisor,
    guarded_mean,
    key_weights,
    largest,
    mask_keys,
    softmax,
    split_heads,
    valid_keys,
)
from aftexport.operators.schema import Attribute

NORMALIZATION = Attribute(
    "normalization",
    "softmax",
    "softmax: each query over its channels, and each key channel over the tokens; "
    "scaling: query and key are divided by the square root of the number of keys.",
    ("softmax", "scaling"),
)
SCALE = Attribute("scale", 1.0, "Factor of the result.")


def _check(
    op_type: str,
    causal: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    num_heads: int,
    normalization: str,
    scale: float,
) -> None:
    check_same_shape(op_type, query=query, key=key, value=value)
    check_lengths(op_type, query, lengths)
    check_heads(op_type, query, num_heads)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    num_heads: int,
    normalization: str,
    scale: float,
    causal: bool,
) -> Tensor:
    """Compute the definition; the causal form row by row.

    Args:
        query, key, value: ``[B, T, D]``.
        lengths: int64 ``[B]``.
    """
    if normalization == "scaling":
        return compute(
            query, key, value, lengths, num_heads=num_heads, normalization=normalization,
            scale=scale, causal=causal,
        )  # fmt: skip
    queries = split_heads(query, num_heads).softmax(3)
    keys = split_heads(mask_keys(key, lengths), num_heads)
    values = split_heads(value, num_heads)
    ends = range(1, key.shape[1] + 1) if causal else [key.shape[1]]
    rows = [_attend(queries, keys, values, end, causal) for end in ends]
    return scale * torch.cat(rows, 1).flatten(2)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, end: int, causal: bool) -> Tensor:
    context = torch.einsum("bthc,bthe->bhce", softmax(keys[:, :end]), values[:, :end])
    asking = queries[:, end - 1 : end] if causal else queries
    return torch.einsum("bthc,bhce->bthe", asking, context)


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    num_heads: int,
    normalization: str,
    scale: float,
    causal: bool,
) -> Tensor:
    """Compute ``reference`` in time linear in T, also for the causal form."""
    queries, keys, values = (split_heads(x, num_heads) for x in (query, key, value))
    if normalization == "scaling":
        valid = valid_keys(lengths, query.shape[1])
        keys = torch.where(valid[..., None, None], keys, 0)
        if causal:
            count = valid.to(query.dtype).cumsum(1).clamp(min=1)
            result = causal_product(queries, keys, values) / count[..., None, None]
        else:
            count = lengths.clamp(1, query.shape[1])[:, None, None, None]
            result = torch.einsum("bthc,bhce->bthe", queries, context(keys, values) / count)
        return scale * result.flatten(2)
    keys = split_heads(mask_keys(key, lengths), num_heads)
    asking = queries.softmax(3)
    if causal:
        result = guarded_mean(_causal_sums, _causal_rows, asking, keys, values)
    else:
        weight = (keys - largest(keys)).exp()
        means = context(weight, values) / divisor(weight.sum(1))[..., None]
        result = torch.einsum("bthc,bhce->bthe", asking, means)
    return scale * result.flatten(2)


def _causal_sums(queries: Tensor, keys: Tensor, values: Tensor) -> Sums:
    # Each key channel has its own denominator, so the queries are divided by channel.
    # The guard only tests the smallest denominator of each row.
    weight, is_none = key_weights(keys)
    total = torch.where(is_none, 1, weight.cumsum(1))
    least = total.amin(3, keepdim=True)
    return causal_product(queries * (least / total), weight, values), least


def _causal_rows(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    ends = range(1, keys.shape[1] + 1)
    return torch.cat([_attend(queries, keys, values, end, True) for end in ends], 1)


def _body(*, normalization: str, causal: bool) -> str:
    lines = text.inputs_as_float("query", "key", "value") + text.head_shape()
    lines += text.heads("query_f", "queries") + text.heads("value_f", "values")
    lines += "scale = Constant <value_float: float = @scale> ()\n"
    if normalization == "softmax":
        lines += text.mask("key_f", "logits_3d", rank=3) + text.heads("logits_3d", "logits")
        lines += "asking = Softmax <axis = 3> (queries)\n"
        lines += causal_softmax_body() if causal else _softmax_body()
    else:
        lines += text.valid_keys()
        lines += """
            float_valid = Cast <to = 1> (valid)
            three_axes = Constant <value_ints = [2, 3]> ()
            valid_4d = Unsqueeze(float_valid, three_axes)
            counts = Unsqueeze(valid, three_axes)
        """
        lines += text.heads("key_f", "all_keys")
        lines += "keys = Where(counts, all_keys, zero_f)\nasking = Identity(queries)\n"
        lines += _scaling_causal_body() if causal else _scaling_body()
    lines += """
        packed = Reshape(attended, packed_shape)
        result = Mul(packed, scale)
    """
    return lines + text.output("result")


_ATTEND_BODY = """
    asking_heads = Transpose <perm = [0, 2, 1, 3]> (asking)
    attended_heads = MatMul(asking_heads, context_used)
    attended = Transpose <perm = [0, 2, 1, 3]> (attended_heads)
"""


def _softmax_body() -> str:
    return (
        sums.sum_cut("query")
        + sums.split("logits", "key_blocks", gap="masked")
        + sums.split("values", "value_blocks")
        + sums.softmax_weights("key_blocks", "key_weight")
        + sums.context("key_weight", "value_blocks", "context")
        + """
        total_columns = Transpose <perm = [0, 2, 3, 1]> (key_weight_total)
        context_used = Div(context, total_columns)
    """
        + _ATTEND_BODY
    )


def _scaling_body() -> str:
    return (
        sums.sum_cut("query")
        + sums.split("keys", "key_blocks")
        + sums.split("values", "value_blocks")
        + sums.context("key_blocks", "value_blocks", "context")
        + """
        count = ReduceSum <keepdims = 1> (valid_4d, axis1)
        at_least_one = Max(count, one_f)
        context_used = Div(context, at_least_one)
    """
        + _ATTEND_BODY
    )


def _scaling_causal_body() -> str:
    return (
        causal_product_body("asking", "keys", "values", "products")
        + """
        count = CumSum(valid_4d, one)
        at_least_one = Max(count, one_f)
        attended = Div(products, at_least_one)
    """
    )


EFFICIENT_ATTENTION, CAUSAL_EFFICIENT_ATTENTION = Mechanism(
    op_type="EfficientAttention",
    stem="efficient_attention",
    inputs=("query", "key", "value", "lengths"),
    shapes=("B T D", "B T D", "B T D", "B"),
    exponents=("key",),
    attributes=(NUM_HEADS, NORMALIZATION, SCALE),
    check=_check,
    compute=compute,
    reference=reference,
    body=_body,
    doc="Efficient Attention (arXiv 1812.01243): query, key, value [B, T, D], heads packed in D.",
).register()
