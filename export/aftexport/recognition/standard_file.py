"""A file with our operators, written to a file with standard operators only.

Each operator becomes its portable body, or from opset 27 on a recurrent node of ONNX, which has no
lengths. A LinearAttention keeps its state at a token of padding with key 0, value 0, decay 0 (a
factor of 1) and beta 0. A causal convolution reads no later token; the state after the last token
is gathered from the inputs. Both outputs become 0 at the rows of padding.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import UsageError
from aftexport.lowering.file_format import lower_format
from aftexport.lowering.nodes import NewNodes, take_place
from aftexport.operators.domain import DOMAIN, operator_name, operators_in
from aftexport.operators.mechanisms.causal_depthwise_conv import CAUSAL_DEPTHWISE_CONV
from aftexport.operators.mechanisms.recurrent_linear_attention import RECURRENT_LINEAR_ATTENTION
from aftexport.operators.portable_bodies import attach_bodies
from aftexport.operators.registry import ALL_OPERATORS, operator_of
from aftexport.recognition.graph.shape_probe import Arrays, NoRunnableSizes, probe
from aftexport.recognition.onnx_file import check_outputs, load_graph, read_weights, serialized
from aftexport.recognition.standard_recurrence.expansion import (
    check_known,
    raise_opset,
    runnable_form,
)
from aftexport.recognition.standard_recurrence.node_values import (
    CAUSAL_CONV,
    FIRST_OPSET,
    LINEAR_ATTENTION,
    Padding,
    are_full,
)
from aftexport.recognition.standard_recurrence.translation import cancel_transposes
from aftexport.system.contract import IDS, LENGTHS
from aftexport.system.files import replacing_file
from aftexport.system.onnx_files import MODEL


@dataclass
class StandardForm:
    """A model in standard operators."""

    model: onnx.ModelProto
    # Number of nodes by our operator and the operator of ONNX.
    standard: Counter[tuple[str, str]] = field(default_factory=Counter)
    # Number of nodes by our operator and the reason for its body.
    bodies: Counter[tuple[str, str]] = field(default_factory=Counter)


def unfuse_file(source: Path, target: Path, opset: int | None = None) -> StandardForm:
    """Write the model of a bundle or a file to ``target`` in standard operators.

    Opset 27 or later gives the recurrent operators of ONNX, which few runtimes load. None gives
    portable bodies in the opset of the source.

    Raises:
        UsageError: if the source has no such operators, or the opset does not fit.
        EngineError: if the source or the result does not run.
        ParityError: if the outputs differ; nothing is written.
    """
    path = source / MODEL if source.is_dir() else source
    model = load_graph(path)
    if not operators_in(model):
        raise UsageError(
            f"{path}: expected a model with operators of {DOMAIN}, got none.",
            "Give a bundle, its model.onnx, or a file that aftexport fuse wrote.",
        )
    read_weights(model, path)
    before = OnnxRuntimeEngine(serialized(model), fused=False)
    form = standard_form(model, opset)
    del form.model.graph.value_info[:]
    lower_format(form.model)
    # A runtime without opset 27 runs the definition of ONNX in its place.
    after = OnnxRuntimeEngine(serialized(runnable_form(ir.from_proto(form.model))), fused=False)
    try:
        runs = probe(model).runs
    except NoRunnableSizes as error:
        raise UsageError(
            f"{path}: expected a model that ONNX Runtime runs, got an error ({error}).",
            "Export the model again.",
        ) from error
    for inputs in _inputs([{name: run[name] for name in before.input_names} for run in runs]):
        check_outputs(after.run(inputs), before.run(inputs))
    with replacing_file(target) as aside:
        aside.write_bytes(serialized(form.model))
    return form


def standard_form(model: onnx.ModelProto, opset: int | None) -> StandardForm:
    """Return a model in standard operators only.

    Opset 27 or later gives the recurrent operators of ONNX, None bodies in the model's opset.

    Raises:
        UsageError: if the installed onnx lacks the opset, or a node has another meaning there.
    """
    if opset is not None:
        if opset < FIRST_OPSET:
            raise UsageError(
                f"--opset must be at least {FIRST_OPSET}, got {opset}.",
                "Leave it out for the fallbacks in the opset of the model.",
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


def _inputs(runs: list[Arrays]) -> Iterator[dict[str, NDArray[np.generic]]]:
    """Yield the inputs of runs: with one valid token, all of them, and different numbers."""
    random = np.random.default_rng(0)
    for run in runs:
        inputs = dict(run)
        if IDS in inputs:
            ids = inputs[IDS]
            inputs[IDS] = random.integers(0, 2, ids.shape).astype(ids.dtype)
        yield inputs
        if LENGTHS in inputs:
            tokens = max(array.shape[1] for array in inputs.values() if array.ndim > 1)
            batch = inputs[LENGTHS].size
            yield {**inputs, LENGTHS: np.full(batch, tokens)}
            yield {**inputs, LENGTHS: np.linspace(tokens, 1, batch).astype(np.int64)}


def write_causal_conv(node: ir.Node, padding: Padding, new: NewNodes) -> list[ir.Value]:
    """Add the nodes that compute the outputs of a node, and return both outputs."""
    x, weight, bias, past, lengths = node.inputs
    assert x is not None  # a required input
    assert weight is not None  # a required input
    assert lengths is not None  # a required input
    before = None if past is None else _turned(past, new)
    inputs = [_turned(x, new), _filter(weight, new), bias, before]
    while inputs[-1] is None:
        inputs.pop()
    attributes = [a for name, a in node.attributes.items() if name == "activation"]
    standard = ir.Node("", CAUSAL_CONV, inputs, attributes, num_outputs=2)
    output, present = (_turned(value, new) for value in new.append(standard))
    if are_full(lengths, x):
        return [output, present]
    output = padding.cleared(output, padding.valid(x, lengths))
    state = node.outputs[1]
    if state.uses() or state.is_graph_output():
        present = _state(x, weight, past, lengths, new)
    return [output, present]


def _turned(value: ir.Value, new: NewNodes) -> ir.Value:
    return new.add("Transpose", value, perm=[0, 2, 1])


def _filter(weight: ir.Value, new: NewNodes) -> ir.Value:
    """Return a filter ``[C, K]`` as ``[C, 1, K]``."""
    if weight.const_value is not None and not weight.is_graph_input():
        return new.constant(weight.const_value.numpy()[:, None])
    return new.add("Unsqueeze", weight, new.constant([1]))


def _state(
    x: ir.Value, weight: ir.Value, past: ir.Value | None, lengths: ir.Value, new: NewNodes
) -> ir.Value:
    """Return the K - 1 inputs up to the last token within the lengths, ``[B, K - 1, C]``."""
    one = new.constant([1])
    count = new.add("Sub", new.add("Shape", weight, start=1, end=2), one)
    batch = new.add("Shape", x, start=0, end=1)
    shape = new.add("Concat", batch, count, new.add("Shape", x, start=2, end=3), axis=0)
    if past is None:
        zero = new.add("CastLike", new.constant([0]), x)
        past = new.add("Expand", zero, shape)
    inputs = new.add("Concat", past, x, axis=1)
    # The inputs begin with K - 1 tokens of the past, so the state begins at the length itself.
    start, step = (new.constant(np.array(number)) for number in (0, 1))
    numbers = new.add("Range", start, new.add("Squeeze", count), step)
    inside = new.add("Max", new.add("Min", lengths, new.add("Shape", x, start=1, end=2)), start)
    places = new.add("Add", new.add("Unsqueeze", inside, one), numbers)
    column = new.add("Unsqueeze", places, new.constant([2]))
    return new.add("GatherElements", inputs, new.add("Expand", column, shape), axis=1)


_KEPT = ("update_rule", "q_num_heads", "kv_num_heads", "scale")


def why_not_standard(node: ir.Node) -> str:
    """Return the reason why the standard operator cannot express a node; empty if it can."""
    direction = node.attributes.get_string("direction", "forward")
    if direction != "forward":
        return f"direction {direction}"
    normalizer = node.attributes.get_string("normalizer", "none")
    return "" if normalizer == "none" else f"normalizer {normalizer}"


def write_linear_attention(node: ir.Node, padding: Padding, new: NewNodes) -> list[ir.Value]:
    """Add the nodes that compute the outputs of a node, and return both outputs."""
    query, key, value, past, decay, beta, lengths = node.inputs
    assert query is not None  # a required input
    assert lengths is not None  # a required input
    is_full = are_full(lengths, query)
    if not is_full:
        valid = padding.valid(query, lengths)
        key, value, decay, beta = (
            None if tensor is None else padding.cleared(tensor, valid)
            for tensor in (key, value, decay, beta)
        )
    attributes = [node.attributes[name] for name in _KEPT if name in node.attributes]
    inputs = [query, key, value, past, decay, beta]
    while inputs[-1] is None:
        inputs.pop()
    standard = ir.Node("", LINEAR_ATTENTION, inputs, attributes, num_outputs=2)
    output, present = new.append(standard)
    return [output if is_full else padding.cleared(output, valid), present]
