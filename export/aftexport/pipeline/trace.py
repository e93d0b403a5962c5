"""The translation of a checkpoint's model to ONNX, with the cases of its parity check."""

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn
from torch.export import ExportedProgram

from aftexport.bundle.golden import Array, Case
from aftexport.bundle.tokenizer import check_tokenizer, largest_id
from aftexport.capture.capture import ENGINE_PRECISIONS, PRECISIONS, capture, copied
from aftexport.capture.failure import OneWayError
from aftexport.capture.input_spec import input_spec
from aftexport.capture.model_inputs import (
    ForwardSignature,
    ModelInputs,
    features_of,
    with_plain_inputs,
)
from aftexport.capture.model_outputs import output_names, single_numbers
from aftexport.capture.model_spec import InputSpec
from aftexport.capture.module_translations import UntranslatedError, is_library_only
from aftexport.capture.reference_module import ReferenceModule
from aftexport.checkpoint import Checkpoint
from aftexport.engines.torch import TorchEngine
from aftexport.errors import AftexportError, EngineError, TraceError, UsageError
from aftexport.lowering.evidence import explained_model
from aftexport.lowering.finish import finish
from aftexport.lowering.float32_sums import accumulate_in_float32
from aftexport.lowering.to_onnx import lower, max_tokens
from aftexport.operators.domain import operators_in
from aftexport.parity import TOLERANCES
from aftexport.parity.activations import Beyond
from aftexport.pipeline.golden_cases import model_cases, operator_cases
from aftexport.pipeline.independence import find_breach
from aftexport.pipeline.onnx_interface import add_width
from aftexport.pipeline.request import Request, check_ids
from aftexport.pipeline.traced_model import LONG, TracedModel
from aftexport.pipeline.value_ranges import (
    bounded_spec,
    find_unusual,
    long_inputs,
    repeated_inputs,
)
from aftexport.pipeline.windows import window_case
from aftexport.recognition.attention.blocks import MAX_WHOLE_TOKENS, scan_in_blocks
from aftexport.recognition.graph.normalize import normalize
from aftexport.recognition.recognizer import recognize
from aftexport.recognition.result import Recognition
from aftexport.system.contract import DEFAULT_OPSET, IDS, MAX_TOKENS
from aftexport.system.process import give_back

_FEW_TOKENS = 5
"""The number of tokens in the first documents that a model runs."""


