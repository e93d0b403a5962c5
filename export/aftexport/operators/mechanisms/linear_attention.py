"""Linear attention with a normalizer.

    Y[t] = phi(Q[t]) S / (phi(Q[t]) z + eps),  S = sum_u phi(K[u])^T V[u],  z = sum_u phi(K[u])

Katharopoulos et al., Transformers are RNNs, arXiv 2006.16236, eq. 5; phi(x) is
elu(x) + 1 (eq. 7) or relu(x). ``identity``: query and key are features already.
Causal: S and z run up to the query's position. The divisor is phi(Q[t]) z + eps
(``add``), max(phi(Q[t]) z, eps) (``clamp``), or left out (``none``).

Features of elu and relu are never negative, so a divisor is at least eps, and all
forms agree for any input. Features by ``identity`` may be negative. Their products
may then cancel to a sum near 0, of which no form keeps the digits: the relative error
of a divisor is about 1e-7 times sum_u |phi(Q[t])| |phi(K[u])| over its magnitude. With
``add`` a divisor of exactly 0 gives infinite or NaN rows; ``clamp`` never does.

The ONNX operator ``LinearAttention`` (opset 27) has no normalizer. Runtimes match
built-in operators only by name, so this one is ``NormalizedLinearAttention``.
"""

from collections.abc import Collection

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums
from aftexport.operators.mechanisms import _grouped_heads as grouped
from aftexport.operators.mechanisms._grouped_heads import causal_product_body
from aftexport.operators.schema import KV_NUM_HEADS, NUM_HEADS, Attribute, Mechanism

FEATURE_MAP = Attribute(
    "feature_map",
    "elu",
    "elu: elu(x) + 1; relu: max(x, 0); identity: query and key are features.",
    ("elu", "relu", "identity"),
    cpu_only_choices=("identity",),
)
NORMALIZER = Attribute(
    "normalizer",
    "add",
    "The divisor. add: the normalizer plus eps; clamp: the normalizer, at least eps; none: 1.",
    ("add", "clamp", "none"),
    is_cpu_only=True,
)
MIN_EPS = 1e-20
"""Minimum eps; a smaller one is raised to it, in float64 too.

A number below 1.2e-38 may be 0 in one form and not in another. Multiplied by sums over keys of up
to 1e12, it is 1e-6 of this eps. So all forms agree if the normalizer is 0 or nearly 0, and the
reciprocal of eps is far from infinite.
"""
EPS = Attribute(
    "eps",
    1e-6,
    "Added to the normalizer, or its minimum; keeps it from being zero. "
    f"Below {MIN_EPS:g} it counts as that.",
)


def _features_body(name: str, result: str, feature_map: str) -> str:
    if feature_map == "identity":
        return f"{result} = Identity({name})\n"
    if feature_map == "relu":
        return f"{result} = Relu({name})\n"
    return f"""
        {result}_positive = Greater({name}, zero_f)
        {result}_plus_one = Add({name}, one_f)
        {result}_negative = Min({name}, zero_f)
        {result}_exp = Exp({result}_negative)
        {result} = Where({result}_positive, {result}_plus_one, {result}_exp)
    """


def _body(*, feature_map: str, normalizer: str, causal: bool, present: Collection[str] = ()) -> str:
    lengths = "key_lengths" if "key_lengths" in present else "lengths"
    lines = text.inputs_as_float("query", "key", "value", sequence="key")
    lines += grouped.head_shapes() + text.valid_keys(lengths)
    lines += text.constants(two_1d=[2], last_axis=[-1], min_eps=MIN_EPS)
    lines += _features_body("query_f", "query_features", feature_map)
    lines += _features_body("key_f", "key_features", feature_map)
    lines += """
        valid_3d = Unsqueeze(valid, two_1d)
        valid_features = Where(valid_3d, key_features, zero_f)
    """
    lines += grouped.kv_heads("valid_features", "keys") + _values_body(normalizer)
    if causal:
        lines += text.heads("query_features", "queries")
        lines += grouped.repeat_heads("keys", "all_keys")
        lines += grouped.repeat_heads("values", "all_values")
        lines += causal_product_body("queries", "all_keys", "all_values", "sums")
    else:
        lines += sums.cut_of("key")
        lines += sums.split("keys", "key_blocks") + sums.split("values", "value_blocks")
        lines += sums.context("key_blocks", "value_blocks", "context")
        lines += grouped.attend("query_features", "context", "sums")
    lines += _division_body(normalizer)
    lines += "result = Reshape(attended, packed_shape)\n"
    return lines + text.output("result")


def _values_body(normalizer: str) -> str:
    """Define ``values``, ``[B, S, kv heads, e]``; for a normalizer with a last channel of ones."""
    if normalizer == "none":
        return grouped.kv_heads("value_f", "values")
    return (
        grouped.kv_heads("value_f", "only_values")
        + """
        first_channel = Slice(only_values, zero_1d, one_1d, last_axis)
        ones_shape = Shape(first_channel)
        ones = ConstantOfShape <value = float[1] {1.0}> (ones_shape)
        values = Concat <axis = 3> (only_values, ones)
    """
    )


def _division_body(normalizer: str) -> str:
    """Define ``attended``: ``sums`` over the divisor from their last channel."""
    if normalizer == "none":
        return "attended = Identity(sums)\n"
    divide = {
        "add": "positive = Add(normalizer, positive_eps)\n",
        "clamp": "positive = Max(normalizer, positive_eps)\n",
    }[normalizer]
    return (
        """
        last = Constant <value_ints = [-1]> ()
        far = Constant <value_ints = [9223372036854775807]> ()
        numerator = Slice(sums, zero_1d, last, last_axis)
        normalizer = Slice(sums, last, far, last_axis)
        eps = Constant <value_float: float = @eps> ()
        positive_eps = Max(eps, min_eps)
    """
        + divide
        + "attended = Div(numerator, positive)\n"
    )


PAIR = Mechanism(
    op_type="NormalizedLinearAttention",
    stem="linear_attention",
    inputs=("query", "key", "value", "lengths", "key_lengths"),
    optional=("key_lengths",),
    shapes=("B T Q", "B S K", "B S V", "B", "B"),
    exponents=("key",),
    attributes=(NUM_HEADS, FEATURE_MAP, EPS, NORMALIZER, KV_NUM_HEADS),
    body=_body,
    sizes=grouped.sizes,
    nonnegative=lambda a: {"query": 0, "key": 0} if a["feature_map"] == "identity" else {},
    doc=(
        "Linear attention (arXiv 2006.16236, eq. 5): query [B, T, num_heads * d], "
        "key [B, S, kv_num_heads * d], value [B, S, kv_num_heads * e], heads packed in the "
        "channels. S may differ from T if key_lengths [B] gives the numbers of keys; without it "
        "they are lengths."
    ),
).register()
