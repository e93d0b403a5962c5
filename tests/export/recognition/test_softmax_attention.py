"""Softmax attention in graphs of other people's modules, and what only looks like it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from sampling import any_case
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.lowering.to_onnx import lower
from aftexport.nn import DotProductAttention, GatedDeltaNet
from aftexport.operators.domain import operators_in
from aftexport.operators.portable_bodies import attach_bodies
from aftexport.pipeline.export import export
from aftexport.recognition.graph.normalize import normalize
from aftexport.recognition.recognizer import recognize
from aftexport.recognition.result import Recognition
from aftexport.system.contract import MAX_TOKENS

pytestmark = pytest.mark.filterwarnings("ignore")
HEADS, WIDTH = 4, 8
DIM = HEADS * WIDTH
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of queries, keys and values ``[B, H, T, d]``, and lengths."""


class Layer(nn.Module):
    """Attention between projections, and a projection of the result."""

    def __init__(self, attention: Attend, *, key_heads: int = HEADS) -> None:
        super().__init__()
        self.attention = attention
        self.query = nn.Linear(DIM, DIM)
        self.key, self.value = (nn.Linear(DIM, key_heads * WIDTH) for _ in range(2))
        self.output = nn.Linear(DIM, DIM)

    def forward(self, input_features: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = (
            layer(input_features).unflatten(2, (-1, WIDTH)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.output(self.attention(q, k, v, lengths).transpose(1, 2).flatten(2))


class OneProduct(nn.Module):
    """One weight for query, key and value, in heads as GPT-NeoX or in thirds as ModernBERT."""

    def __init__(self, *, in_heads: bool) -> None:
        super().__init__()
        self.in_heads = in_heads
        self.weight = nn.Linear(DIM, 3 * DIM)

    def forward(self, input_features: Tensor, lengths: Tensor) -> Tensor:
        sizes = (HEADS, 3, WIDTH) if self.in_heads else (3, HEADS, WIDTH)
        parts = self.weight(input_features).unflatten(2, sizes)
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(3 if self.in_heads else 2))
        return padded(q, k, v, lengths).transpose(1, 2).flatten(2)


class JoinedRows(Layer):
    """Documents and tokens are joined after the attention, as in GPT-2."""

    def forward(self, input_features: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = (
            layer(input_features).unflatten(2, (-1, WIDTH)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        rows = self.attention(q, k, v, lengths).transpose(1, 2).reshape(-1, DIM)
        return self.output(rows).reshape(input_features.shape)


def graph_of(module: nn.Module) -> onnx.ModelProto:
    tokens = torch.export.Dim("tokens", max=MAX_TOKENS)
    batch = torch.export.Dim("batch", max=64)
    program = torch.export.export(
        module.eval(),
        (torch.randn(2, 6, DIM), torch.tensor([6, 3])),
        dynamic_shapes=({0: batch, 1: tokens}, {0: batch}),
    )
    return lower(program)


def searched(module: nn.Module) -> tuple[Recognition, onnx.ModelProto]:
    graph = normalize(graph_of(module))
    found = recognize(graph)
    return found, ir.to_proto(graph)


def assert_equal(module: nn.Module, model: onnx.ModelProto) -> None:
    """Compare the tokens of documents, with the kernels and without them."""
    for kernels in (False, True):
        engine = OnnxRuntimeEngine(attach_bodies(model).SerializeToString(), fused=kernels)
        for tokens in (1, 2, 127, 129, 300):
            x = torch.randn(3, tokens, DIM, generator=torch.Generator().manual_seed(tokens))
            lengths = torch.tensor([tokens, max(tokens // 2, 1), 1])
            feeds = {"input_features": x.numpy(), "lengths": lengths.numpy()}
            (given,) = engine.run({name: feeds[name] for name in engine.input_names}).values()
            with torch.inference_mode():
                expected = module.double()(x.double(), lengths).numpy()
            module.float()
            counted = np.arange(tokens) < lengths.numpy()[:, None]
            np.testing.assert_allclose(given[counted], expected[counted], atol=2e-5)


def counted_keys(k: Tensor, lengths: Tensor) -> Tensor:
    return (torch.arange(k.shape[2]) < lengths[:, None])[:, None, None]


def distance(k: Tensor) -> Tensor:
    places = torch.arange(k.shape[2])
    return places - places[:, None]


def padded(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return attend(q, k, v, attn_mask=counted_keys(k, lengths))


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, low: float = -math.inf, bias: Any = 0
) -> Tensor:
    scores = q @ k.transpose(2, 3) / math.sqrt(WIDTH) + bias
    return torch.softmax(scores.masked_fill(~mask, low), -1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return by_hand(q, k, v, distance(k) <= 0)


def causal_of_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    low = torch.finfo(q.dtype).min
    return by_hand(q, k, v, counted_keys(k, lengths) & (distance(k) <= 0), low)


def added_mask(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    low = torch.finfo(torch.float32).min
    mask = (1 - counted_keys(k, lengths).to(q.dtype)) * low
    return torch.softmax(q @ k.transpose(2, 3) / math.sqrt(WIDTH) + mask, -1) @ v


def small_added_mask(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    mask = (1 - counted_keys(k, lengths).to(q.dtype)) * -10000.0
    return torch.softmax((q / math.sqrt(WIDTH)) @ k.transpose(2, 3) + mask, -1) @ v


def window(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return by_hand(q, k, v, counted_keys(k, lengths) & (distance(k).abs() <= 20))


def uneven_window(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    inside = (distance(k) >= -40) & (distance(k) < 3)
    return by_hand(q, k, v, inside & counted_keys(k, lengths))


def causal_window(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return by_hand(q, k, v, (distance(k) <= 0) & (distance(k) > -64))


def of_joined_heads(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Documents and heads are one axis, and the mask has both."""
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q / math.sqrt(WIDTH), k, v))
    scores = torch.bmm(flat_q, flat_k.transpose(1, 2)).reshape(-1, HEADS, q.shape[2], k.shape[2])
    scores = scores.masked_fill(~counted_keys(k, lengths), torch.finfo(torch.float32).min)
    weights = torch.softmax(scores.flatten(0, 1), -1)
    return torch.bmm(weights, flat_v).reshape(-1, HEADS, q.shape[2], WIDTH)


def grouped(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for x in (k, v))
    return padded(q, k, v, lengths)


def capped(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    scores = 5.0 * torch.tanh(q @ k.transpose(2, 3) * 0.7 / 5.0)
    scores = scores.masked_fill(~counted_keys(k, lengths), -math.inf)
    return torch.softmax(scores, -1) @ v


def with_sinks(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3) * 0.3
    scores = scores.masked_fill(~(counted_keys(k, lengths) & (distance(k) <= 0)), -1e38)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]).to(q).reshape(1, -1, 1, 1)
    both = torch.cat([scores, sinks.expand(q.shape[0], -1, q.shape[2], -1)], -1)
    both = both - both.max(-1, keepdim=True).values
    return torch.softmax(both, -1)[..., :-1] @ v


def buckets(k: Tensor) -> Tensor:
    """Return the buckets of T5 for both directions: 8 exact ones and 8 up to 64 on each side."""
    places = distance(k)
    far = places.abs()
    grown = 8 + (torch.log(far.clamp(min=1).float() / 8) / math.log(8) * 8).to(torch.int64)
    return (places > 0) * 16 + torch.where(far < 8, far, grown.clamp(max=15))


TABLE = torch.randn(32, HEADS, generator=torch.Generator().manual_seed(1))


def biased(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    bias = TABLE.to(q)[buckets(k)].permute(2, 0, 1)[None]
    mask = (~counted_keys(k, lengths)).to(q.dtype) * torch.finfo(torch.float32).min
    return torch.softmax(q @ k.transpose(2, 3) + (bias + mask), -1) @ v


def tables(k: Tensor, width: int, *, twice: bool) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``[1, T, width]``, or half as wide."""
    rates = 0.3 ** torch.arange(width // 2)
    angles = torch.arange(k.shape[2])[None, :, None].to(k) * rates.to(k)
    angles = torch.cat([angles, angles], -1) if twice else angles
    return angles.cos()[:, None], angles.sin()[:, None]


def in_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def in_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)


def rotary(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    cos, sin = tables(k, WIDTH, twice=True)
    return padded(in_halves(q, cos, sin), in_halves(k, cos, sin), v, lengths)


def rotary_of_a_part(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    cos, sin = tables(k, 4, twice=True)
    q, k = (torch.cat([in_halves(x[..., :4], cos, sin), x[..., 4:]], -1) for x in (q, k))
    return causal_window(q, k, v, lengths)


def rotary_in_pairs(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    cos, sin = tables(k, WIDTH, twice=False)
    return grouped(in_pairs(q, cos, sin), in_pairs(k, cos, sin), v, lengths)


def rotary_after_norms(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, WIDTH).to(q)
    q, k = (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight for x in (q, k))
    return rotary(q, k, v, lengths)


def rotary_of_queries(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return padded(in_halves(q, *tables(k, WIDTH, twice=True)), k, v, lengths)


def rotary_of_documents(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Positions from the end of each document."""
    places = torch.arange(k.shape[2]) - lengths[:, None]
    angles = places[:, None, :, None].to(k) * (0.3 ** torch.arange(WIDTH // 2)).repeat(2).to(k)
    cos, sin = angles.cos(), angles.sin()
    return padded(in_halves(q, cos, sin), in_halves(k, cos, sin), v, lengths)


ROTARY = {
    "rotary": (Layer(rotary), 0),
    "rotary of a part": (Layer(rotary_of_a_part), 0),
    "rotary in pairs": (Layer(rotary_in_pairs, key_heads=2), 1),
    "rotary after norms": (Layer(rotary_after_norms), 0),
}
EXPLICIT = (rotary_of_queries, rotary_of_documents)
FORMS: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "padded": (Layer(padded), {}),
    "no mask": (Layer(lambda q, k, v, _: attend(q, k, v)), {}),
    "causal": (Layer(causal), {"window_right": 0}),
    "causal, lengths": (Layer(causal_of_lengths), {"window_right": 0}),
    "added mask": (Layer(added_mask), {}),
    "small added mask": (Layer(small_added_mask), {}),
    "window": (Layer(window), {"window_left": 20, "window_right": 20}),
    "uneven window": (Layer(uneven_window), {"window_left": 40, "window_right": 2}),
    "causal window": (Layer(causal_window), {"window_left": 63, "window_right": 0}),
    "joined heads": (Layer(of_joined_heads), {}),
    "joined rows": (JoinedRows(padded), {}),
    "grouped": (Layer(grouped, key_heads=2), {"kv_num_heads": 2}),
    "capped": (Layer(capped), {"softcap": 5.0, "scale": 0.7}),
    "sinks": (Layer(with_sinks), {"window_right": 0}),
    "bias": (Layer(biased), {}),
    "one product": (OneProduct(in_heads=False), {}),
    "one product in heads": (OneProduct(in_heads=True), {}),
}


@pytest.mark.table(keep=0.3, by=any_case)
@pytest.mark.parametrize("name", FORMS)
def test_forms_are_recognized(name: str) -> None:
    module, attributes = FORMS[name]
    found, model = searched(module)
    assert [match.operator for match in found.matches] == ["SoftmaxAttention"], found.near_misses
    assert not found.near_misses
    given = found.matches[0].attributes
    for key in ("window_left", "window_right", "softcap", "kv_num_heads"):
        assert given.get(key) == attributes.get(key)
    assert given["scale"] == pytest.approx(attributes.get("scale", given["scale"]))
    assert "Softmax" not in {node.op_type for node in model.graph.node}
    assert_equal(module, model)


def window_of_torch(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    inside = counted_keys(k, lengths) & (distance(k).abs() <= 20)
    return attend(q, k, v, attn_mask=inside)


class Hybrid(nn.Module):
    """A window, a delta rule, and full attention, with rotary positions and of our own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                Layer(window_of_torch),
                GatedDeltaNet(DIM, HEADS, causal=True),
                Layer(rotary),
                DotProductAttention(DIM, HEADS, causal=True),
            ]
        )

    def forward(self, input_features: Tensor, lengths: Tensor) -> Tensor:
        x = input_features
        for layer in self.layers:
            x = x + layer(x, lengths)
        return x


def test_hybrids_are_recognized_too() -> None:
    module = Hybrid()
    found, model = searched(module)
    counts = operators_in(model)
    assert not found.near_misses
    assert (counts["SoftmaxAttention"], counts["RecurrentLinearAttention"]) == (3, 1)
    # The third is a layer of aftexport, which calls the operator.
    assert [match.attributes.get("window_right") for match in found.matches] == [20, None]
    assert_equal(module, model)


@pytest.mark.parametrize("name", ROTARY)
def test_rotations_are_absorbed(name: str) -> None:
    module, interleaved = ROTARY[name]
    found, model = searched(module)
    (match,) = found.matches
    assert match.attributes["interleaved"] == interleaved
    kinds = {node.op_type for node in model.graph.node}
    assert not kinds & {"Neg", "Softmax", "Expand"}
    assert ("Transpose" in kinds) == (name == "rotary after norms")  # these read heads first
    assert_equal(module, model)


@pytest.mark.parametrize("attention", EXPLICIT)
def test_other_rotations_stay(attention: Attend) -> None:
    module = Layer(attention)
    found, model = searched(module)
    (match,) = found.matches
    assert "interleaved" not in match.attributes
    assert_equal(module, model)


@pytest.mark.parametrize("name", ["padded", "grouped", "one product"])
def test_operands_need_no_transpose(name: str) -> None:
    _, model = searched(FORMS[name][0])
    kinds = {node.op_type for node in model.graph.node}
    assert not kinds & {"Transpose", "Reshape", "Gather", "Expand"}


def of_content(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return by_hand(q, k, v, (k[..., 0] > -9)[:, :, None])


def dilated(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return by_hand(q, k, v, distance(k) % 2 == 0)


def in_blocks(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    block = torch.arange(k.shape[2]) // 50
    return by_hand(q, k, v, block == block[:, None])


def window_of_batch(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    reach = torch.arange(lengths.shape[0])[:, None, None, None] + 2
    return by_hand(q, k, v, distance(k).abs() <= reach)


def window_of_length(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return by_hand(q, k, v, distance(k).abs() * 2 <= lengths[:, None, None, None])


def with_a_hole(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return by_hand(q, k, v, (torch.arange(k.shape[2]) != 70) & counted_keys(k, lengths))


def window_of_heads(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    reach = torch.tensor([2, 3, 5, 9])[:, None, None]
    return by_hand(q, k, v, (distance(k).abs() <= reach)[None])


def global_and_window(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return by_hand(q, k, v, (distance(k).abs() <= 20) | (torch.arange(k.shape[2]) == 0))


def too_wide(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return by_hand(q, k, v, distance(k).abs() <= 9000)


def of_other_keys(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return by_hand(q, k, v, torch.arange(k.shape[2]) < lengths[:, None, None, None] - 1, -1e38)


def unbounded_bias(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return by_hand(q, k, v, counted_keys(k, lengths), bias=-0.1 * distance(k).abs())


def of_positions(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    places = torch.arange(k.shape[2]).to(q)
    bias = 0.01 * torch.sin(places)[:, None] * torch.cos(places)
    return by_hand(q, k, v, counted_keys(k, lengths), bias=bias)


def with_scores_added(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    more = (q.sum(-1, keepdim=True) * torch.cos(distance(k).to(q))) * 0.1
    return by_hand(q, k, v, counted_keys(k, lengths), bias=more)


def masked_weights(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.transpose(2, 3), -1)
    return weights.masked_fill(~counted_keys(k, lengths), 0.0) @ v


LOOK_ALIKES: dict[str, tuple[Attend, str]] = {
    "content": (of_content, "depends on the inputs"),
    "dilated": (dilated, "hides other keys"),
    "blocks": (in_blocks, "hides other keys"),
    "window of batch": (window_of_batch, "hides other keys"),
    "window of length": (window_of_length, "hides other keys"),
    "hole": (with_a_hole, "hides other keys"),
    "window of heads": (window_of_heads, "differs between heads"),
    "global and window": (global_and_window, "hides other keys"),
    "too wide": (too_wide, "has the number 9000"),
    "other keys": (of_other_keys, "hides other keys"),
    "unbounded bias": (unbounded_bias, "has no bound"),
    "bias of positions": (of_positions, "more than head and distance"),
    "scores added": (with_scores_added, "depends on the inputs"),
    "masked weights": (masked_weights, "pairs of query and key"),
}


@pytest.mark.table(keep=0.3, by=any_case)
@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_stay(name: str) -> None:
    attention, reason = LOOK_ALIKES[name]
    found, model = searched(Layer(attention))
    assert not found.matches
    assert "Softmax" in {node.op_type for node in model.graph.node}
    (miss,) = found.near_misses
    assert reason in miss.reason


SIZES = {"vocab_size": 300, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
MARKS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
FOLDERS = {
    "Bert": ({"num_hidden_layers": 2, "max_position_embeddings": 520}, 2),
    "ModernBert": (
        MARKS
        | {"num_hidden_layers": 4, "local_attention": 16, "cls_token_id": 2, "sep_token_id": 3},
        4,
    ),
}


@pytest.mark.slow
@pytest.mark.table(keep=0.4, by=any_case)
@pytest.mark.parametrize("family", FOLDERS)
def test_folders_equal_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    entries, layers = FOLDERS[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **entries)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    model.save_pretrained(tmp_path / "model")
    file = export(tmp_path / "model").path / "model.onnx"
    counts = operators_in(onnx.load(file))
    assert counts["SoftmaxAttention"] == layers
    engine = OnnxRuntimeEngine(file)
    model.double()
    for tokens in (1, 2, 127, 128, 129, 513):
        lengths = np.array([tokens, (tokens + 1) // 2, 1])
        ids = np.random.default_rng(tokens).integers(5, 300, (3, tokens))
        counted = np.arange(tokens) < lengths[:, None]
        (given,) = engine.run({"input_ids": np.where(counted, ids, 7), "lengths": lengths}).values()
        with torch.inference_mode():
            expected = model(
                input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(counted).long()
            ).logits.numpy()
        np.testing.assert_allclose(given, expected, atol=2e-5, err_msg=str(tokens))
