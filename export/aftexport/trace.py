"""From a PyTorch module to an ONNX graph with custom operators.

``torch.export`` first, because it raises where a model branches on a shape that
``torch.onnx.export`` would silently freeze; then ONNX with bare custom nodes;
then the portable bodies, attached last, because the exporter would inline them.
"""

import copy
import inspect
import logging
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx
import onnx.inliner
import onnx_ir as ir
import sympy
import torch
from onnxscript import values
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from aftexport.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION
from aftexport.errors import TraceError, UsageError
from aftexport.fuse.encoder import fuse_encoder
from aftexport.fuse.fastformer import fuse_fastformer
from aftexport.manifest import MAX_TOKENS
from aftexport.mechanisms import OPERATORS, Operator
from aftexport.position_bias import choose_precisions
from aftexport.registry import ALL_OPERATORS

OPSETS = range(18, 26)
"""Opsets the bodies are written for and torch.onnx can produce."""
DEFAULT_OPSET = 20
_MAX_BATCH = 1 << 16
_AXES: dict[str, dict[int, str]] = {
    "input_ids": {0: "batch", 1: "tokens"},
    "lengths": {0: "batch"},
}


@dataclass(frozen=True)
class InputSpec:
    """What a model takes.

    Attributes:
        names: ``input_ids`` (int64 ``[batch, tokens]``), and ``lengths`` (int64
            ``[batch]``) where the model takes it.
        vocab_size: ids are below this.
        embedding: the parameter the ids are looked up in.
        max_tokens: most tokens of a document; None for no bound.
    """

    names: tuple[str, ...]
    vocab_size: int
    embedding: str
    max_tokens: int | None


def capture(
    model: nn.Module, *, dtype: torch.dtype = torch.float32, max_tokens: int | None = None
) -> ExportedProgram:
    """Captures a module whose ``forward`` takes ``input_ids`` and, if it likes, ``lengths``.

    Args:
        model: left as it is; a copy is put in evaluation mode, cast and folded.
        dtype: floating-point type of the exported parameters.
        max_tokens: most tokens of a document, None for ``MAX_TOKENS``.

    Raises:
        TraceError: where the forward signature differs, or the model cannot be
            captured for every batch and length.
    """
    parameters = inspect.signature(model.forward).parameters
    names = tuple(parameters)
    model = copy.deepcopy(model).eval().to(dtype)
    if names not in (("input_ids", "lengths"), ("input_ids",)):
        if not _takes_one(parameters.values()):
            raise TraceError(
                f"The model's forward takes ({', '.join(names)}).",
                "Wrap it in a module whose forward takes (input_ids [batch, tokens], "
                "lengths [batch]).",
            )
        model, names = _OfIds(model), ("input_ids",)
    for module in model.modules():
        if callable(fold := getattr(module, "fold", None)):
            fold()
    limit = max_tokens or MAX_TOKENS
    # A batch or a length of 1 in the example would be taken for a constant.
    examples: dict[str, Tensor] = {
        "input_ids": torch.zeros(2, min(16, limit), dtype=torch.int64),
        "lengths": torch.full((2,), min(16, limit), dtype=torch.int64),
    }
    dims: dict[str, Any] = {
        "batch": Dim("batch", min=1, max=_MAX_BATCH),
        "tokens": Dim("tokens", min=1, max=limit) if limit > 1 else 1,
    }
    shapes = {n: {axis: dims[d] for axis, d in _AXES[n].items()} for n in names}
    try:
        with _quiet(), torch.no_grad():
            return torch.export.export(
                model, tuple(examples[n] for n in names), dynamic_shapes=shapes
            )
    except Exception as error:
        if max_tokens is None and (bound := _learned_length(str(error))) is not None:
            return capture(model, dtype=dtype, max_tokens=bound)
        raise TraceError(
            f"torch.export cannot capture the model for every batch and length: {_first(error)}",
            _remedy(model, str(error)),
        ) from error


