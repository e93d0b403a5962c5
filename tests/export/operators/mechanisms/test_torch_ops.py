"""The torch op of every operator against the reference in float64."""

import numpy as np
import pytest
import torch

from aftexport.operators.torch_ops import OPERATORS

from .cases import (
    BOUND,
    FEW,
    ONE_GATE,
    PAIRS,
    Case,
    Variant,
    as_tensors,
    error,
    make_inputs,
    named,
    run_torch,
    truth,
)


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(**named(PAIRS))
def test_the_torch_op_equals_the_reference(variant: Variant, case: Case, dtype: str) -> None:
    inputs = make_inputs(variant.operator, case)
    inputs = {n: x.astype(dtype) if n != "lengths" else x for n, x in inputs.items()}
    result = run_torch(variant, inputs, case.heads)
    assert result.dtype == dtype
    assert error(result, truth(variant, case), inputs) < BOUND[dtype]


@pytest.mark.parametrize("case", FEW, ids=str)
@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_float16_op_computes_in_float32(variant: Variant, case: Case) -> None:
    if case.spread > 1 and _leaves_float16(variant, case):
        pytest.skip("the right answer is beyond float16")
    inputs = make_inputs(variant.operator, case, "float16")
    result = run_torch(variant, inputs, case.heads)
    assert result.dtype == np.float16
    expected = truth(variant, case, "float16")
    assert error(result, expected, inputs) < BOUND["float16"]
    # Nothing but the last rounding is 16 bits wide.
    assert error(result, expected, inputs) < 2 * 2**-11


def _leaves_float16(variant: Variant, case: Case) -> bool:
    return np.abs(truth(variant, case, "float16")).max() > np.finfo(np.float16).max


@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_bfloat16_goes_in_and_out(variant: Variant) -> None:
    case = Case("bfloat16", 33, (33, 20))
    inputs = make_inputs(variant.operator, case)
    *floats, lengths = as_tensors(inputs)
    floats = [x.bfloat16() for x in floats]
    attributes = variant.attributes(case.heads)
    result = variant.operator.torch_op(*floats, lengths, *attributes.values())
    assert result.dtype == torch.bfloat16
    expected = variant.operator.reference(*(x.double() for x in floats), lengths, **attributes)
    assert error(result.double().numpy(), expected.numpy(), inputs) < 2 * 2**-8


@pytest.mark.parametrize(("batch", "tokens"), [(0, 33), (2, 0)])
@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_empty_batch_gives_empty_result(variant: Variant, batch: int, tokens: int) -> None:
    """Either the documents or their tokens are missing."""
    *floats, lengths = as_tensors(make_inputs(variant.operator, Case("cut", 33, (33, 20))))
    cut = [x[:batch, :tokens] if x.dim() == 3 else x for x in floats]
    leaves = [x.detach().requires_grad_() for x in cut]
    result = variant.operator.torch_op(*leaves, lengths[:batch], *variant.attributes(2).values())
    assert result.shape == leaves[0].shape
    result.sum().backward()  # as the loss of a batch of which nothing is left
    assert all(x.grad is None or not x.grad.any() for x in leaves)


@pytest.mark.parametrize(("tokens", "keys", "width"), [(0, 0, 6), (0, 4, 6), (3, 0, 6), (3, 4, 0)])
@pytest.mark.parametrize("name", ["NormalizedLinearAttention", "EfficientAttention"])
def test_empty_keys_give_zeros(name: str, tokens: int, keys: int, width: int) -> None:
    """The keys have lengths of their own, and the values another width than the keys."""
    operator = OPERATORS[name]
    sizes = (tokens, 16), (keys, 8), (keys, width)
    leaves = [torch.randn(2, *size, requires_grad=True) for size in sizes]
    lengths = torch.tensor([tokens, 0]), torch.tensor([keys, 0])
    values = {a.name: a.default for a in operator.attributes} | {"num_heads": 4, "kv_num_heads": 2}
    result = operator.torch_op(*leaves, lengths[0], *values.values(), lengths[1])
    assert result.shape == (2, tokens, 2 * width)
    assert not result.any()
    result.sum().backward()
    assert all(x.grad is None or not x.grad.any() for x in leaves)


@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_non_contiguous_inputs_stay_unchanged(variant: Variant) -> None:
    inputs = make_inputs(variant.operator, Case("strided", 33, (33, 20)))
    strided = [torch.stack((x, x), -1)[..., 0] if x.dim() == 3 else x for x in as_tensors(inputs)]
    result = variant.operator.torch_op(*strided, *variant.attributes(2).values())
    assert result.is_contiguous()
    assert error(result.numpy(), run_torch(variant, inputs), inputs) < 1e-6
    for tensor, before in zip(strided, inputs.values(), strict=True):
        assert np.array_equal(tensor.numpy(), before)
