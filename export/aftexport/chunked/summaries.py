"""Summaries of an attention's keys and values: a few that replace all of them.

A summary has keys and values, its bias is 0, and it has no position. One operator can therefore
attend to tokens and summaries together. The summary of several summaries has the same form.

    AFT-simple, -local:  There is one key, log sum_u exp(K[u]) for each channel. Its value is the
                         mean of the values with the weights exp(K[u]).
    AFT-conv:            It is AFT-simple with one logit for each head. AFT-simple with heads has
                         the same summary.
    Efficient Attention: Each head has d keys. Key c is log sum_u exp(K[u,c]) at channel c, and has
                         no weight at other channels. Its value is the mean of the values with the
                         weights exp(K[u,c]).
    linear attention:    There are d keys. phi(key c) is sum_u phi(K[u,c]) at channel c, and 0 at
                         other channels. Its value is sum_u phi(K[u,c]) V[u], divided by that sum.
                         If phi is the identity, the sum may be negative. The divisor is then its
                         magnitude. One more key has the difference at each channel, and value 0.
"""

from dataclasses import dataclass

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.chunked.token_flow import NotChunkable
from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums

DOMAIN = "aftexport.summary"


@dataclass(frozen=True)
class Window:
    """The numbers of tokens before and after a query that have a bias for it."""

    left: int
    right: int


def window_of(node: ir.Node, causal: bool, bias: NDArray[np.generic] | None) -> Window:
    """Return the window of an operator, whose bias is a ``filter [H, s]`` or ``band [R, W]``.

    Raises:
        NotChunkable: if the operator has no summary, or a computed bias.
    """
    stem = node.op_type.removeprefix("Causal")
    if stem in ("EfficientAttention", "NormalizedLinearAttention"):
        if node.attributes.get_int("kv_num_heads", 0) or len(node.inputs) > 4:
            raise NotChunkable(f"{node.op_type} has heads or lengths of its own for its keys")
        return Window(0, 0)
    if stem == "AftSimple":
        return Window(0, 0)
    if stem not in ("AftConv", "AftLocal"):
        raise NotChunkable(f"{node.op_type} has no summary of a chunk's keys and values")
    if bias is None:
        raise NotChunkable(f"the bias of {node.op_type} is computed")
    width = bias.shape[1]
    left = width - 1 if causal else (width - 1) // 2
    return Window(left, width - 1 - left)


def summary(node: ir.Node, opset: int) -> onnx.FunctionProto:
    """Return the function from float32 ``key [1, T, *]`` and ``value`` to ``few_keys, few_values``.

    Raises:
        NotChunkable: if the operator or its setting has no summary.
    """
    attributes = {name: a.value for name, a in node.attributes.items()}
    stem = node.op_type.removeprefix("Causal")
    num_heads = attributes.get("num_heads", 1)
    if stem == "AftLocal" or (stem == "AftSimple" and not attributes.get("num_heads", 0)):
        body = _MEAN + "few_keys = Identity(log_sum)\nfew_values = Identity(mean)\n"
    elif stem in ("AftConv", "AftSimple"):
        body = _heads("value", "values", num_heads) + _MEAN_OF_HEADS
    elif stem == "EfficientAttention":
        if attributes.get("normalization", "softmax") != "softmax":
            raise NotChunkable("EfficientAttention divides by the number of keys (scaling)")
        body = _context(num_heads, "weight", _EXPONENTIALS, "few = Identity(log_sum)\n")
        body += _DIAGONAL
    elif stem == "NormalizedLinearAttention":
        feature_map = attributes.get("feature_map", "elu")
        features, inverse = _FEATURE_MAPS[feature_map]
        body = _context(num_heads, "feature", features + _FEATURES, inverse)
        body += _CORRECTION if feature_map == "identity" else _DIAGONAL
    else:
        raise NotChunkable(f"{node.op_type} has no summary of a chunk's keys and values")
    return onnx.parser.parse_function(
        f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]>\n'
        f"Summary (key, value) => (few_keys, few_values)\n{{{_COMMON}{body}}}"
    )


def _heads(name: str, result: str, num_heads: int) -> str:
    return f"""
        {result}_shape = Constant <value_ints = [0, 0, {num_heads}, -1]> ()
        {result} = Reshape({name}, {result}_shape)
    """


