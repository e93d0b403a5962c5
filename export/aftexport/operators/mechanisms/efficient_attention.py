"""Efficient Attention: the keys and values are multiplied first.

    Y = scale * rho_q(Q) (rho_k(K)^T V)      per head

Shen et al., Efficient Attention: Attention with Linear Complexities, arXiv
1812.01243. ``softmax``: rho_q over the channels of each query, rho_k over the
tokens of each key channel; other axes would give another function. ``scaling``:
both divide by sqrt(n), n the number of keys, which equals dot-product attention
with scaling. The authors do not use 1/sqrt(d); ``scale`` allows it. Causal (a
prefix form, not in the paper): rho_k over the tokens up to the query's.

In the causal softmax form, the context up to a token is a sum of outer products of key weights and
values. It is relative to the largest logit so far of each key channel, so it is exact for any
range. Each block of tokens starts from 0; then the contexts of the earlier blocks are added.
"""

from collections.abc import Collection

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums
from aftexport.operators.mechanisms import _grouped_heads as grouped
from aftexport.operators.mechanisms._grouped_heads import causal_product_body
from aftexport.operators.schema import KV_NUM_HEADS, NUM_HEADS, Attribute, Mechanism

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
        sums.cut_of("key")
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
        + _causal_softmax_body()
    )


def _scaling_body() -> str:
    return (
        sums.cut_of("key")
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


PAIR = Mechanism(
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


def _causal_softmax_body() -> str:
    """Define ``attended``, ``[B, T, H, e]``: each query with the mean context up to its token."""
    # Reads asking, logits and values, [B, T, H, *], and the common names.
    lines = sums.cut_of("query", cut="scan") + sums.running_sums("logits", "run", rank=4)
    lines += sums.split("asking", "asking_blocks", cut="scan")
    lines += sums.split("values", "value_blocks", cut="scan")
    lines += text.divisor("run_d", "run_divisor")
    lines += _weights_body() + _own_block_body() + _earlier_blocks_body()
    lines += "attended_blocks = Add(of_own_block, of_earlier)\n"
    return lines + sums.tokens_of("attended_blocks", "attended")


def _weights_body() -> str:
    """Define the divided queries, and the decay and the weight of each token in its block."""
    return """
        asked_blocks = Div(asking_blocks, run_divisor)
        all_but_last = Sub(scan_size, one_1d)
        earlier_m = Slice(run_m, zero_1d, all_but_last, axis2)
        start_shape = Concat <axis = 0> (scan_states_shape, one_1d, run_logit_width)
        no_logit = Expand(lowest, start_shape)
        shifted_m = Concat <axis = 2> (no_logit, earlier_m)
        drop_blocks = Sub(shifted_m, run_m)
        decay_blocks = Exp(drop_blocks)
        rise_blocks = Sub(run_logit, run_m)
        weight_blocks = Exp(rise_blocks)
        value_width = Shape <start = 3> (values)
        contexts_shape = Concat <axis = 0> (scan_states_shape, run_logit_width, value_width)
        no_contexts = Expand(zero_f, contexts_shape)
    """


def _own_block_body() -> str:
    """Define ``of_own_block``, ``[B, blocks, size, H, e]``: the part of the token's own block."""
    step = (
        text.constants(row_axis=[-2], column_axis=[-1])
        + """
        decay_column = Unsqueeze(decay, column_axis)
        n_kept = Mul(n, decay_column)
        weight_column = Unsqueeze(weight, column_axis)
        value_row = Unsqueeze(v, row_axis)
        n_new = Mul(weight_column, value_row)
        n_next = Add(n_kept, n_new)
        asked_row = Unsqueeze(q, row_axis)
        answer_row = MatMul(asked_row, n_next)
        answer = Squeeze(answer_row, row_axis)
    """
    )
    scanned = {"q": "asked", "decay": "decay", "weight": "weight", "v": "value"}
    return text.scan(
        step,
        states={"n": "no_contexts"},
        scanned={name: f"{tensor}_blocks" for name, tensor in scanned.items()},
        outputs={"answer": "of_own_block"},
        ranks={"n": 5} | dict.fromkeys((*scanned, "answer"), 4),
        axis=2,
    )


def _earlier_blocks_body() -> str:
    """Define ``of_earlier``, ``[B, blocks, size, H, e]``: the part of the earlier blocks."""
    lines = """
        final_m = Slice(run_m, all_but_last, scan_size, axis2)
        block_rise = Sub(run_logit, final_m)
        block_weight = Exp(block_rise)
        columns = Transpose <perm = [0, 1, 3, 4, 2]> (block_weight)
        rows = Transpose <perm = [0, 1, 3, 2, 4]> (value_blocks)
        block_contexts = MatMul(columns, rows)
        block_m = Squeeze(final_m, axis2)
        blocks_less_one = Sub(scan_blocks, one_1d)
        earlier_block_m = Slice(block_m, zero_1d, blocks_less_one, axis1)
        no_block_shape = Concat <axis = 0> (scan_batch, one_1d, run_logit_width)
        no_block_logit = Expand(lowest, no_block_shape)
        before_m = Concat <axis = 1> (no_block_logit, earlier_block_m)
        block_drop = Sub(before_m, block_m)
        block_decay = Exp(block_drop)
        context_shape = Concat <axis = 0> (scan_batch, run_logit_width, value_width)
        no_context = Expand(zero_f, context_shape)
    """
    step = (
        text.constants(column_axis=[-1])
        + """
        before = Identity(n)
        decay_column = Unsqueeze(decay, column_axis)
        n_kept = Mul(n, decay_column)
        n_next = Add(n_kept, of_block)
    """
    )
    lines += text.scan(
        step,
        states={"n": "no_context"},
        scanned={"decay": "block_decay", "of_block": "block_contexts"},
        outputs={"before": "contexts_before"},
        ranks={"n": 4, "decay": 3, "of_block": 4, "before": 4},
    )
    return (
        lines
        + """
        before_m_column = Unsqueeze(before_m, axis2)
        asked_drop = Sub(before_m_column, run_m)
        asked_decay = Exp(asked_drop)
        asked_before = Mul(asked_blocks, asked_decay)
        asked_heads = Transpose <perm = [0, 1, 3, 2, 4]> (asked_before)
        earlier_heads = MatMul(asked_heads, contexts_before)
        of_earlier = Transpose <perm = [0, 1, 3, 2, 4]> (earlier_heads)
    """
    )
