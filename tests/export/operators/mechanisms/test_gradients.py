"""Gradients of the torch ops, and torch's requirements for custom operators."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .cases import BOUND, CAUSAL, ONE_GATE, VARIANTS, Case, Inputs, Variant, as_tensors, make_inputs

SMALL = Case("gradients", 5, (5, 3), channels=4, window=2, spare=1)


def _leaves(inputs: Inputs) -> tuple[list[torch.Tensor], torch.Tensor]:
    *floats, lengths = as_tensors(inputs)
    return [x.double().requires_grad_() for x in floats], lengths


@pytest.mark.table(keep=0.4, by=lambda variant: variant.op_type)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gradients_equal_finite_differences(variant: Variant) -> None:
    floats, lengths = _leaves(make_inputs(variant.operator, SMALL))
    attributes = variant.attributes(SMALL.heads).values()
    assert torch.autograd.gradcheck(
        lambda *leaves: variant.operator.torch_op(*leaves, lengths, *attributes), floats
    )


@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_second_gradients_match_reference(variant: Variant) -> None:
    attributes = variant.attributes(SMALL.heads)

    def penalty_gradients(op: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves, lengths = _leaves(make_inputs(variant.operator, SMALL))
        total = op(*leaves, lengths, *attributes.values())[0].square().sum()
        first = torch.autograd.grad(total, leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    def reference(*inputs: Any) -> torch.Tensor:
        count = len(variant.operator.required_inputs)
        return variant.operator.reference(*inputs[:count], **attributes)

    exact = penalty_gradients(reference)
    for found, expected in zip(penalty_gradients(variant.operator.torch_op), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def _types(variant: Variant) -> list[torch.dtype]:
    """Fastformer's second logits are cubic in the inputs: large ones are beyond float32."""
    cubic = variant.operator.stem == "fastformer"
    return [torch.float64] if cubic else [torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("variant", "dtype"), [(v, t) for v in ONE_GATE for t in _types(v)], ids=str
)
@pytest.mark.parametrize("arrangement", ["late large key", "dominating key", "opposed"])
def test_gradients_of_hard_values_match_reference(
    variant: Variant, arrangement: str, dtype: torch.dtype
) -> None:
    case = Case("hard gradients", 9, (9, 6), channels=4, arrangement=arrangement)
    attributes = variant.attributes(case.heads)
    exact_leaves, lengths = _leaves(make_inputs(variant.operator, case))
    leaves = [x.detach().to(dtype).requires_grad_() for x in exact_leaves]
    valid = torch.arange(case.tokens) < lengths[:, None]

    exact = variant.operator.reference(*exact_leaves, lengths, **attributes)
    exact[valid].square().sum().backward()
    result = variant.operator.torch_op(*leaves, lengths, *attributes.values())
    result[valid].square().sum().backward()
    for leaf, exact_leaf in zip(leaves, exact_leaves, strict=True):
        largest = max(1.0, exact_leaf.grad.abs().max().item())
        difference = (leaf.grad - exact_leaf.grad).abs().max().item()
        assert difference / largest < BOUND[str(dtype).removeprefix("torch.")]


@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_valid_rows_ignore_padding_in_gradients(variant: Variant) -> None:
    """Padded tokens get no gradient from valid rows."""
    floats, lengths = _leaves(make_inputs(variant.operator, SMALL))
    attributes = variant.attributes(SMALL.heads).values()
    variant.operator.torch_op(*floats, lengths, *attributes)[1, :3].sum().backward()
    for name, leaf in zip(variant.operator.inputs, floats, strict=False):
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
        if leaf.dim() == 3:
            assert leaf.grad[1, 3:].abs().max() < 1e-12, name
            assert leaf.grad[0].abs().max() < 1e-12, name


@pytest.mark.parametrize("variant", CAUSAL, ids=str)
def test_causal_rows_ignore_later_token_gradients(variant: Variant) -> None:
    """Later tokens get no gradient from a causal row."""
    floats, lengths = _leaves(make_inputs(variant.operator, SMALL))
    attributes = variant.attributes(SMALL.heads).values()
    variant.operator.torch_op(*floats, lengths, *attributes)[:, 2].sum().backward()
    for name, leaf in zip(variant.operator.inputs, floats, strict=False):
        if leaf.dim() == 3:
            assert leaf.grad is not None
            assert leaf.grad[:, 3:].abs().max() < 1e-12, name


@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_only_requested_gradients_are_computed(variant: Variant) -> None:
    *floats, lengths = as_tensors(make_inputs(variant.operator, SMALL))
    floats[2].requires_grad_()
    result = variant.operator.torch_op(*floats, lengths, *variant.attributes(2).values())
    result.sum().backward()
    assert floats[2].grad is not None
    assert all(x.grad is None for x in floats if x is not floats[2])


@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_op_keeps_torch_library_rules(variant: Variant) -> None:
    *floats, lengths = as_tensors(make_inputs(variant.operator, SMALL))
    arguments = (*(x.requires_grad_() for x in floats), lengths, *variant.attributes(2).values())
    torch.library.opcheck(
        variant.operator.torch_op,
        arguments,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_inference_op_compiles_for_any_shape(variant: Variant) -> None:
    arguments = (
        *as_tensors(make_inputs(variant.operator, SMALL)),
        *variant.attributes(2).values(),
    )
    torch.library.opcheck(
        variant.operator.torch_op, arguments, test_utils="test_aot_dispatch_dynamic"
    )
