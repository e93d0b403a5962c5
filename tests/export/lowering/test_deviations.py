"""Standard deviations over the whole range of float32, as PyTorch gives them."""

from collections.abc import Callable

import numpy as np
import pytest
import tiny_models
import torch
from sampling import any_case
from torch import Tensor, nn

from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower

_SCALES = (1e-38, 1e-30, 1e-22, 1e-10, 1.0, 1e10, 1e18, 1e19, 1e20, 1e30, 1e37, 3e38)
_OFFSETS = (0.0, 1.0, 100.0)


def table() -> Tensor:
    """Return rows of 16 numbers around each scale, up to 100 deviations from zero."""
    spread = np.random.default_rng(0).uniform(-1, 1, 16)
    rows = np.array([(spread + offset) * scale for scale in _SCALES for offset in _OFFSETS])
    held = np.abs(rows).max(1) < float(np.finfo(np.float32).max)
    return torch.from_numpy(np.concatenate([rows[held], np.zeros((1, 16))]).astype(np.float32))


class Deviation(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(table())
        self.function = function

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.function(self.embedding(input_ids)).flatten(1)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sample": lambda x: x.std(-1),
    "population": lambda x: x.std(-1, unbiased=False),
    "corrected": lambda x: torch.std(x, -1, correction=2, keepdim=True),
    "with mean": lambda x: torch.std_mean(x / 32, -1)[0],
    "of tokens": lambda x: x.std(1, correction=0),
    "of both": lambda x: x.std((1, 2), keepdim=True),
}


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_deviation_neither_overflows_nor_vanishes(name: str) -> None:
    module = Deviation(FUNCTIONS[name]).eval()
    engine = OnnxRuntimeEngine(finish(lower(capture(module))).SerializeToString())
    count = module.embedding.num_embeddings
    ids = np.arange(count)[:, None].repeat(3, 1)
    with torch.inference_mode():
        expected = module(torch.from_numpy(ids)).numpy()
    served = engine.run({"input_ids": ids})["logits"]
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(served, expected, rtol=2e-5, atol=1e-44)


def test_deviation_of_one_token_is_nan() -> None:
    module = Deviation(lambda x: x.std(1)).eval()
    engine = OnnxRuntimeEngine(finish(lower(capture(module))).SerializeToString())
    assert np.isnan(engine.run({"input_ids": np.zeros((1, 1), np.int64)})["logits"]).all()


def test_deviation_in_float16_counts_every_token() -> None:
    class Pooled(tiny_models.Bag):
        def forward(self, input_ids: Tensor) -> Tensor:
            return self.embedding(input_ids).std(1)

    module = Pooled().eval()
    engine = OnnxRuntimeEngine(
        finish(lower(capture(module, dtype=torch.float16)), precision="fp16").SerializeToString()
    )
    ids = np.random.default_rng(0).integers(0, tiny_models.VOCABULARY, (1, 70_000))
    with torch.inference_mode():
        expected = module(torch.from_numpy(ids)).numpy()
    np.testing.assert_allclose(engine.run({"input_ids": ids})["logits"], expected, rtol=5e-3)
