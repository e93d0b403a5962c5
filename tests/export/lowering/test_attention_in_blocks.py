"""Causal attention of long documents runs in blocks of queries and equals PyTorch's."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from aftexport.capture.capture import capture
from aftexport.chunked.softmax_attention import count_softmax_attention
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.lowering.attention_in_blocks import BLOCK
from aftexport.lowering.to_onnx import lower
from aftexport.lowering.translations import MAX_WHOLE_TOKENS


class Causal(nn.Module):
    """Causal attention of four heads of queries and two of keys."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids).unflatten(-1, (4, 4)).transpose(1, 2)
        attended = attend(x, x[:, :2], x[:, 2:], is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(2)


@pytest.fixture(scope="module")
def engine() -> OnnxRuntimeEngine:
    graph = lower(capture(Causal(), max_tokens=1 << 16))
    assert [node.op_type for node in graph.graph.node].count("Scan") == 1
    assert count_softmax_attention(graph) == 1
    return OnnxRuntimeEngine(graph.SerializeToString(), fused=False)


@pytest.mark.parametrize("tokens", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_blocks_equal_pytorch(tokens: int, engine: OnnxRuntimeEngine) -> None:
    ids = torch.randint(0, 64, (2, tokens), generator=torch.Generator().manual_seed(tokens))
    with torch.inference_mode():
        expected = Causal()(ids).numpy()
    (given,) = engine.run({"input_ids": ids.numpy()}).values()
    np.testing.assert_allclose(given, expected, atol=1e-5, rtol=1e-5)


def test_short_documents_keep_one_product() -> None:
    graph = lower(capture(Causal(), max_tokens=MAX_WHOLE_TOKENS))
    assert "Scan" not in {node.op_type for node in graph.graph.node}


class SharedQueries(nn.Module):
    """Causal attention of one query head, the same for both heads of keys."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids).unflatten(-1, (4, 4)).transpose(1, 2)
        return attend(x[:, :1], x[:, :2], x[:, 2:], is_causal=True).transpose(1, 2).flatten(2)


def test_queries_are_broadcast_to_keys() -> None:
    graph = lower(capture(SharedQueries(), max_tokens=1 << 16))
    assert "Scan" in {node.op_type for node in graph.graph.node}
    ids = torch.arange(BLOCK + 3)[None] % 64
    with torch.inference_mode():
        expected = SharedQueries()(ids).numpy()
    engine = OnnxRuntimeEngine(graph.SerializeToString(), fused=False)
    (given,) = engine.run({"input_ids": ids.numpy()}).values()
    np.testing.assert_allclose(given, expected, atol=1e-5, rtol=1e-5)
