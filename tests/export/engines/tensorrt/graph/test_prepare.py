"""Graphs of exported models as TensorRT gets them."""

from pathlib import Path

import engines
import numpy as np
import onnx
import onnx.parser
import pytest
import tiny_models
import torch
from sampling import any_case

from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.engines.tensorrt.graph.network import Network
from aftexport.engines.tensorrt.graph.prepare import (
    fold_constants,
    infer_types,
    name_plugins,
    prepare_graph,
    remove_idle_casts,
    remove_plugins,
)
from aftexport.errors import EngineError
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, operators_in
from aftexport.operators.mechanisms import MECHANISMS


@pytest.mark.table(keep=0.3, by=any_case)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_prepared_graph_computes_same(mechanism: str, tmp_path: Path) -> None:
    bound = {"max_length": 100} if mechanism == "aft_full" else {}
    path = engines.graph(tmp_path, "fp32", mechanism=mechanism, **bound)
    prepared = prepare_graph(onnx.load(path), has_plugins=False)
    onnx.checker.check_model(prepared)
    ids, lengths = np.arange(80).reshape(2, 40) % 50, np.array([40, 13])
    first, second = (
        OnnxRuntimeEngine(model, threads=1, fused=False, optimized=False).run(
            {"input_ids": ids, "lengths": lengths}
        )["logits"]
        for model in (path, prepared.SerializeToString())
    )
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-6)


def test_unused_and_unsorted_nodes(tmp_path: Path) -> None:
    model = onnx.load(engines.graph(tmp_path))
    nodes = list(model.graph.node)
    model.graph.node.add(op_type="Relu", input=["logits"], output=["unused"])
    moved = model.graph.node.pop(0)
    model.graph.node.append(moved)
    prepared = prepare_graph(model, has_plugins=True)
    assert {node.output[0] for node in prepared.graph.node} == {n.output[0] for n in nodes}
    onnx.checker.check_model(prepared)


def test_cycle_is_refused(tmp_path: Path) -> None:
    model = onnx.load(engines.graph(tmp_path))
    attention = next(node for node in model.graph.node if node.domain == DOMAIN)
    producer = next(node for node in model.graph.node if attention.input[0] in node.output)
    producer.input[0] = attention.output[0]
    with pytest.raises(EngineError, match="cannot be prepared for TensorRT: Cycle"):
        prepare_graph(model, has_plugins=True)


@pytest.fixture
def model() -> onnx.ModelProto:
    program = capture(tiny_models.MixedSettings(), dtype=torch.float16, max_tokens=300)
    return finish(lower(program), precision="fp16", fuse=False)


def plugin_attributes(model: onnx.ModelProto) -> list[dict[str, str]]:
    nodes = [node for node in model.graph.node if node.domain == DOMAIN]
    return [
        {a.name: a.s.decode() for a in node.attribute if a.name in PLUGIN_ATTRIBUTES}
        for node in nodes
    ]


def set_eps(model: onnx.ModelProto, op_type: str) -> None:
    """Give nodes an attribute that no plugin takes."""
    for node in model.graph.node:
        if node.op_type == op_type:
            (eps,) = (a for a in node.attribute if a.name == "eps")
            eps.f = 0.5


def test_every_form_gets_plugin(model: onnx.ModelProto) -> None:
    """Another form takes the name, so the body of the most common one gives it up."""
    before = operators_in(model)
    assert {"AftSimple", "AftSimple_none"} <= before.keys()
    for node in model.graph.node:
        kept = [a for a in node.attribute if a.name not in PLUGIN_ATTRIBUTES]
        del node.attribute[:]
        node.attribute.extend(kept)
    network = Network(model)
    name_plugins(network)
    named = network.to_model()
    after = operators_in(named)
    assert after["AftSimple"] == before["AftSimple"] + before["AftSimple_none"]
    assert plugin_attributes(named) == [PLUGIN_ATTRIBUTES] * sum(after.values())
    assert "AftSimple" not in {function.name for function in named.functions}
    assert "AftSimplePortable" in {function.name for function in named.functions}


