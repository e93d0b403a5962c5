"""Models with outputs per token, their graphs with named outputs, and their runs in chunks."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
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
from aftexport.nn import ClassifierConfig
from aftexport.nn.encoder import Encoder
from aftexport.nn.pooling import AttentionPooling, MeanPooling
from aftexport.parity import TOLERANCES

Array = NDArray[np.generic]
Outputs = Mapping[str, Tensor]


class Encoded(nn.Module):
    """An embedding and an encoder, the base of the models here."""

    names: Sequence[str] = ("logits",)

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

    def forward(self, input_ids: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.outputs(self.encoded(input_ids, lengths), lengths).values())

    def outputs(self, x: Tensor, lengths: Tensor) -> Outputs:
        raise NotImplementedError


class Tagger(Encoded):
    """Nine labels per token."""

    names = ("tags",)

    def outputs(self, x: Tensor, lengths: Tensor) -> Outputs:
        return {"tags": self.tags(x)}


class TopicAndTags(Encoded):
    """Labels for the document, and for each of its tokens."""

    names = ("topic", "tags")

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


def lowered(module: Encoded) -> onnx.ModelProto:
    """Lower a module to a graph whose outputs have the module's names."""
    model = lower(capture(module))
    for output, name in zip(list(model.graph.output), module.names, strict=True):
        _rename(model.graph, output.name, name)
    return model


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == old:
                    names[place] = new
    for value in (*graph.output, *graph.value_info):
        if value.name == old:
            value.name = new


class Chunks:
    """A model in chunks, with the float64 model that it must equal."""

    def __init__(self, module: Encoded, folder: Path) -> None:
        self.path = folder / CHUNKED
        self.plan: ChunkedPlan = write_chunked(self.path, lowered(module), precision="fp32")
        self.names = module.names
        self._truth = module.double()

    def model(self, chunk_tokens: int | None = None) -> ChunkedModel:
        return ChunkedModel(self.path, self.plan, threads=1, chunk_tokens=chunk_tokens)

    def expected(self, ids: NDArray[np.int64]) -> dict[str, Array]:
        with torch.inference_mode():
            found = self._truth(torch.from_numpy(ids)[None], torch.tensor([ids.size]))
        return {name: value.numpy() for name, value in zip(self.names, found, strict=True)}

    def check(self, ids: NDArray[np.int64], chunk_tokens: int | None = None) -> None:
        """Compare all outputs of a document with those of the whole document in float64."""
        found, expected = self.model(chunk_tokens).run(ids), self.expected(ids)
        assert found.keys() == expected.keys()
        for name, truth in expected.items():
            assert found[name].shape == truth.shape
            error = np.abs(found[name] - truth).max() / max(1.0, np.abs(truth).max())
            assert error <= TOLERANCES["fp32"].bound, name


def document(tokens: int) -> NDArray[np.int64]:
    return np.random.default_rng(tokens).integers(0, tiny_models.VOCABULARY, tokens)
