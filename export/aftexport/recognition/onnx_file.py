"""Recognition in an ONNX file, written to a file with operators of the domain.

Recurrent nodes of ONNX and ONNX Runtime are replaced before mechanisms are searched.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, EncodeError

from aftexport.bundle.golden import OPERATOR_OUTPUT, Case
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import ParityError, UsageError
from aftexport.lowering.file_format import lower_format
from aftexport.lowering.graph_values import random_node
from aftexport.lowering.optimizer_faults import avoid_optimizer_faults
from aftexport.operators.domain import DOMAIN, opset_of
from aftexport.operators.portable_bodies import attach_bodies
from aftexport.parity import compare
from aftexport.recognition.graph.normalize import normalize
from aftexport.recognition.graph.shape_probe import Arrays, NoRunnableSizes, ProbedGraph, probe
from aftexport.recognition.recognizer import recognize
from aftexport.recognition.result import NearMiss, Recognition
from aftexport.recognition.standard_recurrence.expansion import (
    check_known,
    lower_opset,
    runnable_form,
)
from aftexport.recognition.standard_recurrence.node_values import is_standard
from aftexport.recognition.standard_recurrence.translation import (
    Translation,
    check_foreign_nodes,
    translate,
)
from aftexport.system.files import replacing_file
from aftexport.system.onnx_files import MAX_MODEL_BYTES, files_beside, load_weights


def fuse_file(
    source: Path, target: Path, progress: Callable[[int, int, str], None] | None = None
) -> Recognition:
    """Write ``source`` to ``target`` with recognized mechanisms replaced by operators.

    Recurrent nodes of ONNX and ONNX Runtime are replaced too. Without a change, the file is copied.
    Weights in files beside the source, as torch.onnx writes them, are stored in the target itself.

    Raises:
        UsageError: if the source is not an ONNX model of at most 2 GiB, already has such
            operators, or is random.
        EngineError: if the result does not run.
        ParityError: if the outputs of the whole model differ; nothing is written.
    """
    original = _load(source)
    is_whole = not files_beside(original)
    if not is_whole:
        read_weights(original, source)
    graph = _normalized(original, source)
    translation, probed = replace_foreign_nodes(graph, source)
    recognition = recognize(graph, progress)
    add_translation(recognition, translation)
    if not recognition.has_changes:
        if source.resolve() != target.resolve():
            with replacing_file(target) as aside:
                if is_whole:
                    shutil.copyfile(source, aside)
                else:
                    aside.write_bytes(serialized(original))
        return recognition
    _refuse_random(original, source)
    avoid_optimizer_faults(graph)
    fused = ir.to_proto(graph)
    lower_format(fused)
    fused = attach_bodies(fused)
    probed = probed or recognition.probed
    assert probed is not None
    _check(fused, probed)
    with replacing_file(target) as aside:
        aside.write_bytes(serialized(fused))
    return recognition


def read_onnx(source: Path) -> tuple[onnx.ModelProto, ir.Model]:
    """Return a model with all its weights, and its normalized graph.

    Raises:
        UsageError: if the file is not an ONNX model of at most 2 GiB, already has operators of
            the domain, or is random.
    """
    model = _load(source)
    read_weights(model, source)
    _refuse_random(model, source)
    return model, _normalized(model, source)


def _normalized(model: onnx.ModelProto, source: Path) -> ir.Model:
    try:
        return normalize(model)
    except Exception as error:  # other libraries, on any file
        raise UsageError(
            f"{source}: the graph cannot be normalized ({error}).",
            "Check it with onnx.checker, or export it with opset 18 or later.",
        ) from error


def _refuse_random(model: onnx.ModelProto, source: Path) -> None:
    if (random := random_node(model)) is not None:
        raise UsageError(
            f"{source}: the outputs are random and cannot be compared: {random}.",
            "Export the model in evaluation mode: model.eval(), and no training= for "
            "torch.onnx.export.",
        )


def load_graph(source: Path) -> onnx.ModelProto:
    """Return a model without the weights in files beside it.

    Raises:
        UsageError: if the file is not an ONNX model, or its opset is newer than the installed onnx.
    """
    try:
        model = onnx.load(source, load_external_data=False)
    except (DecodeError, ValueError) as error:
        raise UsageError(
            f"{source}: expected an ONNX model ({error}).", "Check the file."
        ) from error
    if not model.graph.node or not model.graph.output:
        raise UsageError(
            f"{source}: expected a graph with nodes and outputs.", "Give another file."
        )
    check_known(opset_of(model))
    return model


def _load(source: Path) -> onnx.ModelProto:
    model = load_graph(source)
    if any(node.domain == DOMAIN for node in model.graph.node):
        raise UsageError(
            f"{source}: the model already has operators of {DOMAIN}.", "Give the original model."
        )
    return model


def read_weights(model: onnx.ModelProto, source: Path) -> None:
    """Load the weights in files beside the source, up to 2 GiB."""
    try:
        size = sum((source.parent / name).stat().st_size for name in files_beside(model))
        if size > MAX_MODEL_BYTES:
            raise UsageError(
                f"{source}: expected at most 2 GiB of weights, got {size / 2**30:.1f} GiB.",
                "Fuse a model of fewer or smaller weights.",
            )
        load_weights(model, source.parent)
        onnx.load_external_data_for_model(model, str(source.parent))  # tensors in attributes
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise UsageError(
            f"{source}: its weights cannot be read ({error}).",
            "Put the files that it names beside it.",
        ) from error


def serialized(model: onnx.ModelProto) -> bytes:
    """Return the bytes of one file; raise UsageError above 2 GiB."""
    try:
        return bytes(model.SerializeToString())
    except (ValueError, EncodeError) as error:
        raise UsageError(
            "The new model exceeds 2 GiB, the limit of one ONNX file.",
            "Give a model of fewer or smaller weights.",
        ) from error


def _check(fused: onnx.ModelProto, probed: ProbedGraph) -> None:
    """Run the whole model with portable bodies, and compare it with the probed runs."""
    engine = OnnxRuntimeEngine(serialized(fused), fused=False)
    for run in filter(None, (*probed.runs, *probed.edge_runs, probed.long_run)):
        outputs = engine.run({name: run[name] for name in engine.input_names})
        check_outputs(outputs, run)


def check_outputs(outputs: Arrays, expected: Arrays) -> None:
    """Raise ParityError if an output of a rewritten model differs from that of the original."""
    for name, output in outputs.items():
        if output.shape == expected[name].shape and not output.size:
            continue  # the state of a filter of one tap
        precision = "fp16" if output.dtype.itemsize == 2 else "fp32"
        case = Case("as probed", name, {}, {OPERATOR_OUTPUT: expected[name]})
        (result,) = compare(case, {OPERATOR_OUTPUT: output}, precision)
        if not result.passed and np.isfinite(expected[name].astype(np.float64)).all():
            raise ParityError(
                f"Output {name} of the new model differs by {result.error:.1e}, "
                f"the bound is {result.bound:.0e}.",
                "Nothing was written: use the original model.",
            )


def replace_foreign_nodes(
    model: ir.Model, source: Path, runnable: onnx.ModelProto | None = None
) -> tuple[Translation, ProbedGraph | None]:
    """Replace such nodes in place, and lower an opset that no released runtime loads.

    Return the replaced nodes, and the values of the file itself; None without such nodes.

    Raises:
        UsageError: if a node violates its definition, the file does not run, or a node needs an
            opset that no released runtime loads.
    """
    if not check_foreign_nodes(model):
        lower_opset(model)
        return Translation(), None
    try:
        probed = probe(runnable_form(model) if runnable is None else runnable)
    except NoRunnableSizes as error:
        if not any(is_standard(node) for node in model.graph):
            return Translation(), None  # the search gives the reason, as for any such file
        raise UsageError(
            f"{source}: expected a model that ONNX Runtime runs, got an error ({error}).",
            "Correct the model, or install a newer ONNX Runtime.",
        ) from error
    translation = translate(model, probed.runs[0])
    lower_opset(model)
    return translation, probed


def add_translation(recognition: Recognition, translation: Translation) -> None:
    """Add replaced nodes, and those that stay, to the result of the search."""
    recognition.translated = translation.replaced
    recognition.near_misses[:0] = [NearMiss(*left) for left in translation.left]
