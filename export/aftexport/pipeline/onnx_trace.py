"""A plain ONNX file as a traced model, whose reference is the file itself."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto

from aftexport.bundle.golden import Array, Case
from aftexport.capture.model_spec import InputSpec
from aftexport.engines import Stop, Tensors
from aftexport.engines.cast_graph import add_float64_operators, widen, widened_bytes
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.engines.onnxruntime.sessions import is_out_of_memory, reason
from aftexport.errors import EngineError, TraceError, UsageError, first_line
from aftexport.lowering.evidence import explained_model
from aftexport.lowering.file_format import lower_format
from aftexport.lowering.finish import finish
from aftexport.lowering.float32_sums import accumulate_in_float32
from aftexport.lowering.graph_values import rename_inner_values
from aftexport.options import ExportOptions
from aftexport.parity import TOLERANCES
from aftexport.pipeline.independence import DOUBLE_BOUND, find_breach
from aftexport.pipeline.onnx_interface import (
    add_width,
    name_axes,
    use_plain_inputs,
    use_plain_outputs,
)
from aftexport.pipeline.request import Request, check_ids
from aftexport.pipeline.traced_model import TracedModel, case_inputs
from aftexport.pipeline.value_ranges import bounded_spec, find_unusual, repeated_inputs
from aftexport.pipeline.windows import window_case
from aftexport.recognition.onnx_file import add_translation, read_onnx, replace_foreign_nodes
from aftexport.recognition.recognizer import recognize
from aftexport.recognition.standard_recurrence.expansion import infer_shapes, runnable_form
from aftexport.system.contract import FEATURES, IDS, LENGTHS, MAX_TOKENS
from aftexport.system.onnx_files import MAX_MODEL_BYTES

_NARROW = (TensorProto.FLOAT, TensorProto.FLOAT16)


class OnnxReference:
    """A model in ONNX Runtime's standard operators, in float64 if it has them all.

    A short run of ``sample`` decides on ``precision``; ``reason`` is that against float64.

    Raises:
        EngineError: if the model cannot run in its own types either.
    """

    name = "onnxruntime"
    takes_choice = False

    def __init__(self, model: onnx.ModelProto, sample: Tensors) -> None:
        self.precision, self.reason = "float64", ""
        self._is_wide = True
        try:
            self._engine = OnnxRuntimeEngine(_widened(model), fused=False)
            self.run(sample)
        except EngineError as error:
            self.precision, self.reason = "float32", first_line(error).rstrip(".")
            self._is_wide = False
            self._engine = OnnxRuntimeEngine(model.SerializeToString(), fused=False)
            self.run(sample)

    def run(
        self,
        inputs: Tensors,
        stop: Stop | None = None,
        outputs: Collection[str] | None = None,
    ) -> dict[str, NDArray[np.generic]]:
        """Run the model once; see ``Engine.run``."""
        given = {
            name: array.astype(np.float64) if self._is_wide and array.dtype.kind == "f" else array
            for name, array in inputs.items()
        }
        return self._engine.run(given, stop, outputs)

    def release(self) -> None:
        """Do nothing: the model lives only during an export."""


def _widened(model: onnx.ModelProto) -> bytes:
    """Return the model in float64."""
    size = widened_bytes(model, _NARROW, TensorProto.DOUBLE)
    if size > MAX_MODEL_BYTES:
        raise EngineError(
            f"Expected a model of at most 2 GiB in float64, got {size / 2**30:.1f} GiB.",
            "Compare it in float32.",
        )
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    widen(wide, _NARROW, TensorProto.DOUBLE)
    add_float64_operators(wide)
    return bytes(wide.SerializeToString())


def trace_onnx(
    request: Request,
    tokenizer: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> TracedModel:
    """Read an ONNX file, and run it on the cases.

    Raises:
        UsageError: if the file is not such a model, or an option does not suit it.
        TraceError: if its inputs, outputs or axes do not fit, or its scores depend on other
            documents of a run.
        EngineError: if ONNX Runtime cannot run it.
    """
    options, path = request.options, request.source.name
    _check_options(request)
    _, graph = read_onnx(path)
    precision = _precision(graph.graph, options.precision)
    _forget_shapes(graph.graph)
    names = use_plain_inputs(graph)
    _check_main_input(names[0], options)
    renamed = use_plain_outputs(graph)
    rename_inner_values(graph.graph)
    file = runnable_form(graph)
    spec, table = _spec(ir.from_proto(file), file, names, request)
    check_ids(spec, tokenizer)
    if narrow := _single_numbers(graph, file, spec):
        add_width(graph, narrow)
        file = runnable_form(graph)
    reference = OnnxReference(file, _document(spec, 2))
    translation, _ = replace_foreign_nodes(graph, path, file)
    graph = _with_shapes(ir.to_proto(graph), reference.run(_document(spec, 2)))
    own = ir.to_proto(graph)
    recognition = recognize(graph, progress)
    add_translation(recognition, translation)
    lowered = ir.to_proto(graph) if recognition.matches else own
    lowered = accumulate_in_float32(lowered)
    if precision == "fp16":
        spec = bounded_spec(lowered, spec, options.max_length, can_compare=False)
    order = None if table is None else np.linalg.norm(table[: spec.vocab_size], axis=1).argsort()
    if options.batching:
        _refuse_breach(reference, spec, order)
    cases = _cases(reference, spec, order)
    if options.long_documents is not None:
        cases.append(window_case(options, spec, tokenizer, reference))
    explained, evidence = explained_model(lowered, options.to)
    unusual = None
    if precision == "fp16" or options.precision != "fp32":
        whole = finish(explained, fuse=False)
        unusual = find_unusual(whole, spec, cases, batching=options.batching, progress=progress)
        if unusual.ids:
            inputs = repeated_inputs(unusual.ids, spec)
            cases.append(Case("unusual tokens repeated", "model", inputs, reference.run(inputs)))
    model = finish(explained, precision=precision, fuse=options.to == "onnx")
    lower_format(model)
    return TracedModel(
        *(lowered, model, evidence, spec, precision, cases, recognition),
        reference=reference.precision,
        why_not_float64=reference.reason,
        left_out=(),
        is_of_onnx=True,
        renamed=renamed,
        beyond=None if unusual is None else unusual.beyond,
    )


def _check_options(request: Request) -> None:
    """Refuse options that only apply to PyTorch models."""
    source, options = request.source, request.options
    unused = {
        f"--factory {source.factory_name}": source.factory is not None,
        **dict.fromkeys(source.permissions, True),
        f"--opset {options.opset}": options.opset is not None,
        **{f"--input {extra.name}": True for extra in request.extras},
        "--text-pairs": options.text_pairs,
    }
    if given := [option for option, is_given in unused.items() if is_given]:
        raise UsageError(
            f"Expected a PyTorch model with {given[0]}, got the ONNX file {source.name}.",
            f"Leave {given[0]} out.",
        )
    if options.precision == "fp16" or (options.to != "onnx" and options.precision != "fp32"):
        raise UsageError(
            f"Expected no --precision for an ONNX file, whose weights keep their types, got "
            f"{options.precision}.",
            "Leave --precision out, or export the PyTorch model.",
        )
    if options.max_length is not None and not 1 <= options.max_length <= MAX_TOKENS:
        raise UsageError(
            f"--max-length must be from 1 to {MAX_TOKENS}, got {options.max_length}.",
            "Give such a number, or leave --max-length out.",
        )


def _check_main_input(name: str, options: ExportOptions) -> None:
    """Refuse options for features with a file of ids, and those for ids with one of features."""
    of_features = {
        f"--features {options.features}": options.features is not None,
        f"--feature-file {options.feature_file}": options.feature_file is not None,
    }
    of_ids = {f"--vocab-size {options.vocab_size}": options.vocab_size is not None}
    expected, unused = ("features", of_ids) if name == FEATURES else ("token ids", of_features)
    if given := [option for option, is_given in unused.items() if is_given]:
        raise UsageError(
            f"Expected options for a file of {expected}, got {given[0]}.", f"Leave {given[0]} out."
        )


def _precision(graph: ir.Graph, asked: str) -> str:
    """Return the precision of the bundle, by the types of the weights and the outputs."""
    types = {value.dtype for value in graph.outputs} | set(_weight_types(graph))
    if ir.DataType.BFLOAT16 in types:
        raise UsageError(
            "Expected weights of float32 or float16 in an ONNX file, got bfloat16.",
            "Export the model in float32.",
        )
    if ir.DataType.FLOAT16 not in types:
        return "fp32" if asked == "auto" else asked
    if asked != "fp32":
        raise UsageError(
            f"Expected no --precision for a file with weights of float16, got {asked}.",
            "Leave --precision out, or export the model in float32.",
        )
    return "fp16"


def _weight_types(graph: ir.Graph) -> Iterator[ir.DataType | None]:
    """Yield the types of the constants of a graph and of its subgraphs."""
    for inner in (graph, *graph.subgraphs()):
        for value in inner.initializers.values():
            yield value.dtype if value.const_value is None else value.const_value.dtype
        for node in inner:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.TENSOR:
                    yield attribute.as_tensor().dtype


def _forget_shapes(graph: ir.Graph) -> None:
    """Drop the described shapes, whose axes may have any names."""
    for node in graph:
        for value in node.outputs:
            value.shape = None
            if not any(value is output for output in graph.outputs):
                value.type = None


def _spec(
    graph: ir.Model, model: onnx.ModelProto, names: tuple[str, ...], request: Request
) -> tuple[InputSpec, NDArray[np.float32] | None]:
    """Return the inputs with their limits, and the table of the ids."""
    main, options = graph.graph.inputs[0], request.options
    vocab_size, num_features, table = None, None, None
    if main.name == FEATURES:
        assert main.shape is not None  # checked with the inputs
        num_features = _num_features(int(main.shape[2]), request)  # type: ignore[arg-type]
    else:
        table = _table(main)
        vocab_size = _vocab_size(table, options.vocab_size)
    spec = InputSpec(names, vocab_size, num_features, "", None)
    engine = OnnxRuntimeEngine(model.SerializeToString(), fused=False)
    run = lambda tokens: engine.run(_document(spec, tokens))  # noqa: E731
    longest = _longest_document(run, _position_sizes(graph, main))
    spec = InputSpec(names, vocab_size, num_features, "", longest)
    spec.check_max_length(options.max_length)
    limit = longest if options.max_length is None else options.max_length
    return InputSpec(names, vocab_size, num_features, "", limit), table


def _single_numbers(graph: ir.Model, model: onnx.ModelProto, spec: InputSpec) -> list[str]:
    """Return the outputs ``[batch]`` or ``[batch, tokens]``, by runs of two lengths."""
    shapes = {str(value.name): value.shape for value in graph.graph.outputs}
    candidates = [
        name
        for name, shape in shapes.items()
        if shape is None or (len(shape) < 3 and not (len(shape) == 2 and isinstance(shape[1], int)))
    ]
    if not candidates or spec.max_tokens == 1:
        return []
    engine = OnnxRuntimeEngine(model.SerializeToString(), fused=False)
    short, long = (engine.run(_document(spec, tokens)) for tokens in (1, 2))
    return [
        name
        for name in candidates
        if long[name].shape == (1,) or (short[name].shape, long[name].shape) == ((1, 1), (1, 2))
    ]


def _num_features(count: int, request: Request) -> int:
    asked = request.num_features
    if asked is not None and asked != count:
        raise UsageError(
            f"Expected {count} features of each token, as the file has, got {asked}.",
            "Correct --features or --feature-file, or leave it out.",
        )
    return count


def _table(ids: ir.Value) -> NDArray[np.float32] | None:
    """Return the table of the ids as float32 numbers ``[ids, D]``."""
    found = _id_table(ids)
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
    return spec.in_order(inputs)


def _with_shapes(model: onnx.ModelProto, outputs: Mapping[str, Any]) -> ir.Model:
    """Return the graph with the inferred shapes of its values."""
    graph = ir.from_proto(model)
    name_axes(graph, {name: output.shape for name, output in outputs.items()})
    return ir.from_proto(infer_shapes(ir.to_proto(graph)))


def _cases(
    reference: OnnxReference, spec: InputSpec, order: NDArray[np.int64] | None
) -> list[Case]:
    """Return the cases with the file's answers; raise EngineError where memory runs out."""
    cases: list[Case] = []
    longest = 1
    for name, inputs in case_inputs(spec, order).items():
        chosen = {key: inputs[key] for key in spec.names}
        batch, tokens = chosen[spec.main].shape[:2]
        try:
            cases.append(Case(name, "model", chosen, reference.run(chosen)))
        except EngineError as error:
            if not isinstance(cause := error.__cause__, Exception) or not is_out_of_memory(cause):
                raise
            raise EngineError(
                f"Expected memory for the case {name!r}, {batch} x {tokens:,} tokens, "
                f"got too little ({reason(cause)}).",
                f"Give --max-length {longest}, the longest case that ran, or export on a machine "
                "with more memory.",
            ) from error
        longest = max(longest, tokens)
    return cases


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


