"""ONNX Runtime on the exported graph, by the standard operators of its fallback."""

import tempfile
from pathlib import Path

import onnx
from onnxruntime.quantization import quantize_dynamic

from aftexport.bench.timing import Run
from benchmarks.contenders.contender import (
    ModelContender,
    OperatorContender,
    Precision,
    Prepared,
)
from benchmarks.contenders.onnxruntime_sessions import operator_session, prepare_graph
from benchmarks.task import Task
from benchmarks.workloads import Tensors, Workload


class OnnxRuntime(ModelContender, OperatorContender):
    """The exported graph without our kernels."""

    name = "ort_portable"
    title = "ONNX Runtime"
    precision: Precision = "fp32"

    def prepare(self, task: Task, threads: int) -> Prepared:
        """Load the exported graph."""
        return prepare_graph(task, task.model.graph(), threads, fused=False)

    def prepare_operator(self, workload: Workload, tensors: Tensors, threads: int) -> Run:
        """Load the operator, which the runtime replaces by its body."""
        return operator_session(workload, tensors, threads, fused=False)


class OnnxRuntimeInt8(ModelContender):
    """The same graph with int8 products; each run finds the ranges of activations."""

    name = "ort_dynamic_int8"
    title = "ONNX Runtime, dynamic int8"
    precision: Precision = "int8"

    def prepare(self, task: Task, threads: int) -> Prepared:
        """Quantize the weights."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "int8.onnx"
            quantize_dynamic(task.model.standard_graph, path)
            model = onnx.load(path)
        return prepare_graph(task, model, threads, fused=False)


CONTENDERS = (OnnxRuntime(), OnnxRuntimeInt8())
