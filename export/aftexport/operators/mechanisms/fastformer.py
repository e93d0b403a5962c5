"""Fastformer's additive attention.

    alpha = softmax_T(Q Wa / sqrt(d));  g_q[h] = sum_t alpha[t,h] Q[t,h];  P = K * g_q
    beta  = softmax_T(P Wb / sqrt(d));  g_k[h] = sum_t beta[t,h] P[t,h];   Y = V * g_k

Wu et al., Fastformer: Additive Attention Can Be All You Need, arXiv 2108.09084,
and the authors' code: each head's logit reads the whole row, and the second
pooling is over P, not K. Biases of the logits would add the same number to every
token and cancel in the softmax. Causal (a prefix form, not in the paper): both
poolings run over the tokens up to the query's.
"""

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums
from aftexport.operators.schema import NUM_HEADS, Mechanism


def _body(*, causal: bool) -> str:
    lines = text.inputs_as_float("query", "key", "value", "alpha_weight", "beta_weight")
    lines += text.head_shape()
    lines += """
        width = Shape <start = 2, end = 3> (query)
        head_width = Div(width, num_heads_1d)
        head_width_f = Cast <to = 1> (head_width)
        scale = Sqrt(head_width_f)
        alpha_products = MatMul(query_f, alpha_weight_f)
        alpha_scaled = Div(alpha_products, scale)
    """
    lines += text.mask("alpha_scaled", "alpha_logits", rank=3)
    lines += _causal_body() if causal else _global_body()
    return lines + text.output("result")


def _global_body() -> str:
    lines = text.constants(last_axis=[-1], row_shape=[0, 1, -1]) + sums.cut_of("query")
    lines += _pool_body("alpha_logits", "query_f", "global_query")
    lines += """
        keyed = Mul(key_f, global_query)
        beta_products = MatMul(keyed, beta_weight_f)
        beta_scaled = Div(beta_products, scale)
        beta_logits = Where(valid_keys, beta_scaled, masked)
    """
    lines += _pool_body("beta_logits", "keyed", "global_key")
    return lines + "result = Mul(value_f, global_key)\n"


def _pool_body(logits: str, values: str, result: str) -> str:
    lines = text.heads(values, f"{result}_values")
    lines += sums.split(f"{result}_values", f"{result}_value_blocks")
    lines += sums.split(logits, f"{result}_logit_blocks", gap="masked")
    lines += sums.softmax_weights(f"{result}_logit_blocks", f"{result}_weight")
    lines += f"{result}_columns = Unsqueeze({result}_weight, last_axis)\n"
    lines += sums.context(f"{result}_columns", f"{result}_value_blocks", f"{result}_sums")
    return (
        lines
        + f"""
        {result}_total_rows = Transpose <perm = [0, 2, 1]> ({result}_weight_total)
        {result}_totals = Unsqueeze({result}_total_rows, last_axis)
        {result}_means = Div({result}_sums, {result}_totals)
        {result} = Reshape({result}_means, row_shape)
    """
    )


def _causal_body() -> str:
    lines = text.constants(last_axis=[-1]) + sums.cut_of("query", cut="scan")
    for name, result in (("query_f", "queries"), ("key_f", "keys"), ("value_f", "values")):
        lines += text.heads(name, result)
    lines += "alpha_4d = Unsqueeze(alpha_logits, last_axis)\n"
    lines += sums.running_mean("alpha_4d", "queries", "global_query")
    lines += """
        keyed = Mul(keys, global_query)
        keyed_rows = Reshape(keyed, packed_shape)
        beta_products = MatMul(keyed_rows, beta_weight_f)
        beta_scaled = Div(beta_products, scale)
        beta_logits = Where(valid_keys, beta_scaled, masked)
        beta_4d = Unsqueeze(beta_logits, last_axis)
    """
    lines += sums.running_mean("beta_4d", "keyed", "global_key")
    return (
        lines
        + """
        attended = Mul(values, global_key)
        result = Reshape(attended, packed_shape)
    """
    )


PAIR = Mechanism(
    op_type="Fastformer",
    stem="fastformer",
    inputs=("query", "key", "value", "alpha_weight", "beta_weight", "lengths"),
    shapes=("B T D", "B T D", "B T D", "D H", "D H", "B"),
    exponents=("alpha_weight", "beta_weight"),
    attributes=(NUM_HEADS,),
    body=_body,
    doc=(
        "Fastformer (arXiv 2108.09084): query, key, value [B, T, D], "
        "alpha_weight, beta_weight [D, num_heads]."
    ),
).register()
