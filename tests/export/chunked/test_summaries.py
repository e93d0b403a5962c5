"""A few keys and values stand for a set of them, for any attention, numbers and length."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import fewer

from aftexport.chunked.summaries import DOMAIN, summary, window_of
from aftexport.chunked.token_flow import NotChunkable
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.operators.numerics import MASKED
from aftexport.operators.torch_ops import OPERATORS
from aftexport.parity import TOLERANCES

OPSET = 20
HEADS, DIM = 2, 8
SETTINGS = {
    "AftSimple": {"gate": "sigmoid"},
    "AftLocal": {"gate": "sigmoid"},
    "AftConv": {"num_heads": HEADS, "gate": "sigmoid"},
    "EfficientAttention": {"num_heads": HEADS, "normalization": "softmax", "scale": 0.5},
    "NormalizedLinearAttention": {"num_heads": HEADS, "feature_map": "elu", "eps": 1e-6},
    "NormalizedLinearAttention relu": {"num_heads": HEADS, "feature_map": "relu", "eps": 1e-6},
    "NormalizedLinearAttention identity": {
        "num_heads": HEADS, "feature_map": "identity", "normalizer": "none",
    },
    "NormalizedLinearAttention clamp": {
        "num_heads": HEADS, "feature_map": "identity", "normalizer": "clamp", "eps": 1.0,
    },
    "AftSimple heads": {"gate": "relu", "num_heads": HEADS, "eps": 0.5},
}  # fmt: skip
WITH_HEADS = ("AftConv", "AftSimple heads")
"""Those whose key has a channel for each head."""


def node_of(name: str, causal: bool) -> onnx.NodeProto:
    stem = name.split()[0]
    op_type = f"Causal{stem}" if causal else stem
    names = OPERATORS[op_type].required_inputs
    return onnx.helper.make_node(
        op_type, names, ["output"], domain="ai.aftexport", **SETTINGS[name]
    )


def summarizer(node: onnx.NodeProto) -> OnnxRuntimeEngine:
    def value(name: str) -> onnx.ValueInfoProto:
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (1, None, None))

    outputs = ["few_keys", "few_values"]
    call = onnx.helper.make_node("Summary", ["key", "value"], outputs, domain=DOMAIN)
    graph = onnx.helper.make_graph(
        [call], "main", [value("key"), value("value")], [value(name) for name in outputs]
    )
    imports = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, 1)]
    model = onnx.helper.make_model(
        graph, functions=[summary(ir.from_proto(node), OPSET)], opset_imports=imports, ir_version=10
    )
    return OnnxRuntimeEngine(model.SerializeToString(), threads=1)


SUMMARIZERS = {name: summarizer(node_of(name, False)) for name in SETTINGS}


def tensors_of(
    name: str,
    causal: bool,
    tokens: int,
    window: int,
    spread: float,
    dominating: int | None,
    seed: int,
) -> list[np.ndarray]:
    """Return random queries, keys and values, and the bias of a mechanism with a window."""
    random = np.random.default_rng(seed)
    narrow = name in WITH_HEADS
    query, value = random.normal(size=(2, 1, tokens, DIM)).astype(np.float32)
    key = (random.normal(size=(1, tokens, HEADS if narrow else DIM)) * spread).astype(np.float32)
    if dominating is not None:
        key[:, dominating] += 100
    if name not in ("AftLocal", "AftConv"):
        return [query, key, value]
    narrow = name == "AftConv"
    width = window if causal or narrow else 2 * window - 1
    bias = random.normal(size=(HEADS if narrow else 1, width)).astype(np.float32) * 3
    return [query, key, value, bias]


def attended(name: str, causal: bool, *tensors: np.ndarray) -> np.ndarray:
    """Return the definition in float64 on queries, keys, values and a bias."""
    operator = OPERATORS[node_of(name, causal).op_type]
    length = torch.tensor([tensors[0].shape[1]])
    wide = [torch.from_numpy(np.asarray(x, np.float64)) for x in tensors]
    attributes = {a.name: a.default for a in operator.attributes} | SETTINGS[name]
    return operator.reference(*wide, length, **attributes).numpy()


def summary_of(name: str, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys and values of a summary of the summaries of both halves."""
    cut = (key.shape[1] + 1) // 2
    halves = [
        SUMMARIZERS[name].run({"key": key[:, part], "value": value[:, part]})
        for part in (slice(cut), slice(cut, None))
        if key[:, part].size
    ]
    joined = {
        "key": np.concatenate([half["few_keys"] for half in halves], 1),
        "value": np.concatenate([half["few_values"] for half in halves], 1),
    }
    merged = SUMMARIZERS[name].run(joined)
    return merged["few_keys"], merged["few_values"]


