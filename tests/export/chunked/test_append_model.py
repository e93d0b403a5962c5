"""Tokens appended to a document give the outputs of the whole document, at their own cost."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import any_case, fewer, part_of
from token_models import (
    Chunks,
    Encoded,
    Hybrid,
    Marked,
    Outputs,
    Softmax,
    TopicAndTags,
    document,
    marked_document,
)
from torch import Tensor, nn

from aftexport.bundle.bundle import CHUNKED
from aftexport.bundle.manifest import ChunkedStage
from aftexport.capture.capture import capture
from aftexport.chunked.append_model import AppendModel, NotAppendable
from aftexport.chunked.archive import write_chunked
from aftexport.chunked.document import FIRST_POSITION, LEFT_STATE
from aftexport.chunked.document_state import DocumentState, to_bytes
from aftexport.chunked.opened_archive import OpenedArchive
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import EngineError
from aftexport.lowering.to_onnx import lower
from aftexport.nn.classifier import AttentionPooling
from aftexport.nn.config import RECURRENT_LAYERS
from aftexport.parity import TOLERANCES
from aftexport.system.contract import LENGTHS

WINDOWED = ("aft_conv", "aft_local")
SUMMARIZED = ("aft_simple", "efficient_attention", "fastformer", "linear_attention")
KINDS = {
    **dict.fromkeys(WINDOWED, "window"),
    **dict.fromkeys(SUMMARIZED, "summaries"),
    **dict.fromkeys(RECURRENT_LAYERS, "state"),
}
MECHANISMS = part_of(list(KINDS), lambda name: (name, {KINDS[name]}), 0.25)
WINDOW = 4
SUMMARIES = ("other_keys", "other_values", "key", "value")
BOUND = TOLERANCES["fp32"].bound


class EveryPooling(Encoded):
    """A softmax, a mean, a maximum and the first token pool a document; the tokens have tags."""

    def build(self, dim: int) -> None:
        super().build(dim)
        self.attended = AttentionPooling(dim)
        self.topic = nn.Linear(dim, 3)

    def outputs(self, x: Tensor, lengths: Tensor) -> Outputs:
        valid = (torch.arange(x.shape[1]) < lengths[:, None])[..., None]
        mean = (x * valid).sum(1) / lengths[:, None]
        largest = torch.where(valid, x, -1e38).amax(1)
        return {
            "attended": self.topic(self.attended(x, lengths)),
            "mean": self.topic(mean),
            "largest": self.topic(largest),
            "first": self.topic(x[:, 0]),
            "tags": self.tags(x),
        }


class Appendable:
    """A model that appends tokens, with the float64 model that it must equal."""

    def __init__(
        self,
        module: nn.Module,
        folder: Path,
        *,
        max_run_tokens: int = 50,
        max_tokens: int | None = None,
    ) -> None:
        self._chunks = Chunks(module, folder, max_tokens=max_tokens)
        self.plan = self._chunks.plan
        archive = OpenedArchive(self._chunks.path, threads=1, fused=True)
        self.model = AppendModel(archive, self.plan, "the bundle")
        self.model.max_run_tokens = max_run_tokens

    def append(self, ids: np.ndarray, sizes: Sequence[int]) -> DocumentState:
        """Append a document in pieces, compare every answer, and return the last state."""
        state: DocumentState | None = None
        start = 0
        for size in sizes:
            end = start + size
            found, state = self.model.append(state, ids[start:end])
            assert state.tokens == end
            self.check(found, ids[:end], size)
            start = end
        assert state is not None
        return state

    def check(self, found: dict[str, np.ndarray], ids: np.ndarray, new: int) -> None:
        """Compare outputs with those of the whole document; of tokens only the new ones."""
        expected = self._chunks.expected(ids)
        assert found.keys() == expected.keys()
        for name, array in found.items():
            truth = expected[name][:, -new:] if expected[name].ndim == 3 else expected[name]
            assert array.shape == truth.shape
            error = np.abs(array - truth).max() / max(1.0, np.abs(truth).max())
            assert error <= BOUND, (name, ids.size, new)


@pytest.fixture(scope="module", params=MECHANISMS)
def appendable(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Appendable:
    settings = {"state_size": 4} if request.param in RECURRENT_LAYERS else {}
    # The others have two layers inside, or one attention as those with a window.
    depth = 2 if request.param in WINDOWED else 1
    module = EveryPooling(request.param, causal=True, window=WINDOW, depth=depth, **settings)
    return Appendable(module, tmp_path_factory.mktemp("append"))


def test_single_tokens_equal_whole_document(appendable: Appendable) -> None:
    appendable.append(document(12), [1] * 12)


@given(st.lists(st.one_of(st.integers(1, 6), st.integers(40, 120)), min_size=1, max_size=5))
@settings(max_examples=fewer(12, 0.25), deadline=None)
def test_any_split_equals_whole_document(appendable: Appendable, sizes: list[int]) -> None:
    appendable.append(document(sum(sizes)), sizes)


@pytest.fixture
def token_counts(appendable: Appendable, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the number of tokens in the inputs of each run of a graph."""
    counts: list[int] = []
    run = OnnxRuntimeEngine.run
    of_no_tokens = {LENGTHS, FIRST_POSITION, LEFT_STATE, *SUMMARIES, *appendable.plan.pooled}

    def counted(engine: OnnxRuntimeEngine, inputs: dict[str, np.ndarray], *rest: object) -> object:
        counts.extend({x.shape[1] for name, x in inputs.items() if name not in of_no_tokens})
        return run(engine, inputs, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(OnnxRuntimeEngine, "run", counted)
    return counts


def tokens_read(stage: ChunkedStage, new: int) -> int:
    """Return the number of tokens that the graphs of a stage read for ``new`` tokens."""
    if stage.recurrence is not None:
        return new
    if not stage.causal:
        return new + 1  # it is applied to the first token
    # As many tokens leave the window, and become a part of the summaries, as are new.
    return stage.left + new + new


def test_cost_is_that_of_new_tokens(appendable: Appendable, token_counts: list[int]) -> None:
    """The graphs read only the new tokens, a window before them and the first token."""
    _, state = appendable.model.append(None, document(2_000))
    token_counts.clear()
    new = 3
    appendable.model.append(state, document(new))
    of_stages = sum(tokens_read(stage, new) for stage in appendable.plan.stages)
    of_pooling, of_outputs = new + 1, new
    assert sum(token_counts) == of_stages + of_pooling + of_outputs


def test_state_size_ignores_tokens(appendable: Appendable) -> None:
    sizes = set()
    state: DocumentState | None = None
    for tokens in (400, 400, 400, 18_000):
        _, state = appendable.model.append(state, document(tokens))
        _, state = appendable.model.append(state, document(1))
        sizes.add(state.nbytes)
        assert state.nbytes <= appendable.model.reader.max_bytes
    full = [level is not None for stage in state.stages for level in stage.levels]
    assert any(full)
    width = 16 * 8 * (1 + len(appendable.plan.stages))  # a value of a token in float64, at most
    assert max(sizes) <= 3 * 16 * width


def test_branches_of_state_are_separate(appendable: Appendable) -> None:
    ids = document(20)
    _, state = appendable.model.append(None, ids[:10])
    left, _ = appendable.model.append(state, ids[10:])
    appendable.model.append(state, document(7))
    again, _ = appendable.model.append(state, ids[10:])
    for name in left:
        np.testing.assert_array_equal(left[name], again[name])


def test_state_arrays_are_read_only(appendable: Appendable) -> None:
    _, state = appendable.model.append(None, document(9))
    for _, array in state.arrays():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


WINDOWS = (Softmax(left=5, right=0, turned=4, has_sink=True), Softmax(left=0, right=0))
GROWING = (Softmax(left=5, right=0, turned=8), None, Softmax(right=0, reach=4, kv_heads=1))


@pytest.fixture(scope="module", params=[WINDOWS, GROWING], ids=["windows", "growing"])
def softmax(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Appendable:
    folder = tmp_path_factory.mktemp("softmax")
    return Appendable(Hybrid(*request.param), folder, max_run_tokens=19, max_tokens=512)


@given(st.lists(st.one_of(st.integers(1, 6), st.integers(20, 90)), min_size=1, max_size=5))
@settings(max_examples=fewer(12, 0.25), deadline=None)
def test_softmax_split_equals_whole_document(softmax: Appendable, sizes: list[int]) -> None:
    softmax.append(document(sum(sizes)), sizes)


def test_softmax_state_has_seen_keys(softmax: Appendable) -> None:
    state: DocumentState | None = None
    sizes = []
    for tokens in (1, 5, 30, 30):
        _, state = softmax.model.append(state, document(tokens))
        sizes.append(state.nbytes)
        content = to_bytes(state)
        assert len(content) <= softmax.model.reader.max_bytes
        assert to_bytes(softmax.model.reader.read(content)) == content
    assert sizes[3] - sizes[2] == 30 * softmax.plan.token_state_bytes
    assert bool(softmax.plan.token_state_bytes) == any(
        stage.keys is not None and stage.keys.window_left is None for stage in softmax.plan.stages
    )


def test_softmax_not_causal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAppendable, match=r"its attention \(stage 2 of 2\) depends on later"):
        Appendable(Hybrid(Softmax(left=3, right=0), Softmax(left=3, right=1)), tmp_path)


@pytest.fixture(scope="module", params=[True, False], ids=["head first", "head last"])
def marked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Appendable:
    module = Marked(is_head_first=request.param)
    return Appendable(module, tmp_path_factory.mktemp("marked"), max_run_tokens=19, max_tokens=512)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(0, 60))
