"""From a PyTorch module to a program captured for every batch and length.

``torch.export`` raises where a model branches on a shape that ``torch.onnx.export`` would
silently freeze.
"""

import copy

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from aftexport.capture.attempts import attempt_export
from aftexport.capture.failure import explain, find_bound
from aftexport.capture.forward_signature import ForwardSignature, with_plain_inputs
from aftexport.capture.torch_script import scripted_parts
from aftexport.contract import MAX_TOKENS
from aftexport.errors import TraceError, first_line


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
    if isinstance(model, torch.jit.ScriptModule):
        raise _scripted("The model is")
    names = ForwardSignature.of(model.forward).inputs
    model = prepared(model, dtype)
    limit = max_tokens or MAX_TOKENS
    captured = attempt_export(model, names, limit)
    if isinstance(captured, ExportedProgram):
        return captured
    if parts := scripted_parts(model):
        raise _scripted(f"{', '.join(parts)} in the model is") from captured[-1].error
    if (bound := find_bound(model, names, captured, limit)) is not None:
        limit = bound
        captured = attempt_export(model, names, bound)
        if isinstance(captured, ExportedProgram):
            return captured
    raise explain(model, names, captured, limit) from captured[-1].error


def _scripted(whole: str) -> TraceError:
    return TraceError(
        f"{whole} in TorchScript, whose code torch.export does not see.",
        "Build it without torch.jit.script and torch.jit.trace, and load the same weights.",
    )


def prepared(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a module as it is captured: in evaluation mode, cast, folded, with plain inputs."""
    model = with_plain_inputs(copied(model).eval().to(dtype))
    for module in model.modules():
        if callable(fold := getattr(module, "fold", None)):
            fold()
    return model


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
