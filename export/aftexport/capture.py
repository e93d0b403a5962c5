"""From a PyTorch module to a program captured for every batch and length.

``torch.export`` raises where a model branches on a shape that ``torch.onnx.export`` would
silently freeze.
"""

import copy
import inspect
import logging
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.export import Dim, ExportedProgram
from torch.fx import Node
from torch.fx.experimental import _config

from aftexport.errors import TraceError
from aftexport.manifest import MAX_TOKENS
from aftexport.refusals import (
    IN_TORCH,
    cause,
    decisive,
    failed_in_torch,
    first_line,
    learned_length,
    remedy,
    violation,
)
from aftexport.sizes import Taken, noting_sizes

_aten = torch.ops.aten
_MAX_BATCH = 1 << 16
AXES: dict[str, dict[int, str]] = {
    "input_ids": {0: "batch", 1: "tokens"},
    "lengths": {0: "batch"},
}
"""What the axes of each input are."""


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
        max_tokens: most tokens of a document, None for ``MAX_TOKENS``. Where the model takes
            fewer, and torch.export says how many, it is captured for those.

    Raises:
        TraceError: where the forward signature differs, or the model cannot be
            captured for every batch and length.
    """
    parameters = inspect.signature(model.forward).parameters
    names = tuple(parameters)
    model = copied(model).eval().to(dtype)
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
    shapes = {n: {axis: dims[d] for axis, d in AXES[n].items()} for n in names}
    arguments = tuple(examples[n] for n in names)
    taken: list[Taken] = []
    again: list[Taken] = []
    try:
        return _exported(model, arguments, shapes, taken)
    except Exception as failure:  # torch raises anything
        error = one_way = failure
    if violation(str(error)) is not None or failed_in_torch(error):
        # A size that is not 1 in the example, as of x[:, ::2], is taken never to be, which a
        # short document's is. Told otherwise, torch goes the way that does for 1 too.
        try:
            with _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
                return _exported(model, arguments, shapes, again)
        except Exception as failure:
            if violation(str(failure)) is None:
                again.clear()
            else:
                error = failure
    first = decisive(taken, again)
    bounds = [learned_length(str(error)), *(t.most_tokens(limit) for t in again)]
    # Where sizes may be 1, a table's number of rows may go unsaid.
    bound = min((n for n in bounds if n is not None and n > 1), default=None)
    bound = bound or learned_length(str(one_way)) or limit
    if bound < limit:
        if _takes(model, names, bound + 2):  # the last length can be one more than the bound
            raise TraceError(
                f"The model computes documents of more than {bound} tokens in another way than "
                f"shorter ones{first.place if first else ''}.",
                "Take branches on the number of tokens out of forward. Or export the one way: "
                f"--max-length {bound}.",
            ) from error
        return capture(model, dtype=dtype, max_tokens=bound)
    problem = "torch.export cannot capture the model for every batch and length"
    if (said := violation(str(error))) is not None:
        said = f": {said}" if first is None else f", only where {first}{first.place}"
        raise TraceError(f"{problem}{said}.", remedy(model, str(error), first)) from error
    try:
        with torch.no_grad():
            model(*arguments)
    except Exception as own:  # a module of others raises anything
        given = " and ".join(f"{n} {list(examples[n].shape)}" for n in names)
        raise TraceError(
            f"The model's forward fails in PyTorch too, on {given}: {cause(own)}.",
            remedy(model, str(own), otherwise="Mend what fails there, or wrap the model."),
        ) from own
    if failed_in_torch(error):
        place = first.place if first else ""
        raise TraceError(f"{problem}: torch fails at its sizes{place}, {cause(error)}.", IN_TORCH)
    raise TraceError(f"{problem}: {cause(error)}.", remedy(model, str(error))) from error


def _exported(
    model: nn.Module, arguments: tuple[Tensor, ...], shapes: dict[str, Any], taken: list[Taken]
) -> ExportedProgram:
    with quiet(), torch.no_grad(), noting_sizes(taken):
        return torch.export.export(model, arguments, dynamic_shapes=shapes)


def _takes(model: nn.Module, names: Iterable[str], tokens: int) -> bool:
    """Whether the model can be captured for two documents of that length; computes nothing."""
    examples = {
        "input_ids": torch.zeros(2, tokens, dtype=torch.int64),
        "lengths": torch.full((2,), tokens, dtype=torch.int64),
    }
    try:
        with quiet(), torch.no_grad():
            torch.export.export(model, tuple(examples[n] for n in names))
    except Exception:  # whatever a table that is too short leads to
        return False
    return True


def copied(module: nn.Module) -> nn.Module:
    """A copy of a module, with weights of its own.

    Raises:
        TraceError: where the module holds something that cannot be copied.
    """
    held = (
        value
        for part in module.modules()
        for value in (*vars(part).values(), *part.buffers(recurse=False))
    )
    # What was computed from weights, as weight_norm holds it, autograd does not let be copied.
    results = {id(v): v.detach().clone() for v in held if isinstance(v, Tensor) and not v.is_leaf}
    try:
        return copy.deepcopy(module, results)
    except Exception as error:  # a module of others holds anything
        raise TraceError(
            f"The module cannot be copied: {first_line(error)}",
            "Take what it names out of the module's attributes.",
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
        blocks = [n.target for n in ids.users if isinstance(n.target, HigherOrderOperator)]
        if blocks:
            name = str(blocks[0]).removeprefix("wrap_with_")
            raise TraceError(
                f"The model looks its input_ids up inside a block of its forward: {name}.",
                "Take torch.autocast and the like out of forward; --precision says in which "
                "type products are computed.",
            )
        raise TraceError(
            "The model does not look its input_ids up in an embedding.",
            "Export models whose first step is an nn.Embedding of input_ids.",
        )
    upper = 1
    if not isinstance(shape[1], int):
        upper = min(_upper_bound(program, shape[1]), _rows(program, shape[1].node.expr))
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


_SAME_NUMBERS = frozenset((
    _aten.unsqueeze.default, _aten.expand.default, _aten.expand_as.default, _aten.view.default,
    _aten.reshape.default, _aten.repeat.default, _aten.to.dtype, _aten.to.device,
    _aten.to.dtype_layout, _aten.contiguous.default, _aten.clone.default, _aten._to_copy.default,
))  # fmt: skip


def _rows(program: ExportedProgram, tokens: sympy.Expr) -> int:
    """The most tokens for which every embedding of their positions has a row."""
    most = MAX_TOKENS
    for node in program.graph.find_nodes(op="call_function", target=_aten.embedding.default):
        table: Any
        table, index = node.args[:2]
        needed = _end(index)
        if needed is not None and needed.free_symbols == {tokens}:
            rows = int(table.meta["val"].shape[0])
            ends = partial(needed.subs, tokens)
            most = bisect_right(range(1, most + 1), rows, key=ends)
    return most


def _end(index: Any) -> sympy.Expr | None:
    """One more than the largest number in ``index``; None where it is no range of positions."""
    more = 0
    while index.target in _SAME_NUMBERS or index.target is _aten.add.Tensor:
        if index.target is _aten.add.Tensor:
            if not isinstance(index.args[1], int):
                return None
            more += index.args[1]
        index = index.args[0]
    ends = {_aten.arange.default: 0, _aten.arange.start: 1, _aten.arange.start_step: 1}
    if index.target not in ends or len(index.args) > 2:
        return None
    end = index.args[ends[index.target]]
    symbol = end.meta["val"] if isinstance(end, Node) else end
    return symbol.node.expr + more if isinstance(symbol, torch.SymInt) else None


@contextmanager
def quiet() -> Iterator[None]:
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
