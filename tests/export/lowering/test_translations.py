from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tiny_models
import torch
from sampling import any_case
from tiny_models import Applied
from torch import Tensor, nn
from torch.nn import functional

from aftexport.capture.capture import capture
from aftexport.capture.torch_messages import quiet
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import TraceError
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.lowering.translations import translations
from aftexport.verify.subgraph import run_bodies

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


def test_translation_for_example_length_is_refused(tmp_path: Path) -> None:
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


def moments(x: Tensor) -> Tensor:
    found = [
        *torch.var_mean(x, 1, keepdim=True),
        *(moment[:, None] for moment in torch.var_mean(x, -2, unbiased=False)),
        *torch.std_mean(x, (1, 2), keepdim=True, correction=2),
    ]
    return torch.cat([moment.expand(-1, -1, 4) for moment in found], 1)


def test_variances_with_means_are_pytorchs() -> None:
    """Both of a million nearly equal tokens, too."""
    module = Applied(moments, width=4).eval()
    with torch.no_grad():
        module.embedding.weight.copy_(0.7 + 1e-2 * module.embedding.weight)
    engine = OnnxRuntimeEngine(finish(lower(capture(module))).SerializeToString())
    module.double()
    for shape in ((2, 17), (1, 1_048_576)):
        ids = torch.arange(shape[0] * shape[1]).reshape(shape) % 50
        logits = engine.run({"input_ids": ids.numpy()})["logits"]
        np.testing.assert_allclose(logits, module(ids).detach().numpy(), rtol=1e-4)


_SCALES = (1e-38, 1e-30, 1e-22, 1e-10, 1.0, 1e10, 1e18, 1e19, 1e20, 1e30, 1e37, 3e38)
_OFFSETS = (0.0, 1.0, 100.0)


def table() -> Tensor:
    """Return rows of 16 numbers around each scale, up to 100 deviations from zero."""
    spread = np.random.default_rng(0).uniform(-1, 1, 16)
    rows = np.array([(spread + offset) * scale for scale in _SCALES for offset in _OFFSETS])
    held = np.abs(rows).max(1) < float(np.finfo(np.float32).max)
    return torch.from_numpy(np.concatenate([rows[held], np.zeros((1, 16))]).astype(np.float32))


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
    module = Applied(FUNCTIONS[name], nn.Flatten(1), rows=table()).eval()
    engine = OnnxRuntimeEngine(finish(lower(capture(module))).SerializeToString())
    count = module.embedding.num_embeddings
    ids = np.arange(count)[:, None].repeat(3, 1)
    with torch.inference_mode():
        expected = module(torch.from_numpy(ids)).numpy()
    served = engine.run({"input_ids": ids})["logits"]
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(served, expected, rtol=2e-5, atol=1e-44)


def test_deviation_of_one_token_is_nan() -> None:
    module = Applied(lambda x: x.std(1), rows=table()).eval()
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


ROWS = {
    "ordinary": (0.3, -1.0, 2.0, 0.0),
    "over 88": (-500.0, 100.0, 3.0, 1000.0),
    "before a maximum": (1.0, 2.0, 1e4, 1e6),
    "nothing": (-np.inf, -np.inf, -np.inf, -np.inf),
    "nothing first": (-np.inf, 1.0, -np.inf, 2.0),
    "infinite": (1.0, np.inf, -np.inf, 5.0),
    "largest": (-3e38, 3e38, -3e38, 3e38),
    "little more": (0.0, -20.0, -30.0, -25.0),
}


def log_sums(x: Tensor) -> Tensor:
    return torch.cat([x.logcumsumexp(2), x.logcumsumexp(1), x.flip(2).logcumsumexp(-1)], 2)


def test_sums_are_pytorchs_over_both_axes() -> None:
    module = Applied(log_sums, rows=torch.tensor(list(ROWS.values()))).eval()
    model = finish(lower(capture(module)))
    ids = np.stack([np.arange(len(ROWS)), np.arange(len(ROWS))[::-1]])
    logits = OnnxRuntimeEngine(model.SerializeToString()).run({"input_ids": ids})["logits"]
    with torch.inference_mode():
        expected = module.double()(torch.from_numpy(ids.copy())).numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-6)
    np.testing.assert_allclose(run_bodies(model, {"input_ids": ids}), expected, rtol=1e-12)


class EveryAxis(nn.Module):
    """The sums over each axis of ``[A, B, C]``, of a vector, and in each type."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        vector = x.flatten()
        return (
            x.logcumsumexp(0),
            x.logcumsumexp(1),
            x.logcumsumexp(-1),
            vector.logcumsumexp(0),
            vector.double().logcumsumexp(0),
            vector.half().logcumsumexp(0),
        )


RELATIVE_ERRORS = {"float16": 1e-3, "float32": 1e-6, "float64": 1e-13}


@pytest.fixture(scope="module")
def every_axis() -> onnxruntime.InferenceSession:
    every = torch.export.Dim.DYNAMIC
    with quiet():
        program = torch.onnx.export(
            EveryAxis().eval(),
            (torch.zeros(2, 3, 4),),
            dynamo=True,
            opset_version=20,
            custom_translation_table=translations(),
            dynamic_shapes=(dict.fromkeys(range(3), every),),
            verbose=False,
        )
    assert program is not None
    return onnxruntime.InferenceSession(program.model_proto.SerializeToString())


def assert_pytorchs(session: onnxruntime.InferenceSession, x: Tensor) -> None:
    outputs = session.run(None, {"x": x.numpy()})
    singles, doubles = EveryAxis()(x), EveryAxis()(x.double())
    for got, single, double in zip(outputs, singles, doubles, strict=True):
        assert got.dtype == single.numpy().dtype
        # What float16 rounds the terms to is not in question.
        expected = single.double() if single.dtype == torch.float16 else double
        error = RELATIVE_ERRORS[str(got.dtype)]
        np.testing.assert_allclose(got, expected.numpy(), rtol=error, atol=error)


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 255, 257, 1023, 1024, 1025, 16385])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_sums_of_every_length(
    count: int, axis: int, every_axis: onnxruntime.InferenceSession
) -> None:
    shape = [2, 1, 3]
    shape[axis] = count
    generator = torch.Generator().manual_seed(count)
    assert_pytorchs(every_axis, 3 * torch.randn(shape, generator=generator))


@pytest.mark.parametrize("last", [-np.inf, np.inf, np.nan])
def test_infinities_and_nan_reach_later_blocks(
    last: float, every_axis: onnxruntime.InferenceSession
) -> None:
    x = torch.randn(1, 3000, 2, generator=torch.Generator().manual_seed(0))
    x[:, :1100] = -np.inf
    x[:, 1500] = last
    x[:, 2500, 1] = np.inf
    assert_pytorchs(every_axis, x)


@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_half_million_terms_sum_exactly(
    noise: float, every_axis: onnxruntime.InferenceSession
) -> None:
    """Equal terms are the worst case of a running sum; nearly equal ones come close."""
    x = 1.7 + noise * torch.randn(1, 524_288, 1, generator=torch.Generator().manual_seed(0))
    (sums,) = every_axis.run([every_axis.get_outputs()[1].name], {"x": x.numpy()})
    assert np.abs(sums - x.double().logcumsumexp(1).numpy()).max() < 1e-5
