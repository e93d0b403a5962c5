"""The forms of the operators that the fused kernels take.

A runtime chooses a kernel by the name of a node. A node that the kernel takes gets the name of its
operator. A node that it does not take gets another name, that of a copy of its function, so the
runtime runs its portable body.
"""

import onnx

from aftexport.operators.domain import DOMAIN, operator_name
from aftexport.operators.registry import operator_of

_SUFFIX = "Portable"


def takes_form(library: str, node: onnx.NodeProto) -> bool:
    """Return whether the kernels of a library take a node of our domain.

    Those for the CPU take every form; the others lack those of ``OnnxOperator.cpu_only_parts``.

    Args:
        library: the name of the library, see ``aftplugins.RUNTIMES``.
        node: the node.
    """
    operator = operator_of(node.op_type)
    if operator is None:
        return True
    if library not in operator.libraries:
        return False
    return library == "onnxruntime" or not operator.cpu_only_parts(node)


def choose_kernels(model: onnx.ModelProto, library: str) -> bool:
    """Rename nodes in place: those that the kernels of a library take have their operator's name.

    If a node of another form gets that name, no body has it any more. A runtime without the kernel
    then refuses the model, and does not run the body of the most common form.

    Args:
        model: the model, for a runtime in which the library is registered.
        library: the name of the library, see ``aftplugins.RUNTIMES``.

    Returns:
        Whether there were any.
    """
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
    for name in sorted(other_forms & functions.keys()):
        model.functions.remove(functions[name])
    return bool(copied or other_forms)
