"""An ONNX file in, the same model with operators of the domain out."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, EncodeError

from aftexport.bundle.golden import Case
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import ParityError, UsageError
from aftexport.lowering.file_format import lower_format
from aftexport.lowering.random_nodes import random_node
from aftexport.onnx_io import MAX_MODEL_BYTES, files_beside, load_weights
from aftexport.operators.domain import DOMAIN
from aftexport.operators.portable_bodies import attach_bodies
from aftexport.parity import compare
from aftexport.passes.optimizer_faults import avoid_optimizer_faults
from aftexport.recognition.graph.normalize import normalize
from aftexport.recognition.graph.shape_probe import ProbedGraph
from aftexport.recognition.recognizer import Recognition, recognize
from aftexport.system.files import replacing_file


def fuse_file(
    source: Path, target: Path, progress: Callable[[int, int, str], None] | None = None
) -> Recognition:
    """Writes ``source`` to ``target`` with the mechanisms that were found made operators.

    Where none was found, the file is copied as it is. Weights beside the source, as torch.onnx
    writes them, are in the target itself. ``progress`` is as in ``recognise``.

    Raises:
        UsageError: where the source is no ONNX model of up to 2 GiB, has such operators already,
            or is random.
        EngineError: where the result does not run.
        ParityError: where the whole model's outputs differ; nothing is written.
    """
    original = _load(source)
    is_whole = not files_beside(original)
    if not is_whole:
        _read_weights(original, source)
    try:
        graph = normalize(original)
    except Exception as error:  # libraries of others, on files of others
        raise UsageError(
            f"{source}: it cannot be normalised ({error}).",
            "Check it with onnx.checker, or export it with opset 18 or later.",
        ) from error
    found = recognize(graph, progress)
    if not found.matches:
        if source.resolve() != target.resolve():
            with replacing_file(target) as aside:
                if is_whole:
                    shutil.copyfile(source, aside)
                else:
                    aside.write_bytes(_serialized(original))
        return found
    if (random := random_node(original)) is not None:
        raise UsageError(
            f"{source}: its outputs are random, and cannot be compared: {random}.",
            "Export the model in evaluation mode: model.eval(), and no training= for "
            "torch.onnx.export.",
        )
    fused = ir.to_proto(graph)
    avoid_optimizer_faults(fused)
    lower_format(fused)
    fused = attach_bodies(fused)
    assert found.probed is not None
    _check(fused, found.probed)
    with replacing_file(target) as aside:
        aside.write_bytes(_serialized(fused))
    return found


def _load(source: Path) -> onnx.ModelProto:
    try:
        model = onnx.load(source, load_external_data=False)
    except (DecodeError, ValueError) as error:
        raise UsageError(f"{source}: it is no ONNX model ({error}).", "Check the file.") from error
    if not model.graph.node or not model.graph.output:
        raise UsageError(f"{source}: it holds no graph.", "Give an ONNX model.")
    if any(node.domain == DOMAIN for node in model.graph.node):
        raise UsageError(
            f"{source}: it has operators of {DOMAIN} already.", "Give the model as it was before."
        )
    return model


def _read_weights(model: onnx.ModelProto, source: Path) -> None:
    try:
        size = sum((source.parent / name).stat().st_size for name in files_beside(model))
        if size > MAX_MODEL_BYTES:
            raise UsageError(
                f"{source}: it has {size / 2**30:.1f} GiB of weights, and one ONNX file holds 2.",
                "Fuse a model of fewer or smaller weights.",
            )
        load_weights(model, source.parent)
        onnx.load_external_data_for_model(model, str(source.parent))  # those of attributes
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise UsageError(
            f"{source}: its weights cannot be read ({error}).", "Put the files it names beside it."
        ) from error


def _serialized(model: onnx.ModelProto) -> bytes:
    try:
        return bytes(model.SerializeToString())
    except (ValueError, EncodeError) as error:
        raise UsageError(
            "The fused model is over 2 GiB, which one ONNX file cannot hold.",
            "Fuse a model of fewer or smaller weights.",
        ) from error


def _check(fused: onnx.ModelProto, probed: ProbedGraph) -> None:
    """Runs the whole model by the portable bodies on what the original was measured with."""
    engine = OnnxRuntimeEngine(_serialized(fused), fused=False)
    for run in filter(None, (*probed.runs, *probed.edge_runs, probed.long_run)):
        outputs = engine.run({name: run[name] for name in engine.input_names})
        for name, output in outputs.items():
            precision = "fp16" if output.dtype.itemsize == 2 else "fp32"
            result = compare(Case("as measured", name, {}, run[name]), output, precision)
            if not result.passed and np.isfinite(run[name].astype(np.float64)).all():
                raise ParityError(
                    f"Output {name} differs by {result.error:.1e} once fused, "
                    f"the bound is {result.bound:.0e}.",
                    "Use the original model: nothing was written.",
                )
