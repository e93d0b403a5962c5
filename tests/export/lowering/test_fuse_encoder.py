"""The rewrites of layers around the attention: matches, exceptions, and equal results."""

import inspect
from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from sampling import any_case
from torch import Tensor, nn

from aftexport.lowering.fuse_encoder import fuse_encoder, fuse_fastformer
from aftexport.lowering.translations import translations
from aftexport.nn.fastformer import Fastformer
from aftexport.operators.portable_bodies import attach_bodies
from aftexport.parity import TOLERANCES

DIM = 24


class Block(nn.Module):
    """A feed-forward block, or one that only looks like it."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.inner = nn.Linear(DIM, 20, bias=change != "no bias")
        self.outer = nn.Linear(20, DIM)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
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

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        mixed, *others = (layer(normed) for layer in self.layers)
        for index, other in enumerate(others):
            mixed = mixed * other.mean(2, keepdim=True) if index % 2 == 0 else mixed + other
        residual = x[:, :1] if self.change == "residual is broadcast" else x
        result = residual + self.output(mixed)
        return result + normed if self.change == "norm is read again" else result


class Layer(nn.Module):
    """The attention half of an encoder layer, or one that only looks like it."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.change = change
        self.norm, self.other_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        for parameter in (*self.norm.parameters(), *self.other_norm.parameters()):
            nn.init.normal_(parameter, 0.5)
        heads = DIM // 2 if change == "narrow heads" else 4
        self.attention = Fastformer(DIM, heads, causal=change == "causal")

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        normed, attention = self.norm(x), self.attention
        if self.change in ("", "causal", "narrow heads"):
            return x + attention(normed, lengths)
        query, key = attention.query(normed), attention.key(normed)
        if self.change == "key of another norm":
            key = attention.key(self.other_norm(x))
        value = key if self.change == "value is the key" else query
        weights = (attention.alpha_weight, attention.beta_weight)
        mixed = torch.ops.aftexport.fastformer(query, key, value, *weights, lengths, 4)
        inner_residual = key if self.change == "residual of the key" else query
        inner = attention.output(mixed) + inner_residual
        result = (normed if self.change == "residual after the norm" else x) + inner
        read_again = {
            "norm is read again": normed,
            "key is read again": key,
            "query is read again": query,
            "inner sum is read again": inner,
        }
        return result * read_again.get(self.change, 1.0)


def exported(module: nn.Module) -> ir.Model:
    batch, tokens = torch.export.Dim("b"), torch.export.Dim("t")
    names = [*inspect.signature(module.forward).parameters]
    examples = {"x": torch.randn(2, 5, DIM), "lengths": torch.tensor([5, 3])}
    shapes = {"x": {0: batch, 1: tokens}, "lengths": {0: batch}}
    program = torch.export.export(
        module.eval(),
        tuple(examples[name] for name in names),
        dynamic_shapes={name: shapes[name] for name in names},
    )
    result = torch.onnx.export(
        program,
        (),
        dynamo=True,
        opset_version=20,
        verbose=False,
        input_names=names,
        custom_translation_table=translations(),
    )
    assert result is not None
    return result.model


def fused(model: ir.Model) -> onnx.ModelProto:
    fuse_fastformer(model)
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
    names = [value.name for value in session.get_inputs()]
    for shape, ends in (((1, 1), [1]), ((3, 7), [7, 1, 4]), ((2, 65), [64, 65])):
        given = {"x": torch.randn(*shape, DIM), "lengths": torch.tensor(ends)}
        wide = [given[n].double() if n == "x" else given[n] for n in names]
        with torch.no_grad():
            expected = module.double()(*wide).numpy()
        module.float()
        actual = session.run(None, {n: given[n].numpy() for n in names})[0]
        assert np.isfinite(actual).all()
        valid = np.ones(shape, bool)
        if "lengths" in names:
            valid = np.arange(shape[1]) < np.array(ends)[:, None]
        scale = max(1.0, np.abs(expected[valid]).max())
        assert np.abs(actual - expected)[valid].max() / scale <= TOLERANCES["fp32"].bound


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
        (Layer("causal"), "LayerNormFastformer"),
        (Layer("narrow heads"), "LayerNormFastformer"),
        (Layer("key of another norm"), "LayerNormFastformer"),
        (Layer("value is the key"), "LayerNormFastformer"),
        (Layer("residual of the key"), "LayerNormFastformer"),
        (Layer("residual after the norm"), "LayerNormFastformer"),
        (Layer("norm is read again"), "LayerNormFastformer"),
        (Layer("key is read again"), "LayerNormFastformer"),
        (Layer("query is read again"), "LayerNormFastformer"),
        (Layer("inner sum is read again"), "LayerNormFastformer"),
    ],
    ids=lambda value: getattr(value, "change", ""),
)
def test_look_alike_stays_unchanged(module: nn.Module, absent: str) -> None:
    model = fused(exported(module))
    assert absent not in counts(model)
    if isinstance(module, Layer):
        attention = "CausalFastformer" if module.change == "causal" else "Fastformer"
        assert attention in counts(model)
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
@pytest.mark.parametrize(
    "module",
    [Projections(widths=[DIM, 4]), Projections(widths=[DIM, 4, DIM]), Layer()],
    ids=["two", "three", "fastformer"],
)
def test_fused_layers_leave_nothing_unread(module: nn.Module) -> None:
    model = fused(exported(module))
    read = {name for node in model.graph.node for name in node.input}
    assert {i.name for i in model.graph.initializer} <= read


@pytest.mark.filterwarnings("ignore")
def test_fastformer_layer_becomes_one_node() -> None:
    module = Layer()
    model = fused(exported(module))
    assert [n.op_type for n in model.graph.node] == ["LayerNormFastformer"]
    assert_unchanged(module, model)
