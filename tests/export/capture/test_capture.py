import inspect
import math
import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from torch import Tensor, nn
from torch.fx.experimental import _config
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aftexport.capture.capture import capture, copied
from aftexport.capture.input_spec import input_spec
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import TraceError
from aftexport.lowering.to_onnx import lower
from aftexport.nn import DocumentClassifier
from aftexport.passes.finish import finish


def test_spec_describes_inputs(classifier: DocumentClassifier) -> None:
    spec = input_spec(capture(classifier))
    assert spec.names == ("input_ids", "lengths")
    assert (spec.vocab_size, spec.embedding, spec.max_tokens) == (300, "embedding.weight", None)


def test_capture_leaves_module_unchanged() -> None:
    module = tiny_models.Dropout().train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    capture(module, dtype=torch.float16)
    assert module.training
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name])


def test_module_keeping_results_is_captured() -> None:
    module = tiny_models.Bag()
    module.kept = module.head.weight * 2
    module.register_buffer("scale", module.head.weight.norm())
    assert input_spec(capture(module)).names == ("input_ids",)
    assert module.kept.requires_grad
    copied(module).kept.zero_()
    assert module.kept.any()


def test_uncopyable_module_is_refused() -> None:
    module = tiny_models.Bag()
    module.lock = threading.Lock()
    with pytest.raises(TraceError, match=r"copied: .*lock"):
        capture(module)


