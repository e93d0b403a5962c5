"""A graph of our operators in standard operators: bodies, and recurrent nodes of opset 27."""

from collections import Counter
from dataclasses import dataclass, field

import onnx
import onnx.inliner
import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass

from aftexport.errors import UsageError
from aftexport.lowering.nodes import NewNodes, take_place
from aftexport.operators.domain import DOMAIN, operator_name
from aftexport.operators.mechanisms.causal_depthwise_conv import CAUSAL_DEPTHWISE_CONV
from aftexport.operators.mechanisms.recurrent_linear_attention import RECURRENT_LINEAR_ATTENTION
from aftexport.operators.portable_bodies import attach_bodies
from aftexport.operators.registry import ALL_OPERATORS, operator_of
from aftexport.recognition.opset_change import check_known, raise_opset
from aftexport.recognition.standard_recurrence.node_values import (
    CAUSAL_CONV,
    FIRST_OPSET,
    LINEAR_ATTENTION,
)
from aftexport.recognition.standard_recurrence.padding import Padding
from aftexport.recognition.standard_recurrence.translation import cancel_transposes
from aftexport.recognition.standard_recurrence.write_causal_conv import write_causal_conv
from aftexport.recognition.standard_recurrence.write_linear_attention import (
    why_not_standard,
    write_linear_attention,
)


@dataclass
class StandardForm:
    """A model in standard operators.

    Attributes:
        model: the model.
        standard: the number of nodes by our operator and the operator of ONNX.
        bodies: the number of nodes by our operator and the reason for its body.
    """

    model: onnx.ModelProto
    standard: Counter[tuple[str, str]] = field(default_factory=Counter)
    bodies: Counter[tuple[str, str]] = field(default_factory=Counter)


def standard_form(model: onnx.ModelProto, opset: int | None) -> StandardForm:
    """Return a model in standard operators only.

    Args:
        model: a model with our operators and their bodies, which stays unchanged.
        opset: 27 or later, for the recurrent operators of ONNX; None for bodies in the opset of
            the model.

    Raises:
        UsageError: if the installed onnx lacks the opset, or a node has another meaning there.
    """
    if opset is not None:
        if opset < FIRST_OPSET:
            raise UsageError(
                f"--opset must be at least {FIRST_OPSET}, got {opset}.",
                "Leave it out for the portable bodies in the opset of the model.",
            )
        check_known(opset)
    graph = ir.from_proto(model)
    form = StandardForm(model)
    _replace(graph, form, opset)
    # The inliner leaves nodes alone that are in no function.
    form.model = onnx.inliner.inline_local_functions(_with_bodies(ir.to_proto(graph)))
    if opset is not None:
        graph = ir.from_proto(form.model)
        raise_opset(graph, opset)
        form.model = ir.to_proto(graph)
    _drop_domain(form.model)
    return form


def _replace(graph: ir.Model, form: StandardForm, opset: int | None) -> None:
    masks = dict[tuple[ir.Value, ir.Value], ir.Value]()
    for node in list(graph.graph):
        if node.domain != DOMAIN:
            continue
        _write_defaults(node)
        reason = _why_body(node, opset)
        if reason is not None:
            form.bodies[operator_name(node.op_type), reason] += 1
            continue
        new = NewNodes(graph.graph, str(node.outputs[0].name))
        padding = Padding(new, masks)
        operator = operator_name(node.op_type)
        is_linear = operator == RECURRENT_LINEAR_ATTENTION.op_type
        write = write_linear_attention if is_linear else write_causal_conv
        outputs = write(node, padding, new)
        graph.graph.insert_before(node, new.nodes)
        for old, replacing in zip(node.outputs, outputs, strict=True):
            take_place(old, replacing)
        graph.graph.remove(node, safe=True)
        form.standard[operator, LINEAR_ATTENTION if is_linear else CAUSAL_CONV] += 1
    if form.standard:
        cancel_transposes(graph.graph)
        CommonSubexpressionEliminationPass()(graph)
        RemoveUnusedNodesPass()(graph)


def _write_defaults(node: ir.Node) -> None:
    """Write the attributes that a node leaves out: the inliner of onnx ignores their defaults."""
    operator = operator_of(node.op_type)
    if operator is None:
        return  # of a newer version, whose body is in the file
    for attribute in (*operator.attributes, *operator.kernel_attributes):
        if attribute.name not in node.attributes:
            written = ir.convenience.convert_attribute(attribute.name, attribute.default)
            node.attributes[attribute.name] = written


def _why_body(node: ir.Node, opset: int | None) -> str | None:
    """Return the reason for the body of a node; None for one that becomes a standard node."""
    operator = operator_name(node.op_type)
    if operator not in (RECURRENT_LINEAR_ATTENTION.op_type, CAUSAL_DEPTHWISE_CONV.op_type):
        return "ONNX has no such operator"
    if opset is None:
        return f"the operator of ONNX needs --opset {FIRST_OPSET}"
    if operator == RECURRENT_LINEAR_ATTENTION.op_type and (reason := why_not_standard(node)):
        return f"the operator of ONNX has no {reason}"
    return None


def _with_bodies(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model in which every node of ours has its body, that of the file if it has one."""
    have = {function.name for function in model.functions if function.domain == DOMAIN}
    bare = {n.op_type for n in model.graph.node if n.domain == DOMAIN and n.op_type not in have}
    if unknown := sorted(bare - ALL_OPERATORS.keys()):
        raise UsageError(
            f"Expected operators of {DOMAIN} that this version has, or their bodies, got "
            f"{', '.join(unknown)} without a body.",
            "Install the version that wrote the file.",
        )
    return attach_bodies(model)


def _drop_domain(model: onnx.ModelProto) -> None:
    kept = [imported for imported in model.opset_import if imported.domain != DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(kept)