_MAX_TRIED_TOKENS = 4096
"""Longer runs of a softmax attention would take seconds and gigabytes each."""


def _longest_document(run: Callable[[int], object], sizes: Sequence[int]) -> int | None:
    """Return the maximum tokens of a document that ``run`` accepts; None for no limit.

    A table of positions ends the documents if the model fails one token after its rows. Sizes over
    ``_MAX_TRIED_TOKENS`` count as such tables, without a run.
    """
    run(1)
    works = 1
    for size in sizes:
        if size > _MAX_TRIED_TOKENS:
            return size
        if not _runs(run, size + 1):
            return _largest(run, works, size + 1)
        works = size + 1
    return None


def _largest(run: Callable[[int], object], works: int, fails: int) -> int:
    """Return the largest length that runs, by bisection."""
    while fails - works > 1:
        middle = (works + fails) // 2
        if _runs(run, middle):
            works = middle
        else:
            fails = middle
    return works


def _runs(run: Callable[[int], object], tokens: int) -> bool:
    try:
        run(tokens)
    except EngineError:
        return False
    return True


_SAME_IDS = (
    "Cast", "Clip", "Expand", "Flatten", "Identity", "Max", "Min", "Reshape", "Squeeze",
    "Unsqueeze", "Where",
)  # fmt: skip
"""Operators whose result has the ids of their inputs."""
_LOOKUPS = ("Gather", "GatherElements", "GatherND", "Slice")


