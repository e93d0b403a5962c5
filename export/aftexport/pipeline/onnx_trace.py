"""A plain ONNX file as a traced model, with its own answers as the reference."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto

from aftexport.bundle.golden import Array, Case
from aftexport.capture.model_spec import InputSpec
from aftexport.contract import DEFAULT_OPSET, FEATURES, IDS, LENGTHS, MAX_TOKENS
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import TraceError, UsageError
from aftexport.lowering.file_format import lower_format
from aftexport.parity import TOLERANCES
from aftexport.passes.finish import finish
from aftexport.passes.float32_sums import accumulate_in_float32
from aftexport.passes.id_tables import id_table, position_sizes
from aftexport.passes.plain_inputs import use_plain_inputs
from aftexport.passes.plain_outputs import name_axes, use_plain_outputs
from aftexport.pipeline.case_inputs import case_inputs
from aftexport.pipeline.explained import explained_model
from aftexport.pipeline.independence import DOUBLE_BOUND, find_breach
from aftexport.pipeline.onnx_limits import longest_document
from aftexport.pipeline.onnx_reference import OnnxReference
from aftexport.pipeline.options import ExportOptions
from aftexport.pipeline.traced_model import TracedModel
from aftexport.recognition.onnx_file import read_onnx
from aftexport.recognition.recognizer import recognize


def trace_onnx(
    options: ExportOptions, progress: Callable[[int, int, str], None] | None = None
) -> TracedModel:
    """Read an ONNX file, and run it on the cases.

    Args:
        options: the options of the export, whose source is the file.
        progress: see ``recognize``.

    Raises:
        UsageError: if the file is not such a model, or an option does not suit it.
        TraceError: if its inputs, outputs or axes do not fit, or its scores depend on other
            documents of a run.
        EngineError: if ONNX Runtime cannot run it.
    """
    _check_options(options)
    original, graph = read_onnx(options.source)
    precision = _precision(original, options.precision)
    names = use_plain_inputs(graph)
    renamed = use_plain_outputs(graph)
    own = ir.to_proto(graph)
    _forget_shapes(own)
    spec, table = _spec(ir.from_proto(own), own, names, options)
    reference = OnnxReference(own, _document(spec, 2))
    graph = _with_shapes(own, reference.run(_document(spec, 2)))
    own = ir.to_proto(graph)
    recognition = recognize(graph, progress)
    lowered = ir.to_proto(graph) if recognition.matches else own
    accumulate_in_float32(lowered)
    order = None if table is None else np.linalg.norm(table[: spec.vocab_size], axis=1).argsort()
    if options.batching:
        _refuse_breach(reference, spec, order)
    cases = [
        Case(name, "model", chosen, reference.run(chosen))
        for name, inputs in case_inputs(spec, order).items()
        for chosen in [{key: inputs[key] for key in spec.names}]
    ]
    explained, evidence = explained_model(lowered, options.to)
    model = finish(explained, precision=precision, fuse=options.to == "onnx")
    lower_format(model)
    return TracedModel(
        *(lowered, model, evidence, spec, precision, cases, recognition),
        reference=reference.precision,
        why_not_float64=reference.reason,
        left_out=(),
        is_of_onnx=True,
        renamed=renamed,
    )


def _check_options(options: ExportOptions) -> None:
    """Refuse options that only apply to PyTorch models."""
    unused = {
        f"--factory {options.factory}": options.factory is not None,
        "--allow-pickle": options.allow_pickle,
        "--trust-remote-code": options.trust_remote_code,
        f"--opset {options.opset}": options.opset != DEFAULT_OPSET,
    }
    if given := [option for option, is_given in unused.items() if is_given]:
        raise UsageError(
            f"{given[0]} is for PyTorch models, got it for the ONNX file {options.source}.",
            f"Leave {given[0]} out.",
        )
    if options.precision == "fp16" or (options.to != "onnx" and options.precision != "fp32"):
        raise UsageError(
            f"An ONNX file keeps the types of its weights, got --precision {options.precision}.",
            "Leave --precision out, or export the PyTorch model.",
        )
    if options.max_length is not None and not 1 <= options.max_length <= MAX_TOKENS:
        raise UsageError(
            f"--max-length must be from 1 to {MAX_TOKENS}, got {options.max_length}.",
            "Give such a number, or leave --max-length out.",
        )


def _precision(model: onnx.ModelProto, asked: str) -> str:
    types = {tensor.data_type for tensor in model.graph.initializer}
    types |= {value.type.tensor_type.elem_type for value in model.graph.output}
    if TensorProto.BFLOAT16 in types:
        raise UsageError(
            "Expected weights of float32 or float16 in an ONNX file, got bfloat16.",
            "Export the model in float32.",
        )
    if TensorProto.FLOAT16 in types:
        return "fp16"
    return "fp32" if asked == "auto" else asked


def _forget_shapes(model: onnx.ModelProto) -> None:
    """Drop the described shapes, whose axes have names of their own."""
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")


def _spec(
    graph: ir.Model, model: onnx.ModelProto, names: tuple[str, ...], options: ExportOptions
) -> tuple[InputSpec, NDArray[np.float32] | None]:
    """Return the inputs with their limits, and the table of the ids."""
    main = graph.graph.inputs[0]
    vocab_size, num_features, table = None, None, None
    if main.name == FEATURES:
        assert main.shape is not None  # checked with the inputs
        num_features = _num_features(int(main.shape[2]), options)  # type: ignore[arg-type]
    else:
        table = _table(graph, main)
        vocab_size = _vocab_size(table, options.vocab_size)
    spec = InputSpec(names, vocab_size, num_features, "", None)
    engine = OnnxRuntimeEngine(model.SerializeToString(), fused=False)
    run = lambda tokens: engine.run(_document(spec, tokens))  # noqa: E731
    longest = longest_document(run, position_sizes(graph, main))
    spec = InputSpec(names, vocab_size, num_features, "", longest)
    spec.check_max_length(options.max_length)
    limit = longest if options.max_length is None else options.max_length
    return InputSpec(names, vocab_size, num_features, "", limit), table


def _num_features(count: int, options: ExportOptions) -> int:
    described = options.described_features()
    asked = options.features if described is None else described.count
    if asked is not None and asked != count:
        raise UsageError(
            f"Expected {count} features of each token, as the file has, got {asked}.",
            "Correct --features or --feature-file, or leave it out.",
        )
    return count


def _table(graph: ir.Model, ids: ir.Value) -> NDArray[np.float32] | None:
    """Return the table of the ids as float32 numbers ``[ids, D]``."""
    found = id_table(graph, ids)
    if found is None or found.const_value is None or len(found.const_value.shape) != 2:
        return None
    return np.array(found.const_value.numpy(), np.float32)


def _vocab_size(table: NDArray[np.float32] | None, asked: int | None) -> int:
    rows = None if table is None else len(table)
    if rows is None and asked is None:
        raise TraceError(
            "Expected token ids that are looked up in a constant table, got another use of them.",
            "Give the number of token ids by --vocab-size.",
        )
    if rows is not None and asked is not None and asked > rows:
        raise UsageError(
            f"--vocab-size must be at most {rows}, the rows of the table, got {asked}.",
            f"Give {rows} or less.",
        )
    return asked or rows or 1


def _document(spec: InputSpec, tokens: int) -> dict[str, Array]:
    """Return the inputs for one document of zeros."""
    inputs: dict[str, Array] = {
        IDS: np.zeros((1, tokens), np.int64),
        FEATURES: np.zeros((1, tokens, spec.num_features or 1), np.float32),
        LENGTHS: np.array([tokens], np.int64),
    }
    return {name: inputs[name] for name in spec.names}


def _with_shapes(model: onnx.ModelProto, outputs: Mapping[str, Any]) -> ir.Model:
    """Return the graph with the inferred shapes of its values."""
    graph = ir.from_proto(model)
    name_axes(graph, {name: output.shape for name, output in outputs.items()})
    return ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(graph), data_prop=True))


def _refuse_breach(
    reference: OnnxReference, spec: InputSpec, order: NDArray[np.int64] | None
) -> None:
    bound = DOUBLE_BOUND if reference.precision == "float64" else TOLERANCES["fp32"].bound
    breach = find_breach(reference, spec, order, bound=bound)
    if breach is None:
        return
    subject = "padding" if breach.is_of_padding else "the other documents of a batch"
    raise TraceError(
        f"Expected scores that do not depend on {subject}, got a difference of {breach.error:.1e}.",
        "Add --no-batching, which runs each document separately; or export a model that computes "
        "each document separately.",
    )