@settings(max_examples=fewer(20, 0.25), deadline=None)
def test_marked_token_of_any_split(marked: Appendable, sizes: list[int], padding: int) -> None:
    tokens = sum(sizes)
    state = marked.append(marked_document(tokens, min(padding, tokens)), sizes)
    content = to_bytes(state)
    assert to_bytes(marked.model.reader.read(content)) == content


class SeenByTags(EveryPooling):
    """The document gates the tags, so that later tokens change those of earlier tokens."""

    def outputs(self, x: Tensor, lengths: Tensor) -> Outputs:
        topic = self.topic(self.attended(x, lengths))
        return {"topic": topic, "tags": self.tags(x * topic.sum(1)[:, None, None])}


def test_gated_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAppendable, match="outputs of earlier tokens depend on later tokens"):
        Appendable(SeenByTags("aft_simple", causal=True, depth=1), tmp_path)


def test_plan_of_another_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / CHUNKED
    module = TopicAndTags("retention", depth=1)
    plan = write_chunked(path, lower(capture(module)), precision="fp32")
    (stage,) = plan.stages
    assert stage.recurrence is not None
    forward = stage.recurrence.model_copy(update={"direction": "forward"})
    wrong = stage.model_copy(update={"recurrence": forward, "causal": True})
    archive = OpenedArchive(path, threads=1, fused=True)
    with pytest.raises(EngineError, match=r"0\.apply .* got an input chunk_right_state"):
        AppendModel(archive, plan.model_copy(update={"stages": (wrong,)}), "the bundle")


