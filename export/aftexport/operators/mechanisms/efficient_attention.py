"""Efficient Attention: the keys and values are multiplied first.

    Y = scale * rho_q(Q) (rho_k(K)^T V)      per head

Shen et al., Efficient Attention: Attention with Linear Complexities, arXiv
1812.01243. ``softmax``: rho_q over the channels of each query, rho_k over the
tokens of each key channel; other axes would give another function. ``scaling``:
both divide by sqrt(n), n the number of keys, which equals dot-product attention
with scaling. The authors do not use 1/sqrt(d); ``scale`` allows it. Causal (a
prefix form, not in the paper): rho_k over the tokens up to the query's.
"""

from collections.abc import Collection

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums
from aftexport.operators.attributes import KV_NUM_HEADS, NUM_HEADS
from aftexport.operators.mechanisms import _grouped_heads as grouped
from aftexport.operators.mechanisms._causal_product import causal_product_body
from aftexport.operators.mechanisms._causal_softmax import causal_softmax_body
from aftexport.operators.mechanisms.mechanism import Mechanism
from aftexport.operators.schema import Attribute

NORMALIZATION = Attribute(
    "normalization",
    "softmax",
    "softmax: each query over its channels, and each key channel over the tokens; "
    "scaling: query and key are divided by the square root of the number of keys.",
    ("softmax", "scaling"),
)
SCALE = Attribute("scale", 1.0, "Factor of the result.")


def _body(*, normalization: str, causal: bool, present: Collection[str] = ()) -> str:
    lengths = "key_lengths" if "key_lengths" in present else "lengths"
    lines = text.inputs_as_float("query", "key", "value", sequence="key") + grouped.head_shapes()
    lines += text.heads("query_f", "queries") + grouped.kv_heads("value_f", "kv_values")
    lines += "scale = Constant <value_float: float = @scale> ()\n"
    if normalization == "softmax":
        lines += text.mask("key_f", "logits_3d", rank=3, lengths=lengths)
        lines += grouped.kv_heads("logits_3d", "kv_logits")
        lines += "asking = Softmax <axis = 3> (queries)\n"
        lines += _softmax_causal_body() if causal else _softmax_body()
    else:
        lines += text.valid_keys(lengths)
        lines += """
            float_valid = Cast <to = 1> (valid)
            three_axes = Constant <value_ints = [2, 3]> ()
            valid_4d = Unsqueeze(float_valid, three_axes)
            counts = Unsqueeze(valid, three_axes)
        """
        lines += grouped.kv_heads("key_f", "all_keys")
        lines += "kv_keys = Where(counts, all_keys, zero_f)\nasking = Identity(queries)\n"
        lines += _scaling_causal_body() if causal else _scaling_body()
    lines += """
        packed = Reshape(attended, packed_shape)
        result = Mul(packed, scale)
    """
    return lines + text.output("result")


def _softmax_body() -> str:
    return (
        sums.sum_cut("key")
        + sums.split("kv_logits", "key_blocks", gap="masked")
        + sums.split("kv_values", "value_blocks")
        + sums.softmax_weights("key_blocks", "key_weight")
        + sums.context("key_weight", "value_blocks", "context")
        + """
        total_columns = Transpose <perm = [0, 2, 3, 1]> (key_weight_total)
        context_used = Div(context, total_columns)
        asking_packed = Reshape(asking, packed_shape)
    """
        + grouped.attend("asking_packed", "context_used", "attended")
    )


def _softmax_causal_body() -> str:
    return (
        grouped.repeat_heads("kv_logits", "logits")
        + grouped.repeat_heads("kv_values", "values")
        + causal_softmax_body()
    )


def _scaling_body() -> str:
    return (
        sums.sum_cut("key")
        + sums.split("kv_keys", "key_blocks")
        + sums.split("kv_values", "value_blocks")
        + sums.context("key_blocks", "value_blocks", "context")
        + """
        count = ReduceSum <keepdims = 1> (valid_4d, axis1)
        at_least_one = Max(count, one_f)
        context_used = Div(context, at_least_one)
    """
        + grouped.attend("query_f", "context_used", "attended")
    )


def _scaling_causal_body() -> str:
    return (
        grouped.repeat_heads("kv_keys", "keys")
        + grouped.repeat_heads("kv_values", "values")
        + causal_product_body("asking", "keys", "values", "products")
        + """
        count = CumSum(valid_4d, one)
        at_least_one = Max(count, one_f)
        attended = Div(products, at_least_one)
    """
    )


EFFICIENT_ATTENTION, CAUSAL_EFFICIENT_ATTENTION = Mechanism(
    op_type="EfficientAttention",
    stem="efficient_attention",
    inputs=("query", "key", "value", "lengths", "key_lengths"),
    optional=("key_lengths",),
    shapes=("B T Q", "B S K", "B S V", "B", "B"),
    exponents=("key",),
    attributes=(NUM_HEADS, NORMALIZATION, SCALE, KV_NUM_HEADS),
    body=_body,
    sizes=grouped.sizes,
    doc=(
        "Efficient Attention (arXiv 1812.01243): query [B, T, num_heads * d], "
        "key [B, S, kv_num_heads * d], value [B, S, kv_num_heads * e], heads packed in the "
        "channels. S may differ from T if key_lengths [B] gives the numbers of keys; without it "
        "they are lengths."
    ),
).register()
