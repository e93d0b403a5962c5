from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import torch
from torch import Tensor

from aftexport.capture.capture import capture
from aftexport.errors import TraceError
from aftexport.lowering.to_onnx import lower


class Through(tiny_models.Bag):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = self.function(x)
        return self.head(x.mean(1))


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: x.cumprod(1), "aten.cumprod"),
        (torch.lgamma, "aten.lgamma"),
        (torch.special.ndtri, "aten.special_ndtri"),
        (lambda x: x.cummax(1)[0], "aten.cummax"),
    ],
)
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load of 2.9
def test_error_names_user_operator_and_line(
    function: Callable[[Tensor], Tensor], operator: str, tmp_path: Path
) -> None:
    program = capture(Through(function))
    said = rf"cannot translate {operator} \(.*test_untranslated.py, line \d+, in .*\): ONNX has no"
    with pytest.raises(TraceError, match=said) as refused:
        lower(program)
    assert "prims." not in str(refused.value)
    torch.export.save(program, tmp_path / "model.pt2")
    with pytest.raises(TraceError, match=said):
        lower(torch.export.load(tmp_path / "model.pt2"))
