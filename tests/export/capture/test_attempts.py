"""A forward that asks whether it is captured is exported as PyTorch runs it."""

from collections.abc import Callable

import pytest
import tiny_models
import torch
from torch import Tensor
from torch.compiler import is_exporting
from torch.fx import _symbolic_trace
from transformers.utils import is_torchdynamo_compiling

from aftexport.capture.capture import capture
from aftexport.errors import TraceError
from aftexport.system.internals.torch_operators import tracing_questions

IDS = torch.arange(12).reshape(3, 4)


class Asking(tiny_models.Bag):
    """Another computation for documents of the word 7, left out while the forward is captured."""

    def __init__(self, is_captured: Callable[[], bool]) -> None:
        super().__init__()
        self.is_captured = is_captured

    def forward(self, input_ids: Tensor) -> Tensor:
        means = self.mean(input_ids)
        if self.is_captured():
            return self.head(means)
        return self.head(means + (input_ids == 7).any(1, keepdim=True))


@pytest.mark.parametrize(
    "is_captured",
    [
        torch.compiler.is_compiling,
        lambda: is_exporting(),
        lambda: torch._dynamo.is_compiling(),
        lambda: torch._utils.is_compiling(),
        _symbolic_trace.is_fx_symbolic_tracing,
        torch.jit.is_tracing,
        torch.onnx.is_in_onnx_export,
        is_torchdynamo_compiling,
    ],
)
@pytest.mark.filterwarnings("ignore:`torch._utils.is_compiling`")
def test_capture_has_branch_of_pytorch(is_captured: Callable[[], bool]) -> None:
    model = Asking(is_captured).eval()
    torch.testing.assert_close(capture(model).module()(IDS), model(IDS))


class AskingBeforeCheck(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and (input_ids == 7).any():
            return self.head(self.mean(input_ids) * 2)
        return self.head(self.mean(input_ids))


class AskingWithNumber(tiny_models.Bag):
    """A size that torch.export keeps free only by reading the code of the forward."""

    def forward(self, input_ids: Tensor) -> Tensor:
        means = self.mean(input_ids[:, : int(input_ids.shape[1] * 0.5) + 1])
        return self.head(means if torch.compiler.is_compiling() else means * 2)


@pytest.mark.parametrize("factory", [AskingBeforeCheck, AskingWithNumber])
def test_refusal_names_question_and_line(factory: type[torch.nn.Module]) -> None:
    asked = r"asks torch.compiler.is_compiling\(\) \(.*test_attempts.py, line \d+, in for"
    with pytest.raises(TraceError, match=asked):
        capture(factory())


def test_questions_are_restored() -> None:
    codes = [question.__code__ for question in tracing_questions()]
    capture(Asking(torch.compiler.is_compiling))
    assert [question.__code__ for question in tracing_questions()] == codes
    assert torch.compiler.is_compiling() is False
