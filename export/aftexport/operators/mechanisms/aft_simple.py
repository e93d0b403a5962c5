"""AFT-simple: softmax over the tokens, per channel.

    Y[t] = gate(Q[t]) * sum_u softmax_T(K)[u] V[u]

Zhai et al., An Attention Free Transformer, arXiv 2105.14103, eq. 5.
"""

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums
from aftexport.operators.attributes import GATE
from aftexport.operators.mechanisms import _running_sums as running
from aftexport.operators.mechanisms.mechanism import Mechanism


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
    body=_body,
    doc="AFT-simple (arXiv 2105.14103, eq. 5): query, key, value [B, T, D].",
).register()
