"""A few keys and values stand for a set of them, for any attention and any numbers."""

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aftexport.chunked.summaries import DOMAIN, summary, window_of
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.operators.mechanisms import OPERATORS
from aftexport.operators.numerics import MASKED
from aftexport.parity import TOLERANCES
from aftexport.passes.token_flow import NotChunkable

OPSET = 20
HEADS, DIM = 2, 8
SETTINGS = {
    "AftSimple": {"gate": "sigmoid"},
    "AftLocal": {"gate": "sigmoid"},
    "AftConv": {"num_heads": HEADS, "gate": "sigmoid"},
    "EfficientAttention": {"num_heads": HEADS, "normalization": "softmax", "scale": 0.5},
    "NormalizedLinearAttention": {"num_heads": HEADS, "feature_map": "elu", "eps": 1e-6},
    "NormalizedLinearAttention relu": {"num_heads": HEADS, "feature_map": "relu", "eps": 1e-6},
}


def node_of(name: str, causal: bool) -> onnx.NodeProto:
    stem = name.split()[0]
    op_type = f"Causal{stem}" if causal else stem
    names = OPERATORS[op_type].inputs
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
        graph, functions=[summary(node, OPSET)], opset_imports=imports, ir_version=10
    )
    return OnnxRuntimeEngine(model.SerializeToString(), threads=1)


SUMMARIZERS = {name: summarizer(node_of(name, False)) for name in SETTINGS}


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
@settings(max_examples=400, deadline=None)
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
    operator = OPERATORS[node.op_type]
    random = np.random.default_rng(seed)
    tokens = before + inside + after
    narrow = name == "AftConv"
    query, value = random.normal(size=(2, 1, tokens, DIM)).astype(np.float32)
    key = (random.normal(size=(1, tokens, HEADS if narrow else DIM)) * spread).astype(np.float32)
    if dominating is not None:
        key[:, dominating] += 100
    bias = []
    if name in ("AftLocal", "AftConv"):
        width = window if causal or narrow else 2 * window - 1
        bias = [random.normal(size=(HEADS if narrow else 1, width)).astype(np.float32) * 3]
    span = window_of(node, causal, bias[0] if bias else None)

    def run(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        given = [torch.from_numpy(np.asarray(x, np.float64)) for x in (query, key, value, *bias)]
        length = torch.tensor([query.shape[1]])
        return operator.reference(*given, length, **SETTINGS[name]).numpy()

    end = before + inside
    low, high = max(before - span.left, 0), min(end + span.right, tokens)
    if causal:
        high = end
    parts = []
    for first, last in ((0, low), (high, tokens)):
        if first < last and not (causal and first):
            cut = (first + last + 1) // 2  # a summary of summaries, too
            few = [
                SUMMARIZERS[name].run({"key": key[:, a:b], "value": value[:, a:b]})
                for a, b in ((first, cut), (cut, last))
                if a < b
            ]
            joined = {
                "key": np.concatenate([f["few_keys"] for f in few], 1),
                "value": np.concatenate([f["few_values"] for f in few], 1),
            }
            merged = SUMMARIZERS[name].run(joined)
            parts.append((merged["few_keys"], merged["few_values"]))
    gap = np.full((1, span.left, key.shape[2]), MASKED, np.float32)
    nothing = np.zeros((1, span.left, DIM), np.float32)
    keys = np.concatenate([*(k for k, _ in parts), gap, key[:, low:high]], 1)
    values = np.concatenate([*(v for _, v in parts), nothing, value[:, low:high]], 1)
    head = keys.shape[1] - (high - low)
    queries = np.concatenate([np.zeros((1, head, DIM), np.float32), query[:, low:high]], 1)

    expected = run(query, key, value)[:, before:end]
    found = run(queries, keys, values)[:, head + before - low :][:, :inside]
    scale = max(1.0, float(np.abs(expected).max()))
    assert np.abs(found - expected).max() <= TOLERANCES["fp32"].bound * scale


def test_few_are_few() -> None:
    key = np.ones((1, 1000, DIM), np.float32)
    for name, engine in SUMMARIZERS.items():
        narrow = key[..., :HEADS] if name == "AftConv" else key
        few = engine.run({"key": narrow, "value": key})
        assert few["few_keys"].shape[1] == (1 if name.startswith("Aft") else DIM // HEADS)


def test_operator_without_summary_is_named() -> None:
    full = onnx.helper.make_node("AftFull", ["q", "k", "v", "w", "n"], ["y"])
    with pytest.raises(NotChunkable, match="AftFull has no summary"):
        window_of(full, False, None)
    local = node_of("AftLocal", False)
    with pytest.raises(NotChunkable, match="a bias for each of 64 positions"):
        window_of(local, False, np.zeros((64, 5)))
    scaling = onnx.helper.make_node(
        "EfficientAttention", ["q", "k", "v", "n"], ["y"], normalization="scaling"
    )
    with pytest.raises(NotChunkable, match="scaling"):
        summary(scaling, OPSET)
