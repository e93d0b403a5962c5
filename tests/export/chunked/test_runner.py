"""A document in chunks has the answer of the whole document."""

import gc
import io
import os
import shutil
import tracemalloc
import warnings
import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import any_case, fewer, part_of
from token_models import Chunks, Hybrid, Marked, Softmax, TopicAndTags, document, marked_document
from torch import Tensor

from aftexport.bench.benchmark import peak_mib
from aftexport.bundle.bundle import CHUNKED, Bundle
from aftexport.capture.capture import capture
from aftexport.chunked.append_model import AppendModel
from aftexport.chunked.archive import write_chunked
from aftexport.chunked.opened_archive import OpenedArchive
from aftexport.chunked.runner import ChunkedModel
from aftexport.chunked.token_flow import NotChunkable
from aftexport.errors import EngineError, InputError
from aftexport.lowering.to_onnx import lower
from aftexport.nn import AftSimple, ClassifierConfig, DocumentClassifier
from aftexport.parity import TOLERANCES
from aftexport.system.onnx_files import MODEL, MODEL_DATA

MECHANISMS = ("aft_conv", "aft_local", "aft_simple", "efficient_attention", "fastformer",
              "linear_attention")  # fmt: skip


def classifier(mechanism: str, causal: bool) -> DocumentClassifier:
    """Return a model of two layers."""
    torch.manual_seed(1)
    settings = {
        "mechanism": mechanism,
        "causal": causal,
        "depth": 2,
        "window": 4,
        "pooling": "attention" if causal else "mean",
    }
    model = DocumentClassifier(ClassifierConfig(**tiny_models.CONFIG | settings)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    return model


@pytest.fixture(
    scope="module",
    params=part_of([(m, c) for m in MECHANISMS for c in (False, True)], lambda p: (str(p), {*p})),
    ids=lambda p: f"{'causal ' if p[1] else ''}{p[0]}",
)
def chunks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chunks:
    return Chunks(classifier(*request.param), tmp_path_factory.mktemp("chunked"))


@given(
    st.one_of(st.integers(1, 40), st.integers(100, 300)),
    st.integers(1, 64),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=fewer(8, 0.12), deadline=None)
def test_any_length_runs_in_any_chunks(
    chunks: Chunks, tokens: int, chunk_tokens: int, repeated: bool, fused: bool
) -> None:
    random = np.random.default_rng(tokens)
    ids = np.full(tokens, 7) if repeated else random.integers(0, tiny_models.VOCABULARY, tokens)
    chunks.check(ids, chunk_tokens, fused=fused)


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 65, 96])
def test_at_the_edges_of_chunks(chunks: Chunks, tokens: int) -> None:
    ids = np.arange(tokens) * 37 % tiny_models.VOCABULARY
    chunks.check(ids, 32)


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize("tokens", [20, 65, 200])
def test_parts_are_counted(chunks: Chunks, tokens: int) -> None:
    model = chunks.model(32)
    stops = sum(1 for _ in model.parts(np.arange(tokens)))
    assert model.count(tokens) == stops + 1


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize("tokens", [1, 32, 65, 200])
def test_what_each_token_adds(chunks: Chunks, tokens: int) -> None:
    model, ids = chunks.truth, np.arange(tokens) * 37 % tiny_models.VOCABULARY
    assert chunks.plan.evidence == (model.config.pooling == "mean")
    if not chunks.plan.evidence:
        return
    with torch.inference_mode():
        x = model.encoder(model.embedding(torch.from_numpy(ids)[None]), torch.tensor([tokens]))
        added = x[0] @ model.head.weight.T / tokens
    chunked = chunks.model(32)
    stops = sum(1 for _ in chunked.parts(ids, evidence=True))
    assert chunked.count(tokens, evidence=True) == stops + 1
    found = chunked.run(ids, evidence=True)
    label = found["logits"].argmax()
    assert found["evidence"].shape == (1, tokens)
    bound = TOLERANCES["fp32"].bound
    assert np.abs(found["evidence"][0] - added[:, label].numpy()).max() <= bound / tokens
    total = found["evidence"].sum() + model.head.bias[label].item()
    assert total == pytest.approx(found["logits"].max(), abs=bound)