def trace(
    checkpoint: Checkpoint,
    request: Request,
    tokenizer: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> TracedModel:
    """Trace a model, and run PyTorch on the cases.

    Raises:
        UsageError: if an option does not suit the model.
        TraceError: if the model cannot be traced.
    """
    try:
        return _traced(checkpoint, request, tokenizer, progress)
    except UntranslatedError:
        raise
    except TraceError as error:
        if checkpoint.module is None or not is_library_only(checkpoint.module):
            raise
        raise TraceError(error.problem, library_remedy(error.remedy)) from error.__cause__


_OPTION = re.compile(r"--(?:max-length \d+|no-batching)")
"""An option in a remedy that avoids the problem."""
_OTHER_FAMILY = (
    "Give a model of a family that docs/models.md lists, or an ONNX file that another exporter "
    "wrote of this model."
)


def library_remedy(remedy: str) -> str:
    """Return what the user of a library's model can do, who cannot change its code."""
    option = _OPTION.search(remedy)
    return f"Add {option[0]}." if option else _OTHER_FAMILY


def _traced(
    checkpoint: Checkpoint,
    request: Request,
    tokenizer: str | None,
    progress: Callable[[int, int, str], None] | None,
) -> TracedModel:
    options = request.options
    to, batching, max_length = options.to, options.batching, options.max_length
    read_spec = partial(input_spec, vocab_size=options.vocab_size, extras=request.extras)
    with _lengths_named(checkpoint, request):
        module, program, precision = _captured(checkpoint, request, read_spec)
    spec = read_spec(program)
    _check_extras(spec, program)
    spec.check_max_length(max_length)
    _check_positions(checkpoint.module, spec.max_tokens, max_length)
    check_ids(spec, tokenizer)
    _check_features(spec, request.num_features)
    rounds = precision != "fp32"
    if precision == "auto":
        precision = "fp32"  # the pipeline changes it after measuring every node
    ranks = single_numbers(program)
    lowered, recognition = _lowered(program, options.opset or DEFAULT_OPSET, ranks, progress)
    is_captured = program is checkpoint.program
    is_half = _type_of(program) in ("float16", "bfloat16")
    if is_half and to == "onnx":  # an engine has a bound of its own
        spec = bounded_spec(lowered, spec, max_length, can_compare=not is_captured)
    embedding = program.state_dict.get(spec.embedding)
    # The float64 module needs the most memory, so run it before further graphs are made.
    reference = module if is_captured else ReferenceModule(copied(module), spec.names)
    with _lengths_named(checkpoint, request):
        cases = model_cases(reference, spec, embedding, program, batching=batching, ranks=ranks)
    give_back()
    explained, evidence = explained_model(lowered, to)
    engine, beyond, long_case = TorchEngine(reference, spec.names, ranks=ranks), None, None
    if options.long_documents is not None:
        cases.append(window_case(options, spec, tokenizer, engine))
    if rounds:
        whole = finish(explained, fuse=False)
        unusual = find_unusual(whole, spec, cases, batching=batching, progress=progress)
        beyond = _weight_beyond(module, program, spec) or _located(unusual.beyond, whole, program)
        del whole
        if unusual.ids:
            inputs = repeated_inputs(unusual.ids, spec)
            cases.append(Case("unusual tokens repeated", "model", inputs, engine.run(inputs)))
    if is_half and beyond is None and to == "onnx" and (long := long_inputs(spec)) is not None:
        long_case = Case("beyond 65,536 tokens", "model", long, engine.run(long))
    model = finish(explained, precision=precision, fuse=to == "onnx")
    element = np.dtype(np.float16) if precision == "fp16" else np.dtype(np.float32)
    cases += operator_cases(model, element)
    return TracedModel(
        *(lowered, model, evidence, spec, precision, cases, recognition),
        reference=getattr(reference, "precision", None) or _type_of(program),
        why_not_float64=getattr(reference, "reason", ""),
        left_out=ForwardSignature.for_inputs(module.forward, spec.names).left_out
        if checkpoint.module
        else (),
        long_case=long_case,
        beyond=beyond,
    )


def _lowered(
    program: ExportedProgram,
    opset: int,
    ranks: Collection[str],
    progress: Callable[[int, int, str], None] | None,
) -> tuple[onnx.ModelProto, Recognition | None]:
    """Return the graph, and the result of the recognition; None without a search."""
    lowered = lower(program, opset=opset)
    if ranks:
        graph = ir.from_proto(lowered)
        add_width(graph, ranks)
        lowered = ir.to_proto(graph)
    has_layers = bool(operators_in(lowered))
    if has_layers and not _may_attend(lowered.graph):
        return accumulate_in_float32(lowered), None
    graph = normalize(lowered)
    recognition = recognize(graph, progress)
    in_blocks = 0
    if recognition.probed is not None and max_tokens(program) > MAX_WHOLE_TOKENS:
        in_blocks = scan_in_blocks(graph, recognition.probed)
    lowered = ir.to_proto(graph) if recognition.matches or in_blocks else lowered
    is_told = not has_layers or bool(recognition.matches or recognition.near_misses)
    return accumulate_in_float32(lowered), recognition if is_told else None


def _may_attend(graph: onnx.GraphProto) -> bool:
    """Return whether a graph has a softmax, and a product of two computed values."""
    constants = {tensor.name for tensor in graph.initializer}
    return any(node.op_type == "Softmax" for node in graph.node) and any(
        node.op_type == "MatMul" and constants.isdisjoint(node.input) for node in graph.node
    )


@contextmanager
def _lengths_named(checkpoint: Checkpoint, request: Request) -> Iterator[None]:
    """Name a maximum length, below the limit of documents, in errors that it avoids."""

    def again(shorter: int) -> TracedModel:
        """Trace the model for shorter documents."""
        options = replace(request.options, max_length=shorter)
        return trace(checkpoint, replace(request, options=options))

    limit = min(request.options.max_length or LONG, LONG)
    try:
        yield
    except OneWayError as error:
        is_enough = _succeeds(partial(again, error.max_tokens))
        raise (error if is_enough else error.without_length) from error.__cause__
    except EngineError as error:
        run = _first_run(checkpoint, request)
        raise _of_length(error, run, again, limit) from error


def _of_length(
    error: EngineError,
    run: Callable[[int], dict[str, Array]],
    again: Callable[[int], TracedModel],
    limit: int,
) -> AftexportError:
    """Return an error with a maximum length if PyTorch fails on longer documents only."""

    def fails(tokens: int) -> bool:
        try:
            run(tokens)
        except EngineError:
            return True
        return False

    longest = bisect_left(range(1, limit + 1), True, key=fails)
    if not 1 <= longest < limit or not _succeeds(partial(again, longest)):
        return error
    return TraceError(
        "Expected a model for documents of every length, got one that PyTorch itself runs up to "
        f"{longest} tokens only.",
        f"Add --max-length {longest}.",
    )


def _succeeds(traced: Callable[[], TracedModel]) -> bool:
    """Return whether a trace succeeds with other options, before a remedy names these."""
    try:
        traced()
    except AftexportError:
        return False
    return True


def first_outputs(
    checkpoint: Checkpoint, request: Request, tokenizer: str | None
) -> dict[str, Array] | None:
    """Return the outputs of two short documents, and check a tokenizer, without a capture.

    None if the module does not run on such documents, for which the capture names the cause.

    Raises:
        UsageError: if the tokenizer has ids that the module lacks.
    """
    try:
        run = _first_run(checkpoint, request)
        short, long = run(_FEW_TOKENS), run(_FEW_TOKENS + 1)
    except Exception:  # a module of a user can raise any exception
        return None
    if tokenizer is not None and checkpoint.module is not None:
        _check_largest_id(checkpoint.module, run, tokenizer)
    rows = {name: [x.shape for x in (short[name], long[name])] for name in short}
    narrow = ([(2,), (2,)], [(2, _FEW_TOKENS), (2, _FEW_TOKENS + 1)])
    return {n: x[..., None] if rows[n] in narrow else x for n, x in short.items()}


def _first_run(checkpoint: Checkpoint, request: Request) -> Callable[..., dict[str, Array]]:
    """Return a function that runs a copy of the model on two documents of so many tokens."""
    num_features, extras = request.num_features, request.extras
    module = checkpoint.module
    plain: nn.Module
    if module is None:
        assert checkpoint.program is not None
        program = checkpoint.program
        names = tuple(map(str, program.graph_signature.user_inputs))
        inputs, plain = ModelInputs(names, num_features, extras), program.module()
    else:
        count = features_of(module, num_features)
        names = ForwardSignature.of(
            module.forward, features=count is not None, extras=[extra.name for extra in extras]
        ).inputs
        inputs = ModelInputs(names, count, extras)
        plain = with_plain_inputs(copied(module), names)
    engine = TorchEngine(plain, names)

    def run(tokens: int, token: int = 0) -> dict[str, Array]:
        examples = {name: x.numpy() for name, x in inputs.examples(tokens).items()}
        if IDS in examples:
            examples[IDS] += token
        return engine.run(examples)

    return run


def _check_largest_id(
    module: nn.Module, run: Callable[..., dict[str, Array]], tokenizer: str
) -> None:
    def has(token: int) -> bool:
        try:
            run(1, token)
        except EngineError:
            return False
        return True

    if has(largest := largest_id(tokenizer)):
        return
    tables = {m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)}
    for rows in sorted(n for n in tables if n <= largest):
        if has(rows - 1) and not has(rows):
            check_tokenizer(tokenizer, rows)


