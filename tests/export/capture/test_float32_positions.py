"""Positions, counts and lengths of float16 models, beyond the numbers that float16 holds."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.lowering.finish import finish
from aftexport.lowering.float32_sums import accumulate_in_float32
from aftexport.lowering.to_onnx import lower

TOKENS = 70_000
WIDTH = 8


class Positioned(nn.Module):
    """A classifier whose tokens or documents depend on positions; subclasses say how."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("frequencies", 10000 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2)))
        self.register_buffer("table", torch.arange(1, 100_001).float())

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.tokens(self.embedding(input_ids), input_ids, lengths)
        # The last tokens show their positions; a mean would hide them.
        return self.head(x[:, -3:].mean(1)) + self.documents(x, lengths)

    def tokens(self, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        return x

    def documents(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x.new_zeros(())


class RunningMean(Positioned):
    def tokens(self, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


class CountedOnes(Positioned):
    def tokens(self, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        return x.cumsum(1) / torch.ones_like(x[..., :1]).cumsum(1)


class CountedMask(Positioned):
    def tokens(self, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(x.shape[1]) < lengths[:, None])[..., None].to(x.dtype)
        return (x * mask).cumsum(1) / mask.cumsum(1).clamp(min=1)


class RunningDeviation(Positioned):
    def tokens(self, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1).type_as(x)[:, None]
        mean = x.cumsum(1) / count
        return ((x * x).cumsum(1) / count - mean * mean).clamp(min=0).sqrt()


class WindowMean(Positioned):
    def tokens(self, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        total = torch.nn.functional.pad(x, (0, 0, 9, 0)).cumsum(1)
        return (total[:, 9:] - total[:, :-9]) / 9


class Table(Positioned):
    def tokens(self, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        return x.cumsum(1) / self.table[: x.shape[1], None]


class Sinusoids(Positioned):
    def tokens(self, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1]).to(x.dtype)[:, None] * self.frequencies
        return x + torch.cat([angles.sin(), angles.cos()], -1)


class Rotated(Positioned):
    def tokens(self, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * self.frequencies
        first, second = x.chunk(2, -1)
        return torch.cat([first * angles.cos() - second * angles.sin(), second], -1)


class HalfMask(Positioned):
    def tokens(self, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        before = torch.arange(x.shape[1]).to(x.dtype) < lengths[:, None].to(x.dtype) - 2
        return x * before[..., None].to(x.dtype)


class WeightedByPosition(Positioned):
    def tokens(self, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        return x * torch.arange(x.shape[1], dtype=x.dtype)[:, None] / x.shape[1]


class LengthFeature(Positioned):
    def documents(self, x: Tensor, lengths: Tensor) -> Tensor:
        return lengths[:, None].to(x.dtype) / 300_000


class LargeConstants(Positioned):
    def tokens(self, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        return x * 1e5 / 1e5

    def documents(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x.sum(1).mean(-1, keepdim=True) / 1e5


class Ids(Positioned):
    def tokens(self, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        return x + (ids * 5000).to(x.dtype)[..., None] / 250_000


@pytest.mark.parametrize("kind", Positioned.__subclasses__())
def test_float16_positions_are_exact(kind: type[Positioned]) -> None:
    module = kind().eval()
    lowered = accumulate_in_float32(lower(capture(module, dtype=torch.float16)))
    model = finish(lowered, precision="fp16").SerializeToString()
    engine = OnnxRuntimeEngine(model, threads=1)
    for tokens in (11, TOKENS):
        ids = np.arange(tokens)[None] * 37 % 50
        inputs = {"input_ids": ids, "lengths": np.array([tokens])}
        with torch.inference_mode():
            expected = kind().eval().double()(*map(torch.from_numpy, inputs.values())).numpy()
        given = engine.run(inputs)["logits"].astype(np.float64)
        assert np.abs(given - expected).max() < 4e-3, tokens


def test_bfloat16_positions_are_exact() -> None:
    program = capture(Sinusoids().eval(), dtype=torch.bfloat16)
    tokens = 3001
    ids = torch.arange(tokens)[None] % 50
    expected = Sinusoids().eval()(ids, torch.tensor([tokens]))
    given = program.module()(ids, torch.tensor([tokens]))
    assert (given - expected).abs().max() < 4e-2


def test_float32_program_is_unchanged() -> None:
    program = capture(Sinusoids().eval())
    assert not list(
        program.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    )
    assert {value.dtype for value in program.state_dict.values()} == {torch.float32}
