"""The attention half of a pre-norm Fastformer layer, collapsed.

    N = LayerNorm(X)
    alpha = softmax_T(N A);               g_q[h] = (sum_t alpha[t,h] N[t]) Wq[h] + bq[h]
    beta = softmax_T(N Wk diag(g_q) B);   g_k[h] = g_q[h] * ((sum_t beta[t,h] N[t]) Wk[h] + bk[h])
    Y = X + N Wq (I + diag(g_k) W) + (bq * g_k) W + bq + b

Wu et al., Fastformer: Additive Attention Can Be All You Need, arXiv 2108.09084, as in the
authors' code, with ``A = Wq Wa / sqrt(d)`` and ``B = Wb / sqrt(d)`` for the logits' weights
Wa and Wb. Pooling commutes with the linear layers, and a term that is the same for every
token cancels in a softmax. So query, key and their products are not computed for every
token: this takes 2 T D^2 + 8 T D H + 2 D^3 FLOPs, but the layer as written takes 6 T D^2.
"""

import onnx

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums
from aftexport.operators.encoder.arithmetic import EPSILON, PRECISION
from aftexport.operators.schema import NUM_HEADS, OnnxOperator, as_float


def _pool(logits: str, weight: str, bias: str, result: str) -> str:
    lines = f"{logits}_masked = Where(valid_keys, {logits}, masked)\n"
    lines += sums.split(f"{logits}_masked", f"{logits}_blocks", gap="masked")
    lines += sums.softmax_weights(f"{logits}_blocks", f"{result}_weight")
    return (
        lines
        + f"""
        {result}_rows = Transpose <perm = [0, 1, 3, 2]> ({result}_weight)
        {result}_of_blocks = MatMul({result}_rows, normed_blocks)
        {result}_sums = ReduceSum <keepdims = 0> ({result}_of_blocks, axis1)
        {result}_totals = Transpose <perm = [0, 2, 1]> ({result}_weight_total)
        {result}_means = Div({result}_sums, {result}_totals)
        {result}_means_4d = Unsqueeze({result}_means, axis2)
        {result}_split = Reshape({weight}, head_shape)
        {result}_heads = Transpose <perm = [1, 0, 2]> ({result}_split)
        {result}_pooled = MatMul({result}_means_4d, {result}_heads)
        {result}_packed = Reshape({result}_pooled, row_shape)
        {result} = Add({result}_packed, {bias})
    """
    )


def _body() -> str:
    return (
        as_float(*_INPUTS[:-1])
        + text.common_constants()
        + text.constants(row_shape=[0, 1, -1])
        + "tokens = Shape <start = 1, end = 2> (x)\n"
        + sums.sum_cut("x")
        + text.valid_keys()
        + """
        valid_keys = Unsqueeze(valid, axis2)
        num_heads = Constant <value_int: int = @num_heads> ()
        num_heads_1d = Unsqueeze(num_heads, zero)
        keep = Constant <value_ints = [0]> ()
        infer = Constant <value_ints = [-1]> ()
        head_shape = Concat <axis = 0> (keep, num_heads_1d, infer)
        normed = LayerNormalization <axis = -1, epsilon: float = @epsilon> (
            x_f, norm_weight_f, norm_bias_f
        )
        alpha_logits = MatMul(normed, alpha_weight_f)
        """
        + sums.split("normed", "normed_blocks")
        + _pool("alpha_logits", "query_weight_f", "query_bias_f", "global_query")
        + """
        global_query_column = Transpose <perm = [0, 2, 1]> (global_query)
        beta_scaled = Mul(global_query_column, beta_weight_f)
        beta = MatMul(key_weight_f, beta_scaled)
        beta_logits = MatMul(normed, beta)
        """
        + _pool("beta_logits", "key_weight_f", "key_bias_f", "mean_key")
        + """
        global_key = Mul(global_query, mean_key)
        query_scaled = Mul(query_weight_f, global_key)
        query_mixed = MatMul(query_scaled, weight_f)
        document_weight = Add(query_mixed, query_weight_f)
        bias_scaled = Mul(query_bias_f, global_key)
        bias_mixed = MatMul(bias_scaled, weight_f)
        biases = Add(query_bias_f, bias_f)
        document_bias = Add(bias_mixed, biases)
        product = MatMul(normed, document_weight)
        change = Add(product, document_bias)
        result = Add(x_f, change)
        output = CastLike(result, x)
        """
    )


_INPUTS = (
    "x",
    "norm_weight",
    "norm_bias",
    "query_weight",
    "query_bias",
    "key_weight",
    "key_bias",
    "alpha_weight",
    "beta_weight",
    "weight",
    "bias",
    "lengths",
)

LAYER_NORM_FASTFORMER = OnnxOperator(
    op_type="LayerNormFastformer",
    inputs=_INPUTS,
    shapes=("B T D", "D", "D", "D D", "D", "D D", "D", "D H", "D H", "D D", "D", "B"),
    exponents=("alpha_weight", "beta_weight"),
    attributes=(EPSILON, NUM_HEADS),
    kernel_attributes=(PRECISION,),
    body=_body,
    doc=(
        "x + Fastformer's layer (arXiv 2108.09084) of LayerNorm(x), with alpha_weight = "
        "query_weight @ Wa / sqrt(d) and beta_weight = Wb / sqrt(d)."
    ),
)
onnx.defs.register_schema(LAYER_NORM_FASTFORMER.schema())
