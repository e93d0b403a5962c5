"""The forms of the operators that the fused kernels take.

A runtime chooses a kernel by the name of a node. A node that the kernel does not take gets another
name, that of a copy of its function, so the runtime runs its portable body.
"""

import onnx

from aftexport.operators.domain import DOMAIN
from aftexport.operators.registry import ALL_OPERATORS

_SUFFIX = "Portable"


def takes_form(library: str, node: onnx.NodeProto) -> bool:
    """Return whether the kernels of a library take a node of our domain.

    Those for the CPU take every form, the others only those of the first version of the contract.

    Args:
        library: the name of the library, see ``aftplugins.RUNTIMES``.
        node: the node.
    """
    operator = ALL_OPERATORS.get(node.op_type)
    return operator is None or library == "onnxruntime" or not operator.later_parts(node)


def rename_untaken(model: onnx.ModelProto, library: str) -> bool:
    """Rename the nodes that the kernels of a library do not take, in place.

    Returns:
        Whether there were any.
    """
    functions = {f.name: f for f in model.functions if f.domain == DOMAIN}
    renamed: set[str] = set()
    for node in model.graph.node:
        if node.domain != DOMAIN or node.op_type not in functions or takes_form(library, node):
            continue
        if node.op_type not in renamed:
            renamed.add(node.op_type)
            copy = model.functions.add()
            copy.CopyFrom(functions[node.op_type])
            copy.name += _SUFFIX
        node.op_type += _SUFFIX
    return bool(renamed)
