"""Models with outputs per token, and their runs in chunks."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiny_models
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from aftexport.bundle.bundle import CHUNKED
from aftexport.bundle.manifest import ChunkedPlan
from aftexport.capture.capture import capture
from aftexport.chunked.archive import write_chunked
from aftexport.chunked.runner import ChunkedModel
from aftexport.lowering.to_onnx import lower
from aftexport.nn import ClassifierConfig, DeltaNet
from aftexport.nn.classifier import AttentionPooling, MeanPooling
from aftexport.nn.encoder import Encoder
from aftexport.parity import TOLERANCES

Array = NDArray[np.generic]
Outputs = dict[str, Tensor]


class Encoded(nn.Module):
    """An embedding and an encoder, the base of the models here."""

    def __init__(self, mechanism: str = "aft_simple", *, causal: bool = False, **settings: object):
        super().__init__()
        torch.manual_seed(1)
        changes = {"mechanism": mechanism, "causal": causal, "depth": 2, "window": 4, **settings}
        if causal:
            changes["pooling"] = "attention"
        config = ClassifierConfig(**tiny_models.CONFIG | changes)
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.encoder = Encoder(config)
        self.build(config.dim)
        with torch.no_grad():
            for weight in self.parameters():
                weight.mul_(1.5)
        self.eval()

    def build(self, dim: int) -> None:
        self.tags = nn.Linear(dim, 9)

    def encoded(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        return self.encoder(self.embedding(input_ids), lengths)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Outputs:
        return self.outputs(self.encoded(input_ids, lengths), lengths)

    def outputs(self, x: Tensor, lengths: Tensor) -> Outputs:
        raise NotImplementedError


class Tagger(Encoded):
    """Nine labels per token."""

    def outputs(self, x: Tensor, lengths: Tensor) -> Outputs:
        return {"tags": self.tags(x)}


class TopicAndTags(Encoded):
    """Labels for the document, and for each of its tokens."""

    def build(self, dim: int) -> None:
        super().build(dim)
        self.pooling: nn.Module = MeanPooling()
        self.topic = nn.Linear(dim, 3)

    def outputs(self, x: Tensor, lengths: Tensor) -> Outputs:
        return {"topic": self.topic(self.pooling(x, lengths)), "tags": self.tags(x)}


class AttendedTopicAndTags(TopicAndTags):
    """Pools by an attention after the encoder, of which the tags see nothing."""

    def build(self, dim: int) -> None:
        super().build(dim)
        self.pooling = AttentionPooling(dim)


class Chunks:
    """A model in chunks, with the float64 model that it must equal."""

    def __init__(self, module: nn.Module, folder: Path, *, max_tokens: int | None = None) -> None:
        self.path = folder / CHUNKED
        lowered = lower(capture(module, max_tokens=max_tokens))
        self.plan: ChunkedPlan = write_chunked(self.path, lowered, precision="fp32")
        self.truth = module.double()

    def model(self, chunk_tokens: int | None = None, *, fused: bool = True) -> ChunkedModel:
        return ChunkedModel(self.path, self.plan, threads=1, chunk_tokens=chunk_tokens, fused=fused)

    def expected(self, ids: NDArray[np.int64]) -> dict[str, Array]:
        with torch.inference_mode():
            found = self.truth(torch.from_numpy(ids)[None], torch.tensor([ids.size]))
        named = {"logits": found} if isinstance(found, Tensor) else found
        return {name: value.numpy() for name, value in named.items()}

    def check(
        self, ids: NDArray[np.int64], chunk_tokens: int | None = None, *, fused: bool = True
    ) -> None:
        """Compare all outputs of a document with those of the whole document in float64."""
        found, expected = self.model(chunk_tokens, fused=fused).run(ids), self.expected(ids)
        assert found.keys() == expected.keys()
        for name, truth in expected.items():
            assert found[name].shape == truth.shape
            error = np.abs(found[name] - truth).max() / max(1.0, np.abs(truth).max())
            assert error <= TOLERANCES["fp32"].bound, name

    def check_evidence(
        self, ids: NDArray[np.int64], chunk_tokens: int, *, fused: bool = True
    ) -> None:
        """Compare the sum of the evidence with the score of the topic, and the counted parts."""
        model = self.model(chunk_tokens, fused=fused)
        parts = sum(1 for _ in model.parts(ids, evidence=True))
        assert model.count(ids.size, evidence=True) == parts + 1
        found = model.run(ids, evidence=True)
        evidence, topic = found["evidence"], found["topic"]
        assert evidence.shape == (1, ids.size)
        added = evidence.sum() + self.truth.get_parameter("topic.bias")[topic.argmax()].item()
        assert abs(added - topic.max()) <= TOLERANCES["fp32"].bound


def document(tokens: int) -> NDArray[np.int64]:
    return np.random.default_rng(tokens).integers(0, tiny_models.VOCABULARY, tokens)


@dataclass(frozen=True, kw_only=True)
class Softmax:
    """The settings of a softmax attention of ``Hybrid``, with two heads."""

    left: int = -1
    right: int = -1
    kv_heads: int = 2
    turned: int = 0  # channels of a head that are rotated by their positions
    positions: int = 512
    interleaved: bool = False
    # whether the model reads the first rows of a table, or computes them for its positions
    is_sliced: bool = False
    is_computed: bool = False
    has_sink: bool = False
    reach: int | None = None  # distances with a bias of their own
    softcap: float = 0.0


class SoftmaxLayer(nn.Module):
    """Softmax attention with projections."""

    def __init__(self, dim: int, settings: Softmax) -> None:
        super().__init__()
        self.settings = settings
        width = dim * settings.kv_heads // 2
        self.query, self.key, self.value = (nn.Linear(dim, n) for n in (dim, width, width))
        self.output = nn.Linear(dim, dim)
        self.sink = nn.Parameter(torch.randn(2)) if settings.has_sink else None
        reach = settings.reach
        self.bias = None if reach is None else nn.Parameter(torch.randn(2, 2 * reach + 1))
        pairs = torch.arange(settings.turned // 2)
        self.register_buffer("frequencies", 100.0 ** (-pairs / max(len(pairs), 1)))
        angles = torch.arange(settings.positions)[:, None] * self.frequencies
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        own = self.settings
        caches = (self.cos, self.sin) if own.turned else (None, None)
        if own.is_sliced:
            caches = (self.cos[: x.shape[1]], self.sin[: x.shape[1]])
        if own.is_computed:
            caches = self.rows(x.shape[1])
        query = self.query(x)
        if own.is_computed:  # channels in another order
            query = torch.cat((query[..., 8:], query[..., :8]), -1)
            query = query.index_select(2, torch.tensor([*range(8, 16), *range(8)]))
        attended = torch.ops.aftexport.softmax_attention(
            query, self.key(x), self.value(x), self.sink, self.bias, lengths, 2, 0.0,
            own.left, own.right, own.softcap, own.kv_heads, int(own.interleaved), None, *caches,
        )  # fmt: skip
        return x + self.output(attended[0])

    def rows(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines as models of transformers compute them."""
        places = torch.arange(tokens)[None].to(self.frequencies.dtype)
        angles = (self.frequencies[None, :, None] @ places[:, None, :]).transpose(1, 2)
        doubled, half = torch.cat((angles, angles), -1), len(self.frequencies)
        cos, sin = (
            (turned * 1.0)[..., :half].reshape(-1, half)
            for turned in (doubled.cos(), doubled.sin())
        )
        return cos, sin