def test_position_biases_count_on(tmp_path: Path) -> None:
    """AFT-local with a bias for each pair of positions, up to its maximum length."""
    module = EveryPooling("aft_local", causal=True, window=WINDOW, max_length=64)
    with torch.no_grad():
        for layer in module.encoder.layers:
            layer.attention.row_factor.mul_(30)
    appendable = Appendable(module, tmp_path, max_run_tokens=9, max_tokens=64)
    appendable.append(document(64), [1, 1, 2, 3, 20, 1, 30, 6])


class LearnedPositions(EveryPooling):
    """Adds an embedding of each position, read by its number or as the first rows of the table."""

    by_number = True

    def build(self, dim: int) -> None:
        super().build(dim)
        self.positions = nn.Embedding(64, dim)

    def encoded(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        tokens = input_ids.shape[1]
        places = torch.arange(tokens) if self.by_number else slice(0, tokens)
        rows = self.positions(places) if self.by_number else self.positions.weight[places]
        return self.encoder(self.embedding(input_ids) + rows, lengths)


class FirstRows(LearnedPositions):
    by_number = False


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize("module", [FirstRows, LearnedPositions])
def test_learned_positions_count_on(module: type[LearnedPositions], tmp_path: Path) -> None:
    model = module("aft_conv", causal=True, window=WINDOW, depth=1)
    appendable = Appendable(model, tmp_path, max_run_tokens=9, max_tokens=64)
    appendable.append(document(64), [1, 1, 2, 3, 20, 1, 30, 6])
