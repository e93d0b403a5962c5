"""Linear attention with a normalizer.

    Y[t] = phi(Q[t]) S / (phi(Q[t]) z + eps),  S = sum_u phi(K[u])^T V[u],  z = sum_u phi(K[u])

Katharopoulos et al., Transformers are RNNs, arXiv 2006.16236, eq. 5; phi(x) is
elu(x) + 1 (eq. 7) or relu(x). Causal: S and z run up to the query's position.
The ONNX operator ``LinearAttention`` (opset 27) has no normalizer. Runtimes match
built-in operators only by name, so this one is ``NormalizedLinearAttention``.
"""

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums
from aftexport.operators.attributes import NUM_HEADS
from aftexport.operators.mechanisms._causal_product import causal_product_body
from aftexport.operators.mechanisms.mechanism import Mechanism
from aftexport.operators.schema import Attribute

FEATURE_MAP = Attribute("feature_map", "elu", "elu: elu(x) + 1; relu: max(x, 0).", ("elu", "relu"))
MIN_EPS = 1e-20
"""Minimum eps of float32 and narrower tensors; a smaller eps is raised to it.

A number below 1.2e-38 may be 0 in one form and not in another. Multiplied by sums over keys of up
to 1e12, it is 1e-6 of this eps. So all forms agree if the normalizer is 0 or nearly 0, and the
reciprocal of eps is far from infinite.
"""
EPS = Attribute(
    "eps",
    1e-6,
    f"Added to the normalizer; keeps it from being zero. Below {MIN_EPS:g} it counts as that.",
)


def _features_body(name: str, result: str, feature_map: str) -> str:
    if feature_map == "relu":
        return f"{result} = Relu({name})\n"
    return f"""
        {result}_positive = Greater({name}, zero_f)
        {result}_plus_one = Add({name}, one_f)
        {result}_negative = Min({name}, zero_f)
        {result}_exp = Exp({result}_negative)
        {result} = Where({result}_positive, {result}_plus_one, {result}_exp)
    """


def _body(*, feature_map: str, causal: bool) -> str:
    lines = text.inputs_as_float("query", "key", "value") + text.head_shape() + text.valid_keys()
    lines += text.constants(two_1d=[2], last_axis=[-1], min_eps=MIN_EPS)
    lines += _features_body("query_f", "query_features", feature_map)
    lines += _features_body("key_f", "key_features", feature_map)
    lines += """
        valid_3d = Unsqueeze(valid, two_1d)
        valid_features = Where(valid_3d, key_features, zero_f)
    """
    lines += text.heads("query_features", "queries") + text.heads("valid_features", "keys")
    lines += text.heads("value_f", "only_values")
    lines += """
        first_channel = Slice(only_values, zero_1d, one_1d, last_axis)
        ones_shape = Shape(first_channel)
        ones = ConstantOfShape <value = float[1] {1.0}> (ones_shape)
        values = Concat <axis = 3> (only_values, ones)
    """
    if causal:
        lines += causal_product_body("queries", "keys", "values", "sums")
    else:
        lines += sums.sum_cut("query")
        lines += sums.split("keys", "key_blocks") + sums.split("values", "value_blocks")
        lines += sums.context("key_blocks", "value_blocks", "context")
        lines += """
            queries_heads = Transpose <perm = [0, 2, 1, 3]> (queries)
            sums_heads = MatMul(queries_heads, context)
            sums = Transpose <perm = [0, 2, 1, 3]> (sums_heads)
        """
    lines += """
        last = Constant <value_ints = [-1]> ()
        far = Constant <value_ints = [9223372036854775807]> ()
        numerator = Slice(sums, zero_1d, last, last_axis)
        normalizer = Slice(sums, last, far, last_axis)
        eps = Constant <value_float: float = @eps> ()
        positive_eps = Max(eps, min_eps)
        positive = Add(normalizer, positive_eps)
        attended = Div(numerator, positive)
        result = Reshape(attended, packed_shape)
    """
    return lines + text.output("result")


NORMALIZED_LINEAR_ATTENTION, CAUSAL_NORMALIZED_LINEAR_ATTENTION = Mechanism(
    op_type="NormalizedLinearAttention",
    stem="linear_attention",
    inputs=("query", "key", "value", "lengths"),
    shapes=("B T D", "B T D", "B T D", "B"),
    exponents=("key",),
    attributes=(NUM_HEADS, FEATURE_MAP, EPS),
    body=_body,
    doc="Linear attention (arXiv 2006.16236, eq. 5): query, key, value [B, T, D], heads in D.",
).register()