class _OfIds(nn.Module):
    """A module that calls its one input something else."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: Tensor) -> Tensor:
        output: Tensor = self.module(input_ids)
        return output


def _takes_one(parameters: Iterable[inspect.Parameter]) -> bool:
    """Whether a forward can be called with one positional tensor."""
    first, *rest = *parameters, None
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return (
        first is not None
        and first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        and all(p is None or p.default is not p.empty or p.kind in variable for p in rest)
    )


def _remedy(model: nn.Module, complaint: str) -> str:
    if not any(isinstance(module, nn.Embedding) for module in model.modules()):
        return (
            "A bundle takes input_ids: put an nn.Embedding before the module and a classifier "
            "after it. Or export it by torch.onnx.export, and run aftexport fuse."
        )
    if "data is not allocated" in complaint:
        return (
            "It reads numbers of a parameter one by one, as aft-pytorch's AFTLocal does to rebuild "
            "wbias in every call. Write that as tensor operations, AFTFull's forward with "
            "self.wbias * band: AFT-local is recognised there."
        )
    return "Take branches on shapes and values out of forward, or bound --max-length."


def _learned_length(complaint: str) -> int | None:
    """The most tokens that torch.export says a model takes, as it slices what it has learned."""
    bounds = [int(n) for n in re.findall(r"tokens = Dim\('tokens', max=(\d+)\)", complaint)]
    # A whole slice is another branch for it, so the last length is beyond the bound.
    bounds += [int(n) - 1 for n in re.findall(r"\.size\(\)\[1\] != (\d+)", complaint)]
    return min(bounds, default=0) if min(bounds, default=0) > 1 else None


def input_spec(program: ExportedProgram) -> InputSpec:
    """Reads from a captured program what it takes.

    Raises:
        TraceError: where inputs differ from what ``capture`` makes, have fixed
            axes, or do not index an embedding.
    """
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    names = tuple(program.graph_signature.user_inputs)
    if names not in (("input_ids", "lengths"), ("input_ids",)):
        raise TraceError(
            f"The program's inputs are ({', '.join(map(str, names))}).",
            "Export it with inputs named input_ids [batch, tokens] and, if used, lengths [batch].",
        )
    ids = next(n for n in placeholders if n.name == "input_ids")
    shape = ids.meta["val"].shape
    for axis, size in zip(("batch", "tokens"), shape, strict=True):
        if isinstance(size, int) and not (axis == "tokens" and size == 1):
            raise TraceError(
                f"The program's {axis} axis is fixed at {size}.",
                "Pass dynamic_shapes to torch.export.export for batch and tokens.",
            )
    tables = [n.args[0] for n in ids.users if n.target is torch.ops.aten.embedding.default]
    if not tables:
        raise TraceError(
            "The model does not look its input_ids up in an embedding.",
            "Export models whose first step is an nn.Embedding of input_ids.",
        )
    upper = 1 if isinstance(shape[1], int) else _upper_bound(program, shape[1])
    table = min(tables, key=lambda node: int(node.meta["val"].shape[0]))
    return InputSpec(
        tuple(map(str, names)),
        int(table.meta["val"].shape[0]),
        program.graph_signature.inputs_to_parameters.get(table.name, ""),
        None if upper >= MAX_TOKENS else upper,
    )


def _upper_bound(program: ExportedProgram, size: torch.SymInt) -> int:
    upper = program.range_constraints[size.node.expr].upper
    # An unbounded axis has an integer infinity, which cannot be made an int.
    return min(int(upper), MAX_TOKENS) if isinstance(upper, sympy.Integer) else MAX_TOKENS


def to_onnx(
    program: ExportedProgram,
    *,
    opset: int = DEFAULT_OPSET,
    precision: str = "fp32",
    fuse: bool = True,
) -> onnx.ModelProto:
    """``lower`` and ``finish`` in one."""
    return finish(lower(program, opset=opset, precision=precision), precision=precision, fuse=fuse)


def lower(
    program: ExportedProgram, *, opset: int = DEFAULT_OPSET, precision: str = "fp32"
) -> onnx.ModelProto:
    """Lowers a captured program to ONNX with bare custom nodes.

    Args:
        program: see ``capture``.
        opset: of the standard operators.
        precision: fp16 where the program is; bf16 or int8 for the products inside kernels.

    Returns:
        The graph, with the shapes of what is between.

    Raises:
        UsageError: for an opset outside ``OPSETS``.
        TraceError: where torch.onnx knows no translation of an operator.
    """
    model = _translated(program, opset).model_proto
    produced = next(o.version for o in model.opset_import if o.domain == "")
    if produced != opset:
        raise TraceError(
            f"torch.onnx produced opset {produced} where {opset} was asked for.",
            f"Leave out --opset, or ask for {DEFAULT_OPSET}.",
        )
    _strip_metadata(model)
    return model


def decomposed(program: ExportedProgram, *, opset: int = DEFAULT_OPSET) -> ExportedProgram:
    """The operators that ``lower`` translates, each named as its result is in the ONNX graph.

    Args:
        program: see ``capture``.
        opset: as given to ``lower``.

    Raises:
        UsageError, TraceError: see ``lower``.
    """
    found = _translated(program, opset).exported_program
    assert found is not None  # it was given
    return found


def _translated(program: ExportedProgram, opset: int) -> torch.onnx.ONNXProgram:
    if opset not in OPSETS:
        raise UsageError(
            f"Opset {opset} is not supported.", f"Choose one from {OPSETS[0]} to {OPSETS[-1]}."
        )
    names = tuple(str(n) for n in program.graph_signature.user_inputs)
    shapes = {n: dict(_AXES[n]) for n in names}
    try:
        with _quiet():
            exported = torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=opset,
                custom_translation_table=translations(),
                dynamic_shapes=shapes,
                input_names=list(names),
                output_names=["logits"],
                verbose=False,
            )
    except Exception as error:
        raise TraceError(
            f"torch.onnx cannot translate the model: {_first(error)}",
            "Replace the operator it names by ones that ONNX has.",
        ) from error
    assert exported is not None
    return exported


def finish(
    lowered: onnx.ModelProto, *, precision: str = "fp32", fuse: bool = True
) -> onnx.ModelProto:
    """Fuses what surrounds the attention, and gives every custom node its portable body.

    Args:
        lowered: see ``lower``; not changed.
        precision: see ``lower``.
        fuse: make operators of what surrounds the attention. TensorRT fuses that itself,
            and their bodies would have it multiply in float32.
    """
    graph = ir.from_proto(lowered)
    if fuse:
        products = "fp32" if precision == "fp16" else precision
        fuse_fastformer(graph, precision=products)
        fuse_encoder(graph, precision=products)
    model = ir.to_proto(graph)
    # Intermediate shapes are inferred again by every runtime; torch's carry its symbols.
    del model.graph.value_info[:]
    choose_precisions(model, precision)
    return attach_bodies(model, next(o.version for o in model.opset_import if o.domain == ""))


def attach_bodies(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Gives every custom operator in ``model`` its portable body, one function per operator.

    A function cannot branch on an attribute, so where nodes of one operator differ
    in a setting, the commonest keeps the operator and the body of the others is
    inlined in standard ops.
    """
    nodes = [n for n in model.graph.node if n.domain == DOMAIN]
    by_operator: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for node in nodes:
        for name, value in PLUGIN_ATTRIBUTES.items():
            if not any(a.name == name for a in node.attribute):
                node.attribute.append(onnx.helper.make_attribute(name, value))
        by_operator[node.op_type][_settings(node)] += 1

    inlined = []
    for op_type, counts in sorted(by_operator.items()):
        operator = ALL_OPERATORS[op_type]
        for rank, (chosen, _) in enumerate(counts.most_common()):
            names = [a.name for a in operator.settings]
            function = operator.function(dict(zip(names, chosen, strict=True)), opset)
            if rank:
                function.name = f"{op_type}_{'_'.join(chosen)}"
                inlined.append((DOMAIN, function.name))
                for node in nodes:
                    if node.op_type == op_type and _settings(node) == chosen:
                        node.op_type = function.name
            model.functions.append(function)
    if nodes and not any(o.domain == DOMAIN for o in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, VERSION))
    if inlined:
        model = onnx.inliner.inline_selected_functions(model, inlined)
    return model


