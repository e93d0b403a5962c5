"""Capture of a PyTorch module for every batch size and length.

``torch.export`` raises an error if a model branches on a shape; ``torch.onnx.export`` would
silently freeze the shape.
"""

import copy
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.jit import ScriptFunction, ScriptModule

from aftexport.capture.attempts import attempt_export
from aftexport.capture.failure import explain, find_bound
from aftexport.capture.float32_positions import keep_positions_float32
from aftexport.capture.model_inputs import (
    ForwardSignature,
    ModelInputs,
    features_of,
    float_type,
    with_plain_inputs,
)
from aftexport.capture.model_outputs import name_outputs
from aftexport.capture.module_translations import choose_exported_forms, refuse_unknown_functions
from aftexport.capture.reference_module import trained_limits
from aftexport.errors import TraceError, first_line
from aftexport.extra_inputs import ExtraInput
from aftexport.system.contract import MAX_TOKENS

PRECISIONS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.float32,
    "int8": torch.float32,
    "auto": torch.float32,
}
"""Precision to the type of weights and activations; bf16 and int8 round inside the products."""


ENGINE_PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Precision to the type of weights and activations for TensorRT, which reads it in the graph."""


def capture(
    model: nn.Module,
    *,
    dtype: torch.dtype = torch.float32,  # the floating-point type of the exported parameters
    # The maximum length of a document in tokens; None for ``MAX_TOKENS``. A lower maximum that
    # torch.export reports takes its place if PyTorch itself refuses longer documents, as a table
    # of positions does.
    max_tokens: int | None = None,
    # The number of features of a token by ``--features``; None for the number that the module
    # declares, or for token ids.
    num_features: int | None = None,
    extras: tuple[ExtraInput, ...] = (),
    mask: bool = True,  # whether a forward without ``lengths`` may get a mask
) -> ExportedProgram:
    """Capture a module whose forward takes token ids or features, and optionally their lengths.

    A forward that takes ``attention_mask`` and no ``lengths`` gets a mask of the lengths. If it
    cannot be captured with a mask, it is captured without one, for documents without padding.

    Raises:
        TraceError: if the forward signature differs, or the model cannot be
            captured for every batch and length, or has a recurrence of an unknown version.
        UsageError: if the number of features is outside its bounds.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise _scripted("the model")
    refuse_unknown_functions(model)
    number = features_of(model, num_features)
    names = [extra.name for extra in extras]
    read = partial(ForwardSignature.of, model.forward, features=number is not None, extras=names)
    signature = read(mask=mask)
    if signature.has_mask:
        masked = ModelInputs(signature.inputs, number, extras)
        try:
            return _captured(model, dtype, masked, max_tokens)
        except TraceError as error:
            with suppress(TraceError):
                signature = read(mask=False)
            if signature.has_mask:  # the forward requires one
                raise error from error.__cause__
    inputs = ModelInputs(signature.inputs, number, extras)
    return _captured(model, dtype, inputs, max_tokens)


def _captured(
    trained: nn.Module, dtype: torch.dtype, inputs: ModelInputs, max_tokens: int | None
) -> ExportedProgram:
    prepare = partial(prepared, trained, dtype, inputs.names)
    model = prepare()
    with trained_limits(model, float_type(trained), dtype):
        captured = _captured_by_attempts(model, prepare, inputs, max_tokens)
    if dtype in (torch.float16, torch.bfloat16):
        keep_positions_float32(captured, trained)
    return captured


def _captured_by_attempts(
    model: nn.Module, prepare: Callable[[], nn.Module], inputs: ModelInputs, max_tokens: int | None
) -> ExportedProgram:
    limit = max_tokens or MAX_TOKENS
    captured = attempt_export(model, inputs, limit)
    if not isinstance(captured, ExportedProgram) and (parts := _scripted_parts(model)):
        raise _scripted(f"{', '.join(parts)} in the model") from captured[-1].error
    # torch.export may name a bound that is one too large, and the next attempt the bound itself.
    while not isinstance(captured, ExportedProgram):
        bound = find_bound(prepare, inputs, captured, limit)
        if bound is None:
            raise explain(model, inputs, captured, limit) from captured[-1].error
        limit = bound
        captured = attempt_export(model, inputs, limit)
    return captured


def _scripted(subject: str) -> TraceError:
    return TraceError(
        f"Expected a module in Python, got TorchScript, which torch.export cannot read: {subject}.",
        "Build it without torch.jit.script and torch.jit.trace, and load the same weights.",
    )


def prepared(model: nn.Module, dtype: torch.dtype, inputs: Collection[str]) -> nn.Module:
    """Return a copy of a module in evaluation mode, cast and folded, with plain inputs."""
    model = with_plain_inputs(copied(model).eval().to(dtype), inputs)
    choose_exported_forms(model)
    # A hook leaves the names of the parameters as they are, and a wrapper would change them.
    model.register_forward_hook(lambda _module, _inputs, result: name_outputs(result))
    for module in model.modules():
        if callable(fold := getattr(module, "fold", None)):
            fold()
    return model


def copied(module: nn.Module) -> nn.Module:
    """Return a copy that shares no weights; raises TraceError if an attribute cannot be copied."""
    values = (
        value
        for part in module.modules()
        for value in (*vars(part).values(), *part.buffers(recurse=False))
    )
    # Autograd refuses to copy tensors computed from weights, such as those that weight_norm holds.
    results = {id(v): v.detach().clone() for v in values if isinstance(v, Tensor) and not v.is_leaf}
    try:
        return copy.deepcopy(module, results)
    except Exception as error:  # a module of a user can hold objects of any type
        raise TraceError(
            f"The module cannot be copied: {first_line(error)}",
            "Remove the object that the error names from the module's attributes.",
        ) from error


def _scripted_parts(model: nn.Module) -> list[str]:
    """Return the names of scripted modules, outermost only, and of scripted functions."""
    names: list[str] = []
    for name, module in model.named_modules():
        if any(name == whole or name.startswith(f"{whole}.") or not whole for whole in names):
            continue
        if isinstance(module, ScriptModule):
            names.append(name)
    return names + [name for module in model.modules() for name in _functions(module)]


def _functions(module: nn.Module) -> list[str]:
    if isinstance(module, ScriptModule):
        return []
    code = getattr(type(module).forward, "__code__", None)
    if code is None:
        return []
    scope = getattr(type(module).forward, "__globals__", {})
    values = {name: scope.get(name, vars(module).get(name)) for name in code.co_names}
    return [name for name, value in values.items() if isinstance(value, ScriptFunction)]
