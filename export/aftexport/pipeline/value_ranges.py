"""Unusual tokens and long documents as cases for rounded models, and values that overflow."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import onnx

from aftexport.bundle.golden import Array, Case, random_tokens
from aftexport.bundle.tokenizer import parse_tokenizer
from aftexport.capture.model_spec import InputSpec
from aftexport.chunked.softmaxes import count_softmax_attention
from aftexport.errors import UsageError
from aftexport.operators.domain import operators_in
from aftexport.operators.encoder import OPERATORS
from aftexport.operators.mechanisms.softmax_attention import SOFTMAX_ATTENTION
from aftexport.parity.activations import Beyond, Extremes, find_extremes, weights_per_token
from aftexport.pipeline.traced_model import with_extras

MAX_FLOAT16 = 65504
"""The largest float16, and the bound of documents that are not compared beyond it."""
_LONG = 70_001
_MAX_LONG_WEIGHTS = 4e6
"""The maximum weights per token for a long case: PyTorch multiplies with them for a minute."""
_REPEATED = 3
_REPETITIONS = 1024


def find_unusual(
    model: onnx.ModelProto,
    spec: InputSpec,
    cases: Sequence[Case],
    *,
    batching: bool,
    progress: Callable[[int, int, str], None] | None,
) -> Extremes:
    """Return the token ids that make values of the model largest, and a value beyond float16.

    The layers of ``model`` are not fused yet, and the values of ``cases`` are checked too.
    """
    generator = np.random.default_rng(3)
    return find_extremes(
        model,
        spec.vocab_size,
        lambda ids: _whole(ids, spec, generator),
        documents=None if batching else 1,
        max_tokens=spec.max_tokens,
        cases={case.name: case.inputs for case in cases if case.subject == "model"},
        progress=progress or (lambda done, total, unit: None),
    )


def repeated_inputs(ids: Sequence[int], spec: InputSpec) -> dict[str, Array]:
    """Return documents of one unusual token each, many times."""
    length = min(_REPETITIONS, spec.max_tokens or _REPETITIONS)
    rows = np.repeat(np.array(ids[:_REPEATED], np.int64)[:, None], length, 1)
    return _whole(rows, spec, np.random.default_rng(4))


def bounded_spec(
    lowered: onnx.ModelProto, spec: InputSpec, asked: int | None, *, can_compare: bool
) -> InputSpec:
    """Return the inputs of a 16-bit graph, with a bound if long documents are not compared.

    They are compared if ``can_compare``: the reference has wider numbers than the graph.

    Raises:
        UsageError: if the user asked for longer documents, which cannot be compared.
    """
    if spec.max_tokens is not None and spec.max_tokens <= MAX_FLOAT16:
        return spec
    is_linear = not (count_softmax_attention(lowered) or _has_squares(lowered))
    if (
        can_compare
        and is_linear
        and (asked is not None or weights_per_token(lowered) <= _MAX_LONG_WEIGHTS)
    ):
        return spec
    if asked is not None:
        raise UsageError(
            f"--max-length must be at most {MAX_FLOAT16} for a 16-bit model that cannot be "
            f"compared with PyTorch on longer documents, got {asked}.",
            f"Give {MAX_FLOAT16} or less, or export with --precision fp32.",
        )
    return replace(spec, max_tokens=MAX_FLOAT16)


def long_inputs(spec: InputSpec) -> dict[str, Array] | None:
    """Return a document beyond the largest float16; None if the model takes no such document."""
    length = min(_LONG, spec.max_tokens or _LONG)
    if length <= MAX_FLOAT16:
        return None
    generator = np.random.default_rng(5)
    tokens = random_tokens(
        generator, (1, length), vocab_size=spec.vocab_size, num_features=spec.num_features
    )
    return _whole(tokens, spec, generator)


def beyond_error(
    beyond: Beyond, model: onnx.ModelProto, tokenizer: str | None, *, is_of_onnx: bool
) -> UsageError:
    """Return the error for a value that float16 does not hold."""
    token = ""
    if beyond.token is not None:
        piece = None if tokenizer is None else parse_tokenizer(tokenizer).id_to_token(beyond.token)
        token = f" of the token id {beyond.token}" + ("" if piece is None else f" ({piece!r})")
    layer = f" in the layer {beyond.layer}" if beyond.layer else ""
    can_be_bf16 = any(name in OPERATORS for name in operators_in(model))
    remedy = (
        "Export with --precision bf16 or fp32." if can_be_bf16 else "Export with --precision fp32."
    )
    return UsageError(
        f"Expected numbers of at most {MAX_FLOAT16:,} in float16, got {beyond.size:,.6g} for the "
        f"value {beyond.value!r}{layer}, in {beyond.place}{token}.",
        "Export the ONNX file again in float32." if is_of_onnx else remedy,
    )


def _whole(ids: Array, spec: InputSpec, generator: np.random.Generator) -> dict[str, Array]:
    documents, tokens = ids.shape[:2]
    inputs = {spec.main: ids, "lengths": np.full(documents, tokens, np.int64)}
    return with_extras(inputs, spec, generator)


def _has_squares(model: onnx.ModelProto) -> bool:
    """Return whether a described value has two axes of tokens, or PyTorch may compute one."""
    # In PyTorch even the mask of a window has all pairs of tokens.
    return SOFTMAX_ATTENTION.op_type in operators_in(model) or any(
        sum("tokens" in axis.dim_param for axis in value.type.tensor_type.shape.dim) > 1
        for value in model.graph.value_info
    )
