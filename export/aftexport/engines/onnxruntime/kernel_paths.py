"""The path of each custom operator: its fused kernel or its portable body."""

import tempfile
from pathlib import Path

import onnx

from aftexport.engines.cast_graph import has_bfloat16, widen
from aftexport.engines.onnxruntime.package import onnxruntime
from aftexport.engines.onnxruntime.providers import PROVIDERS, Provider
from aftexport.engines.onnxruntime.sessions import session, session_options
from aftexport.operators.domain import DOMAIN, operators_in
from aftexport.operators.kernel_forms import choose_kernels

_SMALL_BYTES = 1024


def operator_paths(model: Path, *, provider: Provider = "cpu") -> dict[str, str]:
    """Return the path of each custom operator and form of a model: ``fused`` or ``portable``.

    A form is fused only if all of its nodes are.

    The runtime replaces a node by its portable body if no kernel is registered.
    So the nodes that remain in its optimized graph run fused.

    Raises:
        EngineError: if the runtime refuses the model or the kernel library.
    """
    bare = _without_weights(onnx.load(model, load_external_data=False))
    written = [node.op_type for node in _custom_nodes(bare)]
    if has_bfloat16(bare):
        widen(bare)
    chosen = PROVIDERS[provider]
    if chosen.kernels:
        choose_kernels(bare, chosen.library)
    served = [node.op_type for node in _custom_nodes(bare)]
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        options = session_options(threads=1)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.optimized_model_filepath = str(optimized)
        session(bare.SerializeToString(), options, provider, fused=True)
        left = operators_in(onnx.load(optimized))
    before = operators_in(bare)
    # Nodes of one form may differ in a number such as eps, which decides about the kernel as well.
    fused: dict[str, bool] = {}
    for op_type, name in zip(written, served, strict=True):
        fused[op_type] = fused.get(op_type, True) and left[name] == before[name]
    return {op_type: "fused" if fused[op_type] else "portable" for op_type in sorted(fused)}


def _custom_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.domain == DOMAIN]


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace a model's weights by inputs: the choice of kernels depends only on types."""
    graph = model.graph
    weights = list(graph.initializer)
    del graph.initializer[:]
    for tensor in weights:
        if tensor.ByteSize() < _SMALL_BYTES and tensor.data_location != tensor.EXTERNAL:
            graph.initializer.append(tensor)  # small constants such as shapes and axes
        elif all(value.name != tensor.name for value in graph.input):
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            graph.input.append(info)
    return model
