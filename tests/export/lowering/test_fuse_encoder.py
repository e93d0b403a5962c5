"""The rewrites of layers around the attention: matches, exceptions, and equal results."""

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

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

pytestmark = pytest.mark.filterwarnings("ignore")


class RMSNorm(nn.Module):
    """The norm as transformers writes it, or another formula that only looks like it."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM) * 0.3 + 1)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32) if x.dtype == torch.float16 else x
        power = 4 if self.change == "fourth power" else 2
        axis = 1 if self.change == "mean over tokens" else 2
        variance = wide.pow(power).mean(axis, keepdim=True)
        other = wide.abs() if self.change == "root of another value" else wide
        normed = self.weight * (other * torch.rsqrt(variance + 1e-6)).to(x.dtype)
        return normed + variance if self.change == "variance is read again" else normed


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(DIM),
    "layer norm without bias": lambda: nn.LayerNorm(DIM, bias=False),
    "rms norm": RMSNorm,
    "torch's rms norm": lambda: nn.RMSNorm(DIM, eps=1e-6),
    "no norm": nn.Identity,
}


class Block(nn.Module):
    """A feed-forward block, or one that only looks like it."""

    def __init__(self, change: str = "", norm: str = "layer norm", *, bias: bool = True) -> None:
        super().__init__()
        self.norm = RMSNorm(change) if norm == "another norm" else NORMS[norm]()
        for parameter in self.norm.parameters():
            nn.init.normal_(parameter, 1, 0.3)
        self.inner = nn.Linear(DIM, 20, bias=bias and change != "no bias")
        self.up = nn.Linear(DIM, 20, bias=bias)
        self.both = nn.Linear(DIM, 40, bias=bias)
        self.outer = nn.Linear(20, DIM, bias=bias)
        self.change, self.name = change, norm

    def __str__(self) -> str:
        return f"{self.name}, {self.change}, bias {self.outer.bias is not None}"

    def hidden(self, normed: Tensor, x: Tensor) -> Tensor:
        inner = self.inner(normed)
        match self.change:
            case "relu":
                return inner.relu()
            case "silu":
                return nn.functional.silu(inner)
            case "sigmoid of another value":
                return inner * self.up(normed).sigmoid()
            case "gelu in two weights":
                return nn.functional.gelu(inner) * self.up(normed)
            case "silu in two weights":
                return self.up(normed) * nn.functional.silu(inner)
            case "gate of another value":
                return nn.functional.silu(inner) * self.up(x)
            case "gelu in one weight":
                first, second = self.both(normed).chunk(2, dim=-1)
                return nn.functional.gelu(first) * second
            case "silu in uneven slices":
                both = self.both(normed)
                return nn.functional.silu(both[..., 20:]) * both[..., :20]
        return nn.functional.gelu(
            inner, approximate="tanh" if self.change == "tanh gelu" else "none"
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        hidden = self.hidden(normed, x)
        residual = normed if self.change == "residual after the norm" else x
        result = residual + self.outer(hidden)
        return result + hidden.sum() if self.change == "hidden is read again" else result


class Encoder(nn.Module):
    """A layer of an encoder family, whose attention a product of the projections stands for."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.family, bias = family, family == "BERT"
        norm = {"BERT": "layer norm", "ModernBERT": "layer norm without bias", "Llama": "rms norm"}
        self.first, self.second = NORMS[norm[family]](), NORMS[norm[family]]()
        self.projections = nn.ModuleList(nn.Linear(DIM, DIM, bias=bias) for _ in range(3))
        self.packed = nn.Linear(DIM, 3 * DIM, bias=bias)
        self.output = nn.Linear(DIM, DIM, bias=bias)
        self.inner, self.up = nn.Linear(DIM, 40, bias=bias), nn.Linear(DIM, 40, bias=bias)
        self.both, self.outer = nn.Linear(DIM, 80, bias=bias), nn.Linear(40, DIM, bias=bias)

    def attention(self, x: Tensor) -> Tensor:
        if self.family == "ModernBERT":
            query, key, value = self.packed(x).split(DIM, dim=-1)
        else:
            query, key, value = (layer(x) for layer in self.projections)
        return self.output(query * key.mean(2, keepdim=True) - value)

    def feed_forward(self, x: Tensor) -> Tensor:
        if self.family == "ModernBERT":
            first, second = self.both(x).chunk(2, dim=-1)
            return self.outer(nn.functional.gelu(first) * second)
        if self.family == "Llama":
            return self.outer(nn.functional.silu(self.inner(x)) * self.up(x))
        return self.outer(nn.functional.gelu(self.inner(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2  # a computed value, as the embedding is
        if self.family == "BERT":
            attended = self.first(x + self.attention(x))
            return self.second(attended + self.feed_forward(attended))
        x = x + self.attention(self.first(x))
        return x + self.feed_forward(self.second(x))


class Projections(nn.Module):
    """Linear layers behind one norm, and an output projection with a residual."""

    def __init__(self, change: str = "", widths: Sequence[int] = (DIM, 4, DIM)) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, width) for width in widths)
        self.packed = nn.Linear(DIM, sum(widths))
        self.output = nn.Linear(DIM, DIM)
        self.change, self.widths = change, list(widths)

    def parts(self, normed: Tensor) -> Sequence[Tensor]:
        packed, ends = self.packed(normed), np.cumsum([0, *self.widths]).tolist()
        slices = list(pairwise(ends))
        match self.change:
            case "split":
                return packed.split(self.widths, dim=-1)
            case "slices":
                return [packed[..., begin:end] for begin, end in slices]
            case "slices from the end":
                return [packed[..., begin - ends[-1] : end] for begin, end in slices]
            case "overlapping slices":
                return [packed[..., 0:DIM], packed[..., 2:6], packed[..., -DIM:]]
            case "packed is read again":
                parts = packed.split(self.widths, dim=-1)
                return [parts[0] + packed.sum(2, keepdim=True), *parts[1:]]
            case "slices of tokens":
                return [packed[:, :1, :DIM], packed[:, -1:, :4], packed[:, :, -DIM:]]
        return [layer(normed) for layer in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        mixed, *others = self.parts(normed)
        for index, other in enumerate(others):
            mixed = mixed * other.mean(2, keepdim=True) if index % 2 == 0 else mixed - other
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


def test_projections_become_two_operators() -> None:
    module = Projections()
    model = fused(exported(module))
    assert counts(model) == {"LayerNormQueryKeyValue": 1, "LinearResidual": 1}
    assert_unchanged(module, model)


@pytest.mark.table(keep=0.1)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "change",
    ["", "no bias", "tanh gelu", "relu", "silu", "gelu in two weights", "silu in two weights",
     "gelu in one weight", "silu in uneven slices"],
)  # fmt: skip
def test_feed_forward_block_becomes_one_operator(change: str, norm: str, bias: bool) -> None:
    module = Block(change, norm, bias=bias)
    model = fused(exported(module))
    assert [node.op_type for node in model.graph.node] == ["LayerNormFeedForward"]
    assert_unchanged(module, model)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("BERT", {"LayerNormalization": 2, "LayerNormQueryKeyValue": 1}),
        ("ModernBERT", {"LayerNormQueryKeyValue": 1}),
        ("Llama", {"LayerNormQueryKeyValue": 1}),
    ],
)
def test_layer_of_family_has_no_product_left(family: str, expected: dict[str, int]) -> None:
    module = Encoder(family)
    model = fused(exported(module))
    found = Counter(node.op_type for node in model.graph.node)
    assert not found.keys() & {"MatMul", "Pow", "Split", "Slice", "Gelu", "Sigmoid"}
    wanted = {"LayerNormFeedForward": 1, "LinearResidual": 1} | expected
    assert {name: found[name] for name in wanted} == wanted
    assert_unchanged(module, model)


