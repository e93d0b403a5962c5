"""AFT-simple: softmax over the tokens, per channel.

    Y[t] = gate(Q[t]) * sum_u exp(K[u]) V[u] / (sum_u exp(K[u]) + eps)

Zhai et al., An Attention Free Transformer, arXiv 2105.14103, eq. 5; eps is 0 there. With
``num_heads`` the key has one channel for each head, whose values share its weights: the
separable attention of Mehta and Rastegari, MobileViTv2, arXiv 2206.02680, has one in all.
"""

from collections.abc import Mapping
from typing import Any

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums
from aftexport.operators.schema import DENOMINATOR_EPS, GATE, Attribute, Mechanism

_NUM_HEADS = Attribute(
    "num_heads",
    0,
    "Number of channels of the key; divides the channels of query and value. "
    "0: those of the value.",
    is_cpu_only=True,
)


def _sizes(attributes: Mapping[str, Any]) -> dict[str, int]:
    heads = int(attributes["num_heads"])
    return {"D": 16 * max(heads, 1), "K": heads or 16}


def _body(*, gate: str, causal: bool) -> str:
    lines = text.inputs_as_float("query", "key", "value") + text.log_eps()
    lines += text.mask("key_f", "logits_3d", rank=3) + _by_head_body()
    lines += _causal_body() if causal else _global_body()
    lines += """
        packed_shape = Shape(value_f)
        mean_packed = Reshape(mean, packed_shape)
    """
    return lines + text.gate(gate, "query_f", "mean_packed", "result") + text.output("result")


def _by_head_body() -> str:
    """Define ``logits [B, T, H, 1]`` and ``values [B, T, H, D / H]`` for H channels of the key."""
    return """
        last_axis = Constant <value_ints = [3]> ()
        logits = Unsqueeze(logits_3d, last_axis)
        columns = Shape <start = 2, end = 3> (key_f)
        sizes = Constant <value_ints = [0, 0]> ()
        infer = Constant <value_ints = [-1]> ()
        head_shape = Concat <axis = 0> (sizes, columns, infer)
        values = Reshape(value_f, head_shape)
    """


def _causal_body() -> str:
    lines = sums.cut_of("value_f", cut="scan")
    return lines + sums.running_mean("logits", "values", "mean", has_eps=True)


def _global_body() -> str:
    return (
        sums.cut_of("value_f")
        + sums.split("logits", "logit_blocks", gap="masked")
        + sums.split("values", "value_blocks")
        + sums.softmax_weights("logit_blocks", "weight", has_eps=True)
        + "weighted = Mul(weight, value_blocks)\n"
        + sums.total("weighted", "numerator")
        + """
        one_mean = Div(numerator, weight_total)
        value_shape = Shape(values)
        mean = Expand(one_mean, value_shape)
        """
    )


PAIR = Mechanism(
    op_type="AftSimple",
    stem="aft_simple",
    inputs=("query", "key", "value", "lengths"),
    shapes=("B T D", "B T K", "B T D", "B"),
    exponents=("key",),
    attributes=(GATE, _NUM_HEADS, DENOMINATOR_EPS),
    body=_body,
    sizes=_sizes,
    doc=(
        "AFT-simple (arXiv 2105.14103, eq. 5): query, value [B, T, D], key [B, T, D], or "
        "[B, T, num_heads] with a channel for each head of the value."
    ),
).register()
