"""Exports to 16 bits of models whose rare words, positions or constants exceed 16 bits."""

from io import StringIO
from pathlib import Path

import onnx
import pytest
import torch
from rich.console import Console
from token_models import Hybrid, Softmax
from torch import Tensor, nn

from aftexport.capture.capture import capture
from aftexport.capture.model_spec import InputSpec
from aftexport.errors import UsageError
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.pipeline.export import export
from aftexport.pipeline.value_ranges import MAX_FLOAT16, bounded_spec, find_unusual, long_inputs

VOCABULARY, WIDTH, HIDDEN, WORD = 3000, 8, 16, 1234
SPEC = InputSpec(("input_ids", "lengths"), VOCABULARY, None, "embedding.weight", None)


class RareWord(nn.Module):
    """A feed-forward layer with one hidden unit that only one word of ordinary norm drives."""

    def __init__(self, hidden: float = 9e4, residual: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        with torch.no_grad():
            self.embedding.weight[:, 0] = 0
            self.embedding.weight[WORD, 0] = 2
            self.up.weight[:, 0], self.up.weight[0] = 0, 0
            self.up.weight[0, 0] = hidden / 2
            self.down.weight[:, 0] = residual / hidden
            self.head.weight.mul_(1 / max(1, residual))

    def layer(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.layer(self.embedding(input_ids))
        mask = torch.arange(input_ids.shape[1]) < lengths[:, None]
        return self.head((x * mask[..., None]).sum(1) / lengths[:, None].to(x.dtype))


def residual_stream() -> nn.Module:
    return RareWord(hidden=100, residual=2e5)


class Gated(RareWord):
    """Both factors fit float16, and their product does not."""

    def __init__(self) -> None:
        super().__init__(hidden=400)

    def layer(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x) * self.up(x).relu()) * 1e-6


class AtPosition(RareWord):
    """Only the sum of the word's unit and that of one position exceeds float16."""

    def __init__(self) -> None:
        super().__init__(hidden=5e4)
        self.places = nn.Embedding(64, WIDTH)
        with torch.no_grad():
            self.places.weight.zero_()
            self.places.weight[37, 0] = 1.9

    def layer(self, x: Tensor) -> Tensor:
        return super().layer(x + self.places(torch.arange(x.shape[1])))


class Squares(RareWord):
    """A norm by hand, whose squares exceed float16."""

    def __init__(self) -> None:
        super().__init__(hidden=100, residual=900)

    def layer(self, x: Tensor) -> Tensor:
        x = super().layer(x)
        return x / (x * x).mean(-1, keepdim=True).sqrt()


def graph_of(module: nn.Module, max_tokens: int | None = None) -> onnx.ModelProto:
    lowered = lower(capture(module.eval(), dtype=torch.float16, max_tokens=max_tokens))
    return finish(lowered, fuse=False)


@pytest.mark.parametrize("make", [residual_stream, Gated, AtPosition, Squares])
def test_unusual_word_is_found(make: object) -> None:
    limit = 64 if make is AtPosition else None
    spec = InputSpec(SPEC.names, VOCABULARY, None, SPEC.embedding, limit)
    found = find_unusual(graph_of(make(), limit), spec, [], batching=True, progress=None)  # type: ignore[operator]
    assert WORD in found.ids[:8]
    assert found.beyond is not None
    assert found.beyond.token == WORD
    assert found.beyond.size > MAX_FLOAT16


def test_ordinary_model_fits() -> None:
    graph = graph_of(RareWord(hidden=6e4))
    found = find_unusual(graph, SPEC, [], batching=True, progress=None)
    assert found.beyond is None
    assert found.ids[0] == WORD


def test_large_vocabulary_is_screened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aftexport.parity.activations.MAX_PRODUCTS", VOCABULARY * 200)
    found = find_unusual(graph_of(RareWord()), SPEC, [], batching=True, progress=None)
    assert found.beyond is not None
    assert found.beyond.token == WORD


def test_infinite_weight_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = RareWord(hidden=100)
    with torch.no_grad():
        module.embedding.weight[WORD, 3] = 7e4
        module.up.weight[:, 3] *= 1e-5
    monkeypatch.setattr("builtins.rare_word", lambda: module, raising=False)
    with pytest.raises(UsageError, match=rf"70,000 .*embedding.weight.* token id {WORD}"):
        export(factory="builtins:rare_word", precision="fp16", out=tmp_path / "m.bundle")


def test_refusal_names_word_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.rare_word", RareWord, raising=False)
    options = {"factory": "builtins:rare_word", "precision": "fp16", "out": tmp_path / "m.bundle"}
    with pytest.raises(UsageError, match=f"layer up, .* token id {WORD}") as refusal:
        export(**options)  # type: ignore[arg-type]
    assert "89,984" in refusal.value.problem  # its weights have 11 bits
    assert "--precision bf16 or fp32" in refusal.value.remedy
    bundle = export(**options | {"precision": "bf16"})  # type: ignore[arg-type]
    case = next(c for c in bundle.golden() if c.name == "unusual tokens repeated")
    assert (case.inputs["input_ids"][0] == WORD).all()
    assert case.shape[1] == 1024


def test_long_documents_are_bounded_or_compared() -> None:
    graph = graph_of(RareWord())
    assert bounded_spec(graph, SPEC, None, can_compare=True) == SPEC
    inputs = long_inputs(SPEC)
    assert inputs is not None
    assert inputs["input_ids"].shape[1] > 65536
    bounded = bounded_spec(graph, SPEC, None, can_compare=False)
    assert bounded.max_tokens == MAX_FLOAT16
    assert long_inputs(bounded) is None
    with pytest.raises(UsageError, match="100000"):
        bounded_spec(graph, SPEC, 100_000, can_compare=False)


@pytest.mark.parametrize("window", [3, -1])
def test_pairs_of_tokens_are_not_compared(window: int) -> None:
    """In PyTorch even the mask of a window may have all pairs of tokens."""
    graph = graph_of(Hybrid(Softmax(left=window, right=window)))
    assert bounded_spec(graph, SPEC, None, can_compare=True).max_tokens == MAX_FLOAT16


def test_bound_of_float16_is_not_the_models(tmp_path: Path) -> None:
    program = capture(RareWord(hidden=10).eval(), dtype=torch.float16, max_tokens=None)
    torch.export.save(program, tmp_path / "m.pt2")
    console = Console(file=StringIO(), width=300)
    bundle = export(tmp_path / "m.pt2", console=console)
    assert bundle.manifest.max_tokens == MAX_FLOAT16
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "more than 65504 tokens were not compared" in text
    assert "limit of the model" not in text
