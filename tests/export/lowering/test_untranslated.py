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


def _shifted(x: Tensor) -> Tensor:
    return x + (x.long()[..., :1] >> torch.arange(16)).float()


def _scored(x: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    heads: Tensor = flex_attention(x[:, None], x[:, None], x[:, None])
    return heads[:, 0]


@pytest.mark.parametrize(
    ("function", "reason", "remedy"),
    [
        (lambda x: torch.exp(torch.complex(x, x)).real, "complex numbers", "two tensors of real"),
        (lambda x: torch.complex(x, x).cumsum(1).imag, "complex numbers", "two tensors of real"),
        (_shifted, "shifts by a constant", r"x // 2\*\*k"),
        (_scored, "flex_attention", "scaled_dot_product_attention"),
    ],
)
def test_error_names_cause_beyond_operator(
    function: Callable[[Tensor], Tensor], reason: str, remedy: str
) -> None:
    with pytest.raises(TraceError, match=f"{reason}.*{remedy}") as refused:
        lower(capture(Through(function)))
    assert "ONNX has no such operator" not in str(refused.value)


def in_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x.transpose(1, 2)).float().mean(2, keepdim=True) * x


@pytest.mark.parametrize(
    ("function", "operator"),
    [(in_autocast, "aten.matmul"), (lambda x: x.bfloat16().tanh().float(), "aten.tanh")],
)
def test_bfloat16_in_forward_is_refused(
    function: Callable[[Tensor], Tensor], operator: str
) -> None:
    with pytest.raises(TraceError, match=rf"got {operator} in bfloat16") as refused:
        lower(capture(Through(function)))
    assert "torch.autocast" in refused.value.remedy
    assert "--opset" not in refused.value.remedy


def test_rounding_to_bfloat16_is_kept() -> None:
    operators = [
        n.op_type for n in lower(capture(Through(lambda x: x.bfloat16().float()))).graph.node
    ]
    assert operators.count("Cast") == 2
