"""Sessions of ONNX Runtime, with and without our kernels; not a contender itself."""

import onnx
import onnxruntime

import aftplugins
from aftexport.bench.timing import Run
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.engines.onnxruntime.engine import operator_shares
from benchmarks.contenders.contender import Prepared
from benchmarks.task import Task
from benchmarks.workloads import OP_TYPES, Tensors, Workload, single_operator

_PRODUCTS = ("LayerNormLinear", "LayerNormQueryKeyValue", "LayerNormFeedForward", "LinearResidual",
             "MatMul", "Gemm")  # fmt: skip
_STAGES = dict.fromkeys(_PRODUCTS, "products") | dict.fromkeys(OP_TYPES.values(), "attention")


def prepare_graph(task: Task, model: onnx.ModelProto, threads: int, *, fused: bool) -> Prepared:
    """Load a graph, and profile it where our kernels run it.

    Args:
        task: the document.
        model: the graph.
        threads: number of threads per operator.
        fused: whether our kernels run its operators.
    """
    content = model.SerializeToString()
    engine = OnnxRuntimeEngine(content, threads=threads, fused=fused)
    arrays = task.arrays
    stages = {}
    if fused:
        stages = _by_stage(operator_shares(content, arrays, threads=threads, fused=fused))
    return Prepared(lambda: engine.run(arrays)["logits"], stages, engine.release)


def operator_session(workload: Workload, tensors: Tensors, threads: int, *, fused: bool) -> Run:
    """Load a single operator.

    Args:
        workload: the operator and its size.
        tensors: its inputs.
        threads: number of threads.
        fused: whether our kernel runs it.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Its threads would otherwise spin for 45 ms after a call, on cores the next one needs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # An arena would hide the memory that a call takes.
    options.enable_cpu_mem_arena = False
    if fused:
        if why := aftplugins.missing("onnxruntime"):
            raise RuntimeError(why)
        options.register_custom_ops_library(str(aftplugins.library("onnxruntime")))
    model, feeds = single_operator(workload, tensors)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda: session.run(None, feeds)


def _by_stage(shares: dict[str, float]) -> dict[str, float]:
    stages = {"products": 0.0, "attention": 0.0, "rest": 0.0}
    for op_type, share in shares.items():
        stages[_STAGES.get(op_type, "rest")] += share
    return stages
