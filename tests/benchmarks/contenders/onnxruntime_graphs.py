"""The exported graph in ONNX Runtime: by our kernels, and by the operators of its fallback."""

import tempfile
from pathlib import Path

import onnx
from onnxruntime.quantization import quantize_dynamic

from aftexport.bench.timing import Run
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.engines.onnxruntime.engine import operator_shares
from benchmarks.contenders.contender import ModelContender, OperatorContender, Prepared
from benchmarks.task import Task
from benchmarks.workloads import OP_TYPES, Tensors, Workload, open_session, single_operator

_PRODUCTS = ("LayerNormLinear", "LayerNormQueryKeyValue", "LayerNormFeedForward", "LinearResidual",
             "MatMul", "Gemm")  # fmt: skip
_STAGES = dict.fromkeys(_PRODUCTS, "products") | dict.fromkeys(OP_TYPES.values(), "attention")


class Graph(ModelContender):
    """The exported graph; our kernels, where they run it, keep the bound on the error."""

    def prepare(self, task: Task, threads: int) -> Prepared:
        """Load the graph, and profile it where our kernels run it."""
        return self._loaded(task.model.graph(self.precision), task, threads)

    def _loaded(self, model: onnx.ModelProto, task: Task, threads: int) -> Prepared:
        content, arrays, fused = model.SerializeToString(), task.arrays, self.is_ours
        engine = OnnxRuntimeEngine(content, threads=threads, fused=fused)
        stages = {}
        if fused:
            stages = _by_stage(operator_shares(content, arrays, threads=threads, fused=fused))
        return Prepared(lambda: engine.run(arrays)["logits"], stages, engine.release)


class GraphAndOperator(Graph, OperatorContender):
    """The graph, or a single operator, which the runtime replaces by its body without kernels."""

    def prepare_operator(self, workload: Workload, tensors: Tensors, threads: int) -> Run:
        """Load the operator.

        Raises:
            RuntimeError: if it is ours and the kernels were not built.
        """
        model, feeds = single_operator(workload, tensors)
        # An arena would hide the memory that a call takes, and threads that spin for 45 ms after
        # a call would do so on cores that the next one needs.
        session = open_session(
            model, threads, has_kernels=self.is_ours, has_arena=False, spins=False
        )
        return lambda: session.run(None, feeds)


class StandardGraph(Graph):
    """The graph of standard operators."""

    def prepare(self, task: Task, threads: int) -> Prepared:
        """Load the graph."""
        return self._loaded(task.model.standard_graph, task, threads)


class QuantizedGraph(Graph):
    """The graph without our kernels and with int8 products; each run finds their ranges."""

    def prepare(self, task: Task, threads: int) -> Prepared:
        """Quantize the weights."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "int8.onnx"
            quantize_dynamic(task.model.standard_graph, path)
            model = onnx.load(path)
        return self._loaded(model, task, threads)


def _by_stage(shares: dict[str, float]) -> dict[str, float]:
    stages = {"products": 0.0, "attention": 0.0, "rest": 0.0}
    for op_type, share in shares.items():
        stages[_STAGES.get(op_type, "rest")] += share
    return stages


CONTENDERS = (
    GraphAndOperator("aftexport_fp32", "aftexport fp32", is_ours=True),
    Graph("aftexport_bf16", "aftexport bf16", "bf16", is_ours=True),
    Graph("aftexport_int8", "aftexport int8", "int8", is_ours=True),
    GraphAndOperator("ort_portable", "ONNX Runtime"),
    QuantizedGraph("ort_dynamic_int8", "ONNX Runtime, dynamic int8", "int8"),
)
ENCODERS = (*CONTENDERS[:3], StandardGraph("ort_standard", "ONNX Runtime"))
