"""Efficient Attention: the keys and values meet first.

    Y = scale * rho_q(Q) (rho_k(K)^T V)      per head

Shen et al., Efficient Attention: Attention with Linear Complexities, arXiv
1812.01243. ``softmax``: rho_q over the channels of each query, rho_k over the
tokens of each key channel; the other axes are another function. ``scaling``:
both divide by sqrt(n), n the number of keys, which is dot-product attention with
scaling exactly. The authors use no 1/sqrt(d); ``scale`` is there for those who do.
Causal (a prefix form, not in the paper): rho_k over the tokens up to the query's.
"""

import torch
from torch import Tensor

from aftexport.mechanisms import _text as text
from aftexport.mechanisms._numerics import (
    Sums,
    causal_product,
    check_heads,
    check_lengths,
    check_same_shape,
    guarded_mean,
    mask_keys,
    split_heads,
    valid_keys,
)
from aftexport.mechanisms._operator import NUM_HEADS, define
from aftexport.operators import Attribute

NORMALIZATION = Attribute(
    "normalization",
    "softmax",
    "softmax: of each query over its channels and of each key channel over the tokens; "
    "scaling: both divided by the square root of the number of keys.",
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
    """The definition; causal, row by row.

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
    context = torch.einsum("bthc,bthe->bhce", keys[:, :end].softmax(1), values[:, :end])
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
    """``reference`` in time linear in T, causal too."""
    queries, keys, values = (split_heads(x, num_heads) for x in (query, key, value))
    if normalization == "scaling":
        valid = valid_keys(lengths, query.shape[1])
        keys = torch.where(valid[..., None, None], keys, 0)
        if causal:
            count = valid.to(query.dtype).cumsum(1).clamp(min=1)
            result = causal_product(queries, keys, values) / count[..., None, None]
        else:
            count = lengths.clamp(1, query.shape[1])[:, None, None, None]
            context = torch.einsum("bthc,bthe->bhce", keys, values) / count
            result = torch.einsum("bthc,bhce->bthe", queries, context)
        return scale * result.flatten(2)
    if not causal:
        return reference(
            query, key, value, lengths, num_heads=num_heads, normalization=normalization,
            scale=scale, causal=False,
        )  # fmt: skip
    keys = split_heads(mask_keys(key, lengths), num_heads)
    result = guarded_mean(_causal_sums, _causal_rows, queries.softmax(3), keys, values)
    return scale * result.flatten(2)


def _causal_sums(queries: Tensor, keys: Tensor, values: Tensor) -> Sums:
    # Each key channel has a denominator of its own, so the division is by channel, on
    # the queries; the least of a row's denominators stands for all in the guard.
    weight = (keys - keys.amax(1, keepdim=True)).exp()
    total = weight.cumsum(1)
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
        lines += _softmax_causal_body() if causal else _softmax_body()
    else:
        lines += text.valid_keys()
        lines += """
            float_valid = Cast <to = 1> (valid)
            three_axes = Constant <value_ints = [2, 3]> ()
            valid_4d = Unsqueeze(float_valid, three_axes)
        """
        lines += text.heads("key_f", "all_keys")
        lines += "keys = Mul(all_keys, valid_4d)\nasking = Identity(queries)\n"
        lines += _scaling_causal_body() if causal else _scaling_body()
    lines += """
        packed = Reshape(attended, packed_shape)
        result = Mul(packed, scale)
    """
    return lines + text.output("result")


def _context_body(keys: str) -> str:
    return f"""
        keys_last = Transpose <perm = [0, 2, 3, 1]> ({keys})
        values_heads = Transpose <perm = [0, 2, 1, 3]> (values)
        context = MatMul(keys_last, values_heads)
    """


_ATTEND_BODY = """
    asking_heads = Transpose <perm = [0, 2, 1, 3]> (asking)
    attended_heads = MatMul(asking_heads, context_used)
    attended = Transpose <perm = [0, 2, 1, 3]> (attended_heads)
"""


def _softmax_body() -> str:
    lines = "key_weight = Softmax <axis = 1> (logits)\n" + _context_body("key_weight")
    return lines + "context_used = Identity(context)\n" + _ATTEND_BODY


def _scaling_body() -> str:
    return (
        _context_body("keys")
        + """
        count = ReduceSum <keepdims = 1> (valid_4d, axis1)
        one_f = Constant <value_float = 1.0> ()
        at_least_one = Max(count, one_f)
        context_used = Div(context, at_least_one)
    """
        + _ATTEND_BODY
    )


def _scaling_causal_body() -> str:
    return (
        text.causal_product("asking", "keys", "values", "products")
        + """
        count = CumSum(valid_4d, one)
        one_f = Constant <value_float = 1.0> ()
        at_least_one = Max(count, one_f)
        attended = Div(products, at_least_one)
    """
    )


def _softmax_causal_body() -> str:
    """The context, a running sum of outer products, with a running maximum per key channel."""
    lines = """
        first_logit = Gather <axis = 1> (logits, zero)
        d_start = Mul(first_logit, zero_f)
        m_start = Add(d_start, masked)
        first_value = Gather <axis = 1> (values, zero)
        last_axis = Constant <value_ints = [-1]> ()
        row_axis = Constant <value_ints = [-2]> ()
        column_zero = Unsqueeze(d_start, last_axis)
        first_row = Unsqueeze(first_value, row_axis)
        n_start = Mul(column_zero, first_row)
    """
    step = """
        m_next = Max(m, logit)
        drop = Sub(m, m_next)
        decay = Exp(drop)
        rise = Sub(logit, m_next)
        weight = Exp(rise)
        d_kept = Mul(d, decay)
        d_next = Add(d_kept, weight)
        decay_column = Unsqueeze(decay, last_axis)
        n_kept = Mul(n, decay_column)
        weight_column = Unsqueeze(weight, last_axis)
        value_row = Unsqueeze(v, row_axis)
        n_new = Mul(weight_column, value_row)
        n_next = Add(n_kept, n_new)
        asked = Div(q, d_next)
        asked_row = Unsqueeze(asked, row_axis)
        answer_row = MatMul(asked_row, n_next)
        answer = Squeeze(answer_row, row_axis)
    """
    return lines + text.scan(
        step,
        states={"m": "m_start", "n": "n_start", "d": "d_start"},
        scanned={"logit": "logits", "q": "asking", "v": "values"},
        outputs={"answer": "attended"},
        ranks={"m": 3, "n": 4, "d": 3, "logit": 3, "q": 3, "v": 3, "answer": 3},
    )


EFFICIENT_ATTENTION, CAUSAL_EFFICIENT_ATTENTION = define(
    "EfficientAttention",
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
)
