from collections.abc import Callable

import pytest
import tiny_models
import torch
from torch import Tensor, finfo, nn
from torch.nn import functional

from aftexport.capture.capture import capture, copied
from aftexport.capture.reference_module import ReferenceModule

IDS = torch.arange(12).view(2, 6)
Compute = Callable[[tiny_models.Bag, Tensor], Tensor]


class Computing(tiny_models.Bag):
    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.compute(self, input_ids))


def state(m: tiny_models.Bag, ids: Tensor) -> Tensor:
    x = m.embedding(ids)
    carried = torch.zeros(x.shape[0], 16, 16).baddbmm_(x.transpose(1, 2), x)
    return (carried @ torch.ones(16, 1)).squeeze(-1)


def rotated(m: tiny_models.Bag, ids: Tensor) -> Tensor:
    angles = torch.arange(ids.shape[1], dtype=torch.float32)[:, None] * torch.ones(8)
    x = m.embedding(ids).to(torch.float32)
    return (x * torch.cat([angles.sin(), angles.cos()], -1)).mean(1) @ torch.eye(16)


def softmax(m: tiny_models.Bag, ids: Tensor) -> Tensor:
    weights = torch.softmax(m.embedding(ids), 1, dtype=torch.float32)
    return torch.einsum("btd,btd->bd", weights, m.embedding(ids).float())


@pytest.mark.parametrize(
    "compute",
    [
        state,
        rotated,
        softmax,
        lambda m, ids: (functional.one_hot(ids, 300).float() @ m.embedding.weight).mean(1),
        lambda m, ids: m.mean(ids).type(torch.FloatTensor),
        lambda m, ids: functional.linear(m.mean(ids).float(), torch.tensor([[0.5] * 16] * 16)),
    ],
)
def test_fixed_types_are_widened(compute: Compute) -> None:
    module = Computing(compute).eval()
    reference = ReferenceModule(copied(module), ["input_ids"])
    outputs = reference(IDS)
    assert (reference.precision, reference.reason) == ("float64", "")
    assert outputs.dtype == torch.float64
    assert (outputs.float() - outputs).any()  # digits that float32 has not
    torch.testing.assert_close(outputs.float(), module(IDS))
    assert torch.equal(reference(IDS), outputs)
    assert torch.get_default_dtype() == torch.float32


def cast_and_back(m: tiny_models.Bag, ids: Tensor) -> Tensor:
    x = m.mean(ids)
    return x.float().tanh().to(x.dtype)


@pytest.mark.parametrize(
    ("compute", "casts"), [(cast_and_back, True), (tiny_models.Bag.mean, False)]
)
def test_casts_to_float32_are_noted(compute: Compute, casts: bool) -> None:
    reference = ReferenceModule(copied(Computing(compute).eval()), ["input_ids"])
    outputs = reference(IDS)
    assert reference.casts_to_float32 == casts
    with reference.without_casts():
        assert torch.equal(reference(IDS), outputs) != casts
    assert torch.equal(reference(IDS), outputs)


def test_rounding_to_half_stays() -> None:
    module = Computing(lambda m, ids: m.mean(ids).half().float())
    outputs = ReferenceModule(copied(module), ["input_ids"])(IDS)
    torch.testing.assert_close(outputs.float(), module(IDS), rtol=1e-6, atol=1e-6)


def test_float32_alone_is_said() -> None:
    module = tiny_models.FixedType().eval()
    reference = ReferenceModule(copied(module), ["input_ids"])
    assert torch.equal(reference(IDS), module(IDS))
    assert reference.precision == "float32"
    assert "float32 is expected (" in reference.reason
    assert torch.get_default_dtype() == torch.float32


def test_failing_module_fails_as_itself() -> None:
    class Failing(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            raise KeyError(str(torch.get_default_dtype()))

    with pytest.raises(KeyError, match="float32"):
        ReferenceModule(Failing(), ["input_ids"])(IDS)
    assert torch.get_default_dtype() == torch.float32


def scaled(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


@pytest.mark.parametrize(
    "compute",
    [
        lambda m, ids: functional.rms_norm(m.mean(ids), (16,)),
        lambda m, ids: nn.RMSNorm(16)(m.mean(ids)),
        lambda m, ids: scaled(m.mean(ids), torch.finfo(m.mean(ids).dtype).eps),
        lambda m, ids: scaled(m.mean(ids), finfo().eps),
        lambda m, ids: (m.mean(ids).square() ** 9 + torch.finfo(m.mean(ids).dtype).tiny).log(),
        lambda m, ids: torch.nan_to_num(m.mean(ids) / 0).mul(1e-38),
    ],
)
def test_constants_are_of_trained_type(compute: Compute) -> None:
    module = Computing(compute).eval()
    with torch.no_grad():
        module.embedding.weight.mul_(1e-4)
    reference = ReferenceModule(copied(module), ["input_ids"])
    with torch.inference_mode():
        torch.testing.assert_close(reference(IDS).float(), module(IDS), rtol=1e-5, atol=1e-5)
    assert finfo is torch.finfo


def test_capture_keeps_constants_of_bfloat16() -> None:
    class Normed(tiny_models.Bag):
        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.mean(input_ids)
            return self.head(scaled(x, torch.finfo(x.dtype).eps))

    module = Normed().bfloat16().eval()
    with torch.no_grad():
        module.embedding.weight.mul_(0.1)
        found = capture(module).module()(IDS)
        torch.testing.assert_close(found, module(IDS).float(), rtol=3e-2, atol=3e-2)
