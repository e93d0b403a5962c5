import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from aftexport.capture.capture import capture
from aftexport.capture.torch_logs import quiet
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.lowering.translations import translations
from aftexport.verify.layers.float64 import run_bodies

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


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ROWS), 4)
        with torch.no_grad():
            self.embedding.weight.copy_(torch.tensor(list(ROWS.values())))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return torch.cat([x.logcumsumexp(2), x.logcumsumexp(1), x.flip(2).logcumsumexp(-1)], 2)


def test_sums_are_pytorchs_over_both_axes() -> None:
    module = Sums().eval()
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