@given(
    st.sampled_from(sorted(SETTINGS)),
    st.booleans(),
    st.integers(0, 20),
    st.integers(1, 20),
    st.integers(0, 20),
    st.integers(1, 4),
    st.sampled_from([0.1, 1.0, 10.0, 100.0]),
    st.sampled_from([None, 0, -1]),
    st.integers(0, 99),
)
@settings(max_examples=fewer(400), deadline=None)
def test_summaries_attend_like_their_tokens(
    name: str,
    causal: bool,
    before: int,
    inside: int,
    after: int,
    window: int,
    spread: float,
    dominating: int | None,
    seed: int,
) -> None:
    """Attention to summaries equals attention to the tokens that they stand for."""
    node = node_of(name, causal)
    tokens, end = before + inside + after, before + inside
    query, key, value, *bias = tensors_of(name, causal, tokens, window, spread, dominating, seed)
    span = window_of(ir.from_proto(node), causal, bias[0] if bias else None)
    low = max(before - span.left, 0)
    high = end if causal else min(end + span.right, tokens)
    parts = [summary_of(name, key[:, :low], value[:, :low])] if low else []
    if high < tokens and not causal:
        parts.append(summary_of(name, key[:, high:], value[:, high:]))
    gap = np.full((1, span.left, key.shape[2]), MASKED, np.float32)
    nothing = np.zeros((1, span.left, DIM), np.float32)
    keys = np.concatenate([*(k for k, _ in parts), gap, key[:, low:high]], 1)
    values = np.concatenate([*(v for _, v in parts), nothing, value[:, low:high]], 1)
    head = keys.shape[1] - (high - low)
    queries = np.concatenate([np.zeros((1, head, DIM), np.float32), query[:, low:high]], 1)

    expected = attended(name, causal, query, key, value, *bias)[:, before:end]
    rows = attended(name, causal, queries, keys, values, *bias)[:, head + before - low :]
    scale = max(1.0, float(np.abs(expected).max()))
    assert np.abs(rows[:, :inside] - expected).max() <= TOLERANCES["fp32"].bound * scale


def test_few_are_few() -> None:
    key = np.ones((1, 1000, DIM), np.float32)
    for name, engine in SUMMARIZERS.items():
        narrow = key[..., :HEADS] if name in WITH_HEADS else key
        few = engine.run({"key": narrow, "value": key})
        corrections = name.endswith((" identity", " clamp"))
        expected = 1 if name.startswith("Aft") else DIM // HEADS + corrections
        assert few["few_keys"].shape[1] == expected


def test_operator_without_summary_is_named() -> None:
    full = onnx.helper.make_node("AftFull", ["q", "k", "v", "w", "n"], ["y"])
    with pytest.raises(NotChunkable, match="AftFull has no summary"):
        window_of(ir.from_proto(full), False, None)
    scaling = onnx.helper.make_node(
        "EfficientAttention", ["q", "k", "v", "n"], ["y"], normalization="scaling"
    )
    with pytest.raises(NotChunkable, match="scaling"):
        summary(ir.from_proto(scaling), OPSET)
    for inputs, attributes in ((["q", "k", "v", "n"], {"kv_num_heads": 1}), ([*"qkvnm"], {})):
        shared = onnx.helper.make_node("EfficientAttention", inputs, ["y"], **attributes)
        with pytest.raises(NotChunkable, match="of its own for its keys"):
            window_of(ir.from_proto(shared), False, None)


MANY_TOKENS = 1_048_576


@pytest.mark.parametrize("name", SETTINGS)
def test_million_equal_tokens_have_exact_summary(name: str) -> None:
    random = np.random.default_rng(0)
    width = HEADS if name in WITH_HEADS else DIM
    key = np.abs(random.normal(size=(1, 1, width))).astype(np.float32)
    value = random.normal(size=(1, 1, DIM)).astype(np.float32)
    one = SUMMARIZERS[name].run({"key": key, "value": value})
    few = SUMMARIZERS[name].run(
        {"key": np.repeat(key, MANY_TOKENS, 1), "value": np.repeat(value, MANY_TOKENS, 1)}
    )
    np.testing.assert_allclose(few["few_values"], one["few_values"], rtol=1e-4)
    counted = np.isfinite(one["few_keys"])
    assert np.array_equal(np.isfinite(few["few_keys"]), counted)
    found, before = (f["few_keys"][counted].astype(np.float64) for f in (few, one))
    if name.startswith("NormalizedLinearAttention"):
        # An inverse of the sum of features: elu's is the sum less one, that of others the sum.
        plus = 1 if SETTINGS[name]["feature_map"] == "elu" else 0
        is_zero = before == -plus  # the other channels of identity
        assert np.array_equal(found[is_zero], before[is_zero])
        counts = (found + plus)[~is_zero] / (before + plus)[~is_zero]
        assert counts.size >= DIM
    else:
        counts = np.exp(found - before)
    np.testing.assert_allclose(counts, MANY_TOKENS, rtol=1e-4)
