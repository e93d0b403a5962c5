"""The exported graph with our kernels in ONNX Runtime, in each precision."""

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


class _Kernels(ModelContender):
    is_ours = True

    def prepare(self, task: Task, threads: int) -> Prepared:
        """Load the exported graph and the kernel library."""
        return prepare_graph(task, task.model.graph(self.precision), threads, fused=True)


class KernelsFloat32(_Kernels, OperatorContender):
    """Our kernels in float32."""

    name = "aftexport_fp32"
    title = "aftexport fp32"
    precision: Precision = "fp32"

    def prepare_operator(self, workload: Workload, tensors: Tensors, threads: int) -> Run:
        """Load the operator and the kernel library.

        Raises:
            RuntimeError: if the kernels were not built.
        """
        return operator_session(workload, tensors, threads, fused=True)


class KernelsBfloat16(_Kernels):
    """Our kernels with the bound of bf16 on the error."""

    name = "aftexport_bf16"
    title = "aftexport bf16"
    precision: Precision = "bf16"


class KernelsInt8(_Kernels):
    """Our kernels with the bound of int8 on the error."""

    name = "aftexport_int8"
    title = "aftexport int8"
    precision: Precision = "int8"


CONTENDERS = (KernelsFloat32(), KernelsBfloat16(), KernelsInt8())
