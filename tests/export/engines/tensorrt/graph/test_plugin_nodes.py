"""The nodes of a graph that run by a plugin."""

import onnx
import pytest
import tiny_models
import torch

from aftexport.capture.capture import capture
from aftexport.engines.tensorrt.graph.network import Network
from aftexport.engines.tensorrt.graph.plugin_nodes import name_plugins, remove_plugins
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, operators_in


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
