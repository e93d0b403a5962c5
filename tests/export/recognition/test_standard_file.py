"""``aftexport unfuse``: our operators as bodies, and the recurrent ones as those of ONNX."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_texts
import pytest
from commands import assert_refused, run_here
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from recurrent_graphs import RULES, causal_conv, inputs_of, linear_attention

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import EngineError, UsageError
from aftexport.operators.domain import DOMAIN, operators_in
from aftexport.recognition.onnx_file import fuse_file
from aftexport.recognition.standard_file import StandardForm, standard_form, unfuse_file

Arrays = dict[str, np.ndarray]


def written(
    model: onnx.ModelProto, folder: Path, opset: int | None = 27
) -> tuple[onnx.ModelProto, StandardForm]:
    onnx.save(model, folder / "own.onnx")
    form = unfuse_file(folder / "own.onnx", folder / "standard.onnx", opset)
    found = onnx.load(folder / "standard.onnx")
    onnx.checker.check_model(found, full_check=True)
    assert not found.functions
    assert [imported.domain for imported in found.opset_import] == [""]
    return found, form


def run(model: onnx.ModelProto, inputs: Arrays) -> Arrays:
    """Run the operators of ONNX by its own evaluator, and other files in ONNX Runtime."""
    if model.opset_import[0].version < 27:
        return OnnxRuntimeEngine(model.SerializeToString(), fused=False).run(inputs)
    names = [value.name for value in model.graph.output]
    return dict(zip(names, ReferenceEvaluator(model).run(names, inputs), strict=True))


def assert_same(model: onnx.ModelProto, found: onnx.ModelProto, tokens: int = 7) -> None:
    inputs = inputs_of(model, tokens)
    for name, expected in run(model, inputs).items():
        np.testing.assert_allclose(run(found, inputs)[name], expected, atol=1e-5, rtol=1e-4)


def kinds(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.table(keep=0.15)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("has_state", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=["each", "grouped"])
def test_padding_changes_nothing(
    rule: str, has_state: bool, by_channel: bool, heads: tuple[int, int], tmp_path: Path
) -> None:
    """Documents of all tokens, of some and of none share the batch."""
    model = linear_attention(
        DOMAIN, rule=rule, has_state=has_state, by_channel=by_channel, heads=heads, lengths=True
    )
    found, form = written(model, tmp_path)
    assert kinds(found).count("LinearAttention") == 1
    assert dict(form.standard) == {("RecurrentLinearAttention", "LinearAttention"): 1}
    assert_same(model, found)
    assert_same(model, found, tokens=1)


def test_lengths_out_of_range_are_bounded(tmp_path: Path) -> None:
    model = causal_conv(DOMAIN, has_state=True)
    found, _ = written(model, tmp_path)
    inputs = inputs_of(model, 7)
    inputs["lengths"] = np.resize(np.array([-3, 16]), len(inputs["lengths"]))
    results = run(found, inputs)
    for name, expected in run(model, inputs).items():
        np.testing.assert_allclose(results[name], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rule", ["linear", "gated_delta"])
def test_padding_may_be_nan(rule: str, tmp_path: Path) -> None:
    model = linear_attention(DOMAIN, rule=rule, lengths=True)
    found, _ = written(model, tmp_path)
    inputs = inputs_of(model)
    expected = run(found, inputs)
    for name, array in inputs.items():
        if name != "lengths":
            array[1, 3:] = np.nan
            array[2] = np.nan
    for name, output in run(found, inputs).items():
        np.testing.assert_array_equal(output, expected[name])


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("has_state", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize("taps", [1, 3])
def test_state_is_that_of_last_valid_token(
    activation: str, has_bias: bool, has_state: bool, taps: int, tmp_path: Path
) -> None:
    model = causal_conv(
        DOMAIN,
        activation=activation,
        has_bias=has_bias,
        has_state=has_state and taps > 1,
        taps=taps,
    )
    found, _ = written(model, tmp_path)
    assert kinds(found).count("CausalConvWithState") == 1
    assert_same(model, found)
    assert_same(model, found, tokens=1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"direction": "reverse"}, "no direction reverse"),
        ({"direction": "bidirectional"}, "no direction bidirectional"),
        ({"normalizer": "sum", "rule": "gated"}, "no normalizer sum"),
    ],
    ids=["reverse", "bidirectional", "normalizer"],
)
def test_other_forms_become_bodies(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model = linear_attention(DOMAIN, lengths=True, **settings)
    del model.graph.output[1]  # the state has another shape in these forms
    found, form = written(model, tmp_path)
    assert "LinearAttention" not in kinds(found)
    ((operator, why),) = form.bodies
    assert (operator, why) == ("RecurrentLinearAttention", f"the operator of ONNX has {reason}")
    inputs = inputs_of(model)
    inputs["key"] = np.abs(inputs["key"]) + 1  # keeps the normalizer away from 0
    inputs["query"] = np.abs(inputs["query"])
    expected, output = (run(m, inputs)["output"] for m in (model, found))
    np.testing.assert_allclose(output, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "model",
    [linear_attention(DOMAIN, lengths=True, has_state=True), causal_conv(DOMAIN)],
    ids=["attention", "convolution"],
)
def test_bodies_keep_opset(model: onnx.ModelProto, tmp_path: Path) -> None:
    found, form = written(model, tmp_path, opset=None)
    assert found.opset_import[0].version == 20
    assert not form.standard
    assert not {"LinearAttention", "CausalConvWithState"} & set(kinds(found))
    assert_same(model, found)


def test_node_without_body_gets_one() -> None:
    """An operator of a later version keeps the body of the file, and needs it."""
    model = linear_attention(DOMAIN, lengths=True, rule="linear")
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.functions[:]
    found = standard_form(bare, None).model
    assert not found.functions
    assert_same(model, found)
    body = onnx.parser.parse_function(
        f'<domain: "{DOMAIN}", opset_import: ["" : 20]> Unheard (x) => (y) {{ y = Identity(x) }}'
    )
    bare.functions.append(body)
    bare.graph.node.append(helper.make_node("Unheard", ["output"], ["same"], domain=DOMAIN))
    assert_same(model, standard_form(bare, None).model)
    del bare.functions[:]
    with pytest.raises(UsageError, match="got Unheard without a body"):
        standard_form(bare, None)


@pytest.mark.parametrize(
    "model",
    [
        linear_attention("", rule="linear"),
        linear_attention("", rule="gated_delta", has_state=True),
        linear_attention("", heads=(4, 1), by_channel=True, rule="gated"),
        causal_conv("", has_state=True, has_bias=True, activation="silu"),
    ],
    ids=["linear", "gated_delta", "channel", "convolution"],
)
def test_round_trip_keeps_nodes(model: onnx.ModelProto, tmp_path: Path) -> None:
    """The lengths of a file without padding need no mask on the way back."""
    onnx.save(model, tmp_path / "first.onnx")
    fuse_file(tmp_path / "first.onnx", tmp_path / "own.onnx")
    unfuse_file(tmp_path / "own.onnx", tmp_path / "standard.onnx", 27)
    found = onnx.load(tmp_path / "standard.onnx")
    assert set(kinds(found)) <= {*kinds(model), "Transpose"}
    (given,), (back,) = (
        [n for n in m.graph.node if n.op_type in ("LinearAttention", "CausalConvWithState")]
        for m in (model, found)
    )
    present = [[i for i, name in enumerate(n.input) if name] for n in (given, back)]
    assert present[0] == present[1]
    assert_same(model, found)
    fuse_file(tmp_path / "standard.onnx", tmp_path / "again.onnx")
    own, again = (onnx.load(tmp_path / f"{name}.onnx") for name in ("own", "again"))
    assert operators_in(own) == operators_in(again)
    inputs = inputs_of(model)
    for name, expected in run(own, inputs).items():
        np.testing.assert_allclose(run(again, inputs)[name], expected, atol=1e-6)


def test_no_transpose_is_left_between_convolutions(tmp_path: Path) -> None:
    """Two convolutions in a row turn their input once and their output once."""
    model = causal_conv("")
    (first,) = model.graph.node
    second = onnx.NodeProto()
    second.CopyFrom(first)
    second.name, first.output[0], second.input[0] = "second", "between", "between"
    first.output[1], model.graph.output[1].name = "present_state", "present_state"
    second.output[1] = ""
    model.graph.node.append(second)
    onnx.save(model, tmp_path / "first.onnx")
    fuse_file(tmp_path / "first.onnx", tmp_path / "own.onnx")
    own = onnx.load(tmp_path / "own.onnx")
    assert kinds(own).count("Transpose") == 3  # the input, the output and the state
    assert_same(model, own)


def test_lengths_of_other_tokens_are_no_full_lengths(tmp_path: Path) -> None:
    """Lengths that count the tokens of another tensor are masked."""
    model = linear_attention(DOMAIN, lengths=True)
    lengths = next(i for i in model.graph.input if i.name == "lengths")
    model.graph.input.remove(lengths)
    fewer = helper.make_tensor_value_info("fewer", TensorProto.FLOAT, ["B", "L"])
    model.graph.input.append(fewer)
    for node in (
        helper.make_node("Expand", ["count", "rows"], ["lengths"]),
        helper.make_node("Shape", ["fewer"], ["rows"], start=0, end=1),
        helper.make_node("Shape", ["fewer"], ["count"], start=1, end=2),
    ):
        model.graph.node.insert(0, node)
    found, _ = written(model, tmp_path)
    inputs = inputs_of(model) | {"fewer": np.zeros((3, 4), np.float32)}
    expected = run(model, inputs)
    for name, output in run(found, inputs).items():
        np.testing.assert_allclose(output, expected[name], atol=1e-5)
    assert (expected["output"][:, 4:] == 0).all()


def test_node_without_lengths_is_refused(tmp_path: Path) -> None:
    model = linear_attention(DOMAIN, lengths=True)
    del model.graph.node[0].input[-1]
    with pytest.raises(EngineError, match="RecurrentLinearAttention"):
        written(model, tmp_path)


def test_command_names_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(linear_attention(DOMAIN, lengths=True), tmp_path / "own.onnx")
    words = ["unfuse", tmp_path / "own.onnx", tmp_path / "new.onnx"]
    done = run_here(words, capsys)
    assert done.code == 0
    assert "fallback" in done.out
    assert "--opset 27" in " ".join(done.out.split())
    done = run_here([*words, "--opset", "27"], capsys)
    assert done.code == 0
    assert " LinearAttention" in done.out
    assert onnx.load(tmp_path / "new.onnx").opset_import[0].version == 27


def test_unfit_sources_and_opsets_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(onnx_texts.text_model(), tmp_path / "text.onnx")
    onnx.save(linear_attention(DOMAIN, lengths=True), tmp_path / "own.onnx")
    out = tmp_path / "new.onnx"
    text, own = (["unfuse", tmp_path / name, out] for name in ("text.onnx", "own.onnx"))
    assert_refused(run_here(text, capsys), f"operators of {DOMAIN}, got none")
    assert_refused(run_here([*own, "--opset", "26"], capsys), "at least 27, got 26")
    assert_refused(run_here([*own, "--opset", "99"], capsys), "got 99", "Install a newer onnx")
    monkeypatch.setattr(onnx.defs, "onnx_opset_version", lambda: 24)
    assert_refused(run_here([*own, "--opset", "27"], capsys), "opsets up to 24, got 27")
    assert not out.exists()
