"""An ONNX file in, the same model with operators of the domain out."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, EncodeError

from aftexport.domain import DOMAIN
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import ParityError, UsageError
from aftexport.files import replacing_file
from aftexport.fuse.measured import Measured
from aftexport.fuse.normalise import normalised
from aftexport.fuse.recognition import Recognition, recognise
from aftexport.parity import Case, compare
from aftexport.trace import attach_bodies

_OLDEST_IR = 8
"""The first version of the file format that has model-local functions."""


def fuse_file(source: Path, target: Path) -> Recognition:
    """Writes ``source`` to ``target`` with the mechanisms that were found made operators.

    Where none was found, the file is copied as it is.

    Raises:
        UsageError: where the source is no ONNX model in one file, or has such operators already.
        EngineError: where the result does not run.
        ParityError: where the whole model's outputs differ; nothing is written.
    """
    original = _load(source)
    try:
        graph = normalised(original)
    except Exception as error:  # libraries of others, on files of others
        raise UsageError(
            f"{source}: it cannot be normalised ({error}).",
            "Check it with onnx.checker, or export it with opset 18 or later.",
        ) from error
    found = recognise(graph)
    if not found.matches:
        if source.resolve() != target.resolve():
            with replacing_file(target) as aside:
                shutil.copyfile(source, aside)
        return found
    fused = ir.to_proto(graph)
    fused.ir_version = max(fused.ir_version, _OLDEST_IR)
    fused = attach_bodies(fused, graph.opset_imports[""])
    assert found.measured is not None
    _check(fused, found.measured)
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
    if any(tensor.data_location for tensor in model.graph.initializer):
        raise UsageError(
            f"{source}: its weights lie in another file.", "Save it as one file of up to 2 GiB."
        )
    if any(node.domain == DOMAIN for node in model.graph.node):
        raise UsageError(
            f"{source}: it has operators of {DOMAIN} already.", "Give the model as it was before."
        )
    return model


def _serialized(model: onnx.ModelProto) -> bytes:
    try:
        return bytes(model.SerializeToString())
    except (ValueError, EncodeError) as error:
        raise UsageError(
            "The fused model is over 2 GiB, which one ONNX file cannot hold.",
            "Fuse a model of fewer or smaller weights.",
        ) from error


def _check(fused: onnx.ModelProto, measured: Measured) -> None:
    """Runs the whole model by the portable bodies on what the original was measured with."""
    engine = OnnxRuntimeEngine(_serialized(fused), fused=False)
    runs = [*measured.runs, *measured.more, *([measured.long] if measured.long else [])]
    for run in runs:
        outputs = engine.run({name: run[name] for name in engine.input_names})
        for name, output in outputs.items():
            precision = "fp16" if output.dtype.itemsize == 2 else "fp32"
            result = compare(Case("as measured", name, {}, run[name]), output, precision)
            if not result.passed and np.isfinite(run[name].astype(np.float64)).all():
                raise ParityError(
                    f"Output {name} differs by {result.error:.1e} once fused, "
                    f"the bound is {result.bound:.0e}.",
                    "Please report this model; nothing was written.",
                )
