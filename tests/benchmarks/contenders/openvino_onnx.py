"""OpenVINO: in float32, in bf16, and in int8 by NNCF."""

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import nncf
import onnx
import onnx.inliner
import openvino

from aftexport.bench.timing import Run
from benchmarks.contenders.contender import (
    CannotReadError,
    ModelContender,
    OperatorContender,
    Precision,
    Prepared,
    last_line,
)
from benchmarks.task import Model, Task
from benchmarks.workloads import Tensors, Workload, single_operator

_CORE = openvino.Core()
_HINTS = {"fp32": "f32", "bf16": "bf16"}
logging.getLogger("nncf").setLevel(logging.ERROR)


@dataclass(frozen=True, eq=False)
class OpenVino(ModelContender):
    """The exported graph."""

    rest: Precision = "fp32"
    """The precision of operators that are not quantized, where the processor has it."""

    def prepare(self, task: Task, threads: int) -> Prepared:
        """Compile the exported graph for the task's length: code for any length is slower."""
        capabilities = _CORE.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if self.precision == "bf16" and "BF16" not in capabilities:
            raise CannotReadError("OpenVINO computes bf16 only where the processor has it")
        rest = self.rest if "BF16" in capabilities else "fp32"
        model = self.graph(task.model).clone()
        request = _compile(model, task.arrays, threads, rest, **self.settings())
        arrays = task.arrays
        release = request.get_compiled_model().release_memory
        return Prepared(lambda: request.infer(arrays)[0], release=release)

    def graph(self, model: Model) -> openvino.Model:
        """Return the graph to compile."""
        return _standard(model)

    def settings(self) -> dict[str, Any]:
        """Return further properties of the compiled model."""
        return {}


class OpenVinoOperator(OpenVino, OperatorContender):
    """The graph, or a single operator."""

    def prepare_operator(self, workload: Workload, tensors: Tensors, threads: int) -> Run:
        """Compile the operator with its body in its place."""
        model, feeds = single_operator(workload, tensors)
        graph = read(onnx.inliner.inline_local_functions(model))
        request = _compile(graph, feeds, threads, "fp32")
        # The output is not copied, as that of the other contenders is not.
        return lambda: list(request.infer(feeds, share_inputs=True, share_outputs=True).values())


class OpenVinoInt8(OpenVino):
    """Weights and activations quantized by NNCF on documents."""

    def graph(self, model: Model) -> openvino.Model:
        """Quantize weights and activations."""
        return _quantized(model)


class OpenVinoDynamicInt8(OpenVino):
    """Weights of int8 by NNCF; each run finds the ranges of activations."""

    def graph(self, model: Model) -> openvino.Model:
        """Quantize the weights."""
        return nncf.compress_weights(
            _standard(model).clone(), mode=nncf.CompressWeightsMode.INT8_SYM
        )

    def settings(self) -> dict[str, Any]:
        """Return the size of a group that shares a range."""
        return {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "256"}


@dataclass(frozen=True, eq=False)
class OpenVinoTorch(OpenVino):
    """The model converted from PyTorch, which keeps its attention as one operator."""

    def graph(self, model: Model) -> openvino.Model:
        """Convert the program, and quantize it for int8."""
        converted = openvino.convert_model(model.program)
        return _by_nncf(converted, model) if self.precision == "int8" else converted


@lru_cache(maxsize=1)
def _standard(model: Model) -> openvino.Model:
    return read(model.standard_graph)


@lru_cache(maxsize=1)
def _quantized(model: Model) -> openvino.Model:
    return _by_nncf(_standard(model), model)


def _by_nncf(graph: openvino.Model, model: Model) -> openvino.Model:
    """Return a graph whose weights and activations NNCF has quantized on documents."""
    documents = model.calibration()
    try:
        return nncf.quantize(
            graph, nncf.Dataset(documents), model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(documents),
        )  # fmt: skip
    except nncf.InternalError as error:
        raise CannotReadError(f"NNCF does not quantize the model: {last_line(error)}") from error


def read(model: onnx.ModelProto) -> openvino.Model:
    """Read a graph of standard operators.

    Raises:
        CannotReadError: if OpenVINO does not support an operator of it.
    """
    try:
        return _CORE.read_model(model.SerializeToString())
    except RuntimeError as error:
        summary = str(error).rpartition("Summary:")[2]
        lines = [line.strip("- ") for line in summary.splitlines() if line.strip()]
        raise CannotReadError("; ".join(lines)) from error


def _compile(
    model: openvino.Model, feeds: dict[str, Any], threads: int, hint: Precision, **settings: Any
) -> openvino.InferRequest:
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": _HINTS[hint],
    }
    try:
        model.reshape({name: list(array.shape) for name, array in feeds.items()})
        return _CORE.compile_model(model, "CPU", properties | settings).create_infer_request()
    except RuntimeError as error:
        raise CannotReadError(last_line(error)) from error


CONTENDERS = (
    OpenVinoOperator("openvino_fp32", "OpenVINO"),
    OpenVino("openvino_bf16", "OpenVINO bf16", "bf16", rest="bf16"),
    OpenVinoInt8("openvino_int8", "OpenVINO int8 (NNCF)", "int8", rest="bf16"),
    OpenVinoDynamicInt8("openvino_dynamic_int8", "OpenVINO dynamic int8 (NNCF)", "int8"),
)
ENCODERS = (
    *CONTENDERS[:3],
    OpenVinoTorch("openvino_torch_fp32", "OpenVINO from PyTorch"),
    OpenVinoTorch("openvino_torch_bf16", "OpenVINO from PyTorch, bf16", "bf16", rest="bf16"),
    OpenVinoTorch("openvino_torch_int8", "OpenVINO from PyTorch, int8 (NNCF)", "int8", rest="bf16"),
)
