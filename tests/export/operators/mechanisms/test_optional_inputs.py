"""Optional inputs from PyTorch to the file, and bodies chosen by them."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from aftexport.lowering.to_onnx import lower
from aftexport.operators.domain import DOMAIN, operators_in
from aftexport.operators.portable_bodies import attach_bodies

from .recurrent_cases import ATTENTION, Form, absent_inputs, node_of


class Layers(nn.Module):
    """A convolution, a gated delta rule, and a linear one that goes on from its state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, input_features: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        operators = torch.ops.aftexport
        x, _ = operators.causal_depthwise_conv(
            input_features, self.weight, None, None, lengths, "silu"
        )
        key = nn.functional.normalize(x, dim=2)
        gates = -x[..., :2].abs(), x[..., :1].sigmoid()
        settings = ("forward", "none", "head", 2, 2, 0.0, 1e-6)
        y, state = operators.recurrent_linear_attention(
            x, key, x, None, *gates, lengths, "gated_delta", *settings
        )
        z, last = operators.recurrent_linear_attention(
            y, key, x, state, None, None, lengths, "linear", *settings
        )
        return {"rows": z, "last": last}


def test_exported_nodes_leave_absent_inputs_out() -> None:
    torch.manual_seed(0)
    model, lengths = Layers(), torch.tensor([7, 3])
    example = (torch.randn(2, 7, 8), lengths)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    program = torch.export.export(model, example, dynamic_shapes=(axes, {0: axes[0]}))
    proto = lower(program, opset=20)
    inputs = {
        node.op_type: [bool(name) for name in node.input]
        for node in reversed(proto.graph.node)
        if node.domain == DOMAIN
    }
    assert inputs == {
        "CausalDepthwiseConv": [True, True, False, False, True],
        "RecurrentLinearAttention": [True, True, True, False, True, True, True],
    }
    bare = attach_bodies(proto)
    session = onnxruntime.InferenceSession(bare.SerializeToString())
    for tokens in (1, 7, 70):
        x = torch.randn(2, tokens, 8)
        results = session.run(
            ["rows", "last"], {"input_features": x.numpy(), "lengths": lengths.numpy()}
        )
        with torch.no_grad():
            expected = model(x, lengths)
        for result, reference in zip(results, expected.values(), strict=True):
            np.testing.assert_allclose(result, reference.numpy(), rtol=1e-5, atol=1e-5)


def model_of(*forms: Form) -> onnx.ModelProto:
    """Return a graph of one node for each form."""
    nodes = []
    for form in forms:
        present = frozenset(ATTENTION.inputs) - absent_inputs(form)
        nodes.append(node_of(ATTENTION, present, form.attributes))
    graph = onnx.helper.make_graph(nodes, "graph", [], [])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)])


def test_most_common_form_keeps_operator() -> None:
    common, past = Form(has_past=False), Form(has_past=True)
    model = attach_bodies(model_of(past, common, common, Form("linear", has_past=False)))
    name = "RecurrentLinearAttention"
    linear = f"{name}_linear_forward_none_head"
    gated = f"{name}_gated_delta_forward_none_head_past_state_decay_beta"
    assert operators_in(model) == Counter({name: 2, linear: 1, gated: 1})
    reads = {}
    for function in model.functions:
        assert function.input == list(ATTENTION.inputs)
        reads[function.name] = {n for node in function.node for n in node.input}
    optional = {form: read & set(ATTENTION.optional) for form, read in reads.items()}
    assert optional == {
        name: {"decay", "beta"},
        linear: set(),
        gated: {"past_state", "decay", "beta"},
    }
    assert all("lengths" in read for read in reads.values())


def test_names_of_optional_inputs_are_in_schema() -> None:
    schema = onnx.defs.get_schema("RecurrentLinearAttention", 1, DOMAIN)
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    assert [i.name for i in schema.inputs if i.option == optional] == list(ATTENTION.optional)
    assert schema.inputs[-1].type_str == "tensor(int64)"
    assert [o.name for o in schema.outputs] == ["output", "present_state"]
