"""From a PyTorch module to a program captured for every batch and length.

``torch.export`` raises where a model branches on a shape that ``torch.onnx.export`` would
silently freeze.
"""

import copy
import inspect
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
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

_MAX_BATCH = 1 << 16
AXES: dict[str, dict[int, str]] = {
    "input_ids": {0: "batch", 1: "tokens"},
    "lengths": {0: "batch"},
}
"""What the axes of each input are."""


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
    captured = _exported(model, arguments, shapes)
    if isinstance(captured, ExportedProgram):
        return captured
    taken, error = decisive(*(f.sizes for f in captured)), captured[-1].error
    bound = _most_tokens(captured, limit)
    if bound == limit:
        _refuse(model, {n: examples[n] for n in names}, error, taken)
    if _takes(model, names, bound + 2):  # the last length can be one more than the bound
        raise TraceError(
            f"The model computes documents of more than {bound} tokens in another way than "
            f"shorter ones{taken.place if taken else ''}.",
            "Take branches on the number of tokens out of forward. Or export the one way: "
            f"--max-length {bound}.",
        ) from error
    return capture(model, dtype=dtype, max_tokens=bound)


@dataclass(frozen=True)
class _Failure:
    """Why torch.export did not capture a model, and what it took for given of its sizes."""

    error: Exception
    sizes: list[Taken]


def _exported(
    model: nn.Module, arguments: tuple[Tensor, ...], shapes: dict[str, Any]
) -> ExportedProgram | list[_Failure]:
    """The program, or the failure of each attempt, of which the last says most."""
    failures: list[_Failure] = []
    # A size that is not 1 in the example, as of x[:, ::2], is taken never to be, which a short
    # document's is. Told otherwise, torch goes the way that does for 1 too.
    for may_be_one in (False, True):
        sizes: list[Taken] = []
        options = _config.patch(backed_size_oblivious=may_be_one)  # type: ignore[attr-defined]
        try:
            with options, quiet(), torch.no_grad(), noting_sizes(sizes):
                return torch.export.export(model, arguments, dynamic_shapes=shapes)
        except Exception as error:  # torch raises anything
            of_sizes = violation(str(error)) is not None
            if not may_be_one or of_sizes:
                failures.append(_Failure(error, sizes))
            if not of_sizes and not failed_in_torch(error):
                break
    return failures


def _most_tokens(failures: Sequence[_Failure], limit: int) -> int:
    """The most tokens with which the model can be captured; ``limit`` where none is said."""
    first, *again = failures
    bounds = [learned_length(str(failures[-1].error))]
    bounds += [taken.most_tokens(limit) for failure in again for taken in failure.sizes]
    # Where sizes may be 1, a table's number of rows may go unsaid.
    bound = min((n for n in bounds if n is not None and n > 1), default=None)
    return min(bound or learned_length(str(first.error)) or limit, limit)


def _refuse(
    model: nn.Module, examples: Mapping[str, Tensor], error: Exception, taken: Taken | None
) -> NoReturn:
    """Raises the TraceError that says why a model cannot be captured, and what to do."""
    problem = "torch.export cannot capture the model for every batch and length"
    if (said := violation(str(error))) is not None:
        said = f": {said}" if taken is None else f", only where {taken}{taken.place}"
        raise TraceError(f"{problem}{said}.", remedy(model, str(error), taken)) from error
    try:
        with torch.no_grad():
            model(*examples.values())
    except Exception as own:  # a module of others raises anything
        given = " and ".join(f"{name} {list(x.shape)}" for name, x in examples.items())
        raise TraceError(
            f"The model's forward fails in PyTorch too, on {given}: {cause(own)}.",
            remedy(model, str(own), otherwise="Mend what fails there, or wrap the model."),
        ) from own
    if failed_in_torch(error):
        place = taken.place if taken else ""
        problem = f"{problem}: torch fails at its sizes{place}, {cause(error)}."
        raise TraceError(problem, IN_TORCH) from error
    raise TraceError(f"{problem}: {cause(error)}.", remedy(model, str(error))) from error


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


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps from the user what torch says beside its errors.

    Deprecation notes, warnings of a missing torchvision, and the traceback that its fake tensors
    log of an attempt that fails, whose error says the same.
    """
    levels = {"torch.onnx": logging.ERROR, "torch._subclasses.fake_tensor": logging.CRITICAL}
    before = {logging.getLogger(name): logging.getLogger(name).level for name in levels}
    for logger in before:
        logger.setLevel(levels[logger.name])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)
