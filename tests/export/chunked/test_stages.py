"""Recurrences, softmax attentions and biases of positions in chunks equal whole documents."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from sampling import any_case
from token_models import Chunks, Hybrid, Outputs, Softmax, TopicAndTags, document
from torch import Tensor, nn

from aftexport.bundle.manifest import ChunkedStage, KeptKeys, Recurrence
from aftexport.capture.capture import capture
from aftexport.chunked.archive import write_chunked
from aftexport.chunked.runner import ChunkedModel
from aftexport.chunked.token_flow import NotChunkable
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import EngineError
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.nn.config import RECURRENT_LAYERS
from aftexport.parity import TOLERANCES


class Recurrent(TopicAndTags):
    """A layer of one mechanism, whose tags depend much on the state."""

    def __init__(self, mechanism: str, *, causal: bool) -> None:
        super().__init__(mechanism, causal=causal, depth=1, num_heads=2, state_size=4)


@pytest.mark.table(keep=0.25, by=any_case)
@pytest.mark.parametrize("causal", [False, True], ids=["global", "causal"])
@pytest.mark.parametrize("mechanism", RECURRENT_LAYERS)
def test_layer_equals_whole_document(mechanism: str, causal: bool, tmp_path: Path) -> None:
    module = Recurrent(mechanism, causal=causal)
    chunks = Chunks(module, tmp_path)
    recurrences = [stage.recurrence for stage in chunks.plan.stages]
    assert recurrences[-1] is not None
    assert recurrences[-1].direction == ("forward" if causal else "bidirectional")
    assert chunks.plan.evidence
    for tokens, chunk_tokens in ((1, 4), (3, 1), (7, 3), (40, 9), (40, 64)):
        ids = document(tokens)
        chunks.check(ids, chunk_tokens)
        chunks.check_evidence(ids, chunk_tokens)


class Grouped(TopicAndTags):
    """A convolution, then a recurrence with a normalizer and two queries for each state."""

    def __init__(self, direction: str) -> None:
        self.direction = direction
        super().__init__(depth=1)

    def build(self, dim: int) -> None:
        super().build(2 * dim)
        self.key, self.decay = nn.Linear(dim, 4), nn.Linear(dim, 4)
        self.taps = nn.Parameter(torch.randn(4, 3))

    def first_state(self, lengths: Tensor) -> Tensor | None:
        return None

    def run(self, input_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        ops, x = torch.ops.aftexport, self.embedding(input_ids)
        first = self.first_state(lengths)
        key, _ = ops.causal_depthwise_conv(self.key(x), self.taps, None, None, lengths, "none")
        query = torch.cat((key, 2 * key), -1).exp()
        decay = nn.functional.logsigmoid(self.decay(x))
        return ops.recurrent_linear_attention(
            query, key.exp(), x, first, decay, None, lengths,
            "gated", self.direction, "sum", "channel", 4, 2, 0.0, 1e-6,
        )  # fmt: skip

    def encoded(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        return self.run(input_ids, lengths)[0]


class WithState(Grouped):
    """Adds the last state to the topic."""

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Outputs:
        x, state = self.run(input_ids, lengths)
        outputs = self.outputs(x, lengths)
        return outputs | {"topic": outputs["topic"] + state.sum((1, 2, 3))[:, None]}


class FromState(Grouped):
    """Starts in a state of ones."""

    def first_state(self, lengths: Tensor) -> Tensor:
        return torch.ones(len(lengths), 2, 2, 9, device=lengths.device)


def test_convolution_of_one_tap_has_empty_state(tmp_path: Path) -> None:
    chunks = Chunks(TopicAndTags("delta_net", depth=1, num_heads=2, conv_taps=1), tmp_path)
    assert chunks.plan.stages[0].recurrence == Recurrence(direction="forward", shape=(0, 48))
    for tokens, chunk_tokens in ((1, 4), (7, 3)):
        chunks.check(document(tokens), chunk_tokens)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_direction_with_groups_equals_whole_document(direction: str, tmp_path: Path) -> None:
    chunks = Chunks(Grouped(direction), tmp_path)
    convolution, attention = chunks.plan.stages
    assert convolution.recurrence == Recurrence(direction="forward", shape=(2, 4))
    assert attention.recurrence == Recurrence(direction=direction, shape=(2, 2, 9))
    assert attention.causal == (direction == "forward")
    for tokens, chunk_tokens in ((1, 4), (7, 3), (40, 1), (40, 9)):
        chunks.check(document(tokens), chunk_tokens)


def test_second_chunk_depends_on_first_token(tmp_path: Path) -> None:
    model = Chunks(Grouped("forward"), tmp_path).model(8)
    ids = document(40)
    changed = ids.copy()
    changed[0] = (ids[0] + 1) % 300
    difference = model.run(ids)["tags"] - model.run(changed)["tags"]
    assert (np.abs(difference[0, 8:16]).max(1) > 0).all()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (WithState, "ReduceSum .* uses the last state of a recurrence"),
        (FromState, "RecurrentLinearAttention .* gets its first state from the model"),
    ],
)
def test_state_of_the_model_is_refused(module: type[Grouped], reason: str, tmp_path: Path) -> None:
    lowered = lower(capture(module("forward")))
    with pytest.raises(NotChunkable, match=reason):
        write_chunked(tmp_path / "chunked.zip", lowered, precision="fp32")


def test_wrong_shape_of_state_is_named(tmp_path: Path) -> None:
    chunks = Chunks(Grouped("forward"), tmp_path)
    convolution, attention = chunks.plan.stages
    wrong = attention.model_copy(
        update={"recurrence": Recurrence(direction="forward", shape=(2, 2, 8))}
    )
    plan = chunks.plan.model_copy(update={"stages": (convolution, wrong)})
    with pytest.raises(EngineError, match=r"chunk_left_state|state of shape"):
        ChunkedModel(chunks.path, plan, threads=1).run(document(5))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"left": 1}, "left, right: expected 0 for a recurrence, got 1 and 0"),
        ({"causal": False}, "causal: expected true for a recurrence that is forward"),
    ],
)
def test_plan_of_recurrence_is_checked(changes: dict[str, object], reason: str) -> None:
    recurrence = {"direction": "forward", "shape": (2, 3)}
    plan = {"left": 0, "right": 0, "causal": True, "keeps": (), "recurrence": recurrence}
    ChunkedStage.model_validate(plan)
    with pytest.raises(ValueError, match=reason):
        ChunkedStage.model_validate(plan | changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"right": 2}, "left, right: expected 0 for kept keys, got 0 and 2"),
        ({"causal": True}, "causal: expected false for a window with 3 keys on the right"),
        (
            {"recurrence": {"direction": "bidirectional", "shape": (2, 3)}},
            "keys: expected none for a recurrence",
        ),
    ],
)
def test_plan_of_keys_is_checked(changes: dict[str, object], reason: str) -> None:
    keys = {"window_left": None, "window_right": 3, "width": 8}
    plan = {"left": 0, "right": 0, "causal": False, "keeps": (), "recurrence": None, "keys": keys}
    ChunkedStage.model_validate(plan)
    with pytest.raises(ValueError, match=reason):
        ChunkedStage.model_validate(plan | changes)


def test_state_larger_than_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="shape: expected at most 268435456 numbers"):
        Recurrence(direction="forward", shape=(1 << 10, 1 << 10, 1 << 10))


def test_state_of_many_axes_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 3 items"):
        Recurrence(direction="forward", shape=(1,) * 65)  # NumPy has at most 64


HYBRID = (Softmax(left=5, right=0, turned=4), None, Softmax(), Softmax(right=0, turned=8))
SOFTMAXES = {
    "window": (Softmax(left=3, right=2),),
    "wider than a chunk": (Softmax(left=30, right=0), Softmax(left=0, right=41)),
    "own token": (Softmax(left=0, right=0),),
    "full": (Softmax(),),
    "causal": (Softmax(right=0),),
    "left of it": (Softmax(left=4),),
    "grouped": (Softmax(kv_heads=1), Softmax(kv_heads=1, left=7, right=7, turned=8)),
    "sinks": (Softmax(has_sink=True), Softmax(has_sink=True, left=2, right=9)),
    "biases and caps": (Softmax(reach=3, softcap=2.0), Softmax(reach=6, left=5, right=1)),
    "rotated": (Softmax(turned=4), Softmax(turned=6, interleaved=True), Softmax(turned=2, left=3)),
    "sliced": (Softmax(turned=8, is_sliced=True), Softmax(turned=8, is_sliced=True, right=0)),
    "computed": (Softmax(turned=8, is_computed=True), Softmax(turned=4, is_computed=True, left=3)),
    "hybrid": HYBRID,
}


@pytest.mark.table(keep=0.25, by=any_case)
@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmax_equals_whole_document(name: str, tmp_path: Path) -> None:
    module = Hybrid(*SOFTMAXES[name])
    chunks = Chunks(module, tmp_path, max_tokens=512)
    chunks.check(document(100), 37, fused=False)
    for tokens, chunk_tokens in ((1, 4), (7, 1), (40, 64), (300, 37)):
        ids = document(tokens)
        chunks.check(ids, chunk_tokens)
        chunks.check_evidence(ids, chunk_tokens)


def test_softmax_plan_has_windows(tmp_path: Path) -> None:
    plan = Chunks(Hybrid(*HYBRID), tmp_path, max_tokens=512).plan
    attentions = [stage for stage in plan.stages if stage.recurrence is None]
    assert [stage.keys for stage in attentions] == [
        KeptKeys(window_left=5, window_right=0, width=32),
        KeptKeys(window_left=None, window_right=None, width=32),
        KeptKeys(window_left=None, window_right=0, width=32),
    ]
    assert [stage.causal for stage in attentions] == [True, False, True]
    assert plan.token_state_bytes == 2 * 4 * 32
    weights = 3 * 4 * 16 * 16 + (48 + 2 + 16) * 16 + 9 * 16
    # A pair of tokens costs 32 multiply-adds, half of that if causal.
    assert plan.quadratic_tokens == weights // (32 + 16)


def test_batch_equals_its_documents_in_chunks(tmp_path: Path) -> None:
    chunks = Chunks(Hybrid(*HYBRID), tmp_path, max_tokens=512)
    documents = [document(tokens) for tokens in (1, 17, 130, 64)]
    padded = np.zeros((4, 130), np.int64)
    for row, ids in zip(padded, documents, strict=True):
        row[: ids.size] = ids
    with torch.inference_mode():
        lengths = torch.tensor([ids.size for ids in documents])
        batch = chunks.truth(torch.from_numpy(padded), lengths)
    for row, ids in enumerate(documents):
        found = chunks.model(19).run(ids)
        for name, array in found.items():
            expected = batch[name][row].numpy()
            expected = expected[: ids.size] if array.ndim == 3 else expected
            error = np.abs(array[0] - expected).max() / max(1.0, np.abs(expected).max())
            assert error <= TOLERANCES["fp32"].bound


WINDOWS = (Softmax(left=64, right=64), Softmax(left=5000, right=0), Softmax(left=1, right=3000))
LONG_HYBRID = (Softmax(left=64, right=64), None, Softmax(), Softmax(right=0, kv_heads=1))


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "chunk_tokens"), [(WINDOWS, 1000), (LONG_HYBRID, 8000)])
def test_long_document_equals_whole_run(
    layers: Sequence[Softmax | None], chunk_tokens: int, tmp_path: Path
) -> None:
    module = Hybrid(*layers)
    lowered = lower(capture(module))
    chunks = Chunks(module, tmp_path)
    ids = document(65_537)
    engine = OnnxRuntimeEngine(finish(lowered).SerializeToString(), threads=2)
    whole = engine.run({"input_ids": ids[None], "lengths": np.array([ids.size])})
    found = chunks.model(chunk_tokens).run(ids)
    for name, expected in whole.items():
        error = np.abs(found[name] - expected).max() / max(1.0, np.abs(expected).max())
        assert error <= TOLERANCES["fp32"].bound, name


class Attending(TopicAndTags):
    """One attention whose call a test chooses."""

    def __init__(self, chosen: Callable[..., Tensor]) -> None:
        self.chosen = chosen
        super().__init__(depth=1)

    def encoded(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.chosen(torch.ops.aftexport.softmax_attention, x, lengths)


PLAIN = (2, 0.0, -1, -1, 0.0)


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (
            lambda attend, x, n: attend(x, x, x, None, None, n, *PLAIN, 0, 0, n)[0],
            "attends to other tokens than the document has",
        ),
        (
            lambda attend, x, n: attend(x, x, x, x.sum(1)[0, :2], None, n, *PLAIN)[0],
            "has a computed sink",
        ),
        (
            lambda attend, x, n: (lambda y, total: y * total.sum(2, keepdim=True))(
                *attend(x, x, x, None, None, n, *PLAIN)
            ),
            "the sums of an attention's weights",
        ),
    ],
)
def test_other_softmax_is_refused(
    chosen: Callable[..., Tensor], reason: str, tmp_path: Path
) -> None:
    lowered = lower(capture(Attending(chosen)))
    with pytest.raises(NotChunkable, match=reason):
        write_chunked(tmp_path / "chunked.zip", lowered, precision="fp32")


MAX_TOKENS = 64


class LearnedPositions(TopicAndTags):
    """Adds an embedding of each position; the mask counts the same positions."""

    def build(self, dim: int) -> None:
        super().build(dim)
        self.positions = nn.Embedding(MAX_TOKENS, dim)

    def encoded(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1])
        valid = (places < lengths[:, None])[..., None]
        x = self.embedding(input_ids) + self.positions(places)
        return self.encoder(x * valid, lengths)


def with_position_biases() -> TopicAndTags:
    module = TopicAndTags("aft_local", depth=1, max_length=MAX_TOKENS)
    with torch.no_grad():
        # Biases that differ by more than the tolerance.
        module.encoder.layers[0].attention.row_factor.mul_(30)
    return module


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize(
    "build", [with_position_biases, lambda: LearnedPositions("aft_simple", depth=1)]
)
def test_chunks_read_rows_of_positions(build: Callable[[], TopicAndTags], tmp_path: Path) -> None:
    module = build()
    chunks = Chunks(module, tmp_path, max_tokens=MAX_TOKENS)
    for tokens, chunk_tokens in ((1, 1), (20, 1), (40, 13), (MAX_TOKENS, 20), (MAX_TOKENS, 99)):
        ids = document(tokens)
        for fused in (True, False):
            chunks.check(ids, chunk_tokens, fused=fused)
            chunks.check_evidence(ids, chunk_tokens, fused=fused)
