"""A checkpoint's model in ONNX, and the cases that judge it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn
from torch.export import ExportedProgram

from aftexport.bundle.golden import Case
from aftexport.capture.capture import capture, copied
from aftexport.capture.forward_signature import ForwardSignature
from aftexport.capture.input_spec import InputSpec, input_spec
from aftexport.capture.precision import ENGINE_PRECISIONS, PRECISIONS
from aftexport.capture.reference_module import ReferenceModule
from aftexport.checkpoint import Checkpoint
from aftexport.contract import MAX_TOKENS
from aftexport.errors import UsageError
from aftexport.lowering.to_onnx import lower
from aftexport.operators.domain import operators_in
from aftexport.passes.evidence import NoEvidence, add_evidence
from aftexport.passes.finish import finish
from aftexport.passes.float32_sums import accumulate_in_float32
from aftexport.pipeline.golden_cases import model_cases, operator_cases
from aftexport.recognition.graph.normalize import normalize
from aftexport.recognition.recognizer import Recognition, recognize
from aftexport.system.memory import give_back


@dataclass(frozen=True)
class Traced:
    """A model in ONNX, before and after fusing, and what is needed to judge it.

    ``evidence`` is what ``add_evidence`` returns, or why there is none. ``reference`` is the type
    that PyTorch computed the cases in, ``why_not_float64`` the reason where it should have been
    float64. ``left_out`` are parameters of padding that stay at their defaults.
    """

    lowered: onnx.ModelProto
    model: onnx.ModelProto
    evidence: tuple[float, ...] | str
    spec: InputSpec
    precision: str
    cases: Sequence[Case]
    recognition: Recognition | None
    reference: str
    why_not_float64: str
    left_out: tuple[str, ...]


def trace(
    checkpoint: Checkpoint,
    to: str,
    precision: str,
    max_length: int | None,
    opset: int,
    *,
    batching: bool = True,
    vocab_size: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Traced:
    """Traces a model, and runs PyTorch on the cases.

    Args:
        checkpoint: that holds it.
        to, precision, max_length, opset, batching, vocab_size: see ``exporter.export``.
        progress: see ``recognize``.

    Raises:
        UsageError: where they do not suit the model.
        TraceError: where it cannot be traced.
    """
    module, program = checkpoint.module, checkpoint.program
    if program is not None:
        if precision != "fp32" or max_length is not None:
            raise UsageError(
                "A .pt2 program is exported as it was captured.",
                "Leave --precision and --max-length out, or export it so from PyTorch.",
            )
        module = program.module()
        types = {t.dtype for t in program.state_dict.values()}
        precision = next(
            (p for p, t in ENGINE_PRECISIONS.items() if p != "fp32" and t in types), precision
        )
    else:
        assert module is not None
        limit = _max_tokens(module, max_length)
        dtype = (PRECISIONS if to == "onnx" else ENGINE_PRECISIONS)[precision]
        program = capture(module, dtype=dtype, max_tokens=limit)
    spec = input_spec(program, vocab_size)
    if max_length is not None and spec.max_tokens is not None and spec.max_tokens < max_length:
        raise UsageError(
            f"--max-length {max_length} is over the {spec.max_tokens} tokens the model can be "
            "exported for.",
            f"Give {spec.max_tokens} or less.",
        )
    if precision == "auto":
        precision = "fp32"  # until every node was measured
    lowered = lower(program, opset=opset)
    recognition = None
    if not operators_in(lowered):
        # No layers of ours: what there is may be other people's.
        lowered, recognition = _recognize(lowered, progress)
    accumulate_in_float32(lowered)
    embedding = program.state_dict.get(spec.embedding)
    # In float64 the module takes most memory of all: before there are more graphs of it.
    reference = ReferenceModule(copied(module)) if program is not checkpoint.program else module
    cases = model_cases(reference, spec, embedding, program, batching=batching)
    give_back()
    explained, evidence = _explained(lowered, to)
    model = finish(explained, precision=precision, fuse=to == "onnx")
    element = np.dtype(np.float16) if precision == "fp16" else np.dtype(np.float32)
    cases += operator_cases(model, element)
    return Traced(
        *(lowered, model, evidence, spec, precision, cases, recognition),
        reference=getattr(reference, "precision", None) or _type_of(program),
        why_not_float64=getattr(reference, "reason", ""),
        left_out=ForwardSignature.of(module.forward).left_out if checkpoint.module else (),
    )


def _type_of(program: ExportedProgram) -> str:
    """The type that a captured program computes in, of its weights."""
    types = {t.dtype for t in program.state_dict.values() if t.is_floating_point()}
    narrowest = min(types or {torch.float32}, key=lambda dtype: dtype.itemsize)
    return str(narrowest).removeprefix("torch.")


def _recognize(
    lowered: onnx.ModelProto, progress: Callable[[int, int, str], None] | None
) -> tuple[onnx.ModelProto, Recognition]:
    graph = normalize(lowered)
    found = recognize(graph, progress)
    return (ir.to_proto(graph) if found.matches else lowered), found


def _explained(
    lowered: onnx.ModelProto, to: str
) -> tuple[onnx.ModelProto, tuple[float, ...] | str]:
    if to != "onnx":
        return lowered, "TensorRT engines put out logits alone"
    explained = onnx.ModelProto()
    explained.CopyFrom(lowered)
    try:
        return explained, add_evidence(explained)
    except NoEvidence as reason:
        return lowered, str(reason)


def _max_tokens(module: nn.Module, asked: int | None) -> int | None:
    found = [getattr(m, "max_length", None) for m in module.modules()]
    learned = [length for length in found if isinstance(length, int) and length > 0]
    limit = min(learned, default=None)
    if asked is None or asked < 1:
        if asked is not None:
            raise UsageError(f"--max-length {asked} is no length.", "Give 1 or more.")
        return limit
    if asked > MAX_TOKENS:
        raise UsageError(
            f"--max-length {asked} is over {MAX_TOKENS}, the longest document there can be.",
            f"Give {limit or MAX_TOKENS} or less, or leave it out.",
        )
    if limit is not None and asked > limit:
        raise UsageError(
            f"--max-length {asked} is over the {limit} positions the model has learned.",
            f"Give {limit} or less.",
        )
    return asked
