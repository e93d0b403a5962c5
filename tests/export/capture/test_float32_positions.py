"""Positions, counts and lengths of float16 models, beyond the numbers that float16 holds."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sampling import any_case
from torch import Tensor, nn

from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.lowering.finish import finish
from aftexport.lowering.float32_sums import accumulate_in_float32
from aftexport.lowering.to_onnx import lower

TOKENS = 70_000
WIDTH = 8


Tokens = Callable[["Positioned", Tensor, Tensor, Tensor], Tensor]
"""A function of the model, ``x [B, T, D]``, the ids and the lengths."""


class Positioned(nn.Module):
    """A classifier whose tokens or documents depend on positions."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.embedding = nn.Embedding(50, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("frequencies", 10000 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2)))
        self.register_buffer("table", torch.arange(1, 100_001).float())

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        if self.name in OF_TOKENS:
            x = OF_TOKENS[self.name](self, x, input_ids, lengths)
        # The last tokens show their positions; a mean would hide them.
        logits = self.head(x[:, -3:].mean(1))
        if self.name == "length":
            return logits + lengths[:, None].to(x.dtype) / 300_000
        if self.name == "large constants":
            return logits + x.sum(1).mean(-1, keepdim=True) / 1e5
        return logits


def counted_mask(m: Positioned, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    mask = (torch.arange(x.shape[1]) < lengths[:, None])[..., None].to(x.dtype)
    return (x * mask).cumsum(1) / mask.cumsum(1).clamp(min=1)


def running_deviation(m: Positioned, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    count = torch.arange(1, x.shape[1] + 1).type_as(x)[:, None]
    mean = x.cumsum(1) / count
    return ((x * x).cumsum(1) / count - mean * mean).clamp(min=0).sqrt()


def window_mean(m: Positioned, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    total = torch.nn.functional.pad(x, (0, 0, 9, 0)).cumsum(1)
    return (total[:, 9:] - total[:, :-9]) / 9


def sinusoids(m: Positioned, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    angles = torch.arange(x.shape[1]).to(x.dtype)[:, None] * m.frequencies
    return x + torch.cat([angles.sin(), angles.cos()], -1)


def rotated(m: Positioned, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * m.frequencies
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second], -1)


def half_mask(m: Positioned, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    before = torch.arange(x.shape[1]).to(x.dtype) < lengths[:, None].to(x.dtype) - 2
    return x * before[..., None].to(x.dtype)


def positions(x: Tensor, first: int) -> Tensor:
    return torch.arange(first, first + x.shape[1], dtype=x.dtype)[:, None]


OF_TOKENS: dict[str, Tokens] = {
    "running mean": lambda m, x, ids, lengths: x.cumsum(1) / positions(x, 1),
    "counted ones": lambda m, x, ids, lengths: x.cumsum(1) / torch.ones_like(x[..., :1]).cumsum(1),
    "counted mask": counted_mask,
    "running deviation": running_deviation,
    "window mean": window_mean,
    "table": lambda m, x, ids, lengths: x.cumsum(1) / m.table[: x.shape[1], None],
    "sinusoids": sinusoids,
    "rotated": rotated,
    "half mask": half_mask,
    "by position": lambda m, x, ids, lengths: x * positions(x, 0) / x.shape[1],
    "large constants": lambda m, x, ids, lengths: x * 1e5 / 1e5,
    "ids": lambda m, x, ids, lengths: x + (ids * 5000).to(x.dtype)[..., None] / 250_000,
}


@pytest.mark.table(keep=0.4, by=any_case)
@pytest.mark.parametrize("name", [*OF_TOKENS, "length"])
def test_float16_positions_are_exact(name: str) -> None:
    module = Positioned(name).eval()
    lowered = accumulate_in_float32(lower(capture(module, dtype=torch.float16)))
    model = finish(lowered, precision="fp16").SerializeToString()
    engine = OnnxRuntimeEngine(model, threads=1)
    for tokens in (11, TOKENS):
        ids = np.arange(tokens)[None] * 37 % 50
        inputs = {"input_ids": ids, "lengths": np.array([tokens])}
        with torch.inference_mode():
            expected = (
                Positioned(name).eval().double()(*map(torch.from_numpy, inputs.values())).numpy()
            )
        given = engine.run(inputs)["logits"].astype(np.float64)
        assert np.abs(given - expected).max() < 4e-3, tokens


def test_bfloat16_positions_are_exact() -> None:
    program = capture(Positioned("sinusoids").eval(), dtype=torch.bfloat16)
    tokens = 3001
    ids = torch.arange(tokens)[None] % 50
    expected = Positioned("sinusoids").eval()(ids, torch.tensor([tokens]))
    given = program.module()(ids, torch.tensor([tokens]))
    assert (given - expected).abs().max() < 4e-2


def test_float32_program_is_unchanged() -> None:
    program = capture(Positioned("sinusoids").eval())
    assert not list(
        program.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    )
    assert {value.dtype for value in program.state_dict.values()} == {torch.float32}
