"""Each pooling in a batch, in chunks and with appended tokens, and the tokens that decide it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sampling import fewer
from torch import Tensor, nn

from aftexport.bundle.bundle import CHUNKED
from aftexport.capture.capture import capture
from aftexport.chunked.append_model import AppendModel
from aftexport.chunked.archive import write_chunked
from aftexport.chunked.opened_archive import OpenedArchive
from aftexport.chunked.runner import ChunkedModel
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.lowering.evidence import add_evidence
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.nn import AftSimple
from aftexport.nn.classifier import LogSumExpPooling, MaxPooling, TopKPooling

VOCABULARY, DIM, PLANTED = 20, 6, 19
LENGTHS = (23, 1, 0, 12, 3)

Array = NDArray[np.generic]
Definition = Callable[[Tensor], Tensor]


def equal_shares(is_chosen: Tensor) -> Tensor:
    return is_chosen / is_chosen.sum(0)


def of_maximum(x: Tensor) -> Tensor:
    return equal_shares(x == x.amax(0)) * x


def of_powers(x: Tensor) -> Tensor:
    logits = x / 0.2
    count = torch.tensor(float(len(x)))
    return 0.2 * (logits.softmax(0) * logits.logsumexp(0) - count.log() / count)


def of_largest(x: Tensor) -> Tensor:
    k = min(4, len(x))
    least = x.topk(k, 0).values[-1]
    places = k - (x > least).sum(0)
    return ((x > least) + equal_shares(x == least) * places) * x / k


POOLINGS: dict[str, tuple[Callable[[], nn.Module], Definition]] = {
    "max": (MaxPooling, of_maximum),
    "logsumexp": (lambda: LogSumExpPooling(0.2), of_powers),
    "top_k": (lambda: TopKPooling(4), of_largest),
}
"""Each pooling, and the part of each token ``[T, C]`` in the pooled channels, in float64."""


class Pooled(nn.Module):
    """Channels of tokens: half are equal for equal ids, half depend on earlier tokens.

    All are negative but those of PLANTED.
    """

    def __init__(self, pooling: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.attention = AftSimple(DIM, causal=True)
        self.pooling = pooling
        self.topic = nn.Linear(2 * DIM, 3)
        with torch.no_grad():
            self.embedding.weight.abs_().neg_().sub_(1)
            self.embedding.weight[PLANTED] = 3
            self.topic.weight.abs_()
            self.topic.bias[1] += 20  # the largest logit of every document

    def encode(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return torch.cat([x, x + 0.1 * self.attention(x, lengths).tanh()], -1)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        return {"topic": self.topic(self.pooling(self.encode(input_ids, lengths), lengths))}


@dataclass(frozen=True)
class Case:
    """A model with a pooling, in every form."""

    truth: Pooled  # in float64
    definition: Definition
    whole: OnnxRuntimeEngine
    chunked: ChunkedModel
    appending: AppendModel

    def expected(self, ids: Array) -> tuple[Array, Array]:
        """Return the logits ``[3]`` of one document, and what each token adds to the largest."""
        topic = self.truth.topic
        tokens = torch.from_numpy(ids)[None]
        with torch.no_grad():
            x = self.truth.encode(tokens, torch.tensor([len(ids)]))[0]
            added = self.definition(x) @ topic.weight.T
            logits = added.sum(0) + topic.bias
        return logits.numpy(), added[:, 1].numpy()

    def check(self, ids: Array, topic: Array, evidence: Array) -> None:
        logits, added = self.expected(ids)
        np.testing.assert_allclose(topic, logits, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(evidence, added, rtol=1e-4, atol=2e-5)


@pytest.fixture(scope="module", params=POOLINGS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    build, definition = POOLINGS[request.param]
    model = Pooled(build()).eval()
    lowered = lower(capture(model))
    path = tmp_path_factory.mktemp("pooled") / CHUNKED
    plan = write_chunked(path, lowered, precision="fp32")
    graph = ir.from_proto(lowered)
    add_evidence(graph)
    whole = OnnxRuntimeEngine(finish(ir.to_proto(graph)).SerializeToString(), threads=1)
    archive = OpenedArchive(path, threads=1, fused=True)
    return Case(
        model.double(),
        definition,
        whole,
        ChunkedModel(path, plan, threads=1),
        AppendModel(archive, plan, "the bundle"),
    )


def document(tokens: int, planted: int | None = None) -> Array:
    """Return ids with many repeats; only the ``planted`` one is PLANTED."""
    ids = np.random.default_rng(tokens).integers(0, PLANTED, tokens)
    if planted is not None:
        ids[planted] = PLANTED
    return ids


def test_batch_of_mixed_lengths(case: Case) -> None:
    """The padding is the id with the largest values, and one document has only padding."""
    ids = np.full((len(LENGTHS), max(LENGTHS)), PLANTED)
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = document(length)
    outputs = case.whole.run({"input_ids": ids, "lengths": np.array(LENGTHS)})
    for row, length in enumerate(LENGTHS):
        topic, evidence = outputs["topic"][row], outputs["evidence"][row]
        assert not evidence[length:].any()
        if length:
            case.check(ids[row, :length], topic, evidence[:length])
        else:
            np.testing.assert_allclose(topic, case.truth.topic.bias.detach(), rtol=1e-6)


@pytest.mark.parametrize("tokens", [1, 2, 300])
@pytest.mark.parametrize("chunk_tokens", [1, 2, 7, 113, 300])
def test_chunks_of_every_size(case: Case, tokens: int, chunk_tokens: int) -> None:
    ids = document(tokens)
    outputs = case.chunked.in_chunks_of(chunk_tokens).run(ids, evidence=True)
    case.check(ids, outputs["topic"][0], outputs["evidence"][0])


@pytest.mark.parametrize("chunk_tokens", [7, 300])
def test_planted_token_is_named(case: Case, chunk_tokens: int) -> None:
    for place in (0, 6, 150, 299):
        ids = document(300, place)
        outputs = case.chunked.in_chunks_of(chunk_tokens).run(ids, evidence=True)
        assert outputs["evidence"][0].argmax() == place
        whole = case.whole.run({"input_ids": ids[None], "lengths": np.array([300])})
        assert whole["evidence"][0].argmax() == place


def test_long_document_of_equal_tokens(case: Case) -> None:
    """A sum of a million powers keeps its digits, and so does the sum of the evidence."""
    ids = np.full(1_000_000, 3)
    logits, added = case.expected(ids[:1])  # each earlier token is the same
    for outputs in (
        case.whole.run({"input_ids": ids[None], "lengths": np.array([ids.size])}),
        case.chunked.in_chunks_of(8192).run(ids, evidence=True),
    ):
        np.testing.assert_allclose(outputs["topic"][0], logits, rtol=1e-5)
        total = outputs["evidence"].sum(dtype=np.float64)
        np.testing.assert_allclose(total, added.sum(), rtol=1e-5)


@given(st.lists(st.one_of(st.integers(1, 6), st.integers(40, 120)), min_size=1, max_size=5))
@settings(max_examples=fewer(12, 0.25), deadline=None)
def test_any_split_appends(case: Case, sizes: list[int]) -> None:
    ids, state, end = document(sum(sizes)), None, 0
    for size in sizes:
        outputs, state = case.appending.append(state, ids[end : end + size])
        end += size
        logits, _ = case.expected(ids[:end])
        np.testing.assert_allclose(outputs["topic"][0], logits, rtol=1e-5, atol=1e-5)
