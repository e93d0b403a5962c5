"""Models of custom nodes, for the builder: one by one, and as PyTorch models are exported."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from aftexport.capture.capture import capture
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.nn import ClassifierConfig, EncoderLayer
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION
from aftexport.operators.torch_ops import OPERATORS
from aftexport.system.contract import DEFAULT_OPSET

CHANNELS, HEADS = 16, 2
PARAMETERS = {
    "position_bias": [32, 32],
    "band": [32, 7],
    "filter": [HEADS, 3],
    "alpha_weight": [CHANNELS, HEADS],
    "beta_weight": [CHANNELS, HEADS],
}

Shapes = Mapping[str, Sequence[int | str]]


def one_of_each(
    *op_types: str,
    element: int = TensorProto.FLOAT,
    elements: Mapping[str, int] | None = None,
    shapes: Shapes | None = None,
    without_last: bool = False,
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a model with one node for each operator, on inputs of its own.

    Args:
        op_types: of the nodes, which have these names too.
        element: ONNX type of all floating-point tensors.
        elements, shapes: those of some inputs, by name, in place of the right ones.
        without_last: leave ``lengths`` out.
        attributes: in place of the defaults.
    """
    nodes, inputs, outputs, functions = [], [], [], []
    for op_type in op_types:
        operator = OPERATORS[op_type]
        required = operator.required_inputs
        names = required[:-1] if without_last else required
        for name in names:
            heads_as_key = operator.stem == "aft_conv" and name == "key"
            sequence = ["batch", "tokens", HEADS if heads_as_key else CHANNELS]
            shape = ["batch"] if name == "lengths" else PARAMETERS.get(name, sequence)
            kind = TensorProto.INT64 if name == "lengths" else element
            kind = (elements or {}).get(name, kind)
            shape = (shapes or {}).get(name, shape)
            inputs.append(helper.make_tensor_value_info(f"{op_type}_{name}", kind, shape))
        first = [a for a in operator.attributes if not a.is_cpu_only]
        own = (*first, *operator.kernel_attributes)
        values = {a.name: HEADS if a.name == "num_heads" else a.default for a in own}
        nodes.append(
            helper.make_node(
                op_type,
                [f"{op_type}_{name}" for name in names],
                [f"{op_type}_output"],
                name=op_type,
                domain=DOMAIN,
                **(values | attributes | PLUGIN_ATTRIBUTES),
            )
        )
        output = ["batch", "tokens", CHANNELS]
        outputs.append(helper.make_tensor_value_info(f"{op_type}_output", element, output))
        defaults = {a.name: str(a.default) for a in operator.settings}
        functions.append(operator.function(defaults, DEFAULT_OPSET))
    opsets = [helper.make_opsetid("", DEFAULT_OPSET), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(
        helper.make_graph(nodes, "operators", inputs, outputs),
        functions=functions,
        opset_imports=opsets,
        ir_version=10,
    )


class Both(nn.Module):
    """An encoder layer of a mechanism and one of its causal form."""

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(
            EncoderLayer(replace(config, causal=causal)) for causal in (False, True)
        )
        self.head = nn.Linear(config.dim, config.num_labels)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, lengths)
        return self.head(x[:, 0])


def exported(mechanism: str) -> onnx.ModelProto:
    """Export a small PyTorch model of a mechanism."""
    torch.manual_seed(0)
    most = 32 if mechanism == "aft_full" else None
    config = ClassifierConfig(
        mechanism=mechanism,
        vocab_size=50,
        num_labels=3,
        dim=CHANNELS,
        num_heads=8,  # too narrow for a Fastformer layer to be made one operator
        ffn_dim=16,
        window=4,
        max_length=most,
    )
    return finish(lower(capture(Both(config).eval(), max_tokens=most)))
