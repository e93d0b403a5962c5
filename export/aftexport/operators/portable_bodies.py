"""Portable bodies of the operators in a model, and the names by which fused kernels replace them.

A body is a function of standard operators. A runtime chooses a kernel by the name of a node. A node
that the kernel takes gets the name of its operator. A node that it does not take gets another name,
that of a copy of its function, so the runtime runs its portable body.
"""

from collections import Counter, defaultdict
from collections.abc import Collection

import onnx
import onnx.inliner

from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION, operator_name, opset_of
from aftexport.operators.registry import ALL_OPERATORS, operator_of

_Form = tuple[tuple[str, ...], tuple[str, ...]]
"""The settings of a node and its optional inputs and outputs."""


def attach_bodies(model: onnx.ModelProto) -> onnx.ModelProto:
    """Add a portable body for every custom operator in ``model``, one function per form."""
    # A function can branch neither on an attribute nor on the presence of an input. If nodes of one
    # operator differ in a setting or in their optional inputs, the most common form has the name of
    # the operator. Nodes of other forms call functions whose names add the form to it. A session
    # with kernels gives them the name of the operator; see choose_kernels. The field
    # overload of ONNX cannot distinguish the forms: ONNX Runtime 1.23 and the evaluator of onnx
    # 1.23 choose a function by its name only.
    opset = opset_of(model)
    have = {f.name for f in model.functions if f.domain == DOMAIN}
    nodes = [n for n in model.graph.node if n.domain == DOMAIN and n.op_type not in have]
    used = _used_names(model.graph)
    by_operator: dict[str, Counter[_Form]] = defaultdict(Counter)
    for node in nodes:
        for name, value in PLUGIN_ATTRIBUTES.items():
            if not any(a.name == name for a in node.attribute):
                node.attribute.append(onnx.helper.make_attribute(name, value))
        _add_defaults(node)
        _drop_unused_outputs(node, used)
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


def remove_unused(model: onnx.ModelProto, names: Collection[str]) -> None:
    """Remove the functions with these names that no node of the main graph calls any more."""
    unused = set(names) - {node.op_type for node in model.graph.node if node.domain == DOMAIN}
    for function in [f for f in model.functions if f.domain == DOMAIN and f.name in unused]:
        model.functions.remove(function)


def _add_defaults(node: onnx.NodeProto) -> None:
    """Add the absent attributes to a node: onnx's inliner knows no defaults of a function."""
    present = {a.name for a in node.attribute}
    for attribute in ALL_OPERATORS[node.op_type].attributes:
        if attribute.name not in present:
            node.attribute.append(onnx.helper.make_attribute(attribute.name, attribute.default))


def _used_names(graph: onnx.GraphProto) -> set[str]:
    """Return the names of the graph's outputs, and those that its nodes and subgraphs read."""
    used = {output.name for output in graph.output}
    for node in graph.node:
        used.update(node.input)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                used |= _used_names(attribute.g)
    return used


def _drop_unused_outputs(node: onnx.NodeProto, used: Collection[str]) -> None:
    """Drop the last outputs that no node reads, if they are optional: some cost time."""
    operator = ALL_OPERATORS[node.op_type]
    while (
        node.output[-1] not in used and operator.outputs[len(node.output) - 1] in operator.optional
    ):
        node.output.pop()


def _form(node: onnx.NodeProto) -> _Form:
    operator = ALL_OPERATORS[node.op_type]
    return tuple(operator.settings_of(node).values()), operator.present_in(node)


def _name(op_type: str, form: _Form) -> str:
    """Return the name of a form, unlike that of its operator."""
    settings, present = form
    return "_".join((op_type, *(settings + present or ("plain",))))


_SUFFIX = "Portable"


def takes_form(library: str, node: onnx.NodeProto) -> bool:
    """Return whether the kernels of a library of ``aftplugins.RUNTIMES`` take our node."""
    operator = operator_of(node.op_type)
    if operator is None:
        return True
    if library not in operator.libraries:
        return False
    return library == "onnxruntime" or not operator.cpu_only_parts(node)


def choose_kernels(model: onnx.ModelProto, library: str) -> bool:
    """Give the nodes that a library's kernels take their operator's name; tell if any changed."""
    functions = {f.name: f for f in model.functions if f.domain == DOMAIN}
    copied: set[str] = set()
    other_forms: set[str] = set()
    for node in model.graph.node:
        if node.domain != DOMAIN or node.op_type not in functions:
            continue
        name, is_known = operator_name(node.op_type), operator_of(node.op_type) is not None
        if is_known and node.op_type != name and takes_form(library, node):
            other_forms.add(name)
            node.op_type = name
        elif node.op_type == name and not takes_form(library, node):
            copied.add(name)
            node.op_type = name + _SUFFIX
    for name in sorted(copied):
        copy = model.functions.add()
        copy.CopyFrom(functions[name])
        copy.name += _SUFFIX
    # Without a body, a runtime that lacks the kernel refuses the model, instead of running the body
    # of the most common form.
    for name in sorted(other_forms & functions.keys()):
        model.functions.remove(functions[name])
    return bool(copied or other_forms)
