"""Portable bodies: every custom operator of a model as a function of standard operators."""

from collections import Counter, defaultdict

import onnx
import onnx.inliner

from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION, opset_of
from aftexport.operators.registry import ALL_OPERATORS


def attach_bodies(model: onnx.ModelProto) -> onnx.ModelProto:
    """Add a portable body for every custom operator in ``model``, one function per operator.

    A function cannot branch on an attribute. If nodes of one operator differ in a setting,
    the most common setting keeps the operator; for the others the body is inlined in
    standard ops.
    """
    opset = opset_of(model)
    nodes = [n for n in model.graph.node if n.domain == DOMAIN]
    by_operator: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for node in nodes:
        for name, value in PLUGIN_ATTRIBUTES.items():
            if not any(a.name == name for a in node.attribute):
                node.attribute.append(onnx.helper.make_attribute(name, value))
        by_operator[node.op_type][_settings(node)] += 1

    inlined = []
    for op_type, counts in sorted(by_operator.items()):
        operator = ALL_OPERATORS[op_type]
        for rank, (chosen, _) in enumerate(counts.most_common()):
            names = [a.name for a in operator.settings]
            function = operator.function(dict(zip(names, chosen, strict=True)), opset)
            if rank:
                function.name = f"{op_type}_{'_'.join(chosen)}"
                inlined.append((DOMAIN, function.name))
                for node in nodes:
                    if node.op_type == op_type and _settings(node) == chosen:
                        node.op_type = function.name
            model.functions.append(function)
    if nodes and not any(o.domain == DOMAIN for o in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, VERSION))
    if inlined:
        model = onnx.inliner.inline_selected_functions(model, inlined)
    return model


def _settings(node: onnx.NodeProto) -> tuple[str, ...]:
    operator = ALL_OPERATORS[node.op_type]
    chosen = operator.attributes_of(node)
    return tuple(str(chosen[a.name]) for a in operator.settings)