_COMMON = (
    text.common_constants()
    + text.constants(last=[-1], packed=[0, 0, -1])
    + "tokens = Shape <start = 1, end = 2> (key)\n"
    + sums.cut_of("key")
)
_EXPONENTIALS = (
    sums.split("key", "key_blocks", gap="masked")
    + sums.softmax_weights("key_blocks", "weight")
    + """
    largest = Squeeze(weight_max, axis1)
    log_total = Log(weight_sum)
    log_sum = Add(largest, log_total)
"""
)
_MEAN = (
    _EXPONENTIALS
    + sums.split("value", "value_blocks")
    + "weighted = Mul(weight, value_blocks)\n"
    + sums.total("weighted", "sum")
    + "mean = Div(sum, weight_total)\n"
)
_MEAN_OF_HEADS = (
    _EXPONENTIALS
    + sums.split("values", "value_blocks")
    + """
    weight_column = Unsqueeze(weight, last)
    total_column = Unsqueeze(weight_total, last)
    weighted = Mul(weight_column, value_blocks)
"""
    + sums.total("weighted", "sum")
    + """
    mean = Div(sum, total_column)
    few_keys = Identity(log_sum)
    few_values = Reshape(mean, packed)
"""
)
_ELU = """
    above = Add(key, one_f)
    below_zero = Min(key, zero_f)
    below = Exp(below_zero)
    positive = Greater(key, zero_f)
    features = Where(positive, above, below)
"""
_ELU_INVERSE = """
    over_one = Greater(feature_total, one_f)
    from_above = Sub(feature_total, one_f)
    from_below = Log(feature_total)
    inverse = Where(over_one, from_above, from_below)
    few = Where(nothing, masked, inverse)
"""
_DIAGONAL = """
    few_4d = Where(diagonal, few_heads, masked)
    few_keys = Reshape(few_4d, packed)
    few_values = Identity(means_packed)
"""
_RELU = "features = Relu(key)\n"
_FEATURES = sums.split("features", "feature") + sums.total("feature", "feature_total")
_RELU_INVERSE = "few = Identity(feature_total)\n"
_FEATURE_MAPS = {
    "elu": (_ELU, _ELU_INVERSE),
    "relu": (_RELU, _RELU_INVERSE),
    "identity": ("features = Identity(key)\n", "few = Identity(divisor)\n"),
}
_CORRECTION = """
    own_keys = Where(diagonal, few_heads, zero_f)
    own_keys_packed = Reshape(own_keys, packed)
    difference = Sub(feature_total, divisor)
    few_keys = Concat <axis = 1> (own_keys_packed, difference)
    few_value_width = Shape <start = 2, end = 3> (means_packed)
    no_value_shape = Concat <axis = 0> (one_1d, one_1d, few_value_width)
    no_value = Expand(zero_f, no_value_shape)
    few_values = Concat <axis = 1> (means_packed, no_value)
"""


def _context(num_heads: int, name: str, features: str, keys: str) -> str:
    """Return the body up to ``means_packed`` and ``few_heads``, the keys' numbers by channel.

    The bodies ``features`` and ``keys`` compute the features, named by ``name``, and the keys from
    their total.
    """
    # A key stands for each channel of a head; ``diagonal`` marks its place.
    return (
        features
        + f"""
        by_head = Constant <value_ints = [0, 0, 0, {num_heads}, -1]> ()
        columns = Reshape({name}, by_head)
        """
        + sums.split("value", "value_blocks")
        + "rows = Reshape(value_blocks, by_head)\n"
        + sums.context("columns", "rows", "context")
        + f"""
        nothing = Equal({name}_total, zero_f)
        magnitude = Abs({name}_total)
        divisor = Where(nothing, one_f, magnitude)
        divisor_shape = Constant <value_ints = [0, {num_heads}, -1, 1]> ()
        divisors = Reshape(divisor, divisor_shape)
        means = Div(context, divisors)
        by_channel = Transpose <perm = [0, 2, 1, 3]> (means)
        means_packed = Reshape(by_channel, packed)
        {keys}
        few_shape = Constant <value_ints = [0, 1, {num_heads}, -1]> ()
        few_heads = Reshape(few, few_shape)
        width = Shape <start = 3, end = 4> (few_heads)
        square = Concat <axis = 0> (width, width)
        ones = ConstantOfShape <value = float[1] {{1}}> (square)
        diagonal_f = EyeLike (ones)
        diagonal_2d = Cast <to = 9> (diagonal_f)
        diagonal_axes = Constant <value_ints = [0, 2]> ()
        diagonal = Unsqueeze(diagonal_2d, diagonal_axes)
    """
    )
