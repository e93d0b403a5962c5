"""AFT-full around a matrix product of the runtime: an operator before it and one after it.

    entries = (exp(K - m) V, exp(K - m)),  m the largest key of each channel
    products = exp(w - r) entries,         r the largest bias of each row; a standard MatMul
    Y = gate(Q) * the ratio of the two halves of the products

``engines.aft_full_product`` puts them in place of ``AftFull``. No PyTorch model calls them.
"""

import onnx

from aftexport.operators import onnx_text as text
from aftexport.operators.mechanisms.aft_full import bias_corner, exact_body
from aftexport.operators.schema import GATE, OnnxOperator


def _prepare_body() -> str:
    lines = text.inputs_as_float("key", "value", sequence="key")
    lines += text.mask("key_f", "logits", rank=3)
    lines += text.weighted_pair("value_f", axis=2)
    return lines + "entries = CastLike(pair, key)\n"


def _finish_body(*, gate: str) -> str:
    """Divide, or compute by the definition if a product is infinite or too small."""
    lines = text.inputs_as_float("query", "key", "value", "position_bias", "products")
    lines += text.mask("key_f", "logits", rank=3)
    lines += bias_corner()
    lines += "key_max_of_all = ReduceMax <keepdims = 1> (logits, axis1)\n"
    lines += text.finite_maximum("key_max_of_all", "key_max")
    lines += """
        bias = Identity(position_bias_f)
        log_eps = Identity(masked)
        numerator, total_weight = Split <axis = 2, num_outputs = 2> (products_f)
        counted_weight = Where(key_max_is_none, one_f, total_weight)
        numerator_size = Abs(numerator)
        largest_product = Max(numerator_size, counted_weight)
        overflows = IsInf(largest_product)
        denominator = Where(overflows, zero_f, counted_weight)
    """
    lines += text.guarded_division(exact_body())
    return lines + text.gate(gate, "query_f", "mean", "result") + text.output("result")


AFT_FULL_PREPARE = OnnxOperator(
    op_type="AftFullPrepare",
    inputs=("key", "value", "lengths"),
    shapes=("B T D", "B T D", "B"),
    outputs=("entries",),
    exponents=("key",),
    attributes=(),
    body=_prepare_body,
    doc=(
        "The right side of AFT-full's product, [B, T, 2 D]: exp(key - m) value and exp(key - m), "
        "m the largest key of the channel; 0 for padded keys."
    ),
)
AFT_FULL_FINISH = OnnxOperator(
    op_type="AftFullFinish",
    inputs=("query", "key", "value", "position_bias", "products", "lengths"),
    shapes=("B T D", "B T D", "B T D", "Tmax Tmax", "B T E", "B"),
    exponents=("key", "position_bias"),
    attributes=(GATE,),
    body=_finish_body,
    doc=(
        "AFT-full from products [B, T, 2 D] = exp(position_bias - its row maxima) @ entries. "
        "Outputs of products that lost digits are computed by the definition, from key, value and "
        "position_bias."
    ),
    sizes=lambda _: {"D": 8, "E": 16},
    nonnegative=lambda _: {"products": 8},
)
for _operator in (AFT_FULL_PREPARE, AFT_FULL_FINISH):
    onnx.defs.register_schema(_operator.schema())
