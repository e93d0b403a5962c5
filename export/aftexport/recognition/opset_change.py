"""A change of the opset of a graph whose nodes mean the same in both.

ONNX gives a new version to many operators only because they take further types. Released runtimes
refuse the newest opset, so a file in it is lowered to one that they all load.
"""

import onnx
import onnx_ir as ir

from aftexport.errors import UsageError
from aftexport.system.contract import DEFAULT_OPSET

NEWEST_OPSET = 26
"""The newest opset that ONNX Runtime 1.31 loads."""
_CHANGED = frozenset(("DFT", "GridSample", "GroupNormalization"))
"""Operators that compute something else in a later opset, under the same attributes and inputs."""


def lower_opset(model: ir.Model) -> None:
    """Give a graph of a newer opset than ``NEWEST_OPSET`` the lowest one that fits, in place.

    Raises:
        UsageError: if a node needs a newer opset, or the installed onnx does not know the opset.
    """
    opset = model.opset_imports.get("", 0)
    if opset <= NEWEST_OPSET:
        return
    check_known(opset)
    nodes = [node for node in model.graph.all_nodes() if node.domain in ("", "ai.onnx")]
    for target in range(DEFAULT_OPSET, NEWEST_OPSET + 1):
        if all(_means_the_same(node, opset, target) for node in nodes):
            model.opset_imports[""] = target
            return
    node = next(node for node in nodes if not _means_the_same(node, opset, NEWEST_OPSET))
    raise UsageError(
        f"Expected operators of opset {NEWEST_OPSET} or lower, got opset {opset} with the node "
        f"{node.name or node.outputs[0].name!r} ({node.op_type}), which has no older form.",
        f"Export the model with opset {NEWEST_OPSET} or lower.",
    )


def raise_opset(model: ir.Model, opset: int) -> None:
    """Give a graph a newer opset, in place.

    Raises:
        UsageError: if a node would mean something else, or the installed onnx lacks the opset.
    """
    check_known(opset)
    own = model.opset_imports.get("", 0)
    for node in model.graph.all_nodes():
        if node.domain in ("", "ai.onnx") and not _means_the_same(node, own, opset):
            raise UsageError(
                f"Expected operators with the same meaning in opset {opset}, got the node "
                f"{node.name or node.outputs[0].name!r} ({node.op_type}) of opset {own}.",
                f"Leave --opset {opset} out.",
            )
    model.opset_imports[""] = max(own, opset)


def check_known(opset: int) -> None:
    """Raise UsageError if the installed onnx does not know an opset."""
    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        raise UsageError(
            f"onnx {onnx.__version__} knows opsets up to {newest}, got {opset}.",
            "Install a newer onnx: pip install --upgrade onnx.",
        )


def _means_the_same(node: ir.Node, opset: int, target: int) -> bool:
    """Return whether a node is valid in another opset and computes the same there."""
    try:
        own, other = (onnx.defs.get_schema(node.op_type, n) for n in (opset, target))
    except onnx.defs.SchemaError:
        return _is_new(node, opset, target)
    if own.since_version == other.since_version:
        return True
    if node.op_type in _CHANGED:
        return False
    defaults_kept = all(
        own.attributes[name].default_value == attribute.default_value
        for name, attribute in other.attributes.items()
        if name not in node.attributes and name in own.attributes
    )
    return (
        defaults_kept
        and all(name in other.attributes for name in node.attributes)
        and len(node.inputs) <= other.max_input
        and len(node.outputs) <= other.max_output
    )


def _is_new(node: ir.Node, opset: int, target: int) -> bool:
    """Return whether an operator is only known in the newer opset, which is the target."""
    return target > opset and onnx.defs.has(node.op_type)
