"""Means of more tokens than float16 can count."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny_models
import torch
from torch import Tensor, nn

from aftexport.bundle.bundle import CHUNKED
from aftexport.capture.capture import capture
from aftexport.chunked.archive import write_chunked
from aftexport.chunked.runner import ChunkedModel
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.lowering.finish import finish
from aftexport.lowering.float32_sums import accumulate_in_float32
from aftexport.lowering.to_onnx import lower
from aftexport.nn import AftSimple
from aftexport.parity import TOLERANCES

TOKENS = 100_000


class Pooled(nn.Module):
    """Pools in the type of its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(tiny_models.VOCABULARY, 8)
        nn.init.normal_(self.embedding.weight, mean=2)
        self.attention = AftSimple(8)
        self.head = nn.Linear(8, 3)

    def mask(self, ids: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        return mask.unsqueeze(-1).to(self.head.weight.dtype)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = x + self.attention(x, lengths)
        return self.head(self.pool(x, self.mask(input_ids, lengths), lengths))


class Mean(Pooled):
    def pool(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        return x.mean(1)


class ByLength(Pooled):
    def pool(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        return (x * mask).sum(1) / lengths[:, None].to(x.dtype)


class ByMask(Pooled):
    def pool(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        return (x * mask).sum(1) / mask.sum(1).clamp(min=1)


class ByRoot(Pooled):
    def pool(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        return (x * mask).sum(1, keepdim=True)[:, 0] / (x.shape[1] * mask.sum(1)).sqrt()


@pytest.mark.parametrize("kind", [Mean, ByLength, ByMask, ByRoot])
def test_float16_answers_as_float64_does(kind: type[Pooled], tmp_path: Path) -> None:
    module = kind().eval()
    lowered = lower(capture(module, dtype=torch.float16))
    lowered = accumulate_in_float32(lowered)
    plan = write_chunked(tmp_path / CHUNKED, lowered, precision="fp16")
    chunked = ChunkedModel(tmp_path / CHUNKED, plan, threads=1)
    model = finish(lowered, precision="fp16").SerializeToString()
    whole = OnnxRuntimeEngine(model, threads=1)
    ids = np.arange(TOKENS)[None] * 37 % tiny_models.VOCABULARY
    inputs = {"input_ids": ids, "lengths": np.array([TOKENS])}
    with torch.inference_mode():
        expected = module.double()(*map(torch.from_numpy, inputs.values())).numpy()
    bound = TOLERANCES["fp16"].bound * max(1, np.abs(expected).max())
    inputs = {name: inputs[name] for name in whole.input_names}
    for logits in (whole.run(inputs)["logits"], chunked.run(ids[0])["logits"]):
        assert np.isfinite(logits).all()
        assert np.abs(logits - expected).max() <= bound


def test_branches_read_rounded_sum() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        g (float16[batch, tokens, 4] input_features, bool flag) => (float16[batch, 4] y)
        <float16[batch, 4] total>
        {
            axes = Constant <value_ints = [1]> ()
            total = ReduceSum <keepdims = 0> (input_features, axes)
            y = If (flag) <
                then_branch = a () => (float16[batch, 4] kept) { kept = Identity(total) },
                else_branch = b () => (float16[batch, 4] less) { less = Neg(total) }
            >
        }
    """)
    changed = accumulate_in_float32(model)
    onnx.checker.check_model(changed, full_check=True)
    assert [n.op_type for n in changed.graph.node] == [
        "Constant", "Cast", "ReduceSum", "Cast", "If",
    ]  # fmt: skip
    engine = OnnxRuntimeEngine(changed.SerializeToString(), threads=1)
    inputs = {"input_features": np.ones((2, 9, 4), np.float16), "flag": np.array(False)}
    np.testing.assert_array_equal(engine.run(inputs)["y"], np.full((2, 4), -9))
