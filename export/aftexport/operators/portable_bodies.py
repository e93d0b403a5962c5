"""Portable bodies: every custom operator of a model as a function of standard operators."""

from collections import Counter, defaultdict

import onnx
import onnx.inliner

from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION, opset_of
from aftexport.operators.registry import ALL_OPERATORS

_Form = tuple[tuple[str, ...], tuple[str, ...]]
"""The settings of a node and its optional inputs."""


def attach_bodies(model: onnx.ModelProto) -> onnx.ModelProto:
    """Add a portable body for every custom operator in ``model``, one function per form."""
    # A function can branch neither on an attribute nor on the presence of an input. If nodes of one
    # operator differ in a setting or in their optional inputs, the most common form has the name of
    # the operator. Nodes of other forms call functions whose names add the form to it. A session
    # with kernels gives them the name of the operator; see kernel_forms.choose_kernels. The field
    # overload of ONNX cannot distinguish the forms: ONNX Runtime 1.23 and the evaluator of onnx
    # 1.23 choose a function by its name only.
    opset = opset_of(model)
    have = {f.name for f in model.functions if f.domain == DOMAIN}
    nodes = [n for n in model.graph.node if n.domain == DOMAIN and n.op_type not in have]
    by_operator: dict[str, Counter[_Form]] = defaultdict(Counter)
    for node in nodes:
        for name, value in PLUGIN_ATTRIBUTES.items():
            if not any(a.name == name for a in node.attribute):
                node.attribute.append(onnx.helper.make_attribute(name, value))
        _add_defaults(node)
        by_operator[node.op_type][_form(node)] += 1

    names: dict[tuple[str, _Form], str] = {}
    for op_type, counts in sorted(by_operator.items()):
        operator = ALL_OPERATORS[op_type]
        for rank, (form, _) in enumerate(counts.most_common()):
            settings, present = form
            chosen = {a.name: value for a, value in zip(operator.settings, settings, strict=True)}
            function = operator.function(chosen, opset, present)
            if rank:
                function.name = _name(op_type, form)
            names[op_type, form] = function.name
            model.functions.append(function)
    for node in nodes:
        node.op_type = names[node.op_type, _form(node)]
    if nodes and not any(o.domain == DOMAIN for o in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, VERSION))
    return model


def inline_partial_calls(model: onnx.ModelProto) -> onnx.ModelProto:
    """Inline the bodies of operators whose nodes leave out an input before another one."""
    # The parser of TensorRT refuses a call of a function with such an input, and no TensorRT plugin
    # has optional inputs.
    functions = {f.name for f in model.functions if f.domain == DOMAIN}
    partial = {n.op_type for n in model.graph.node if n.domain == DOMAIN and "" in n.input}
    called = sorted((DOMAIN, name) for name in partial & functions)
    return onnx.inliner.inline_selected_functions(model, called) if called else model


def _add_defaults(node: onnx.NodeProto) -> None:
    """Add the absent attributes to a node: onnx's inliner knows no defaults of a function."""
    present = {a.name for a in node.attribute}
    for attribute in ALL_OPERATORS[node.op_type].attributes:
        if attribute.name not in present:
            node.attribute.append(onnx.helper.make_attribute(attribute.name, attribute.default))


def _form(node: onnx.NodeProto) -> _Form:
    operator = ALL_OPERATORS[node.op_type]
    chosen = operator.attributes_of(node)
    return tuple(str(chosen[a.name]) for a in operator.settings), operator.present_in(node)


def _name(op_type: str, form: _Form) -> str:
    """Return the name of a form, unlike that of its operator."""
    settings, present = form
    return "_".join((op_type, *settings, *present))
