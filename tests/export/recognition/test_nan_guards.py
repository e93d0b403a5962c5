"""A NaN guard after a masked mechanism, which rows without keys would pass."""

import io
from collections.abc import Callable

import onnx
import pytest
import torch
from torch import Tensor, nn

from aftexport.recognition.graph.normalize import normalize
from aftexport.recognition.recognizer import recognize
from aftexport.recognition.result import Recognition

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
DIM = 8
GUARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nan_to_num": lambda x, y: torch.nan_to_num(y),
    "isnan": lambda x, y: torch.where(torch.isnan(y), x, y),
    "later": lambda x, y: torch.nan_to_num(x + 2 * y, nan=1.0),
}


class Masked(nn.Module):
    """AFT-simple whose keys a mask of bool ``[B, T]`` leaves out."""

    def __init__(self, guard: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))
        self.guard = guard

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        keys = self.key(x).masked_fill(~mask[..., None], -torch.inf)
        mean = (keys.softmax(1) * self.value(x)).sum(1, keepdim=True)
        return self.guard(x, torch.sigmoid(self.query(x)) * mean)


def recognized(guard: Callable[[Tensor, Tensor], Tensor]) -> Recognition:
    names, file = ["x", "mask"], io.BytesIO()
    torch.onnx.export(
        Masked(guard).eval(),
        (torch.randn(2, 12, DIM), torch.ones(2, 12, dtype=torch.bool)),
        file,
        dynamo=False,
        opset_version=18,
        input_names=names,
        dynamic_axes={name: {0: "batch", 1: "tokens"} for name in names},
    )
    return recognize(normalize(onnx.load_from_string(file.getvalue())))


@pytest.mark.parametrize("name", GUARDS)
def test_guarded_mechanism_is_left_alone(name: str) -> None:
    found = recognized(GUARDS[name])
    assert found.matches == []
    assert any("replaces NaN" in miss.reason for miss in found.near_misses)


def test_mechanism_without_a_guard_is_found() -> None:
    assert len(recognized(lambda x, y: x + y).matches) == 1