@pytest.fixture(scope="module", params=[True, False], ids=["head first", "head last"])
def marked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chunks:
    module = Marked(is_head_first=request.param)
    return Chunks(module, tmp_path_factory.mktemp("marked"), max_tokens=512)


@pytest.mark.table(keep=0.4)
@pytest.mark.parametrize(
    ("tokens", "padding"), [(1, 0), (1, 1), (31, 31), (100, 0), (300, 1), (300, 50), (300, 299)]
)
def test_marked_token_equals_whole(marked: Chunks, tokens: int, padding: int) -> None:
    """The last token that is not padding is in any chunk, or there is none."""
    marked.check(marked_document(tokens, padding), 7)


def test_choice_keeps_one_value(marked: Chunks) -> None:
    """The ids that choose a token are read again; only the delta rule keeps a second value."""
    assert [len(stage.keeps) for stage in marked.plan.stages] == [0, 1, 0, 0]
    assert set(marked.plan.pooled.values()) == {"max", "marked"}


class MeanOfTokens(torch.nn.Module):
    """Pools by a mean that knows no lengths, as other people's models do."""

    def __init__(self, keepdim: bool) -> None:
        super().__init__()
        self.keepdim = keepdim
        self.embedding = torch.nn.Embedding(tiny_models.VOCABULARY, 8)
        self.attention = AftSimple(8)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.attention(self.embedding(input_ids), lengths)
        logits = self.head(x.mean(1, keepdim=self.keepdim))
        return logits[:, 0] if self.keepdim else logits


@pytest.mark.parametrize("keepdim", [False, True])
def test_mean_of_tokens_equals_document_mean(keepdim: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = MeanOfTokens(keepdim).eval()
    chunks = Chunks(module, tmp_path)
    assert chunks.plan.evidence != keepdim
    for tokens in (1, 65, 200):
        ids = np.arange(tokens) * 37 % tiny_models.VOCABULARY
        chunks.check(ids, 32)
        if chunks.plan.evidence:
            found, expected = chunks.model(32).run(ids, evidence=True), chunks.expected(ids)
            label = expected["logits"].argmax()
            added = found["evidence"].sum() + module.head.bias[label].item()
            assert added == pytest.approx(expected["logits"].max(), abs=TOLERANCES["fp32"].bound)


class MeanOfCountedTokens(MeanOfTokens):
    """Counts the tokens by its mask."""

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.attention(self.embedding(input_ids), lengths)
        mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).unsqueeze(-1).to(x.dtype)
        return self.head((x * mask).sum(1) / mask.sum(1).clamp(min=1e-9))


