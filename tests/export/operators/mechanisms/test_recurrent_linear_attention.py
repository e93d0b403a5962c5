"""Recurrent linear attention: definition, torch op and portable body."""

from itertools import pairwise, product

import numpy as np
import onnx
import pytest
import torch
from onnx_runtimes import RUNTIMES
from oracles.recurrent import recurrent_linear_attention
from recurrent_graphs import RULES, has_beta, has_decay

from aftexport.parity import TOLERANCES

from .recurrent_cases import (
    ATTENTION,
    FORMS,
    Arrays,
    Form,
    draw,
    error,
    one_node,
    run_definition,
    run_torch,
    tensors_of,
    typed,
)

FP32, FP16 = TOLERANCES["fp32"].bound, TOLERANCES["fp16"].bound
TOKENS = (1, 7, 63, 64, 65, 200)
FEW = [
    Form("linear", normalizer="sum"),
    Form("gated", "bidirectional", decay_granularity="channel"),
    Form("delta", "reverse", has_past=False),
    Form("gated_delta", "bidirectional"),
]
"""A form of each rule."""
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def rule_of(form: Form) -> tuple[str, str]:
    """Return the settings that choose the statements of a chunk."""
    return form.update_rule, form.decay_granularity


def lengths_of(tokens: int) -> tuple[int, ...]:
    """Return a whole document, a part of one, an empty one, and lengths out of range."""
    return (tokens, tokens // 2 + 1, 0, tokens + 9, -3)


@every_form
def test_definition_equals_formula(form: Form) -> None:
    inputs = typed(draw(form, 11, lengths_of(11)), "float64")
    expected = recurrent_linear_attention(inputs, **form.attributes)
    assert error(run_definition(ATTENTION, inputs, form.attributes), list(expected)) < 1e-11


@pytest.mark.parametrize("granularity", ["head", "channel"])
@pytest.mark.parametrize("rule", RULES)
def test_forward_definition_equals_onnx_operator(rule: str, granularity: str) -> None:
    """The evaluator of onnx defines LinearAttention of opset 27."""
    module = pytest.importorskip("onnx.reference.ops.op_linear_attention")
    form = Form(rule, decay_granularity=granularity)
    inputs = typed(draw(form, 9, (9, 9)), "float32")
    expected = module.LinearAttention._run(
        None,
        *(inputs.get(name) for name in ATTENTION.inputs[:-1]),
        q_num_heads=4,
        kv_num_heads=2,
        update_rule=rule,
    )
    results = run_definition(ATTENTION, inputs, form.attributes)
    assert error(list(expected), results) < 1e-5


@pytest.mark.table(keep=0.1, by=lambda form, tokens, dtype: (form.update_rule, tokens, dtype))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("tokens", TOKENS)
@every_form
def test_torch_op_equals_definition(form: Form, tokens: int, dtype: str) -> None:
    inputs = draw(form, tokens, lengths_of(tokens))
    expected = run_definition(ATTENTION, inputs, form.attributes)
    results = run_torch(ATTENTION, typed(inputs, dtype), form.attributes)
    assert [x.dtype for x in results] == [dtype, dtype]
    assert error(results, expected) < {"float64": 1e-11, "float32": FP32}[dtype]


@pytest.mark.table(keep=0.02, by=lambda runtime, form, **_: (runtime, rule_of(form)))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tokens", [1, 7, 65, 500])
@pytest.mark.parametrize("runtime", RUNTIMES)
@every_form
def test_body_is_right_in_runtime(form: Form, runtime: str, tokens: int, dtype: str) -> None:
    inputs = draw(form, tokens, lengths_of(tokens))
    model = one_node(ATTENTION, typed(inputs, dtype), form.attributes).model()
    results = RUNTIMES[runtime](model)(typed(inputs, dtype))
    expected = run_definition(ATTENTION, inputs, form.attributes)
    found = [results[name] for name in ATTENTION.outputs]
    assert error(found, expected) < {"float32": FP32, "float16": FP16}[dtype]


@pytest.mark.table(keep=0.08, by=lambda form, opset: (form.update_rule, opset))
@pytest.mark.parametrize("opset", [18, 23])
@every_form
def test_body_has_only_standard_operators(form: Form, opset: int) -> None:
    inputs = typed(draw(form, 66, (66, 5)), "float32")
    model = one_node(ATTENTION, inputs, form.attributes, opset).model()
    onnx.checker.check_model(model, full_check=True)
    (function,) = model.functions
    assert all(node.domain == "" for node in function.node)
    results = RUNTIMES["onnxruntime"](model)(inputs)
    expected = run_definition(ATTENTION, inputs, form.attributes)
    assert error([results[n] for n in ATTENTION.outputs], expected) < FP32


GATED = [f for f in FORMS if has_decay(f.update_rule) and f.direction == "bidirectional"]


def hard(form: Form, decays: str) -> Arrays:
    """Return inputs with decays that no difference of running sums holds, and beta 0 or 1."""
    inputs = typed(draw(form, 150, (150, 71)), "float32")
    rng = np.random.default_rng(len(decays))
    shape = inputs["decay"].shape
    inputs["decay"] = {
        "strong": np.full(shape, -80),
        "strong and weak": np.where(rng.uniform(size=shape) < 0.3, -80, -0.01),
        "none": np.zeros(shape),
        "boundless": np.where(rng.uniform(size=shape) < 0.1, -3e38, -1e-3),
    }[decays].astype(np.float32)
    if "beta" in inputs:
        inputs["beta"] = (rng.uniform(size=inputs["beta"].shape) < 0.5).astype(np.float32)
    return inputs


@pytest.mark.table(keep=0.25, by=lambda form, decays: (rule_of(form), decays))
@pytest.mark.parametrize("decays", ["strong", "strong and weak", "none", "boundless"])
@pytest.mark.parametrize("form", GATED, ids=str)
def test_hard_decays_keep_digits(form: Form, decays: str) -> None:
    inputs = hard(form, decays)
    expected = run_definition(ATTENTION, inputs, form.attributes)
    assert error(run_torch(ATTENTION, inputs, form.attributes), expected) < 5e-6
    model = one_node(ATTENTION, inputs, form.attributes).model()
    results = RUNTIMES["onnxruntime"](model)(inputs)
    assert error([results[n] for n in ATTENTION.outputs], expected) < 5e-6


@pytest.mark.parametrize("granularity", ["head", "channel"])
def test_weak_decay_survives_beside_strong(granularity: str) -> None:
    """Two tokens after 62 decays of -80: their own decay of -0.01 counts in full."""
    form = Form("gated", decay_granularity=granularity, has_past=False)
    inputs = typed(draw(form, 64, (64,)), "float32")
    inputs["decay"][:] = -80
    inputs["decay"][:, -2:] = -0.01
    expected, _ = run_definition(ATTENTION, inputs, form.attributes)
    result, _ = run_torch(ATTENTION, inputs, form.attributes)
    np.testing.assert_allclose(result[:, -1], expected[:, -1], rtol=0, atol=1e-6)


def test_growth_beside_zero_state_stays_finite() -> None:
    """The factor exp(95) of an empty state is beyond float32, and counts for nothing."""
    form = Form("gated", has_past=False)
    inputs = typed(draw(form, 20, (20,)), "float32")
    inputs["decay"][:] = 0
    inputs["decay"][:, 0] = 95
    expected = run_definition(ATTENTION, inputs, form.attributes)
    assert error(run_torch(ATTENTION, inputs, form.attributes), expected) < FP32


def test_padding_does_not_hide_overflow() -> None:
    """Padding is not read: NaN and infinity in it must not keep an overflow."""
    form = Form("gated", has_past=False)
    inputs = typed(draw(form, 20, (20, 9)), "float32")
    inputs["decay"][:] = 0
    inputs["decay"][:, 0] = 95
    for name, number in (("query", np.inf), ("key", np.nan), ("value", -np.inf), ("decay", np.nan)):
        inputs[name][1, 9:] = number
    expected = run_definition(ATTENTION, inputs, form.attributes)
    assert error(run_torch(ATTENTION, inputs, form.attributes), expected) < FP32


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *product(("query", "key", "value", "past_state", "beta"), (np.nan, np.inf, -np.inf)),
        *product(("decay",), (np.nan, np.inf)),
    ],
)
def test_infinity_is_not_computed_by_token(
    name: str, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No precision helps against NaN and infinity, and long documents by token take minutes."""
    package = "aftexport.operators.torch_ops.recurrent_linear_attention"
    monkeypatch.setattr(f"{package}.token_by_token", None)
    form = Form()
    inputs = typed(draw(form, 20, (20,)), "float32")
    inputs[name].flat[0] = number
    output, _ = run_torch(ATTENTION, inputs, form.attributes)
    assert np.isnan(output).any() if np.isnan(number) else not np.isfinite(output).all()


@pytest.mark.parametrize("granularity", ["head", "channel"])
@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
def test_decay_of_minus_infinity_clears_state(rule: str, granularity: str) -> None:
    form = Form(rule, "bidirectional", decay_granularity=granularity)
    inputs = typed(draw(form, 90, (90, 40)), "float32")
    inputs["decay"][:, ::7] = -np.inf
    expected = run_definition(ATTENTION, inputs, form.attributes)
    assert error(run_torch(ATTENTION, inputs, form.attributes), expected) < FP32


def part(inputs: Arrays, start: int, end: int, state: np.ndarray) -> Arrays:
    """Return the tokens from ``start`` to ``end`` with a past state."""
    cut = {n: x[:, start:end] for n, x in inputs.items() if x.ndim == 3}
    lengths = np.clip(inputs["lengths"], start, end) - start
    return cut | {"past_state": state, "lengths": lengths}


@pytest.mark.table(keep=0.5)
@pytest.mark.parametrize("form", [f for f in FORMS if f.direction == "bidirectional"], ids=str)
def test_parts_of_document_equal_whole(form: Form) -> None:
    """The forward state comes from the left, the reverse state from the right."""
    inputs = typed(draw(form, 150, (150, 97, 0)), "float64")
    rng = np.random.default_rng(len(str(form)))
    places = [0, *sorted(rng.choice(np.arange(1, 150), 3, replace=False)), 150]
    pairs = list(pairwise(places))
    heads = form.kv_num_heads
    whole, states = run_definition(ATTENTION, inputs, form.attributes)
    past = inputs.get("past_state", np.zeros_like(states))
    entering = {}
    for name, ordered, state in (
        ("forward", pairs, past[:, :heads]),
        ("reverse", pairs[::-1], past[:, heads:]),
    ):
        for start, end in ordered:
            entering[name, start] = state
            cut = part(inputs, start, end, state)
            _, state = run_torch(ATTENTION, cut, form.attributes | {"direction": name})
        expected = states[:, :heads] if name == "forward" else states[:, heads:]
        assert error([state], [expected]) < 1e-10
    rows = []
    for start, end in pairs:
        both = np.concatenate((entering["forward", start], entering["reverse", start]), 1)
        rows.append(run_torch(ATTENTION, part(inputs, start, end, both), form.attributes)[0])
    assert error([np.concatenate(rows, 1)], [whole]) < 1e-10


@pytest.mark.parametrize("form", [f for f in FORMS if f.has_past][::3], ids=str)
def test_padding_is_not_read(form: Form) -> None:
    inputs = typed(draw(form, 70, (70, 33, 0)), "float32")
    clean = run_torch(ATTENTION, inputs, form.attributes)
    for tensor in inputs.values():
        if tensor.ndim == 3:
            tensor[1, 33:] = tensor[2] = np.nan
    output, state = run_torch(ATTENTION, inputs, form.attributes)
    np.testing.assert_array_equal(output, clean[0])
    np.testing.assert_array_equal(state, clean[1])
    assert not output[1, 33:].any()
    assert not output[2].any()
    np.testing.assert_array_equal(state[2], inputs["past_state"][2])


def test_no_tokens_keep_the_state() -> None:
    form = Form()
    inputs = typed(draw(form, 1, (1, 0)), "float32")
    empty = {n: x[:, :0] if x.ndim == 3 else x for n, x in inputs.items()}
    output, state = run_torch(ATTENTION, empty, form.attributes)
    assert output.shape == (2, 0, 20)
    np.testing.assert_array_equal(state, inputs["past_state"])


@pytest.mark.parametrize("rule", RULES)
def test_no_documents_give_empty_results(rule: str) -> None:
    form = Form(rule)
    empty = {n: x[:0] for n, x in typed(draw(form, 9, (9, 4)), "float32").items()}
    output, state = run_torch(ATTENTION, empty, form.attributes)
    assert output.shape == (0, 9, 20)
    assert state.shape == empty["past_state"].shape


@pytest.mark.parametrize("run", ["torch", "body"])
def test_many_equal_tokens_keep_digits(run: str) -> None:
    """A sum over 262,144 tokens; chunk after chunk in float32, it would be off by 1e-4."""
    form = Form("linear", has_past=False, q_num_heads=1, kv_num_heads=1)
    ones = np.full((1, 2**18, 1), 0.1, np.float32)
    inputs = {"query": ones, "key": ones, "value": ones, "lengths": np.array([2**18])}
    if run == "torch":
        _, state = run_torch(ATTENTION, inputs, form.attributes)
    else:
        model = one_node(ATTENTION, inputs, form.attributes).model()
        state = RUNTIMES["onnxruntime"](model)(inputs)["present_state"]
    expected = 2**18 * float(np.float32(0.1)) ** 2
    assert abs(state.item() / expected - 1) < 2e-6


def gradient_leaves(inputs: Arrays) -> list[torch.Tensor | None]:
    tensors = tensors_of(ATTENTION, typed(inputs, "float64"))
    return [x.requires_grad_() if x is not None and x.is_floating_point() else x for x in tensors]


@pytest.mark.parametrize("form", FEW, ids=str)
def test_gradients_equal_finite_differences(form: Form) -> None:
    tensors = gradient_leaves(draw(form, 5, (5, 3), widths=(3, 2)))
    names = [n for n, x in zip(ATTENTION.inputs, tensors, strict=True) if x is not None]

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by_name = dict(zip(names, given, strict=True))
        arguments = [by_name.get(name) for name in ATTENTION.inputs]
        return ATTENTION.torch_op(*arguments, *form.attributes.values())

    assert torch.autograd.gradcheck(run, [x for x in tensors if x is not None], fast_mode=True)


@pytest.mark.parametrize("rule", RULES)
def test_long_gradients_match_definition(rule: str) -> None:
    """Across chunks, and of second order."""
    form = Form(rule, "bidirectional")
    inputs = draw(form, 70, (70, 41), widths=(3, 2))

    def penalty_gradients(run: object) -> list[torch.Tensor]:
        tensors = gradient_leaves(inputs)
        leaves = [x for x in tensors if x is not None and x.requires_grad]
        output, state = run(tensors)
        total = output.square().sum() + state.sum()
        first = torch.autograd.grad(total, leaves, create_graph=True)
        return list(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))

    found = penalty_gradients(lambda x: ATTENTION.torch_op(*x, *form.attributes.values()))
    expected = penalty_gradients(lambda x: ATTENTION.reference(*x, **form.attributes))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("form", FORMS[::9], ids=str)
def test_op_keeps_torch_library_rules(form: Form) -> None:
    tensors = gradient_leaves(draw(form, 5, (5, 3)))
    torch.library.opcheck(
        ATTENTION.torch_op,
        (*tensors, *form.attributes.values()),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("rule", "changes", "message"),
    [
        ("gated", {"decay": None}, "update_rule gated requires the input decay"),
        ("delta", {"beta": None}, "update_rule delta requires the input beta"),
        ("linear", {"decay": (2, 6, 2)}, "update_rule linear forbids the input decay"),
        ("gated", {"beta": (2, 6, 2)}, "update_rule gated forbids the input beta"),
        ("gated", {"decay": (2, 6, 3)}, r"decay must be \[2, 6, 2\]"),
        ("delta", {"beta": (2, 6, 4)}, r"beta must be \[2, 6, 2\]"),
        ("linear", {"key": (2, 6, 10)}, r"key must be \[2, 6, 12\]"),
        ("linear", {"value": (2, 5, 10)}, r"value must be \[2, 6, 10\]"),
        ("linear", {"value": (2, 6, 9)}, "multiple of 2 channels"),
        ("linear", {"past_state": (2, 4, 6, 5)}, r"past_state must be \[2, 2, 6, 5\]"),
        ("linear", {"kv_num_heads": 3}, "q_num_heads must be a positive multiple of kv_num_heads"),
        ("linear", {"q_num_heads": 0}, "q_num_heads must be a positive multiple"),
        ("linear", {"update_rule": "gate"}, "update_rule must be one of linear, gated, delta"),
        ("delta", {"normalizer": "sum"}, "normalizer must be none for update_rule delta"),
        ("delta", {"beta": ()}, r"beta must be \[2, 6, 2\], got shape \(\)"),
        ("linear", {"normalizer": "sum", "eps": 0.0}, "eps must be finite and positive, got 0"),
        (
            "linear",
            {"normalizer": "sum", "eps": np.inf},
            "eps must be finite and positive, got inf",
        ),
    ],
)
def test_unfit_inputs_are_refused(rule: str, changes: dict[str, object], message: str) -> None:
    form = Form(rule)
    inputs = typed(draw(form, 6, (6, 4)), "float32")
    tensors = {
        name: torch.zeros(changes[name]) if isinstance(changes.get(name), tuple) else tensor
        for name, tensor in zip(ATTENTION.inputs, tensors_of(ATTENTION, inputs), strict=True)
        if changes.get(name, 0) is not None
    }
    attributes = form.attributes | {n: v for n, v in changes.items() if n in form.attributes}
    with pytest.raises(ValueError, match=f"RecurrentLinearAttention: .*{message}"):
        ATTENTION.torch_op(*map(tensors.get, ATTENTION.inputs), *attributes.values())


def test_beta_may_be_shared_by_heads() -> None:
    form = Form("delta", "bidirectional")
    inputs = typed(draw(form, 40, (40, 3)), "float32")
    spread = inputs | {"beta": np.repeat(inputs["beta"][..., :1], 2, 2)}
    shared = inputs | {"beta": inputs["beta"][..., :1]}
    expected = run_definition(ATTENTION, spread, form.attributes)
    model = one_node(ATTENTION, shared, form.attributes).model()
    results = RUNTIMES["onnxruntime"](model)(shared)
    assert error(run_torch(ATTENTION, shared, form.attributes), expected) < FP32
    assert error([results[n] for n in ATTENTION.outputs], expected) < FP32


@pytest.mark.parametrize(("rule", "present"), list(product(RULES, ["", "decay", "beta"])))
def test_body_needs_inputs_of_rule(rule: str, present: str) -> None:
    given = {present} - {""}
    takes = {"decay": has_decay(rule), "beta": has_beta(rule)}
    needed = {name for name, is_taken in takes.items() if is_taken}
    settings = {a.name: str(a.default) for a in ATTENTION.settings} | {"update_rule": rule}
    if given == needed:
        assert ATTENTION.function(settings, 20, given).name == "RecurrentLinearAttention"
        return
    with pytest.raises(ValueError, match=f"update_rule {rule} (requires|forbids) the input"):
        ATTENTION.function(settings, 20, given)
