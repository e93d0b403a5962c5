from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from sampling import any_case
from torch import Tensor, nn
from torch.nn import functional

from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import TraceError
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower

LENGTHS = (1, 2, 3, 7, 15, 16, 17, 32, 50, 101)


class Pooled(tiny_models.Bag):
    """Pools ``[batch, 16, tokens]`` to a fixed number of places."""

    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.pool(self.embedding(input_ids).transpose(1, 2)).flatten(1)


def positions_of_largest(x: Tensor) -> Tensor:
    return functional.adaptive_max_pool1d_with_indices(x, 4)[1].to(x.dtype)


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "average": lambda x: functional.adaptive_avg_pool1d(x, 16),
    "average of few": nn.AdaptiveAvgPool1d(3),
    "average of all": nn.AdaptiveAvgPool1d(1),
    "area": lambda x: functional.interpolate(x, size=5, mode="area"),
    "largest": lambda x: functional.adaptive_max_pool1d(x, 16),
    "largest of all": nn.AdaptiveMaxPool1d(1),
    "where it is": positions_of_largest,
    "of channels": lambda x: functional.adaptive_avg_pool1d(x.transpose(1, 2), 4).mean(1),
}


def assert_as_torch(module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    module = module.eval()
    model = finish(lower(capture(module, dtype=dtype)))
    engine = OnnxRuntimeEngine(model.SerializeToString())
    bound = 1e-5 if dtype == torch.float32 else 2e-3
    for tokens in LENGTHS:
        ids = torch.from_numpy(np.random.default_rng(tokens).integers(0, 300, (2, tokens)))
        with torch.inference_mode():
            expected = module.to(dtype)(ids)
        logits = engine.run({"input_ids": ids.numpy()})["logits"]
        np.testing.assert_allclose(logits, expected, rtol=bound, atol=bound, err_msg=str(tokens))


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize("name", POOLS)
def test_fixed_pooling_works_for_other_lengths(name: str) -> None:
    assert_as_torch(Pooled(POOLS[name]))


def test_fixed_pooling_works_in_float16() -> None:
    assert_as_torch(Pooled(POOLS["average"]), torch.float16)
    assert_as_torch(Pooled(POOLS["largest"]), torch.float16)


class Stretched(tiny_models.Bag):
    """Ten learned positions, stretched to the tokens."""

    def __init__(self, mode: str, is_aligned: bool | None) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 16, 10))
        self.options: dict[str, Any] = {"mode": mode, "align_corners": is_aligned}

    def forward(self, input_ids: Tensor) -> Tensor:
        table = functional.interpolate(self.table, size=input_ids.shape[1], **self.options)
        return self.head((self.embedding(input_ids) + table.transpose(1, 2)).tanh().mean(1))


@pytest.mark.parametrize(
    ("mode", "is_aligned"),
    [("linear", False), ("linear", True), ("nearest", None), ("nearest-exact", None)],
)
def test_table_is_stretched_to_any_length(mode: str, is_aligned: bool | None) -> None:
    assert_as_torch(Stretched(mode, is_aligned))


@pytest.mark.parametrize("size", [{"size": 20}, {"scale_factor": 2.0}])
def test_tokens_are_stretched(size: dict[str, Any]) -> None:
    assert_as_torch(Pooled(lambda x: functional.interpolate(x, **size, mode="linear").mean(2)))


class Thirds(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        tokens = input_ids.shape[1]
        rounded = (-(-tokens // 3), tokens // 3, (5 - tokens) // 3, (tokens - 5) // -3)
        return self.mean(input_ids)[:, :4] * torch.tensor(rounded)


def test_negative_sizes_are_divided_downwards() -> None:
    assert_as_torch(Thirds())


def test_size_is_divided_by_one_operator() -> None:
    class Half(tiny_models.Bag):
        def forward(self, input_ids: Tensor) -> Tensor:
            return self.head(self.mean(input_ids) * (input_ids.shape[1] // 2 + 1))

    operators = [node.op_type for node in lower(capture(Half())).graph.node]
    assert operators.count("Div") == 1
    assert "Less" not in operators


def test_translation_for_example_length_is_refused(
    tmp_path: Path,
) -> None:
    """Torch would translate it for the length of the example only."""
    program = capture(Pooled(lambda x: functional.adaptive_avg_pool2d(x, (4, 4))))
    said = r"Mod\(tokens, 4\).*\(adaptive_avg_pool2d, .*test_translations.py, line \d+, in forward"
    with pytest.raises(TraceError, match=said):
        lower(program)
    torch.export.save(program, tmp_path / "model.pt2")
    with pytest.raises(TraceError, match=said.partition(".*")[2]):
        lower(torch.export.load(tmp_path / "model.pt2"))


def test_end_from_values_ignores_example_size() -> None:
    """An end that the values decide is not a size of the example."""

    class Filled(tiny_models.Bag):
        def forward(self, input_ids: Tensor) -> Tensor:
            return self.head(self.embedding(input_ids)[:, : input_ids.ne(0).sum(1).max()].mean(1))

    assert_as_torch(Filled())


def test_patch_convolution_works_for_every_length() -> None:
    # torch asks for the number of documents to choose how the result lies in memory.
    class Patches(tiny_models.Bag):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv1d(16, 16, 4, stride=4)

        def forward(self, input_ids: Tensor) -> Tensor:
            x = functional.pad(self.embedding(input_ids).transpose(1, 2), (0, 4))
            return self.head(self.patches(x).mean(2))

    assert_as_torch(Patches())


def test_padding_equal_to_pooling_runs() -> None:
    def pool(x: Tensor) -> Tensor:
        return functional.avg_pool1d(functional.pad(x, (0, 2)), 2).mean(2)

    assert_as_torch(Pooled(pool))


class Moments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        moments = [
            *torch.var_mean(x, 1, keepdim=True),
            *(moment[:, None] for moment in torch.var_mean(x, -2, unbiased=False)),
            *torch.std_mean(x, (1, 2), keepdim=True, correction=2),
        ]
        return torch.cat([moment.expand(-1, -1, 4) for moment in moments], 1)


def test_variances_with_means_are_pytorchs() -> None:
    """Both of a million nearly equal tokens, too."""
    module = Moments().eval()
    with torch.no_grad():
        module.embedding.weight.copy_(0.7 + 1e-2 * module.embedding.weight)
    engine = OnnxRuntimeEngine(finish(lower(capture(module))).SerializeToString())
    module.double()
    for shape in ((2, 17), (1, 1_048_576)):
        ids = torch.arange(shape[0] * shape[1]).reshape(shape) % 50
        logits = engine.run({"input_ids": ids.numpy()})["logits"]
        np.testing.assert_allclose(logits, module(ids).detach().numpy(), rtol=1e-4)
