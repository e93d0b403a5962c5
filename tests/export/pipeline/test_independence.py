"""Documents that share a run must not change each other's scores."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import aftexport
from aftexport.bundle.bundle import PARITY_PAGE
from aftexport.capture.capture import capture
from aftexport.capture.input_spec import input_spec
from aftexport.capture.model_outputs import single_numbers
from aftexport.capture.reference_module import ReferenceModule
from aftexport.engines.torch import TorchEngine
from aftexport.errors import TraceError
from aftexport.parity import TOLERANCES
from aftexport.pipeline.golden_cases import model_cases
from aftexport.pipeline.independence import DOUBLE_BOUND, find_breach

Step = Callable[[Tensor, Tensor], Tensor]


class Pooled(nn.Module):
    """A masked mean of embeddings ``[B, T, D]``, with one step before it.

    Args:
        step: takes the embeddings and the mask, bool ``[B, T, 1]``.
    """

    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 6)
        self.head = nn.Linear(6, 3)
        self.step = step

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(input_ids.shape[1]) < lengths[:, None])[..., None]
        x = self.step(self.embedding(input_ids), mask)
        return self.head((x * mask).sum(1) / lengths.clamp(min=1)[:, None])


def transposed_softmax(x: Tensor, mask: Tensor) -> Tensor:
    return x.transpose(0, 1).softmax(1).transpose(0, 1)


def in_windows(x: Tensor) -> Tensor:
    """Subtract from each window of 4 tokens its mean."""
    count = -(-x.shape[1] // 4)
    y = nn.functional.pad(x, (0, 0, 0, count * 4 - x.shape[1])).unflatten(1, (count, 4))
    y = (y - y.mean(2, keepdim=True)).flatten(1, 2)
    return x + y[:, : x.shape[1]]


def rounded_by_length(x: Tensor, mask: Tensor) -> Tensor:
    """Round to float32, each number of tokens in another way."""
    shift = 2.0 * x.shape[1]
    return (x.float() + shift - shift).to(x.dtype)


OVER_THE_BATCH: dict[str, Step] = {
    "max": lambda x, mask: x / x.abs().max(),
    "amax": lambda x, mask: x - x.amax((0, 1), keepdim=True),
    "amax of all": lambda x, mask: x / x.abs().amax().clamp(min=1e-3),
    "mean": lambda x, mask: x - x.mean(0),
    "std": lambda x, mask: x / x.std(),
    "softmax": lambda x, mask: x.softmax(0),
    "cumsum": lambda x, mask: x.cumsum(0),
    "flip": lambda x, mask: x.flip(0),
    "sum": lambda x, mask: torch.where(x.sum() > 0, x, -x),
    "batch_norm": lambda x, mask: nn.functional.batch_norm(
        x.transpose(1, 2), None, None, training=True
    ).transpose(1, 2),
}
OVER_THE_BATCH |= {"select": lambda x, mask: x - x[0], "softmax of a layout": transposed_softmax}
# The number of selected tokens depends on their values, so torch.export does not know it.
OVER_THE_BATCH |= {
    "mean of selected tokens": lambda x, mask: x - x[x[..., 0] > 0].mean(0),
    "mean of nonzero indices": lambda x, mask: (
        x - x[(x[..., 0] > 0).nonzero(as_tuple=True)].mean(0)
    ),
    "sum of counts": lambda x, mask: x + torch.unique(x.sign(), return_counts=True)[1].sum(),
    "unique": lambda x, mask: x + torch.unique(x).shape[0],
}
OVER_PADDING: dict[str, Step] = {
    "mean": lambda x, mask: x - x.mean(1, keepdim=True),
    "mean of windows": lambda x, mask: in_windows(x),
    "mean of float32, and little": lambda x, mask: x + 1e-5 * x.float().mean(1, keepdim=True),
    "softmax": lambda x, mask: x * x.softmax(1),
    "flip": lambda x, mask: x.flip(1),
}
BY_ITSELF: dict[str, Step] = {
    "a maximum of each document": lambda x, mask: (
        x / x.masked_fill(~mask, 0).abs().amax((1, 2), keepdim=True)
    ),
    "a softmax over channels": lambda x, mask: x.softmax(-1),
    "a masked softmax": lambda x, mask: x * x.masked_fill(~mask, -torch.inf).softmax(1),
    "casts to float32": rounded_by_length,
    "infinite padding": lambda x, mask: x.masked_fill(~mask, 3e38).clamp(max=1e3),
}


def cases_of(step: Step, *, batching: bool = True) -> None:
    module = Pooled(step)
    program = capture(module)
    spec = input_spec(program)
    reference = ReferenceModule(module, spec.names)
    model_cases(reference, spec, None, program, batching=batching, ranks=single_numbers(program))


@pytest.mark.parametrize("name", OVER_THE_BATCH)
def test_operator_over_batch_is_named(name: str) -> None:
    with pytest.raises(TraceError, match="other documents of a batch") as refused:
        cases_of(OVER_THE_BATCH[name])
    assert f": {name.split()[0].replace('select', '__getitem__')} (" in str(refused.value)
    assert "test_independence.py, line" in str(refused.value)
    assert "--no-batching" in refused.value.remedy


@pytest.mark.parametrize("name", OVER_PADDING)
def test_operator_over_padding_is_named(name: str) -> None:
    with pytest.raises(TraceError, match="depend on padding") as refused:
        cases_of(OVER_PADDING[name])
    assert f": {name.split()[0]} (" in str(refused.value)
    assert "--no-batching" in refused.value.remedy


@pytest.mark.parametrize("name", BY_ITSELF)
def test_independent_documents_are_accepted(name: str) -> None:
    cases_of(BY_ITSELF[name])


def test_casts_to_float32_explain_a_small_breach() -> None:
    """The difference is that of float32, and goes with the casts."""
    module = Pooled(rounded_by_length)
    spec = input_spec(capture(module))
    reference = ReferenceModule(module, spec.names)
    engine = TorchEngine(reference, spec.names)
    breach = find_breach(engine, spec, None, bound=DOUBLE_BOUND)
    assert breach is not None
    assert breach.error < TOLERANCES["fp32"].bound
    with reference.without_casts():
        assert find_breach(engine, spec, None, bound=DOUBLE_BOUND) is None


def test_breach_compares_alone_with_batch() -> None:
    module = Pooled(OVER_THE_BATCH["max"]).double()
    reference = TorchEngine(module, ("input_ids", "lengths"))
    spec = input_spec(capture(Pooled(OVER_THE_BATCH["max"])))
    breach = find_breach(reference, spec, None, bound=DOUBLE_BOUND)
    assert breach is not None
    alone = reference.run(breach.alone())["logits"]
    together = reference.run(breach.inputs)["logits"][breach.row : breach.row + 1]
    scale = max(1.0, float(np.abs(alone).max()))
    assert breach.error == pytest.approx(np.abs(alone - together).max() / scale)


def test_no_batching_is_recorded(tmp_path: Path) -> None:
    factory = "tiny_models:NormalizedOverBatch"
    with pytest.raises(TraceError, match=r": max \("):
        aftexport.export(factory=factory, out=tmp_path / "refused.bundle")
    assert not list(tmp_path.iterdir())  # nothing is written
    bundle = aftexport.export(factory=factory, out=tmp_path / "m.bundle", batching=False)
    assert not bundle.manifest.batching
    assert "runs separately (--no-batching)" in (bundle.path / PARITY_PAGE).read_text()
