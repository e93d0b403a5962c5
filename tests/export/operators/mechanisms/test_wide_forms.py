"""Every form of version 2 of the contract: definitions, torch op, body and kernel."""

from itertools import product

import numpy as np
import pytest
import torch

from aftexport.recognition.proof.definitions import definition

from . import wide_forms
from .wide_forms import FORMS, LENGTHS, Form, error, formula, make_inputs, one_node

CASES = list(product(FORMS, LENGTHS))
NAMES = [f"{form}-{tokens}" for form, (tokens, _) in CASES]
Sizes = tuple[int, tuple[int, ...]]
every_case = pytest.mark.parametrize(("form", "sizes"), CASES, ids=NAMES)


@pytest.mark.table(keep=0.12)
@every_case
def test_definitions_equal_formula(form: Form, sizes: Sizes) -> None:
    inputs = make_inputs(form, *sizes)
    expected = formula(form, inputs)
    assert error(wide_forms.run_reference(form, inputs), expected, inputs["lengths"]) < 1e-9
    with np.errstate(all="ignore"):
        found = definition(form.op_type, form.all_attributes())(*inputs.values())
    assert error(found, expected, inputs["lengths"]) < 1e-9


@pytest.mark.table(keep=0.12)
@every_case
def test_torch_op_equals_formula(form: Form, sizes: Sizes) -> None:
    inputs = make_inputs(form, *sizes)
    found = wide_forms.run_torch(form, inputs)
    assert error(found, formula(form, inputs), inputs["lengths"]) < 2e-5


@pytest.mark.table(keep=0.1)
@every_case
def test_body_equals_formula(form: Form, sizes: Sizes) -> None:
    inputs = make_inputs(form, *sizes)
    (found,) = one_node(form).run(inputs)
    assert error(found, formula(form, inputs), inputs["lengths"]) < 2e-5


@pytest.mark.table(keep=0.25)
@every_case
def test_kernel_equals_formula(form: Form, sizes: Sizes) -> None:
    inputs = make_inputs(form, *sizes)
    (found,) = one_node(form).run(inputs, kernel=True)
    assert error(found, formula(form, inputs), inputs["lengths"]) < 2e-5
    half = {n: x.astype(np.float16) if x.dtype.kind == "f" else x for n, x in inputs.items()}
    (found,) = one_node(form, "float16").run(half, kernel=True)
    assert error(found, formula(form, half), inputs["lengths"]) < 2e-3


@pytest.mark.table(keep=0.1)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradients_equal_finite_differences(form: Form) -> None:
    inputs = wide_forms.as_tensors(make_inputs(form, 5, (5, 3)))
    floats = {n: t.double() for n, t in inputs.items() if t.is_floating_point()}
    others = {n: t for n, t in inputs.items() if n not in floats}
    small = {n: t.clamp(-3, 3).requires_grad_() for n, t in floats.items()}

    def run(*leaves: torch.Tensor) -> torch.Tensor:
        given = dict(zip(small, leaves, strict=True))
        return form.operator.torch_op(**given, **others, **form.all_attributes())

    assert torch.autograd.gradcheck(run, tuple(small.values()), fast_mode=True)


@pytest.mark.table(keep=0.1)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_padding_is_not_read(form: Form) -> None:
    """The rows of each document are as if the padding did not exist."""
    inputs = make_inputs(form, 9, (9, 4))
    expected = wide_forms.run_torch(form, inputs)
    keys = inputs.get("key_lengths", inputs["lengths"])
    for name, ends in (("query", inputs["lengths"]), ("key", keys), ("value", keys)):
        for document, end in enumerate(ends):
            inputs[name][document, end:] = 1e4
    found = wide_forms.run_torch(form, inputs)
    (body,) = one_node(form).run(inputs)
    for document, length in enumerate(inputs["lengths"]):
        rows = slice(0, length)
        np.testing.assert_array_equal(found[document, rows], expected[document, rows])
        np.testing.assert_allclose(
            body[document, rows], expected[document, rows], rtol=2e-5, atol=2e-5
        )


@pytest.mark.parametrize("form", [f for f in FORMS if f.keys == 90][:4], ids=str)
def test_other_numbers_of_keys_need_lengths(form: Form) -> None:
    inputs = make_inputs(form, 5, (5, 3))
    del inputs["key_lengths"]
    with pytest.raises(ValueError, match=f"^{form.op_type}: key must be"):
        wide_forms.run_torch(form, inputs)


def test_calls_of_version_1_keep_their_meaning() -> None:
    """Programs that were saved before the later arguments leave them out."""
    x, lengths = torch.randn(1, 6, 8), torch.tensor([6])
    ops = torch.ops.aftexport
    for before, after in (
        (
            ops.normalized_linear_attention(x, x, x, lengths, 2, "elu", 1e-6),
            ops.normalized_linear_attention(x, x, x, lengths, 2, "elu", 1e-6, "add", 2, lengths),
        ),
        (
            ops.efficient_attention(x, x, x, lengths, 2, "softmax", 1.0),
            ops.efficient_attention(x, x, x, lengths, 2, "softmax", 1.0, 2, lengths),
        ),
        (
            ops.aft_simple(x, x, x, lengths, "tanh"),
            ops.aft_simple(x, x, x, lengths, "tanh", 8, 0.0),
        ),
    ):
        assert torch.equal(before, after)