def _captured(
    checkpoint: Checkpoint, request: Request, read_spec: Callable[[ExportedProgram], InputSpec]
) -> tuple[nn.Module, ExportedProgram, str]:
    """Return the checkpoint's module, its program and the precision of the program."""
    precision, max_length = request.options.precision, request.options.max_length
    if checkpoint.program is not None:
        _check_options_of_program(precision, max_length)
        module = checkpoint.program.module()
        return module, checkpoint.program, _precision_of(checkpoint.program, precision)
    assert checkpoint.module is not None
    limit = _max_tokens(checkpoint.module, max_length)
    dtype = (PRECISIONS if request.options.to == "onnx" else ENGINE_PRECISIONS)[precision]
    capturing = partial(
        capture,
        checkpoint.module,
        dtype=dtype,
        max_tokens=limit,
        num_features=request.num_features,
        extras=request.extras,
    )
    program = capturing()
    if not _masks_padding(checkpoint.module, program, read_spec):
        program = capturing(mask=False)
    return checkpoint.module, program, precision


def _masks_padding(
    module: nn.Module,
    program: ExportedProgram,
    read_spec: Callable[[ExportedProgram], InputSpec],
) -> bool:
    """Return False if a forward gets a mask of the padding, but its scores depend on padding."""
    names = tuple(map(str, program.graph_signature.user_inputs))
    if not ForwardSignature.for_inputs(module.forward, names).has_mask:
        return True
    reference = TorchEngine(
        ReferenceModule(copied(module), names), names, ranks=single_numbers(program)
    )
    breach = find_breach(reference, read_spec(program), None, bound=TOLERANCES["fp32"].bound)
    return breach is None or not breach.is_of_padding


