"""Linear attention with a normalizer.

    Y[t] = phi(Q[t]) S / (phi(Q[t]) z + eps),  S = sum_u phi(K[u])^T V[u],  z = sum_u phi(K[u])

Katharopoulos et al., Transformers are RNNs, arXiv 2006.16236, eq. 5; phi(x) is
elu(x) + 1 (eq. 7) or relu(x). Causal: S and z run up to the query's position.
The ONNX operator ``LinearAttention`` (opset 27) has no normalizer. Runtimes match
built-in operators only by name, so this one is ``NormalizedLinearAttention``.
"""

import torch
from torch import Tensor

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums
from aftexport.operators.mechanism import NUM_HEADS, Mechanism
from aftexport.operators.mechanisms._causal_product import causal_product_body
from aftexport.operators.numerics import (
    causal_product,
    check_heads,
    check_lengths,
    check_same_shape,
    context,
    split_heads,
    valid_keys,
)
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


def _check(
    op_type: str,
    causal: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    num_heads: int,
    feature_map: str,
    eps: float,
) -> None:
    check_same_shape(op_type, query=query, key=key, value=value)
    check_lengths(op_type, query, lengths)
    check_heads(op_type, query, num_heads)
    if not eps > 0:
        raise ValueError(f"{op_type}: eps must be positive, got {eps}")


def features(x: Tensor, feature_map: str) -> Tensor:
    """Return phi(x). Below 0 it is exp(x), because elu(x) + 1 would lose small values."""
    if feature_map == "relu":
        return x.relu()
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def _projected(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, num_heads: int, feature_map: str
) -> tuple[Tensor, Tensor, Tensor]:
    valid = valid_keys(lengths, query.shape[1])[..., None, None]
    queries = features(split_heads(query, num_heads), feature_map)
    keys = torch.where(valid, features(split_heads(key, num_heads), feature_map), 0)
    values = split_heads(value, num_heads)
    return queries, keys, torch.cat((values, torch.ones_like(values[..., :1])), 3)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    num_heads: int,
    feature_map: str,
    eps: float,
    causal: bool,
) -> Tensor:
    """Compute the definition, row by row, from the similarities phi(Q[t]) . phi(K[u]).

    Args:
        query, key, value: ``[B, T, D]``.
        lengths: int64 ``[B]``.
    """
    queries, keys, values = _projected(query, key, value, lengths, num_heads, feature_map)
    rows = []
    for t in range(query.shape[1]):
        end = t + 1 if causal else query.shape[1]
        similarity = torch.einsum("bhc,buhc->buh", queries[:, t], keys[:, :end])
        sums = torch.einsum("buh,buhe->bhe", similarity, values[:, :end])
        rows.append(_divided(sums, eps))
    return torch.stack(rows, 1).flatten(2)


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    num_heads: int,
    feature_map: str,
    eps: float,
    causal: bool,
) -> Tensor:
    """Compute ``reference`` in time linear in T: keys and values are multiplied first."""
    queries, keys, values = _projected(query, key, value, lengths, num_heads, feature_map)
    if causal:
        sums = causal_product(queries, keys, values)
    else:
        sums = torch.einsum("bthc,bhce->bthe", queries, context(keys, values))
    return _divided(sums, eps).flatten(2)


def _divided(sums: Tensor, eps: float) -> Tensor:
    """Divide the sums of values by the last channel, the sum of ones; float64 takes any eps."""
    if sums.dtype != torch.float64:
        eps = max(eps, MIN_EPS)
    return sums[..., :-1] / (sums[..., -1:] + eps)


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
    check=_check,
    compute=compute,
    reference=reference,
    body=_body,
    doc="Linear attention (arXiv 2006.16236, eq. 5): query, key, value [B, T, D], heads in D.",
).register()
