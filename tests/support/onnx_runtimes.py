"""Runtimes of ONNX files that know nothing of our operators, and run their bodies.

OpenVINO does not read functions, so they are inlined for it. It may compute in bfloat16 unless told
otherwise.
"""

import importlib
import sys
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnx.inliner
import onnx.reference
import onnxruntime

# The import of openvino sends telemetry and writes to the home folder, except without this module.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
openvino = importlib.import_module("openvino")

Arrays = dict[str, np.ndarray]
Run = Callable[[Mapping[str, np.ndarray]], Arrays]
"""A function from the inputs of a model to its outputs, by name."""

_CPU = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
_CORE = openvino.Core()


def _evaluator(model: onnx.ModelProto) -> Run:
    evaluator = onnx.reference.ReferenceEvaluator(model)

    def run(inputs: Mapping[str, np.ndarray]) -> Arrays:
        with np.errstate(all="ignore"):  # NumPy warns of exp(-inf)
            results = evaluator.run(None, dict(inputs))
        return dict(zip(evaluator.output_names, map(np.asarray, results), strict=True))

    return run


def _onnxruntime(model: onnx.ModelProto) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(None, dict(inputs)), strict=True))


def _openvino(model: onnx.ModelProto) -> Run:
    inlined = onnx.inliner.inline_local_functions(model)
    compiled = _CORE.compile_model(_CORE.read_model(inlined.SerializeToString()), "CPU", _CPU)
    names = [output.name for output in model.graph.output]
    # OpenVINO drops an input of which only the known size is used.
    taken = {name for port in compiled.inputs for name in port.get_names()}

    def run(inputs: Mapping[str, np.ndarray]) -> Arrays:
        results = compiled({name: value for name, value in inputs.items() if name in taken})
        return {name: results[i].copy() for i, name in enumerate(names)}

    return run


RUNTIMES: dict[str, Callable[[onnx.ModelProto], Run]] = {
    "evaluator": _evaluator,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}
"""Each runtime, as a function that loads a model."""

# The evaluator of onnx 1.19 gives a Scan only as many states as it has scanned tensors.
if tuple(map(int, onnx.__version__.split(".")[:2])) < (1, 23):
    del RUNTIMES["evaluator"]
