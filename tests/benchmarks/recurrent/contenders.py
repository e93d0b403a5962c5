"""The contenders: our kernel, ONNX Runtime's, torch.compile of the chunked form, and our body."""

from collections.abc import Callable

import onnx
import onnxruntime
import torch

import aftplugins
from aftexport.bench.timing import Run
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION
from benchmarks.recurrent.chunked_form import ChunkedForm, Compiler, compile_static
from benchmarks.recurrent.workload import OPERATOR, Feeds, Recurrence

OURS = "aftexport_fp32"
CONTENDERS = {
    OURS: "our kernel",
    "onnxruntime": "ONNX Runtime's `com.microsoft.LinearAttention`",
    "torch_compile": "torch.compile of the chunked form",
    "body": "our portable body in ONNX Runtime",
}
Preparation = Callable[[int], Run]
"""Returns a call of the contender with a number of threads; the call returns the output."""


def preparation(
    name: str, workload: Recurrence, feeds: Feeds, compiler: Compiler = compile_static
) -> Preparation:
    """Return the way to prepare a contender for a number of threads.

    Args:
        name: the contender.
        workload: the update rule and the size.
        feeds: the inputs.
        compiler: the compiler of the chunked form, which compiles at the first call.
    """
    if name == "torch_compile":
        compiled = _chunked(workload, feeds, compiler)
        return lambda threads: compiled

    def prepare(threads: int) -> Run:
        loaded, given = session(name, workload, feeds, threads)
        return lambda: loaded.run(["output"], given)[0]

    return prepare


def session(
    name: str, workload: Recurrence, feeds: Feeds, threads: int, *, has_arena: bool = True
) -> tuple[onnxruntime.InferenceSession, Feeds]:
    """Return a session over one node, and its inputs.

    Args:
        name: the contender.
        workload: the update rule and the size.
        feeds: the inputs.
        threads: number of threads.
        has_arena: whether the session keeps freed memory.
    """
    node = _standard_node(workload, feeds)
    functions: list[onnx.FunctionProto] = []
    if name != "onnxruntime":
        lengths = torch.full((workload.batch,), workload.tokens).numpy()
        feeds = feeds | {"lengths": lengths}
        node, functions = _own_node(workload, feeds)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_cpu_mem_arena = has_arena
    options.log_severity_level = 4
    if name == OURS:
        options.register_custom_ops_library(str(aftplugins.library("onnxruntime")))
    model = _model(node, feeds, functions)
    providers = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=providers
    ), feeds


def _chunked(workload: Recurrence, feeds: Feeds, compiler: Compiler) -> Run:
    tensors = {name: torch.from_numpy(x) for name, x in feeds.items()}
    inputs = [tensors.get(name) for name in ("query", "key", "value", "decay", "beta")]
    form, scale = ChunkedForm(compiler), workload.width**-0.5

    def run() -> object:
        with torch.inference_mode():
            return form(*inputs, heads=workload.heads, scale=scale)  # type: ignore[arg-type]

    return run


def _standard_node(workload: Recurrence, feeds: Feeds) -> onnx.NodeProto:
    return onnx.helper.make_node(
        "LinearAttention",
        [n if n in feeds else "" for n in OPERATOR.inputs[:-1]],
        ["output", "present_state"],
        domain="com.microsoft",
        update_rule=workload.rule,
        scale=workload.width**-0.5,
        q_num_heads=workload.heads,
        kv_num_heads=workload.heads,
    )


def _own_node(
    workload: Recurrence, feeds: Feeds
) -> tuple[onnx.NodeProto, list[onnx.FunctionProto]]:
    node = onnx.helper.make_node(
        OPERATOR.op_type,
        [n if n in feeds else "" for n in OPERATOR.inputs],
        list(OPERATOR.outputs),
        domain=DOMAIN,
        **workload.attributes,
        **PLUGIN_ATTRIBUTES,
    )
    settings = {a.name: workload.attributes[a.name] for a in OPERATOR.settings}
    return node, [OPERATOR.function(settings, 20, frozenset(feeds))]


def _model(
    node: onnx.NodeProto, feeds: Feeds, functions: list[onnx.FunctionProto]
) -> onnx.ModelProto:
    make = onnx.helper
    inputs = [
        make.make_tensor_value_info(name, make.np_dtype_to_tensor_dtype(x.dtype), [None] * x.ndim)
        for name, x in feeds.items()
    ]
    outputs = [make.make_tensor_value_info("output", onnx.TensorProto.FLOAT, None)]
    return make.make_model(
        make.make_graph([node], "operator", inputs, outputs),
        functions=functions,
        opset_imports=[make.make_opsetid("", 20), make.make_opsetid(node.domain, VERSION)],
        ir_version=10,
    )