def _id_table(ids: ir.Value) -> ir.Value | None:
    """Return the smallest constant table with a row for each token id; None without one."""
    tables = [
        node.inputs[0]
        for value in _same_ids(ids)
        for node, place in value.uses()
        if node.op_type == "Gather" and place == 1 and node.attributes.get_int("axis", 0) == 0
    ]
    constant = [t for t in tables if t is not None and t.const_value is not None]
    return min(constant, key=_rows, default=None)


def _position_sizes(model: ir.Model, ids: ir.Value) -> list[int]:
    """Return the sizes of other constants that nodes look rows up in, ascending.

    A table of positions, a mask or a rotation for every position is among them.
    """
    own = set(_same_ids(ids))
    sizes: set[int] = set()
    for node in model.graph:
        table = node.inputs[0] if node.op_type in _LOOKUPS and node.inputs else None
        if table is None or table.const_value is None:
            continue
        if node.op_type == "Gather" and node.inputs[1] in own:
            continue
        sizes.update(size for size in table.const_value.shape.numpy() if size > 1)
    return sorted(sizes)


def _same_ids(ids: ir.Value) -> Iterator[ir.Value]:
    """Yield the values with the numbers of the ids."""
    pending, seen = [ids], set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        yield value
        for node, place in value.uses():
            if node.op_type in _SAME_IDS and (place == 0 or node.op_type != "Reshape"):
                pending += node.outputs


def _rows(table: ir.Value) -> int:
    assert table.const_value is not None  # chosen by it
    return table.const_value.shape.numpy()[0]