def _settings(node: onnx.NodeProto) -> tuple[str, ...]:
    operator = ALL_OPERATORS[node.op_type]
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    chosen = (given.get(a.name, a.default) for a in operator.settings)
    return tuple(v.decode() if isinstance(v, bytes) else str(v) for v in chosen)


def translations() -> dict[Any, Callable[..., Any]]:
    """For torch.onnx: how each torch op of a mechanism becomes one bare custom node."""
    return {o.torch_op: _translation(o) for o in OPERATORS.values()}


def _translation(operator: Operator) -> Callable[..., Any]:
    """A function torch.onnx can read the signature of, which emits one bare custom node."""
    for_kernel = {a.name: a.default for a in operator.kernel_attributes}
    emit = getattr(values.Opset(DOMAIN, VERSION), operator.op_type)
    names = list(operator.inputs)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(n, kind) for n in names]
    parameters += [
        inspect.Parameter(a.name, kind, default=a.default, annotation=type(a.default))
        for a in operator.attributes
    ]

    def translate(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
        bound.apply_defaults()
        tensors = [bound.arguments.pop(n) for n in names]
        return emit(*tensors, **bound.arguments, **for_kernel, **PLUGIN_ATTRIBUTES)

    translate.__name__ = operator.op_type
    translate.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    translate.__annotations__ = {a.name: type(a.default) for a in operator.attributes}
    return translate


def _strip_metadata(model: onnx.ModelProto) -> None:
    """Removes what torch.onnx notes of the source: it leaks paths and differs by machine."""
    graph = model.graph
    for item in (model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info,
                 *graph.initializer, *model.functions):  # fmt: skip
        del item.metadata_props[:]
        item.doc_string = ""
    graph.name = "main"


def _first(error: BaseException) -> str:
    """The first line that says something, of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch's own deprecation notes and missing-torchvision warnings from the user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def operators_in(model: onnx.ModelProto) -> Mapping[str, int]:
    """Counts the custom nodes of a model by operator."""
    return dict(sorted(Counter(n.op_type for n in model.graph.node if n.domain == DOMAIN).items()))