class Hybrid(TopicAndTags):
    """Layers of softmax attention, and of a causal delta rule in place of None."""

    def __init__(self, *layers: Softmax | None, dim: int = 16) -> None:
        self.settings = layers
        super().__init__(depth=1, dim=dim)

    def build(self, dim: int) -> None:
        super().build(dim)
        self.layers = nn.ModuleList(
            DeltaNet(dim, 2, causal=True) if one is None else SoftmaxLayer(dim, one)
            for one in self.settings
        )

    def encoded(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, lengths)
        return x


class Marked(Hybrid):
    """The topic of the last token that is not ``PADDING``, as causal models of transformers."""

    PADDING = 3

    def __init__(self, *, is_head_first: bool = True) -> None:
        self.is_head_first = is_head_first
        causal = Softmax(left=5, right=0)
        super().__init__(causal, None, Softmax(right=0, turned=4, is_computed=True))

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Outputs:
        rows = self.encoded(input_ids, lengths)
        if self.is_head_first:
            rows = self.topic(rows)
        own = (input_ids != self.PADDING).to(torch.int32)
        last = (torch.arange(input_ids.shape[1], dtype=torch.int32) * own).argmax(-1)
        chosen = rows[torch.arange(input_ids.shape[0]), last]
        return {"topic": chosen if self.is_head_first else self.topic(chosen)}


def marked_document(tokens: int, padding: int) -> NDArray[np.int64]:
    """Return a document with a token of padding inside and ``padding`` more at its end."""
    ids = document(tokens)
    ids[ids == Marked.PADDING] += 1
    ids[tokens // 2 : tokens // 2 + 1] = Marked.PADDING
    ids[tokens - padding :] = Marked.PADDING
    return ids