@pytest.mark.parametrize("change", ["split", "slices", "slices from the end"])
def test_product_is_cut_where_its_parts_are_read(change: str) -> None:
    module = Projections(change)
    model = fused(exported(module))
    assert counts(model) == {"LayerNormQueryKeyValue": 1, "LinearResidual": 1}
    assert not {node.op_type for node in model.graph.node} & {"Split", "Slice"}
    assert_unchanged(module, model)


@pytest.mark.parametrize(
    "change", ["overlapping slices", "packed is read again", "slices of tokens"]
)
def test_product_that_cannot_be_cut_stays_whole(change: str) -> None:
    module = Projections(change)
    model = fused(exported(module))
    assert counts(model) == {"LayerNormLinear": 1, "LinearResidual": 1}
    assert_unchanged(module, model)


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ([DIM, 4, DIM], {"LayerNormQueryKeyValue": 1, "LinearResidual": 1}),
        ([DIM, 20], {"LayerNormLinear": 2, "LinearResidual": 1}),
        ([DIM, 4], {"LayerNormLinear": 1, "LinearResidual": 1}),
    ],
    ids=["three", "two", "narrow"],
)
def test_norm_with_other_readers_stays(widths: list[int], expected: dict[str, int]) -> None:
    """Its linear layers become operators without a norm, but for a narrow one."""
    module = Projections("norm is read again", widths)
    model = fused(exported(module))
    assert counts(model) == expected
    assert "LayerNormalization" in {node.op_type for node in model.graph.node}
    norms = [n.input[1] for n in model.graph.node if n.op_type.startswith("LayerNormL")]
    assert not any(norms)
    assert_unchanged(module, model)


@pytest.mark.parametrize(
    "change",
    ["fourth power", "mean over tokens", "root of another value", "variance is read again"],
)
def test_other_norm_stays(change: str) -> None:
    module = Block(change, "another norm")
    model = fused(exported(module))
    assert "Reciprocal" in {node.op_type for node in model.graph.node}
    assert "LayerNormFeedForward" not in counts(model)
    assert_unchanged(module, model)


@pytest.mark.table(keep=0.25, by=any_case)
@pytest.mark.parametrize(
    ("module", "absent"),
    [
        (Block("sigmoid of another value"), "LayerNormFeedForward"),
        (Block("gate of another value"), "LayerNormFeedForward"),
        (Block("residual after the norm"), "LayerNormFeedForward"),
        (Block("hidden is read again"), "LayerNormFeedForward"),
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


@pytest.mark.parametrize("widths", [[DIM], [DIM, 4], [DIM, 4, DIM, 7]], ids=len)
def test_other_linear_layers_fuse_one_each(widths: list[int]) -> None:
    """Linear layers that are not three become one operator each."""
    module = Projections(widths=widths)
    model = fused(exported(module))
    assert counts(model) == {"LayerNormLinear": len(widths), "LinearResidual": 1}
    assert_unchanged(module, model)


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


@pytest.mark.parametrize(
    "module",
    [Projections(widths=[DIM, 4]), Projections(widths=[DIM, 4, DIM]), Layer()],
    ids=["two", "three", "fastformer"],
)
def test_fused_layers_leave_nothing_unread(module: nn.Module) -> None:
    model = fused(exported(module))
    read = {name for node in model.graph.node for name in node.input}
    assert {i.name for i in model.graph.initializer} <= read


def test_fastformer_layer_becomes_one_node() -> None:
    module = Layer()
    model = fused(exported(module))
    assert [n.op_type for n in model.graph.node] == ["LayerNormFastformer"]
    assert_unchanged(module, model)
