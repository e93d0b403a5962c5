"""Recurrent nodes of ONNX and ONNX Runtime in a graph, replaced before mechanisms are searched."""

from pathlib import Path

import onnx
import onnx_ir as ir

from aftexport.errors import UsageError
from aftexport.recognition.graph.shape_probe import NoRunnableSizes, ProbedGraph, probe
from aftexport.recognition.opset_change import lower_opset
from aftexport.recognition.result import NearMiss, Recognition
from aftexport.recognition.standard_recurrence.expansion import runnable_form
from aftexport.recognition.standard_recurrence.node_values import is_standard
from aftexport.recognition.standard_recurrence.translation import (
    Translation,
    check_foreign_nodes,
    translate,
)


def replace_foreign_nodes(
    model: ir.Model, source: Path, runnable: onnx.ModelProto | None = None
) -> tuple[Translation, ProbedGraph | None]:
    """Replace such nodes in place, and lower an opset that no released runtime loads.

    Args:
        model: the graph, normalized and without model-local functions.
        source: the file, for errors.
        runnable: the ``runnable_form`` of the graph; None computes it.

    Returns:
        The replaced nodes, and the values of the file itself; None without such nodes.

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
