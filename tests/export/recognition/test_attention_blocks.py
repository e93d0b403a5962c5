"""Attention in blocks of queries, for forms without an operator."""

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from tiny_models import Applied
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend

from aftexport.capture.capture import capture
from aftexport.chunked.softmaxes import count_softmax_attention
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.lowering.to_onnx import lower
from aftexport.recognition.attention.blocks import BLOCK, scan_in_blocks
from aftexport.recognition.graph.normalize import normalize
from aftexport.recognition.graph.shape_probe import probe

Form = Callable[[Tensor], Tensor]


def of_four_heads(attention: Form) -> Applied:
    """Return a model of an attention of ``[B, 4, T, 4]``."""
    return Applied(
        lambda x: attention(x.unflatten(-1, (4, 4)).transpose(1, 2)).transpose(1, 2).flatten(2),
        rows=64,
        width=16,
    )


def causal(x: Tensor) -> Tensor:
    """Four heads of queries, and two of keys."""
    return attend(x, x[:, :2], x[:, 2:], is_causal=True, enable_gqa=True)


def with_shared_queries(x: Tensor) -> Tensor:
    """One query head, the same for both heads of keys."""
    return attend(x[:, :1], x[:, :2], x[:, 2:], is_causal=True)


def dilated(x: Tensor) -> Tensor:
    """Even distances only, and a row that sees no key."""
    places = torch.arange(x.shape[2])
    mask = ((places[:, None] - places) % 2 == 0) & (places != 2)[:, None]
    return attend(x, x, x, attn_mask=mask)


def of_content(x: Tensor) -> Tensor:
    """Keys with a positive first channel, and a bias of the positions."""
    places = torch.arange(x.shape[2])
    bias = torch.sin(places.to(x.dtype))[:, None] * 0.1 + torch.zeros_like(places)
    return attend(x, x, x, attn_mask=bias.masked_fill((x[..., 0] <= 0)[:, :, None], -10.0))


def by_hand(x: Tensor) -> Tensor:
    """Weights that are masked after their softmax."""
    places = torch.arange(x.shape[2])
    weights = torch.softmax(x @ x.transpose(2, 3) / 2, -1)
    return weights.masked_fill(places > places[:, None], 0.0) @ x


FORMS = (causal, with_shared_queries, dilated, of_content, by_hand)


def in_blocks(form: Form) -> onnx.ModelProto:
    graph = normalize(lower(capture(of_four_heads(form), max_tokens=1 << 16)))
    assert scan_in_blocks(graph, probe(ir.to_proto(graph))) == 1
    return ir.to_proto(graph)


@pytest.fixture(scope="module", params=FORMS)
def blocks(request: pytest.FixtureRequest) -> tuple[Form, onnx.ModelProto]:
    return request.param, in_blocks(request.param)


@pytest.mark.parametrize("tokens", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_blocks_equal_pytorch(tokens: int, blocks: tuple[Form, onnx.ModelProto]) -> None:
    form, model = blocks
    ids = torch.randint(0, 64, (2, tokens), generator=torch.Generator().manual_seed(tokens))
    with torch.inference_mode():
        expected = of_four_heads(form)(ids).numpy()
    engine = OnnxRuntimeEngine(model.SerializeToString(), fused=False)
    (given,) = engine.run({"input_ids": ids.numpy()}).values()
    np.testing.assert_allclose(given, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", [causal, dilated])
def test_masks_of_positions_are_made_in_blocks(form: Form) -> None:
    model = in_blocks(form)
    assert count_softmax_attention(model) == 1
    run = probe(model).runs[0]
    tokens = run["input_ids"].shape[1]
    assert not any(array.shape[-2:] == (tokens, tokens) for array in run.values())
