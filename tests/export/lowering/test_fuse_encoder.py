"""The encoder's rewrites: their matches, their exceptions, and equal results."""

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from sampling import any_case
from torch import nn

from aftexport.lowering.fuse_encoder import fuse_encoder
from aftexport.operators.portable_bodies import attach_bodies
from aftexport.parity import TOLERANCES

DIM = 12


class Block(nn.Module):
    """A feed-forward block, or one that only looks like it."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.inner = nn.Linear(DIM, 20, bias=change != "no bias")
        self.outer = nn.Linear(20, DIM)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        approximate = "tanh" if self.change == "tanh gelu" else "none"
        hidden = nn.functional.gelu(self.inner(normed), approximate=approximate)
        residual = normed if self.change == "residual after the norm" else x
        result = residual + self.outer(hidden)
        return result + hidden.sum() if self.change == "hidden is read again" else result


class Projections(nn.Module):
    """Linear layers behind one norm, and an output projection with a residual."""

    def __init__(self, change: str = "", widths: Sequence[int] = (DIM, 4, DIM)) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, width) for width in widths)
        self.output = nn.Linear(DIM, DIM)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        mixed, *others = (layer(normed) for layer in self.layers)
        for index, other in enumerate(others):
            mixed = mixed * other.mean(2, keepdim=True) if index % 2 == 0 else mixed + other
        residual = x[:, :1] if self.change == "residual is broadcast" else x
        result = residual + self.output(mixed)
        return result + normed if self.change == "norm is read again" else result


def exported(module: nn.Module) -> ir.Model:
    program = torch.export.export(
        module.eval(),
        (torch.randn(2, 5, DIM),),
        dynamic_shapes={"x": {0: torch.export.Dim("b"), 1: torch.export.Dim("t")}},
    )
    result = torch.onnx.export(program, (), dynamo=True, opset_version=20, verbose=False)
    assert result is not None
    return result.model


def fused(model: ir.Model) -> onnx.ModelProto:
    fuse_encoder(model)
    proto = attach_bodies(ir.to_proto(model))
    onnx.checker.check_model(proto, full_check=True)
    return proto


def counts(model: onnx.ModelProto) -> dict[str, int]:
    found = [n.op_type for n in model.graph.node if n.domain == "ai.aftexport"]
    return {op_type: found.count(op_type) for op_type in sorted(set(found))}


def assert_unchanged(module: nn.Module, model: onnx.ModelProto) -> None:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    for shape in ((1, 1), (3, 7), (2, 65)):
        x = torch.randn(*shape, DIM)
        with torch.no_grad():
            expected = module.double()(x.double()).numpy()
        module.float()
        actual = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        scale = max(1.0, np.abs(expected).max())
        assert np.abs(actual - expected).max() / scale <= TOLERANCES["fp32"].bound


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (Block, {"LayerNormFeedForward": 1}),
        (Projections, {"LayerNormQueryKeyValue": 1, "LinearResidual": 1}),
    ],
)
def test_surroundings_of_attention_become_single_operators(
    build: Callable[[], nn.Module], expected: dict[str, int]
) -> None:
    module = build()
    model = fused(exported(module))
    assert counts(model) == expected
    assert_unchanged(module, model)


@pytest.mark.table(keep=0.25, by=any_case)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("module", "absent"),
    [
        (Block("no bias"), "LayerNormFeedForward"),
        (Block("tanh gelu"), "LayerNormFeedForward"),
        (Block("residual after the norm"), "LayerNormFeedForward"),
        (Block("hidden is read again"), "LayerNormFeedForward"),
        (Projections("norm is read again"), "LayerNormQueryKeyValue"),
        (Projections("norm is read again", [DIM, 4]), "LayerNormLinear"),
        (Projections("residual is broadcast"), "LinearResidual"),
    ],
    ids=lambda value: getattr(value, "change", ""),
)
def test_look_alike_stays_unchanged(module: nn.Module, absent: str) -> None:
    model = fused(exported(module))
    assert absent not in counts(model)
    assert_unchanged(module, model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("widths", [[DIM], [DIM, 4], [DIM, 4, DIM, 7]], ids=len)
def test_other_linear_layers_fuse_one_each(widths: list[int]) -> None:
    """Linear layers that are not three become one operator each."""
    module = Projections(widths=widths)
    model = fused(exported(module))
    assert counts(model) == {"LayerNormLinear": len(widths), "LinearResidual": 1}
    assert_unchanged(module, model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("widths", [[DIM, DIM, DIM], [DIM, 4, DIM]], ids=str)
def test_query_key_value_have_own_outputs(widths: list[int]) -> None:
    """Their widths may be any."""
    module = Projections(widths=widths)
    model = fused(exported(module))
    assert counts(model)["LayerNormQueryKeyValue"] == 1
    assert not [n for n in model.graph.node if n.op_type in ("Split", "Concat", "Slice")]
    node = next(n for n in model.graph.node if n.op_type == "LayerNormQueryKeyValue")
    shapes = {i.name: list(i.dims) for i in model.graph.initializer}
    assert [shapes[name] for name in node.input[3::2]] == [[DIM, width] for width in widths]
    assert [shapes[name] for name in node.input[4::2]] == [[width] for width in widths]
    assert_unchanged(module, model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("widths", [[DIM, 4], [DIM, 4, DIM]], ids=len)
def test_fused_linear_layers_leave_nothing_unread(widths: list[int]) -> None:
    model = fused(exported(Projections(widths=widths)))
    read = {name for node in model.graph.node for name in node.input}
    assert {i.name for i in model.graph.initializer} <= read
