"""A model that goes through onnx-graphsurgeon keeps all that it had."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from aftexport.engines.tensorrt.graph.network import MAX_SMALL_BYTES, Network, is_small
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION
from aftexport.operators.torch_ops import OPERATORS

LARGE = np.arange(MAX_SMALL_BYTES // 4 + 16, dtype=np.float32).reshape(16, -1)


def node(
    op_type: str, inputs: list[str], output: str, domain: str = "", **attributes: object
) -> onnx.NodeProto:
    made = helper.make_node(op_type, inputs, [output], f"node_{output}", domain=domain)
    made.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
    return made


def branch(text: str) -> onnx.GraphProto:
    inner = node("Constant", [], "inner", value=numpy_helper.from_array(np.float32(1), "one"))
    inner.metadata_props.add(key="branch", value=text)
    empty = node("Constant", [], "empty")
    empty.attribute.append(helper.make_attribute("value_ints", [], attr_type=AttributeProto.INTS))
    shaped = node("Reshape", ["inner", "empty"], "shaped")
    value = helper.make_tensor_value_info("shaped", TensorProto.FLOAT, [])
    return helper.make_graph([inner, empty, shaped], text, [], [value])


@pytest.fixture
def model() -> onnx.ModelProto:
    """A model with everything that a library may lose."""
    operator = OPERATORS["AftSimple"]
    body = operator.function({a.name: str(a.default) for a in operator.settings}, 20)
    body.doc_string = "the body"
    body.metadata_props.add(key="body", value="its metadata")
    body.value_info.append(helper.make_tensor_value_info("query_f", TensorProto.FLOAT, None))
    attention = node("AftSimple", ["query", "key", "value", "lengths"], "attention", DOMAIN)
    attention.attribute.extend(
        helper.make_attribute(*pair) for pair in {**PLUGIN_ATTRIBUTES, "gate": "sigmoid"}.items()
    )
    attention.doc_string = "the node"
    attention.metadata_props.add(key="range", value="[-3, 4]")
    nodes = [
        attention,
        node("MatMul", ["attention", "weight"], "product"),
        node("Add", ["product", "bias"], "sum"),
        node("If", ["condition"], "chosen", then_branch=branch("then"), else_branch=branch("else")),
        node("Mul", ["sum", "chosen"], "output"),
    ]
    sequence = ["batch", None, 16]
    inputs = [
        *(
            helper.make_tensor_value_info(name, TensorProto.FLOAT, sequence)
            for name in ("query", "key", "value")
        ),
        helper.make_tensor_value_info("lengths", TensorProto.INT64, ["batch"]),
        helper.make_tensor_value_info("condition", TensorProto.BOOL, []),
    ]
    inputs[0].metadata_props.add(key="range", value="[0, 1]")
    inputs[0].doc_string = "the query"
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", None, None])
    between = helper.make_tensor_value_info("product", TensorProto.FLOAT, ["batch", "n", None])
    between.metadata_props.add(key="range", value="[-1, 1]")
    bias = numpy_helper.from_array(np.float32([1]), "bias")
    bias.metadata_props.add(key="weight", value="its metadata")
    graph = helper.make_graph(
        nodes,
        "everything",
        inputs,
        [output],
        [numpy_helper.from_array(LARGE, "weight"), bias],
        doc_string="the graph",
        value_info=[between],
    )
    graph.metadata_props.add(key="graph", value="its metadata")
    graph.quantization_annotation.add(tensor_name="product")
    opsets = [("", 20), (DOMAIN, VERSION), ("com.microsoft", 1)]
    made = helper.make_model(
        graph,
        functions=[body],
        opset_imports=[helper.make_opsetid(*opset) for opset in opsets],
        ir_version=10,
        producer_name="somebody",
        producer_version="1.2",
        domain="org.example",
        model_version=7,
        doc_string="the model",
    )
    helper.set_model_props(made, {"license": "Apache-2.0"})
    return made


def sorted_attributes(nodes: object) -> None:
    for one in nodes:  # type: ignore[attr-defined]
        ordered = sorted(one.attribute, key=lambda attribute: attribute.name)
        del one.attribute[:]
        one.attribute.extend(ordered)
        for attribute in one.attribute:
            sorted_attributes(attribute.g.node)


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def test_round_trip_loses_nothing(model: onnx.ModelProto) -> None:
    """Only the order of a node's attributes may change."""
    back = Network(copied(model)).to_model()
    for one in (model, back):
        sorted_attributes(one.graph.node)
    assert back.graph.node == model.graph.node
    assert back.graph == model.graph
    assert back.functions == model.functions
    assert back == model


