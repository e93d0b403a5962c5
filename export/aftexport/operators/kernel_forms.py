"""The forms of the operators that the fused kernels take.

A runtime chooses a kernel by the name of a node. A node that the kernel takes gets the name of its
operator. A node that it does not take gets another name, that of a copy of its function, so the
runtime runs its portable body.
"""

import onnx

from aftexport.operators.domain import DOMAIN, operator_name
from aftexport.operators.mechanisms import RECURRENT_OPERATORS
from aftexport.operators.registry import operator_of

_SUFFIX = "Portable"


def takes_form(library: str, node: onnx.NodeProto) -> bool:
    """Return whether the kernels of a library of ``aftplugins.RUNTIMES`` take our node."""
    operator = operator_of(node.op_type)
    if operator is None or library == "onnxruntime":
        return True
    return not operator.cpu_only_parts(node) and operator.op_type not in RECURRENT_OPERATORS


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
