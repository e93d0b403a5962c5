"""Running a bundle's golden cases through an engine."""

from collections.abc import Callable, Iterable

import onnx

from aftexport.bundle import Bundle
from aftexport.domain import DOMAIN, VERSION
from aftexport.engines import Engine
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import EngineError
from aftexport.parity import Array, Case, Comparison, compare


def verify(
    bundle: Bundle,
    *,
    engine: Engine | None = None,
    fused: bool = True,
    advance: Callable[[], None] = lambda: None,
) -> list[Comparison]:
    """Compares the bundle's model, and each of its operators alone, with PyTorch's outputs.

    Args:
        bundle: what to check.
        engine: the bundle's model, loaded; None to load it for this alone.
        fused: use the fused kernels where they are built.
        advance: called after every case.

    Raises:
        EngineError: where the model cannot be loaded.
    """
    cases = bundle.golden()
    engine = engine or OnnxRuntimeEngine(bundle.model_path, fused=fused)
    model = onnx.load(bundle.model_path, load_external_data=False)
    results = []
    for case in cases:
        if case.subject == "model":
            output = engine.run(case.inputs)["logits"]
        else:
            output = _run_operator(model, case, fused)
        results.append(compare(case, output, bundle.manifest.precision))
        advance()
    return results


def _run_operator(model: onnx.ModelProto, case: Case, fused: bool) -> Array:
    single = OnnxRuntimeEngine(operator_model(model, case).SerializeToString(), fused=fused)
    return single.run(case.inputs)["output"]


def operator_model(model: onnx.ModelProto, case: Case) -> onnx.ModelProto:
    """A model of one node: the operator of ``case`` as it stands in ``model``, with its body.

    Raises:
        EngineError: where ``model`` has no such node.
    """
    node = next((n for n in model.graph.node if n.op_type == case.subject), None)
    function = next((f for f in model.functions if f.name == case.subject), None)
    if node is None or function is None:
        raise EngineError(
            f"The model has no operator {case.subject} with a body.", "Export the model again."
        )
    alone = onnx.NodeProto()
    alone.CopyFrom(node)
    del alone.input[:], alone.output[:]
    alone.input.extend(function.input)
    alone.output.append("output")
    elements = {
        name: onnx.helper.np_dtype_to_tensor_dtype(tensor.dtype)
        for name, tensor in case.inputs.items()
    }
    inputs = [
        onnx.helper.make_tensor_value_info(name, elements[name], case.inputs[name].shape)
        for name in function.input
    ]
    floats = elements[function.input[0]]
    output = onnx.helper.make_tensor_value_info("output", floats, case.expected.shape)
    standard = next(o.version for o in model.opset_import if o.domain == "")
    return onnx.helper.make_model(
        onnx.helper.make_graph([alone], "operator", inputs, [output]),
        functions=[function],
        opset_imports=[
            onnx.helper.make_opsetid("", standard),
            onnx.helper.make_opsetid(DOMAIN, VERSION),
        ],
        ir_version=model.ir_version,
    )


def worst(results: Iterable[Comparison]) -> Comparison:
    """The comparison furthest over, or least within, its bound."""
    return max(results, key=lambda result: result.error / result.bound)
