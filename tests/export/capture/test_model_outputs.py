"""A forward may return one tensor, or several by name."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import onnx
import pytest
import tiny_models
import torch
from torch import Tensor

from aftexport.capture.capture import capture
from aftexport.capture.model_outputs import named_tensors
from aftexport.errors import TraceError
from aftexport.lowering.to_onnx import lower


class Pair(NamedTuple):
    topic: Tensor
    mood: Tensor | None


class ModelOutput(OrderedDict[str, Tensor | None]):
    """A mapping that torch.export does not know, as those of transformers."""


class Returning(tiny_models.Bag):
    """Returns what a function makes of the logits."""

    def __init__(self, result: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.result = result

    def forward(self, input_ids: Tensor) -> Any:
        return self.result(super().forward(input_ids), input_ids)


def names_of(model: onnx.ModelProto) -> list[str]:
    return [output.name for output in model.graph.output]


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (lambda x, _: x, ["logits"]),
        (lambda x, _: {"topic": x, "loss": None, "mood": x * 2}, ["topic", "mood"]),
        (lambda x, _: Pair(x, x + 1), ["topic", "mood"]),
        (lambda x, _: Pair(x, None), ["topic"]),
        (lambda x, _: ModelOutput(loss=None, logits=x), ["logits"]),
    ],
    ids=["tensor", "dict", "tuple", "tuple with None", "mapping"],
)
def test_outputs_have_names_of_result(
    result: Callable[[Tensor, Tensor], Any], names: list[str]
) -> None:
    model = lower(capture(Returning(result)))
    onnx.checker.check_model(model)
    assert names_of(model) == names
    outputs = named_tensors(Returning(result)(torch.zeros(2, 3, dtype=torch.int64)))
    assert list(outputs) == names


def test_program_of_user_may_return_none() -> None:
    module = Returning(lambda x, _: {"loss": None, "topic": x}).eval()
    axes = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}}
    ids = torch.zeros(2, 3, dtype=torch.int64)
    program = torch.export.export(module, (ids,), dynamic_shapes=axes)
    assert names_of(lower(program)) == ["topic"]


def test_other_values_give_way_to_outputs() -> None:
    model = lower(capture(Returning(lambda x, _: {"embedding": x, "mean": x.exp()})))
    onnx.checker.check_model(model)
    assert names_of(model) == ["embedding", "mean"]
    values = [name for node in model.graph.node for name in node.output]
    assert len(values) == len(set(values))
    assert {"embedding_1", "mean_1"} <= set(values)


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (lambda x, _: (x, x * 2), "got tuple"),
        (lambda x, _: {"topic": x, "past": (x * 2,)}, "got tuple for 'past'"),
        (lambda x, _: {}, "got no tensors"),
        (lambda x, _: {"a b": x}, "got 'a b'"),
        (lambda x, _: {"evidence": x}, "got 'evidence'"),
        (lambda x, _: {"lengths": x}, "got 'lengths'"),
        (lambda x, _: {"topic": x, "again": x}, "a tensor of its own"),
        (lambda x, ids: {"topic": x, "ids": ids}, "'ids', which is an input"),
        (lambda x, _: {"topic": x, "label": x.argmax(1)}, "torch.int64 for 'label'"),
    ],
    ids=["tuple", "nested", "empty", "space", "evidence", "input", "twice", "copy", "integers"],
)
def test_other_results_are_refused(result: Callable[[Tensor, Tensor], Any], problem: str) -> None:
    with pytest.raises(TraceError) as refused:
        lower(capture(Returning(result)))
    assert problem in refused.value.problem
