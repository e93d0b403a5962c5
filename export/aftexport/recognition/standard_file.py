"""A file with our operators, written to a file with standard operators only."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import UsageError
from aftexport.lowering.file_format import lower_format
from aftexport.operators.domain import DOMAIN, operators_in
from aftexport.recognition.graph.shape_probe import Arrays, NoRunnableSizes, probe
from aftexport.recognition.onnx_file import check_outputs, load_graph, read_weights, serialized
from aftexport.recognition.standard_recurrence.expansion import runnable_form
from aftexport.recognition.standard_recurrence.standard_form import StandardForm, standard_form
from aftexport.system.contract import IDS, LENGTHS
from aftexport.system.files import replacing_file
from aftexport.system.onnx_files import MODEL


def unfuse_file(source: Path, target: Path, opset: int | None = None) -> StandardForm:
    """Write the model of a bundle or a file to ``target`` in standard operators.

    Args:
        source: a bundle, or an ONNX file with operators of our domain.
        target: the new file, which may be the source.
        opset: 27 or later for the recurrent operators of ONNX, which few runtimes load; None for
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