def test_mean_may_divide_by_mask_sum(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = np.arange(200) * 37 % tiny_models.VOCABULARY
    Chunks(MeanOfCountedTokens(False).eval(), tmp_path).check(ids, 32)


class MeanOfLargest(MeanOfTokens):
    """Pools by the mean of the largest values of each channel, with or without rows behind."""

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.attention(self.embedding(input_ids), lengths)
        count = min(3, x.shape[1])
        if self.keepdim:
            x, count = torch.nn.functional.pad(x, (0, 0, 0, 3), value=-1e38), 3
        return self.head(x.topk(count, 1).values.mean(1))


def test_mean_of_largest_equals_document_mean(tmp_path: Path) -> None:
    """The second axis of the values that are averaged is not that of the tokens."""
    torch.manual_seed(0)
    ids = np.arange(200) * 37 % tiny_models.VOCABULARY
    Chunks(MeanOfLargest(True).eval(), tmp_path).check(ids, 2)


class WeightsByChannel(MeanOfTokens):
    """Pools each channel by a softmax of its own."""

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.attention(self.embedding(input_ids), lengths)
        return self.head((x.softmax(1) * x).sum(1))


class GatedByAShare(MeanOfTokens):
    """Multiply a number that belongs to no token by a softmax over the tokens."""

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.attention(self.embedding(input_ids), lengths)
        return self.head((x.softmax(1) * input_ids.shape[1]).sum(1))


class ComputedWeights(MeanOfTokens):
    """Fastformer with weights that are no parameters."""

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        weights = self.head.weight[:2].T * x.mean()
        y = torch.ops.aftexport.fastformer(x, x, x, weights, weights, lengths, 2)
        return self.head(y.mean(1))


@pytest.mark.parametrize(
    "module", [MeanOfLargest, WeightsByChannel, GatedByAShare, ComputedWeights]
)
def test_model_without_summary_is_refused(module: type[MeanOfTokens], tmp_path: Path) -> None:
    with pytest.raises(NotChunkable):
        write_chunked(tmp_path / CHUNKED, lower(capture(module(False))), precision="fp32")


def test_every_token_counts(chunks: Chunks) -> None:
    ids = np.arange(200) % 50
    model = chunks.model(32)
    before = model.run(ids)["logits"]
    for place in (0, 100, 199):
        changed = ids.copy()
        changed[place] = 299
        assert np.abs(model.run(changed)["logits"] - before).max() > 1e-5, place


@pytest.fixture(scope="module")
def model(bundle_folder: Path) -> ChunkedModel:
    bundle = Bundle.open(bundle_folder)
    assert bundle.manifest.chunked is not None
    return ChunkedModel(bundle_folder / CHUNKED, bundle.manifest.chunked, chunk_tokens=100)


def open_files() -> set[str]:
    folder = Path("/proc/self/fd")
    found = set()
    for link in folder.iterdir():
        try:
            found.add(str(link.readlink()))
        except OSError:
            continue  # the one that lists them
    return {name for name in found if "(deleted)" in name}


def test_run_stops_after_every_part(model: ChunkedModel) -> None:
    """The caller can give the run up after every part."""
    before = open_files()
    parts = model.parts(np.zeros(1000, np.int64))
    for _ in range(12):
        next(parts)
    assert open_files() - before, "nothing was kept of the first chunks"
    parts.close()
    gc.collect()
    assert open_files() == before


def test_empty_document_is_refused(model: ChunkedModel) -> None:
    with pytest.raises(InputError, match="no tokens"):
        model.run(np.zeros(0, np.int64))


def test_nothing_is_left_behind(model: ChunkedModel, tmp_path: Path) -> None:
    before = open_files()
    model.run(np.zeros(1000, np.int64))
    gc.collect()
    assert open_files() == before
    assert not list(tmp_path.iterdir())


def test_chunks_follow_the_budget(bundle_folder: Path) -> None:
    plan = Bundle.open(bundle_folder).manifest.chunked
    assert plan is not None
    archive = bundle_folder / CHUNKED
    small = ChunkedModel(archive, plan, memory_budget=100 * plan.token_bytes)
    large = ChunkedModel(archive, plan, memory_budget=1 << 40)
    assert small.chunk_tokens == 100
    assert large.chunk_tokens == 8192
    windowed = plan.model_copy(
        update={"stages": (plan.stages[0].model_copy(update={"left": 90, "right": 90}),)}
    )
    assert ChunkedModel(archive, windowed, memory_budget=1).chunk_tokens == 360


def test_archive_holds_both_attention_passes(bundle_folder: Path) -> None:
    with zipfile.ZipFile(bundle_folder / CHUNKED) as archive:
        assert archive.namelist() == [
            "0.reduce.onnx", "0.merge.onnx", "0.apply.onnx", "pool.onnx", "head.onnx",
            "explain.onnx",
        ]  # fmt: skip
        assert archive.testzip() is None


def test_bundle_stores_each_weight_once(bundle_folder: Path) -> None:
    models = [onnx.load(bundle_folder / MODEL, load_external_data=False)]
    with zipfile.ZipFile(bundle_folder / CHUNKED) as archive:
        models += [onnx.load_from_string(archive.read(name)) for name in archive.namelist()]
    places = defaultdict(set)
    for model in models:
        assert model.ir_version <= 9
        for weight in model.graph.initializer:
            assert len(weight.raw_data) < 1024
            if weight.data_location == onnx.TensorProto.EXTERNAL:
                place = {entry.key: entry.value for entry in weight.external_data}
                assert place["location"] == MODEL_DATA
                places[int(place["offset"]), int(place["length"])].add(id(model))
    assert max(map(len, places.values())) > 2, "graphs share weights"
    content = (bundle_folder / MODEL_DATA).read_bytes()
    assert len({content[start : start + size] for start, size in places}) == len(places)
    end = 0
    for start, size in sorted(places):
        assert start == -(-end // 4096) * 4096
        end = start + size
    assert end == len(content)


def test_model_over_message_limit_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights over 2 GiB, here over 1 MiB, are in no message."""
    monkeypatch.setattr("aftexport.system.onnx_files.MAX_MODEL_BYTES", 1 << 20)
    monkeypatch.setattr("aftexport.chunked.opened_archive._MAX_GRAPH_BYTES", 1 << 20)
    chunks = Chunks(TopicAndTags(causal=True, dim=256), tmp_path)
    assert (tmp_path / MODEL_DATA).stat().st_size > 1 << 20
    chunks.check_evidence(document(50), 20)
    chunks.check(document(50), 20)
    model = AppendModel(OpenedArchive(chunks.path, threads=1, fused=True), chunks.plan, "a bundle")
    ids = document(9)
    _, state = model.append(None, ids[:4])
    outputs, _ = model.append(state, ids[4:])
    expected = chunks.expected(ids)["topic"]
    np.testing.assert_allclose(outputs["topic"], expected, atol=1e-4)


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_replaced_bundle_keeps_its_weights(change: str, bundle_copy: Path) -> None:
    """A request ends with the bundle that it began with."""
    plan = Bundle.open(bundle_copy).manifest.chunked
    assert plan is not None
    model = ChunkedModel(bundle_copy / CHUNKED, plan, threads=1)
    before = model.run(np.arange(9))["logits"]
    data = bundle_copy / MODEL_DATA
    if change == "replaced":
        other = data.with_name("other")
        other.write_bytes(bytes(data.stat().st_size))
        other.replace(data)
    else:
        shutil.rmtree(bundle_copy)
    np.testing.assert_array_equal(model.run(np.arange(9))["logits"], before)


def test_replaced_bundle_over_limit_is_refused(
    bundle_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Bundle.open(bundle_copy).manifest.chunked
    assert plan is not None
    model = ChunkedModel(bundle_copy / CHUNKED, plan, threads=1)
    (bundle_copy / MODEL_DATA).unlink()
    monkeypatch.setattr("aftexport.system.onnx_files.MAX_MODEL_BYTES", 1000)
    with pytest.raises(EngineError, match="exceed 2 GiB, the limit without a file"):
        model.run(np.arange(9))


BAD_PLACES = {
    "offset": (str(1 << 40), "must end within"),
    "length": (str(1 << 40), "must end within"),
    "location": ("golden.safetensors", f"must be in {MODEL_DATA}"),
}


@pytest.mark.parametrize("key", BAD_PLACES)
def test_weight_elsewhere_is_refused(key: str, bundle_copy: Path) -> None:
    value, reason = BAD_PLACES[key]
    plan = Bundle.open(bundle_copy).manifest.chunked
    assert plan is not None
    with zipfile.ZipFile(bundle_copy / CHUNKED) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(bundle_copy / CHUNKED, "w") as archive:
        for name, content in members.items():
            graph = onnx.load_from_string(content)
            for weight in graph.graph.initializer:
                for entry in weight.external_data:
                    entry.value = value if entry.key == key else entry.value
            archive.writestr(name, graph.SerializeToString())
    with pytest.raises(EngineError, match=reason):
        ChunkedModel(bundle_copy / CHUNKED, plan, threads=1).run(np.arange(9))


def test_plan_pooling_absent_value_is_refused(bundle_folder: Path) -> None:
    plan = Bundle.open(bundle_folder).manifest.chunked
    assert plan is not None
    wrong = plan.model_copy(update={"pooled": {**plan.pooled, "nothing": "sum"}})
    with pytest.raises(EngineError, match="expected a pooled nothing"):
        ChunkedModel(bundle_folder / CHUNKED, wrong, threads=1).run(np.zeros(10, np.int64))


def test_archive_in_a_cycle_is_closed(bundle_copy: Path) -> None:
    plan = Bundle.open(bundle_copy).manifest.chunked
    assert plan is not None
    model = ChunkedModel(bundle_copy / CHUNKED, plan)
    readers = (o for o in gc.get_objects() if type(o) is io.BufferedReader)
    (file,) = (r for r in readers if r.name == str(bundle_copy / CHUNKED))
    cycle: list[object] = [model]
    cycle.append(cycle)
    del model
    gc.collect()  # puts the archive after its file, which is not reached through the list alone
    del file, cycle
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()
    assert not caught


def test_archive_cut_while_open_is_refused(bundle_folder: Path, tmp_path: Path) -> None:
    plan = Bundle.open(bundle_folder).manifest.chunked
    assert plan is not None
    shutil.copy(bundle_folder / MODEL_DATA, tmp_path)
    archive = Path(shutil.copy(bundle_folder / CHUNKED, tmp_path))
    model = ChunkedModel(archive, plan, threads=1)
    os.truncate(archive, 100)
    with pytest.raises(EngineError, match=CHUNKED):
        model.run(np.zeros(10, np.int64))


def test_memory_ignores_document_length(bundle_folder: Path) -> None:
    plan = Bundle.open(bundle_folder).manifest.chunked
    assert plan is not None
    model = ChunkedModel(bundle_folder / CHUNKED, plan, threads=1)
    ids = np.zeros(1_000_000, np.int64)  # 61 MiB of each value kept between layers
    peak_mib(lambda: model.run(ids[:100_000]))
    peak = peak_mib(lambda: model.run(ids))
    if peak is None:
        pytest.skip("the kernel keeps no count of the highest resident memory")
    assert peak < 24


@pytest.mark.slow
@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize(
    ("window", "head_width", "threads", "budget_mib"),
    [
        *((-1, 8, 1, 8), (10_000, 8, 1, 32), (20_000, 8, 1, 8), (1900, 8, 2, 8)),
        *((-1, 64, 2, 8), (500, 64, 1, 8), (520, 64, 1, 8), (20_000, 64, 1, 8)),
        *((-1, 256, 1, 32), (64, 256, 2, 32), (520, 256, 2, 32)),
    ],
)
def test_softmax_memory_is_the_budget(
    window: int, head_width: int, threads: int, budget_mib: int, tmp_path: Path
) -> None:
    """A document takes what is predicted for a chunk, beside the model and 3 MiB per thread."""
    module = Hybrid(Softmax(left=window, right=window), dim=2 * head_width)
    plan = write_chunked(tmp_path / CHUNKED, lower(capture(module)), precision="fp32")
    budget = budget_mib << 20
    model = ChunkedModel(tmp_path / CHUNKED, plan, threads=threads, memory_budget=budget)
    ids = np.zeros(5 * model.chunk_tokens, np.int64)
    model.run(ids[: model.chunk_tokens], outputs=["topic"])
    loading = peak_mib(lambda: model.run(ids[:100], outputs=["topic"]))
    peak = peak_mib(lambda: model.run(ids, outputs=["topic"]))
    if peak is None or loading is None:
        pytest.skip("the kernel keeps no count of the highest resident memory")
    predicted = plan.token_bytes * model.chunk_tokens
    assert predicted <= budget
    assert peak - loading < predicted / (1 << 20) + 3 * threads


def test_memory_ignores_number_of_chunks(tmp_path: Path) -> None:
    """A summary of linear attention is a matrix for each head, 64 KiB here."""
    settings = {"mechanism": "linear_attention", "dim": 128, "num_heads": 1}
    model = DocumentClassifier(ClassifierConfig(**tiny_models.CONFIG | settings))
    plan = write_chunked(tmp_path / CHUNKED, lower(capture(model)), precision="fp32")
    chunked = ChunkedModel(tmp_path / CHUNKED, plan, threads=1, chunk_tokens=4)

    def peak(chunks: int) -> int:
        tracemalloc.start()
        try:
            chunked.run(np.zeros(4 * chunks, np.int64))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(400) - peak(40) < 4 << 20  # kept, what 360 chunks have would be 110 MiB