class EachDocument(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        means = self.mean(input_ids)
        return torch.stack([self.head(means[i]) for i in range(input_ids.shape[0])])


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (tiny_models.ShapeBranch, "capture"),
        (tiny_models.ValueBranch, "capture"),
        (EachDocument, r"only where Eq\(batch, 2\)"),
        (tiny_models.OtherArguments, r"forward that takes .*\(tokens, mask\)"),
    ],
)
def test_module_without_single_graph_is_refused(factory: type[torch.nn.Module], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        capture(factory())


class ByNumpy(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.from_numpy(self.mean(input_ids).detach().numpy()))


class Broken(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head({}[len(input_ids.shape)])


class InAnObject(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.head(self.mean(input_ids)))


class Quarters(tiny_models.Bag):
    """Cut every second token into quarters, which the capture must accept."""

    def forward(self, input_ids: Tensor) -> Tensor:
        quarters = self.embedding(input_ids[:, ::2]).chunk(4, dim=1)
        return self.head(sum(quarter.mean(1) for quarter in quarters))


class OneToken(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head(x[:, 1:].mean(1) if x.shape[1] != 1 else x[:, 0])


class TopFour(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids).topk(4, dim=1).values.mean(1))


class LinearOfTheRest(tiny_models.Bag):
    """Its assumption multiplies batch and tokens."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids)[:, 2:]).sum(1)


class Halves(tiny_models.Bag):
    """Its slices are captured alone."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        y, z = x[:, ::2], x[:, : x.shape[1] // 2]
        w = y * z
        return self.head(w.sum(1))


class Contiguous(tiny_models.Bag):
    """One of its assumptions divides by zero for one token."""

    def forward(self, input_ids: Tensor) -> Tensor:
        y = self.embedding(input_ids)[:, 2:]
        y = y.transpose(1, 2).contiguous()
        return self.head(y.chunk(4, dim=2)[0].sum(2))


class PositionsOfTheRest(tiny_models.Positions):
    """torch fails at an assertion of its own, unless told that sizes may be 1."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)[:, 3:]
        n = x.shape[1]
        return self.head((x + self.positions.weight[:n]).sum(1))


class PaddedBranch(tiny_models.Bag):
    """Pads to windows of 64 tokens where there is a rest."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        if input_ids.shape[1] % 64 != 0:
            x = nn.functional.pad(x, (0, 0, 0, 64 - input_ids.shape[1] % 64))
        return self.head(x.unflatten(1, (-1, 64)).mean(2).mean(1))


class Pieces(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(sum(x.mean(1) for x in self.embedding(input_ids).split(16, dim=1)))


class EachToken(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head(sum(x[:, i] for i in range(input_ids.shape[1])))


class Recurrent(tiny_models.Bag):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(16, 16, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(input_ids))[0].mean(1))


@pytest.mark.parametrize(
    ("factory", "problem", "remedy"),
    [
        (
            ByNumpy,
            r"cannot capture .*RuntimeError: .*numpy.*capture.py, line \d+",
            "other op",
        ),
        (
            tiny_models.ValueBranch,
            r"Could not guard on data.*tiny_models.py, line \d+, in forward",
            "on values",
        ),
        (
            Broken,
            r"fails in PyTorch, .*\[2, 16\]: KeyError: 2 \(.*test_capture.py, line",
            "Fix the error",
        ),
        (InAnObject, "SimpleNamespace", "returns only the logits"),
        (
            tiny_models.ShapeBranch,
            r"only where tokens > 10 \(.*tiny_models.py, line \d+, in f",
            "--max-length",
        ),
        (
            EachDocument,
            r"Eq\(batch, 2\) \(.*test_capture.py, line \d+, in \w+\)\.$",
            "input_ids.shape",
        ),
        (Quarters, r"only where Eq\(.*, 4\) \(torch.Tensor.chunk, .*capture.py, line \d+", "pad"),
        (OneToken, r"where Ne\(tokens, 1\) \(.*test_capture.py, line \d+", "branches on shapes"),
        (TopFour, r"where tokens >= 4 \(torch.Tensor.topk, .*capture.py, line \d+", "pad"),
        (LinearOfTheRest, r"where .*nn.functional.linear, .*test_capture.py, line", "from 1 token"),
        (Halves, r"where Eq\(.*Tensor.mul, .*test_capture.py, line", "from 1 token"),
        (Contiguous, r"where .*Tensor.contiguous, .*test_capture.py, line", "from 1 token"),
        (PaddedBranch, r"only where Ne\(Mod\(tokens, 64\), 0\) \(.*, in forward", "Windows"),
        (Pieces, r"Tensor.split, .*capture.py, line", "Pad the tokens to"),
        (EachToken, r"Eq\(tokens, 16\) \(.*capture.py, line", "loops over the tokens"),
        (Recurrent, r"\(torch.gru, .*test_capture.py, line \d+, in forward\)", "attention layer"),
    ],
)
def test_refusal_names_cause_line_and_remedy(
    factory: type[nn.Module], problem: str, remedy: str
) -> None:
    with pytest.raises(TraceError) as refused:
        capture(factory())
    assert re.search(problem, refused.value.problem)
    assert remedy in refused.value.remedy
    if factory is not tiny_models.ShapeBranch:  # no bound of any other was tried and works
        assert "--max-length" not in refused.value.remedy


@pytest.mark.parametrize("limit", [8, 2])
def test_loop_over_few_tokens_is_refused(limit: int) -> None:
    """With a maximum of 2 tokens, torch would take 2 for the only length."""
    with pytest.raises(TraceError, match=rf"Eq\(tokens, {limit}\).*loops over the tokens"):
        capture(EachToken(), max_tokens=limit)


def test_advised_bound_works() -> None:
    with pytest.raises(TraceError, match="--max-length 10"):
        capture(tiny_models.ShapeBranch())
    assert input_spec(capture(tiny_models.ShapeBranch(), max_tokens=10)).max_tokens == 10


def test_torch_assertion_is_not_data_branch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An assertion that torch makes itself is not taken for a branch on values."""

    def failing(*args: Any, **kwargs: Any) -> None:
        torch.testing.assert_close(1, 2)

    monkeypatch.setattr(torch.export, "export", failing)
    with pytest.raises(
        TraceError, match="torch itself fails on its sizes, AssertionError"
    ) as refused:
        capture(tiny_models.Bag())
    assert "values" not in refused.value.remedy


def test_torch_has_private_parts() -> None:
    """The capture relies on parts of torch that its authors do not promise to keep."""
    parameters = inspect.signature(ShapeEnv._log_guard).parameters
    assert list(parameters) == ["self", "prefix", "g", "forcing_spec"]
    assert list(inspect.signature(ShapeEnv._maybe_evaluate_static).parameters)[:2] == [
        "self",
        "expr",
    ]
    assert _config.backed_size_oblivious is False
    assert {"source_to_var", "backed_var_to_val"} <= vars(ShapeEnv()).keys()


def test_position_table_bounds_length() -> None:
    # All 32 of them is a length that torch.export takes another branch for.
    assert input_spec(capture(tiny_models.Positions())).max_tokens in (31, 32)


def test_position_table_per_document_bounds_length() -> None:
    assert input_spec(capture(tiny_models.PositionsOfEach())).max_tokens in (31, 32)


def test_position_embedding_bounds_length() -> None:
    assert input_spec(capture(tiny_models.EmbeddedPositions())).max_tokens == 32


def test_longer_position_table_bounds_length() -> None:
    """The table has rows for more than the tokens of the document."""
    # As above; and what the module says of its length is one too many.
    assert input_spec(capture(tiny_models.ClassToken())).max_tokens in (30, 31)
    assert input_spec(capture(tiny_models.ClassToken(), max_tokens=32)).max_tokens in (30, 31)


class EveryFourthPosition(tiny_models.Positions):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)[:, ::4]
        return self.head((x + self.positions.weight[: x.shape[1]]).mean(1))


def test_quarter_position_table_bounds_length() -> None:
    """The table has a row for every fourth token: the bound is four times its rows."""
    module = EveryFourthPosition().eval()
    program = capture(module)
    assert input_spec(program).max_tokens == 128
    for tokens in (1, 3, 4, 5, 128):
        ids = torch.randint(300, (2, tokens))
        torch.testing.assert_close(program.module()(ids), module(ids))


@pytest.mark.parametrize("limit", [None, 32])
def test_positions_after_short_document_are_captured(limit: int | None) -> None:
    module = PositionsOfTheRest().eval()
    program = capture(module, max_tokens=limit)
    assert input_spec(program).max_tokens == (limit or 35)
    for tokens in (1, 3, 4, 32, limit or 35):
        ids = torch.randint(300, (2, tokens))
        torch.testing.assert_close(program.module()(ids), module(ids))


class LongDocuments(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        mean = self.mean(input_ids)
        return self.head(mean * 2 if input_ids.shape[1] > 40 else mean)


class Windows(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        count = (x.shape[1] + 15) // 16
        x = nn.functional.pad(x, (0, 0, 0, count * 16 - x.shape[1])).unflatten(1, (count, 16))
        return self.head(x.mean(2).mean(1))


class FirstWindow(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids)[:, :16].sum(1))


class EverySecond(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids)[:, ::2].sum(1))


class WindowAttention(tiny_models.Bag):
    """The example of export/README.md."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        count = -(-x.shape[1] // 16)
        x = nn.functional.pad(x, (0, 0, 0, count * 16 - x.shape[1])).unflatten(1, (count, 16))
        x = (x @ x.transpose(2, 3)).softmax(-1) @ x
        return self.head(x.mean(2).mean(1))


class Scaled(tiny_models.Bag):
    """By functions of the number of tokens that ask for a Python float."""

    def forward(self, input_ids: Tensor) -> Tensor:
        tokens = input_ids.shape[1]
        x = self.embedding(input_ids) / math.sqrt(tokens) * math.log(tokens + 1, 512)
        return self.head(x.sum(1) * math.exp(-tokens))


class Fractions(tiny_models.Bag):
    """100 * 0.29 is less than 29 in float64, and is 29 in float32."""

    def forward(self, input_ids: Tensor) -> Tensor:
        tokens = input_ids.shape[1]
        x = self.embedding(input_ids) / float(tokens)
        some = x.topk(min(8, tokens), dim=1).values.sum(1) + x[:, : round(tokens * 0.7)].sum(1)
        return self.head(x[:, : int(tokens * 0.29)].sum(1) + some + x[:, : len(input_ids)].sum(1))


class CroppedWindows(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        count = math.ceil(x.shape[1] / 16)
        y = nn.functional.pad(x, (0, 0, 0, count * 16 - x.shape[1])).unflatten(1, (count, 16))
        y = (y - y.mean(2, keepdim=True)).flatten(1, 2)
        return self.head((x + y[:, : x.shape[1]]).sum(1))


def test_branch_for_long_documents_needs_maximum() -> None:
    """The length where the branch begins is not taken for a bound of the model."""
    module = LongDocuments().eval()
    said = r"branch at 40 tokens .*test_capture.py, line \d+, in forward.* --max-length 40"
    with pytest.raises(TraceError, match=said):
        capture(module)
    short = capture(module, max_tokens=40)
    assert input_spec(short).max_tokens == 40
    ids = torch.randint(300, (3, 40))
    torch.testing.assert_close(short.module()(ids), module(ids))


@pytest.mark.parametrize(
    "factory",
    [Windows, WindowAttention, FirstWindow, EverySecond, Scaled, Fractions, CroppedWindows],
)
def test_single_element_of_short_document_generalizes(
    factory: type[nn.Module],
) -> None:
    """A size that is 1 for a short document is captured for every length."""
    module = factory().eval()
    program = capture(module)
    assert input_spec(program).max_tokens is None
    engine = OnnxRuntimeEngine(finish(lower(program)).SerializeToString())
    for tokens in (1, 2, 15, 16, 17, 100):
        ids = torch.randint(300, (2, tokens))
        expected = module(ids).detach()
        torch.testing.assert_close(program.module()(ids), expected)
        logits = engine.run({"input_ids": ids.numpy()})["logits"]
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_program_without_embedding_is_refused() -> None:
    with pytest.raises(TraceError, match="embedding"):
        input_spec(capture(tiny_models.NoEmbedding()))


def test_embedding_under_autocast_is_refused() -> None:
    with pytest.raises(TraceError, match="block of its forward: autocast"):
        input_spec(capture(tiny_models.Autocast()))


@pytest.mark.parametrize("limit", [1, 2, 3, 32])
def test_limit_holds_for_every_shorter_length(limit: int) -> None:
    program = capture(tiny_models.Positions(), max_tokens=limit)
    assert input_spec(program).max_tokens == limit
    engine = OnnxRuntimeEngine(finish(lower(program)).SerializeToString())
    for tokens in {1, (limit + 1) // 2, limit}:
        ids = np.full((1, tokens), 7)
        with torch.inference_mode():
            expected = tiny_models.Positions().eval()(torch.from_numpy(ids)).shape
        assert engine.run({"input_ids": ids})["logits"].shape == expected


class Scripted(tiny_models.Bag):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.inner(self.mean(input_ids)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "said"),
    [(Scripted, "inner in the model"), (lambda: torch.jit.script(tiny_models.Bag()), "the model")],
)
def test_scripted_part_is_refused(build: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(TraceError, match=rf"TorchScript.*: {said}\.") as refused:
        capture(build())
    assert "torch.jit.script" in refused.value.remedy