def test_library_itself_loses_metadata(model: onnx.ModelProto) -> None:
    """A release that keeps it needs no ``_restore_nodes``."""
    for attribute in model.graph.node[3].attribute:
        del attribute.g.node[1:]
    back = gs.export_onnx(gs.import_onnx(copied(model)))
    assert back.functions[0].name == "AftSimple"
    assert back.opset_import == model.opset_import
    assert not back.metadata_props
    assert not back.graph.node[0].metadata_props


def test_large_weights_are_references(model: onnx.ModelProto) -> None:
    network = Network(model)
    tensors = network.graph.tensors()
    assert not is_small(tensors["weight"])
    assert is_small(tensors["bias"])
    assert gs.export_onnx(network.graph).ByteSize() < LARGE.nbytes / 10


def test_renamed_weight_keeps_values(model: onnx.ModelProto) -> None:
    network = Network(model)
    network.graph.tensors()["weight"].name = "renamed"
    weights = {tensor.name: tensor for tensor in network.to_model().graph.initializer}
    assert weights.keys() == {"renamed", "bias"}
    np.testing.assert_array_equal(numpy_helper.to_array(weights["renamed"]), LARGE)


def test_unused_weights_leave(model: onnx.ModelProto) -> None:
    network = Network(model)
    product = next(node for node in network.graph.nodes if node.op == "MatMul")
    product.inputs[1] = gs.Constant("small", np.ones((16, 2), ml_dtypes.bfloat16))
    weights = {t.name: t.data_type for t in network.to_model().graph.initializer}
    assert weights == {"small": TensorProto.BFLOAT16, "bias": TensorProto.FLOAT}


def test_external_weights_stay_outside(model: onnx.ModelProto, tmp_path: Path) -> None:
    """A file of over 2 GiB is not read."""
    onnx.save(
        model,
        tmp_path / "model.onnx",
        save_as_external_data=True,
        location="data",
        size_threshold=0,
    )
    with (tmp_path / "data").open("r+b") as file:
        file.truncate(3 << 30)
    written = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    huge = written.graph.initializer.add(name="huge", data_type=TensorProto.UINT8, dims=[5 << 29])
    huge.data_location = TensorProto.EXTERNAL
    huge.external_data.add(key="location", value="data")
    huge.external_data.add(key="length", value=str(5 << 29))
    written.graph.node.append(node("Shape", ["huge"], "size"))
    written.graph.output.append(helper.make_tensor_value_info("size", TensorProto.INT64, [1]))
    network = Network(copied(written))
    back = network.to_model()
    assert len(back.SerializeToString()) < 100_000
    by_name = {tensor.name: tensor for tensor in written.graph.initializer}
    assert {tensor.name: tensor for tensor in back.graph.initializer} == by_name


def test_new_function_and_domain_are_written(model: onnx.ModelProto) -> None:
    network = Network(model)
    value = gs.Variable("x")
    doubled = gs.Variable("y")
    nodes = [gs.Node("Add", inputs=[value, value], outputs=[doubled])]
    network.graph.functions.append(
        gs.Function("Double", "org.example", nodes, [value], [doubled], opset=20)
    )
    last = network.graph.nodes[-1]
    result = gs.Variable("doubled", np.float32, last.outputs[0].shape)
    network.graph.nodes.append(
        gs.Node(
            "Double", "double", inputs=[last.outputs[0]], outputs=[result], domain="org.example"
        )
    )
    network.graph.outputs = [result]
    back = network.to_model()
    assert [function.name for function in back.functions] == ["AftSimple", "Double"]
    assert "org.example" in {opset.domain for opset in back.opset_import}
    onnx.checker.check_model(back)
