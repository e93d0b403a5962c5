"""Loops over tokens in models of transformers, and in code like that of fla, become operators."""

import threading
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import naive_linear_attention as naive
import pytest
import recurrent_models as models
import torch
from families.table import BY_TITLE, VOCABULARY
from tiny_models import Applied
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_5 import Qwen3_5TextConfig, modeling_qwen3_5

from aftexport.capture.capture import capture, prepared
from aftexport.capture.module_translations import CAUSAL_MASK, GATED_DELTA_RULE, translate_functions
from aftexport.checkpoint.transformers_class import LOGITS, VECTORS, TransformersModel
from aftexport.errors import TraceError

OPERATORS = {
    torch.ops.aftexport.recurrent_linear_attention.default,
    torch.ops.aftexport.causal_depthwise_conv.default,
}
TOKENS = (1, 2, 63, 64, 65, 130)
"""Lengths below, at and above the chunk of 64 tokens."""


def expect_equal(
    program: ExportedProgram,
    model: nn.Module,
    vocabulary: int,
    operators: Collection[Any] = OPERATORS,
) -> None:
    """Compare a program with its model in batches of a whole, a half and a shorter document."""
    assert {node.target for node in program.graph.nodes} >= set(operators)
    captured = program.module()
    generator = torch.Generator().manual_seed(0)
    for tokens in TOKENS:
        lengths = torch.tensor([tokens, (tokens + 1) // 2, max(1, tokens - 1)])
        ids = torch.randint(1, vocabulary, (3, tokens), generator=generator)
        mask = (torch.arange(tokens) < lengths.unsqueeze(1)).long()
        second = lengths if isinstance(model, naive.NaiveClassifier) else mask
        with torch.inference_mode():
            given, expected = captured(ids * mask, lengths), model(ids * mask, second)
        if given.dim() == 3:  # rows of tokens, where those of padding have no meaning
            given, expected = (x[mask.bool()] for x in (given, expected))
        torch.testing.assert_close(given, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", models.BUILDERS)
def test_models_equal_pytorch(name: str) -> None:
    model = models.build(name)
    expect_equal(capture(model), model, models.VOCABULARY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "operators"),
    [
        ("LFM2", {torch.ops.aftexport.causal_depthwise_conv.default}),
        ("MiniMax", {torch.ops.aftexport.recurrent_linear_attention.default}),
        ("Mixtral", ()),
        ("T5", ()),
    ],
)
def test_families_equal_transformers(title: str, operators: Collection[Any]) -> None:
    """A gated convolution, a decay of each head, and experts, beside softmax attention."""
    family = BY_TITLE[title]
    output = VECTORS if family.head == "Model" else LOGITS
    model = TransformersModel(family.build(), output)
    expect_equal(capture(model), model, VOCABULARY, operators)


@pytest.mark.slow
def test_big_bird_equals_each_document() -> None:
    """Documents have the blocks of their own length, whatever the padding of the batch."""
    model = TransformersModel(BY_TITLE["BigBird"].build(), LOGITS)
    captured = capture(model).module()
    generator = torch.Generator().manual_seed(0)
    for lengths in ((1, 5), (705, 704), (1_500, 768, 300), (1_024,), (4_096,)):
        ids = torch.randint(5, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
        with torch.inference_mode():
            given = captured(ids, torch.tensor(lengths))
            each = [model(ids[i : i + 1, :n]) for i, n in enumerate(lengths)]
        torch.testing.assert_close(given, torch.cat(each), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification"])
def test_longformer_equals_transformers(head: str) -> None:
    """A classifier of documents has a global token; one of tokens has windows only."""
    model = TransformersModel(replace(BY_TITLE["Longformer"], head=head).build(), LOGITS)
    captured = capture(model).module()
    generator = torch.Generator().manual_seed(0)
    for lengths in ((1,), (2, 1), (31, 33, 64), (130, 129, 65), (513, 1)):
        ids = torch.randint(5, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
        with torch.inference_mode():
            given = captured(ids, torch.tensor(lengths))
            for row, tokens in enumerate(lengths):
                expected = model(ids[row : row + 1, :tokens], None)[0]
                own = given[row, :tokens] if expected.dim() == 2 else given[row]
                torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", naive.ATTENTIONS)
def test_naive_loops_equal_pytorch(name: str) -> None:
    model = naive.build(name)
    expect_equal(capture(model), model, naive.VOCABULARY)


def test_groups_of_values_equal_pytorch() -> None:
    """Two heads of values share a head of keys; the state goes on from an initial one."""
    torch.manual_seed(0)
    query, key = (torch.randn(2, 70, 2, 8) for _ in range(2))
    value, state = torch.randn(2, 70, 4, 8), torch.randn(2, 4, 8, 8)
    g, beta = -torch.rand(2, 70, 4), torch.rand(2, 70, 4)
    settings = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    own = modeling_qwen3_5.torch_chunk_gated_delta_rule
    expected = own(query, key, value, g=g, beta=beta, **settings)
    given = GATED_DELTA_RULE.replacement(query, key, value, g=g, beta=beta, **settings)
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-4)


def test_other_threads_run_the_library() -> None:
    model = models.build("mamba2")
    own = modeling_mamba2.mamba2_chunk_scan
    arguments = (
        torch.randn(1, 5, 4, 8), torch.rand(1, 5, 4), -torch.rand(4),
        torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8), 4,
    )  # fmt: skip
    operators: list[bool] = []

    def run() -> None:
        with torch.profiler.profile() as profile:
            modeling_mamba2.mamba2_chunk_scan(*arguments)
        names = {event.key for event in profile.key_averages()}
        operators.append("aftexport::recurrent_linear_attention" in names)

    with translate_functions(model):
        assert modeling_mamba2.mamba2_chunk_scan is not own
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        run()
    assert operators == [False, True]
    assert modeling_mamba2.mamba2_chunk_scan is own


def test_functions_return_after_failure() -> None:
    own = modeling_mamba2.mamba2_chunk_scan
    with pytest.raises(ZeroDivisionError), translate_functions(models.build("mamba2")):
        raise ZeroDivisionError
    assert modeling_mamba2.mamba2_chunk_scan is own


def test_required_mask_stays() -> None:
    """Qwen4 lays another mask over the causal one, so it needs the tensor."""
    config = Qwen3_5TextConfig(attn_implementation="sdpa")
    embeddings = torch.zeros(1, 3, 4)
    make = CAUSAL_MASK.replacement
    assert make(config, embeddings, None, cache=None) is None
    mask = make(config, embeddings, None, cache=None, allow_is_causal_skip=False)
    assert mask.shape == (1, 1, 3, 3)


def test_text_has_one_grid_of_positions() -> None:
    """Positions of images differ between the grids, and keep the tables of the library."""
    rotary = modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(head_dim=32))
    x = torch.zeros(2, 7, 4)
    text = torch.arange(7).view(1, 1, -1).expand(4, 2, -1)[1:]
    images = torch.randint(0, 9, (3, 2, 7), generator=torch.Generator().manual_seed(0))
    own = [rotary(x, positions) for positions in (text, images, images[:1])]
    with translate_functions(rotary):
        given = [rotary(x, positions) for positions in (text, images, images[:1])]
    assert [tables[0].shape[0] for tables in given] == [1, 2, 2]
    for ours, expected in zip(given, own, strict=True):
        for table, truth in zip(ours, expected, strict=True):
            assert torch.equal(table.expand_as(truth), truth)


def test_cache_is_off_in_a_copy() -> None:
    """The capture runs without a cache, and the model of the user keeps its own."""
    model = models.build("mamba2")
    assert not prepared(model, torch.float32, ("input_ids", "lengths")).module.body.config.use_cache
    assert model.body.config.use_cache


def test_unknown_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aftexport.capture.module_translations.version", lambda _: "6.1.0")
    with pytest.raises(TraceError, match=r"Expected mamba2_chunk_scan of transformers 5\.16 to"):
        capture(models.build("mamba2"))


@pytest.mark.parametrize("title", ["Mamba", "RWKV"])
def test_other_recurrence_is_refused(title: str) -> None:
    with pytest.raises(TraceError, match=r"Expected a recurrence .*modeling_\w+\), whose") as error:
        capture(TransformersModel(BY_TITLE[title].build(), VECTORS))
    assert "docs/models.md" in error.value.remedy


def test_other_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def mamba2_chunk_scan(x: Tensor) -> Tensor:
        return x

    mamba2_chunk_scan.__module__ = modeling_mamba2.__name__
    monkeypatch.setattr(modeling_mamba2, "mamba2_chunk_scan", mamba2_chunk_scan)
    with pytest.raises(TraceError, match=r"Install transformers 5\.24"):
        capture(models.build("mamba2"))


def test_remedy_names_the_function() -> None:
    def loop(x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            state = state * 0.9 + x[:, t]
        return state

    with pytest.raises(TraceError, match=r"nn\.functional\.recurrent_linear_attention"):
        capture(Applied(loop))