def test_untaken_form_runs_by_own_body(model: onnx.ModelProto) -> None:
    bodies = {f.name: f.node for f in model.functions}
    common = bodies["AftSimple"]
    set_eps(model, "AftSimple")
    network = Network(model)
    name_plugins(network)
    named = network.to_model()
    operators = operators_in(named)
    assert {"AftSimple", "AftSimplePortable"} <= operators.keys()
    assert "AftSimple_none" not in operators
    assert {f.name: f.node for f in named.functions}["AftSimplePortable"] == common
    with_plugin = [attributes for attributes in plugin_attributes(named) if attributes]
    assert len(with_plugin) == sum(operators.values()) - operators["AftSimplePortable"]
    onnx.checker.check_model(named)


def test_portable_graph_names_no_plugin(model: onnx.ModelProto) -> None:
    before = operators_in(model)
    network = Network(model)
    remove_plugins(network)
    named = network.to_model()
    assert operators_in(named) == before
    assert not any(plugin_attributes(named))


def simplified(text: str) -> onnx.ModelProto:
    header = '<ir_version: 10, opset_import: ["" : 20, "custom" : 1]>\n'
    network = Network(onnx.parser.parse_model(header + text))
    for rewrite in (infer_types, remove_idle_casts, fold_constants):
        rewrite(network)
    network.graph.cleanup().toposort()
    model = network.to_model()
    onnx.checker.check_model(model)
    return model


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_idle_cast_leaves() -> None:
    """The type of a value between nodes is inferred."""
    model = simplified("""g (float16[n] x) => (float[n] y, float16[n] z) {
        a = Relu(x)
        b = Cast <to = 10> (a)
        c = Cast <to = 1> (b)
        y = Relu(c)
        z = Cast <to = 10> (x)
    }""")
    assert sorted(operators(model)) == ["Cast", "Cast", "Relu", "Relu"]
    casts = [node for node in model.graph.node if node.op_type == "Cast"]
    assert {cast.input[0] for cast in casts} == {"a", "x"}


def test_cast_of_unknown_type_stays() -> None:
    model = simplified("""g (float[n] x) => (float[n] y) {
        a = custom.Unknown(x)
        b = Cast <to = 1> (a)
        y = Relu(b)
    }""")
    assert "Cast" in operators(model)


def test_small_constants_are_folded() -> None:
    model = simplified("""g (float[n] x) => (float[n] y) <float w = {2.0}> {
        one = Constant <value = float {1.0}> ()
        three = Add(w, one)
        y = Mul(x, three)
    }""")
    assert operators(model) == ["Mul"]
    (weight,) = model.graph.initializer
    assert onnx.numpy_helper.to_array(weight) == 3


@pytest.mark.parametrize(
    "body",
    [
        "c = Expand(w, shape)",  # 16 TiB
        "c = RandomNormalLike(w)",
        "c = custom.Unknown(w)",
        "b = Cast <to = 16> (w)\n c = Cast <to = 1> (b)",
    ],
    ids=["large", "random", "custom", "bfloat16"],
)
def test_other_constants_stay(body: str) -> None:
    model = simplified(f"""g (float[n] x) => (float[n, m] y)
        <float[1, 1] w = {{2.0}}, int64[2] shape = {{2097152, 2097152}}> {{
        {body}
        y = Mul(x, c)
    }}""")
    assert len(model.graph.node) > 1


def test_fraction_of_size_is_kept() -> None:
    """Folding of shapes would turn the factor into an integer, 0."""
    model = simplified("""g (float[n] x) => (int64[1] y) <float half = {0.5}> {
        size = Shape(x)
        wide = Cast <to = 1> (size)
        part = Mul(wide, half)
        y = Cast <to = 7> (part)
    }""")
    assert operators(model) == ["Shape", "Cast", "Mul", "Cast"]
    result = onnx.reference.ReferenceEvaluator(model).run(None, {"x": np.zeros(9, np.float32)})
    np.testing.assert_array_equal(result, [[4]])