def _check_options_of_program(precision: str, max_length: int | None) -> None:
    if precision == "fp32" and max_length is None:
        return
    option = f"--precision {precision}" if max_length is None else f"--max-length {max_length}"
    raise UsageError(
        f"A .pt2 program keeps its precision and its lengths, got {option}.",
        "Leave --precision and --max-length out, or capture another program in PyTorch.",
    )


def _precision_of(program: ExportedProgram, default: str) -> str:
    types = {t.dtype for t in program.state_dict.values()}
    return next((p for p, t in ENGINE_PRECISIONS.items() if p != "fp32" and t in types), default)


def _check_features(spec: InputSpec, declared: int | None) -> None:
    if declared is not None and declared != spec.num_features:
        raise UsageError(
            f"Expected {spec.num_features or 'no'} features of each token, as the program has, "
            f"got {declared}.",
            "Correct --features or --feature-file, or leave it out.",
        )


def _check_extras(spec: InputSpec, program: ExportedProgram) -> None:
    outputs = output_names(program)
    if clash := next((extra.name for extra in spec.extras if extra.name in outputs), None):
        raise UsageError(
            f"An input must have another name than the outputs, got {clash!r} for both.",
            "Rename this entry in the dict that forward returns.",
        )


def _weight_beyond(module: nn.Module, program: ExportedProgram, spec: InputSpec) -> Beyond | None:
    """Return a weight that became infinite when the module was cast; None if there is none."""
    exact = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, stored in program.state_dict.items():
        trained = exact.get(name, stored).detach()
        if not stored.is_floating_point() or trained.shape != stored.shape:
            continue
        lost = stored.detach().isinf() & trained.isfinite()
        if lost.any():
            size = float(trained[lost].abs().max())
            token = int(lost.nonzero()[0, 0]) if name == spec.embedding else None
            return Beyond(name, size, token, "the weights")
    return None


def _located(
    beyond: Beyond | None, model: onnx.ModelProto, program: ExportedProgram
) -> Beyond | None:
    """Return a value with the path of the module that computes it, or of one that reads it."""
    if beyond is None:
        return None
    nodes = {node.name: node for node in program.graph.nodes}
    ahead = [beyond.value]
    for name in ahead:  # grows
        if name in nodes:
            stack = [path for path, _ in nodes[name].meta.get("nn_module_stack", {}).values()]
            return replace(beyond, layer=str(stack[-1]) if stack else "")
        read = (n for n in model.graph.node if name in n.input)
        ahead += [output for node in read for output in node.output if output not in ahead]
    return beyond


def _type_of(program: ExportedProgram) -> str:
    """Return the narrowest type of a captured program's weights, in which it computes."""
    types = {t.dtype for t in program.state_dict.values() if t.is_floating_point()}
    narrowest = min(types or {torch.float32}, key=lambda dtype: dtype.itemsize)
    return str(narrowest).removeprefix("torch.")


def _check_positions(module: nn.Module | None, longest: int | None, asked: int | None) -> None:
    """Raise UsageError if an export takes fewer tokens than its config says, unless asked for."""
    if module is None or longest is None or asked is not None:
        return
    declared = []
    for config in (getattr(part, "config", None) for part in module.modules()):
        positions, padding = (
            getattr(config, name, None) for name in ("max_position_embeddings", "pad_token_id")
        )
        if isinstance(positions, int):
            # RoBERTa's positions begin behind the number of the padding.
            declared.append(positions - (padding + 1 if isinstance(padding, int) else 0))
    own = _max_tokens(module, None) or MAX_TOKENS
    expected = min([own, *declared])
    if declared and longest < expected:
        raise UsageError(
            f"Expected an export for the {expected} tokens of the model's config, got one for at "
            f"most {longest}: the forward fails on longer documents, or computes them in another "
            "way.",
            f"Add --max-length {longest} to accept this limit of the export.",
        )


def _max_tokens(module: nn.Module, asked: int | None) -> int | None:
    declared = [getattr(m, "max_length", None) for m in module.modules()]
    learned = [length for length in declared if isinstance(length, int) and length > 0]
    limit = min(learned, default=None)
    if asked is None:
        return limit
    if asked < 1:
        raise UsageError(f"--max-length must be at least 1, got {asked}.", "Give 1 or more.")
    if asked > MAX_TOKENS:
        raise UsageError(
            f"--max-length must be at most {MAX_TOKENS}, got {asked}.",
            f"Give {limit or MAX_TOKENS} or less, or leave --max-length out.",
        )
    if limit is not None and asked > limit:
        raise UsageError(
            f"--max-length must be at most {limit}, the positions that the model has learned, got "
            f"{asked}.",
            f"Give {limit} or less.",
        )
    return asked
