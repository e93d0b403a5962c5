"""Models that cannot be captured: the error names the cause, the line and a remedy."""

import logging
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from sampling import any_case
from torch import Tensor, nn
from torch.nn import functional

from aftexport.capture.capture import capture
from aftexport.capture.input_spec import input_spec
from aftexport.capture.torch_messages import quiet
from aftexport.errors import TraceError
from aftexport.lowering.to_onnx import lower
from aftexport.pipeline.export import export


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


def by_numpy(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    return torch.from_numpy(m.mean(input_ids).detach().numpy())


def broken(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    return {}[len(input_ids.shape)]


class InAnObject(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.head(self.mean(input_ids)))


def quarters(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    """Cut every second token into quarters, which the capture must accept."""
    quarters = m.embedding(input_ids[:, ::2]).chunk(4, dim=1)
    return sum(quarter.mean(1) for quarter in quarters)


def one_token(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    x = m.embedding(input_ids)
    return x[:, 1:].mean(1) if x.shape[1] != 1 else x[:, 0]


def stretched_by_scale(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    table = m.embedding.weight[:10].T[None]
    scale = input_ids.shape[1] / 10
    table = nn.functional.interpolate(table, scale_factor=scale, mode="linear")
    return m.mean(input_ids) + table.mean(2)


def stretched_by_area(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    table = m.embedding.weight[:10].T[None]
    table = nn.functional.interpolate(table, size=input_ids.shape[1], mode="area")
    return m.mean(input_ids) + table.mean(2)


def top_four(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    return m.embedding(input_ids).topk(4, dim=1).values.mean(1)


class LinearOfTheRest(tiny_models.Bag):
    """Its assumption multiplies batch and tokens."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids)[:, 2:]).sum(1)


def halves(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    """Its slices are captured alone."""
    x = m.embedding(input_ids)
    y, z = x[:, ::2], x[:, : x.shape[1] // 2]
    w = y * z
    return w.sum(1)


def contiguous(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    """One of its assumptions divides by zero for one token."""
    y = m.embedding(input_ids)[:, 2:]
    y = y.transpose(1, 2).contiguous()
    return y.chunk(4, dim=2)[0].sum(2)


def padded_branch(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    """Pads to windows of 64 tokens where there is a rest."""
    x = m.embedding(input_ids)
    if input_ids.shape[1] % 64 != 0:
        x = nn.functional.pad(x, (0, 0, 0, 64 - input_ids.shape[1] % 64))
    return x.unflatten(1, (-1, 64)).mean(2).mean(1)


def pieces(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    return sum(x.mean(1) for x in m.embedding(input_ids).split(16, dim=1))


def each_token(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    x = m.embedding(input_ids)
    return sum(x[:, i] for i in range(input_ids.shape[1]))


class Recurrent(tiny_models.Bag):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(16, 16, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(input_ids))[0].mean(1))


@pytest.mark.table(keep=0.3, by=any_case)
@pytest.mark.parametrize(
    ("factory", "problem", "remedy"),
    [
        (
            by_numpy,
            r"cannot capture .*RuntimeError: .*numpy.*test_failure.py, line \d+",
            "other op",
        ),
        (
            tiny_models.ValueBranch,
            r"Could not guard on data.*tiny_models.py, line \d+, in forward",
            "on values",
        ),
        (
            broken,
            r"fails in PyTorch, .*\[2, 16\]: KeyError: 2 \(.*test_failure.py, line",
            "Fix the error",
        ),
        (InAnObject, "SimpleNamespace", "returns one tensor, or a dict"),
        (
            tiny_models.ShapeBranch,
            r"only where tokens > 10 \(.*tiny_models.py, line \d+, in f",
            "--max-length",
        ),
        (
            EachDocument,
            r"Eq\(batch, 2\) \(.*test_failure.py, line \d+, in \w+\)\.$",
            "input_ids.shape",
        ),
        (
            quarters,
            r"only where Eq\(.*, 4\) \(torch.Tensor.chunk, .*test_failure.py, line \d+",
            "pad",
        ),
        (one_token, r"where Ne\(tokens, 1\) \(.*test_failure.py, line \d+", "branches on shapes"),
        (stretched_by_scale, "interpolate", "size=tokens in place of a scale_factor"),
        (stretched_by_area, "interpolate", "differences of cumsum"),
        (top_four, r"where tokens >= 4 \(torch.Tensor.topk, .*test_failure.py, line \d+", "pad"),
        (LinearOfTheRest, r"where .*nn.functional.linear, .*test_failure.py, line", "from 1 token"),
        (halves, r"where Eq\(.*Tensor.mul, .*test_failure.py, line", "from 1 token"),
        (contiguous, r"where .*Tensor.contiguous, .*test_failure.py, line", "from 1 token"),
        (padded_branch, r"only where Ne\(Mod\(tokens, 64\), 0\) \(.*, in padded_branch", "Windows"),
        (pieces, r"Tensor.split, .*test_failure.py, line", "Pad the tokens to"),
        (each_token, r"Eq\(tokens, 16\) \(.*test_failure.py, line", "loops over the tokens"),
        (Recurrent, r"\(torch.gru, .*test_failure.py, line \d+, in forward\)", "attention layer"),
    ],
)
def test_refusal_names_cause_line_and_remedy(factory: Any, problem: str, remedy: str) -> None:
    is_class = isinstance(factory, type)
    with pytest.raises(TraceError) as refused:
        capture(factory() if is_class else tiny_models.Computed(factory))
    assert re.search(problem, refused.value.problem)
    assert remedy in refused.value.remedy
    if factory is not tiny_models.ShapeBranch:  # no bound of any other was tried and works
        assert "--max-length" not in refused.value.remedy


@pytest.mark.parametrize("limit", [8, 2])
def test_loop_over_few_tokens_is_refused(limit: int) -> None:
    """With a maximum of 2 tokens, torch would take 2 for the only length."""
    with pytest.raises(TraceError, match=rf"Eq\(tokens, {limit}\).*loops over the tokens"):
        capture(tiny_models.Computed(each_token), max_tokens=limit)


def test_advised_bound_works() -> None:
    with pytest.raises(TraceError, match="--max-length 10"):
        capture(tiny_models.ShapeBranch())
    assert input_spec(capture(tiny_models.ShapeBranch(), max_tokens=10)).max_tokens == 10


def test_torch_assertion_is_not_data_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An assertion that torch makes itself is not taken for a branch on values."""

    def failing(*args: Any, **kwargs: Any) -> None:
        torch.testing.assert_close(1, 2)

    monkeypatch.setattr(torch.export, "export", failing)
    with pytest.raises(
        TraceError, match="torch itself fails on its sizes, AssertionError"
    ) as refused:
        capture(tiny_models.Bag())
    assert "values" not in refused.value.remedy


def long_documents(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    mean = m.mean(input_ids)
    return mean * 2 if input_ids.shape[1] > 40 else mean


def test_branch_for_long_documents_needs_maximum() -> None:
    """The length where the branch begins is not taken for a bound of the model."""
    module = tiny_models.Computed(long_documents).eval()
    said = r"branch at 40 tokens .*test_failure.py, line \d+, in long_documents.* --max-length 40"
    with pytest.raises(TraceError, match=said):
        capture(module)
    short = capture(module, max_tokens=40)
    assert input_spec(short).max_tokens == 40
    ids = torch.randint(300, (3, 40))
    torch.testing.assert_close(short.module()(ids), module(ids))


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


GENERATOR = torch.Generator().manual_seed(0)


def of_own_generator(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return x + torch.randn(x.shape, generator=generator)


DRAWING: dict[str, Callable[[Tensor], Tensor]] = {
    "randn": lambda x: x + torch.randn(x.shape, generator=GENERATOR),
    "randn ": of_own_generator,
    "randn  ": lambda x: x + torch.randn(16, generator=GENERATOR),
    "rand": lambda x: x + torch.rand(16),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randint": lambda x: x + torch.randint(0, 3, x.shape),
    "randperm": lambda x: x[:, torch.randperm(x.shape[1])],
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x)),
    "uniform_": lambda x: x + torch.zeros_like(x).uniform_(generator=GENERATOR),
    "exponential_": lambda x: functional.gumbel_softmax(x),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "dropout": lambda x: functional.dropout(x, 0.5, training=True),
}


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize("name", DRAWING)
def test_operator_and_line_are_named(name: str) -> None:
    said = (
        rf"draws random numbers \(aten\.{name.strip()}, .*(tiny_models|test_failure)\.py, line \d+,"
        r" in .*\): a document must have the same scores"
    )
    with pytest.raises(TraceError, match=said) as refused:
        lower(capture(tiny_models.Through(DRAWING[name])))
    assert "self.training" in refused.value.remedy


def test_forward_with_own_seed_is_refused() -> None:
    """PyTorch then gives the same numbers every time, and a runtime gives others."""

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return x + torch.randn_like(x)

    with pytest.raises(TraceError, match=r"aten\.randn_like"):
        lower(capture(tiny_models.Through(seeded)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.dropout(x, 0.5, training=False),
        lambda x: functional.scaled_dot_product_attention(x, x, x),
        lambda x: (torch.rand(3), x)[1],
    ],
)
def test_deterministic_operator_is_lowered(function: Callable[[Tensor], Tensor]) -> None:
    lower(capture(tiny_models.Through(function)))


def of_python(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    return m.mean(input_ids) * random.random()


def of_numpy(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    return m.mean(input_ids) * float(np.random.rand())


@pytest.mark.parametrize("compute", [of_python, of_numpy])
def test_state_reveals_numbers_of_other_libraries(
    compute: Callable[..., Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of their generators shows that NumPy or Python drew random numbers."""
    drawing = partial(tiny_models.Computed, compute)
    monkeypatch.setattr(tiny_models, "drawing", drawing, raising=False)
    with pytest.raises(TraceError, match="draws random numbers in evaluation mode too"):
        export(factory="tiny_models:drawing", to="onnx", out=tmp_path / "out.bundle")


def say(name: str) -> None:
    logging.getLogger(name).critical("a traceback")
    logging.getLogger(name + ".new").error("another")
    print("a graph", file=sys.stderr)
    warnings.warn("deprecated", FutureWarning, stacklevel=1)


@pytest.mark.parametrize(
    "name",
    ["torch", "torch._guards", "torch.fx.experimental.symbolic_shapes", "torch._dynamo", "onnx_ir"],
)
def test_quiet_keeps_back_torch(
    name: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    handler = logging.StreamHandler()
    logging.getLogger(name).addHandler(handler)
    try:
        with quiet():
            say(name)
            logging.getLogger("own").warning("of others")
        assert capsys.readouterr().err == ""
        assert caplog.messages == ["of others"]
        with pytest.warns(FutureWarning):
            say(name)
        assert "a graph" in capsys.readouterr().err
    finally:
        logging.getLogger(name).removeHandler(handler)
