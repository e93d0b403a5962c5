"""The collapse of Fastformer layers: its matches, its exceptions, and equal results."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from sampling import any_case
from torch import Tensor, nn

from aftexport.lowering.fuse_encoder import fuse_encoder
from aftexport.lowering.fuse_fastformer import fuse_fastformer
from aftexport.lowering.translations import translations
from aftexport.nn.fastformer import Fastformer
from aftexport.operators.portable_bodies import attach_bodies
from aftexport.parity import TOLERANCES

DIM = 24


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
    program = torch.export.export(
        module.eval(),
        (torch.randn(2, 5, DIM), torch.tensor([5, 3])),
        dynamic_shapes={"x": {0: batch, 1: tokens}, "lengths": {0: batch}},
    )
    result = torch.onnx.export(
        program,
        (),
        dynamo=True,
        opset_version=20,
        verbose=False,
        input_names=["x", "lengths"],
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


def custom_operators(model: onnx.ModelProto) -> list[str]:
    return sorted(n.op_type for n in model.graph.node if n.domain == "ai.aftexport")


def assert_unchanged(module: nn.Module, model: onnx.ModelProto) -> None:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    for shape, lengths in (((1, 1), [1]), ((3, 7), [7, 1, 4]), ((2, 65), [64, 65])):
        x, ends = torch.randn(*shape, DIM), torch.tensor(lengths)
        with torch.no_grad():
            expected = module.double()(x.double(), ends).numpy()
        module.float()
        actual = session.run(None, {"x": x.numpy(), "lengths": ends.numpy()})[0]
        counts = np.arange(shape[1]) < np.array(lengths)[:, None]
        scale = max(1.0, np.abs(expected[counts]).max())
        assert np.abs(actual - expected)[counts].max() / scale <= TOLERANCES["fp32"].bound
        assert np.isfinite(actual).all()


@pytest.mark.filterwarnings("ignore")
def test_a_layer_becomes_one_operator() -> None:
    module = Layer()
    model = fused(exported(module))
    assert [n.op_type for n in model.graph.node] == ["LayerNormFastformer"]
    assert_unchanged(module, model)


@pytest.mark.table(keep=0.3, by=any_case)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "change",
    [
        "causal",
        "narrow heads",
        "key of another norm",
        "value is the key",
        "residual of the key",
        "residual after the norm",
        "norm is read again",
        "key is read again",
        "query is read again",
        "inner sum is read again",
    ],
)
def test_look_alike_stays_unchanged(change: str) -> None:
    module = Layer(change)
    model = fused(exported(module))
    attention = "CausalFastformer" if change == "causal" else "Fastformer"
    assert attention in custom_operators(model)
    assert_unchanged(module, model)


@pytest.mark.filterwarnings("ignore")
def test_logit_weights_leave_no_copies() -> None:
    model = fused(exported(Layer()))
    read = {name for node in model.graph.node for name in node.input}
    assert {i.name for i in model.graph.initializer} <= read
