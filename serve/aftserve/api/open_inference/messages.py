"""A request's documents, and the response with their results."""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.responses import Response

from aftexport.bundle.manifest import Manifest
from aftexport.errors import InputError
from aftexport.extra_inputs import TOKEN_TYPES, ExtraInput
from aftexport.system.contract import FEATURES, IDS, main_input
from aftserve.api.document_answers import PartsResponse
from aftserve.api.open_inference import tensors
from aftserve.api.open_inference.columns import (
    TOKEN_FIELDS,
    Column,
    PaddedRows,
    columns_of,
    prefix,
)
from aftserve.api.open_inference.schemas import (
    Datatype,
    InferenceRequest,
    InferenceResponse,
    InputTensor,
    OutputTensor,
    TensorMetadata,
)
from aftserve.api.open_inference.tensors import Array
from aftserve.api.request_body import invalid
from aftserve.errors import DocumentTooLongError
from aftserve.model.answers import InlineTokens
from aftserve.model.documents import DocumentAnswer
from aftserve.model.wanted import NO_OPTIONS, AnswerOptions
from aftserve.types import Document, ExtraFields, Text, TextPair

HEADER_LENGTH = "Inference-Header-Content-Length"
"""Header with the length of the JSON in bytes, if tensors follow it."""
_BINARY = "application/octet-stream"
_TEXT = TensorMetadata(name="text", datatype="BYTES", shape=[-1])
_TEXT_PAIR = TensorMetadata(name="text_pair", datatype="BYTES", shape=[-1])
_IDS = TensorMetadata(name=IDS, datatype="INT64", shape=[-1, -1])
_INTEGERS = ("INT64", "INT32")
_LENGTHS = TensorMetadata(name="lengths", datatype="INT64", shape=[-1])


def inputs_of(manifest: Manifest, *, has_tokenizer: bool) -> tuple[TensorMetadata, ...]:
    """Return the inputs of a model."""
    if manifest.features is not None:
        shape = [-1, -1, manifest.features.count]
        own = [TensorMetadata(name=FEATURES, datatype="FP32", shape=shape)]
    else:
        texts = [_TEXT, *([_TEXT_PAIR] if manifest.text_pairs else [])]
        own = [*(texts if has_tokenizer else []), _IDS]
    return (*own, _LENGTHS, *_extra_tensors(manifest))


@dataclass(frozen=True)
class Message:
    """A checked request."""

    request: InferenceRequest
    documents: Sequence[Document]
    given: Sequence[ExtraFields]
    options: AnswerOptions = NO_OPTIONS
    """The heads of the requested outputs."""
    inline: InlineTokens | None = None
    """Count of the tokens whose answers are JSON; None without a requested one."""


def parse(
    content: Any,
    binary: memoryview,
    *,
    max_documents: int,
    manifest: Manifest,
    outputs: Sequence[str],
) -> Message:
    """Check the JSON of a request and the bytes after it."""
    try:
        request = InferenceRequest.model_validate(content)
    except ValidationError as error:
        raise invalid(error) from None
    _check_outputs(request, outputs)
    _check_inputs(request.inputs, max_documents, manifest)
    arrays: dict[str, tensors.Array] = {}
    for tensor in request.inputs:
        size = tensor.parameters.binary_data_size if tensor.parameters else None
        if size is not None and size > len(binary):
            raise InputError(
                f"The input {tensor.name!r} must have {size} bytes after the JSON, "
                f"got {len(binary)}.",
                f"Send {HEADER_LENGTH}, and the tensors after the JSON.",
            )
        arrays[tensor.name] = tensors.read(tensor, None if size is None else binary[:size])
        binary = binary[size or 0 :]
    if len(binary):
        raise InputError(
            f"Every byte after the JSON must belong to an input, got {len(binary)} more.",
            "Set binary_data_size of each input.",
        )
    documents = _documents(arrays)
    return Message(
        request,
        documents,
        _extra_fields(arrays, documents, manifest),
        AnswerOptions(outputs=_requested_heads(request, manifest)),
        InlineTokens(is_padded=True) if _needs_inline_tokens(request, manifest) else None,
    )


def _check_inputs(inputs: Sequence[InputTensor], max_documents: int, manifest: Manifest) -> None:
    """Check the names, types and shapes of the inputs before their values are read."""
    names = [tensor.name[:100] for tensor in inputs]
    _check_names(names, manifest)
    described = dict(zip(names, inputs, strict=True))
    first = described.get("text") or described[manifest.main_input]
    lengths = described.get("lengths")
    _check_first(first, manifest)
    count = math.prod(first.shape) if first.name == "text" else first.shape[0]
    if count == 0:
        raise InputError("Expected at least one document, got none.", "Send its text or token ids.")
    if count > max_documents:
        raise DocumentTooLongError(
            f"A request must have at most {max_documents} documents, got {count}.",
            "Send them in several requests.",
        )
    if lengths is not None and (
        math.prod(lengths.shape) != count or lengths.datatype not in _INTEGERS
    ):
        raise InputError(
            f"The input 'lengths' must be integers [{count}], "
            f"got {lengths.datatype} of {math.prod(lengths.shape)} values.",
            "Send one INT64 for each document.",
        )
    second = described.get("text_pair")
    if second is not None and (second.datatype != "BYTES" or math.prod(second.shape) != count):
        raise InputError(
            f"The input 'text_pair' must be BYTES [{count}], got {second.datatype} of "
            f"{math.prod(second.shape)} values.",
            "Send one text for each text.",
        )
    _check_extra_tensors(described, count, manifest)


def _check_names(names: Sequence[str], manifest: Manifest) -> None:
    """Raise InputError if the inputs are not those of a document."""
    extras = [extra.name for extra in manifest.extra_inputs]
    main = manifest.main_input
    own = sorted(name for name in names if name not in extras)
    is_repeated = len(set(names)) < len(names)
    texts = ["text", "text_pair"] if manifest.text_pairs else ["text"]
    if own in [texts, [main], sorted([main, "lengths"])] and not is_repeated:
        return
    form = " and ".join(texts)
    beside = f", each once, and beside them {', '.join(extras)}" if extras else ""
    if manifest.features is None:
        raise InputError(
            f"The inputs must be {form}, or input_ids, or input_ids and lengths"
            f"{beside}, got {', '.join(names)}.",
            f"Send {form} (BYTES), or input_ids (INT64), with lengths (INT64) if rows are padded.",
        )
    raise InputError(
        "The inputs must be input_features, or input_features and lengths"
        f"{beside}, got {', '.join(names)}.",
        "Send input_features (FP32), with lengths (INT64) if rows are padded.",
    )


def _check_first(first: InputTensor, manifest: Manifest) -> None:
    """Check the type and the axes of the input with the documents."""
    if first.name == "text":
        if first.datatype != "BYTES":
            raise InputError(
                f"The input 'text' must be BYTES, got {first.datatype}.", "Send BYTES."
            )
        if len(first.shape) > 2:
            raise InputError(
                f"The shape of the input 'text' must have one axis, got {len(first.shape)}.",
                "Send one text for each document.",
            )
    elif manifest.features is not None:
        count = manifest.features.count
        if first.datatype != "FP32" or len(first.shape) != 3 or first.shape[2] != count:
            raise InputError(
                f"The input 'input_features' must be FP32 [documents, tokens, {count}], got "
                f"{first.datatype} {first.shape}.",
                f"Send {count} numbers for each token.",
            )
    elif len(first.shape) != 2 or first.datatype not in _INTEGERS:
        raise InputError(
            f"The input 'input_ids' must be integers [documents, tokens], "
            f"got {first.datatype} of {len(first.shape)} axes.",
            "Send INT64 of two axes.",
        )


def _documents(arrays: dict[str, tensors.Array]) -> Sequence[Document]:
    if "text" in arrays:
        texts = [str(text) for text in arrays["text"].ravel()]
        if "text_pair" not in arrays:
            return texts
        return list(map(TextPair, texts, map(str, arrays["text_pair"].ravel())))
    tokens = arrays[main_input(arrays)]
    rows, width = tokens.shape[:2]
    lengths = arrays.get("lengths", np.full(rows, width)).ravel()
    if not ((lengths >= 0) & (lengths <= width)).all():
        bad = next(int(one) for one in lengths if not 0 <= one <= width)
        raise InputError(
            f"The input 'lengths' must be from 0 to {width}, got {bad}.",
            "Send the number of tokens of each row without its padding.",
        )
    documents = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    return [one if one.ndim == 2 else one.astype(np.int64) for one in documents]


def _needs_inline_tokens(request: InferenceRequest, manifest: Manifest) -> bool:
    """Return whether a response has an output for tokens as JSON."""
    heads = manifest.heads
    return any(
        _is_wanted(request, f"{prefix(heads, name)}{field}")
        and not _is_binary(request, f"{prefix(heads, name)}{field}")
        for name, head in heads.items()
        for field, kind in head.fields.items()
        if kind in TOKEN_FIELDS
    )


def _requested_heads(request: InferenceRequest, manifest: Manifest) -> Sequence[str]:
    """Return the heads of the requested outputs; empty for all heads."""
    heads = manifest.heads
    wanted = [output.name for output in request.outputs or ()]
    return [
        name for name in heads if any(output.startswith(prefix(heads, name)) for output in wanted)
    ]


def _is_wanted(request: InferenceRequest, name: str) -> bool:
    return not request.outputs or name in [output.name for output in request.outputs]


def _is_binary(request: InferenceRequest, name: str) -> bool:
    """Return whether an output follows the JSON as bytes."""
    for output in request.outputs or ():
        if output.name == name and output.parameters and output.parameters.binary_data is not None:
            return output.parameters.binary_data
    return bool(request.parameters and request.parameters.binary_data_output)


def respond(
    message: Message,
    answers: Sequence[DocumentAnswer],
    *,
    name: str,
    version: str,
    deadline: float,
) -> Response:
    """Build the response; tensors that are requested as bytes follow the JSON."""
    # Tensors of tokens are sent in parts until the client's deadline.
    request = message.request
    wanted = [output.name for output in request.outputs] if request.outputs else None
    outputs, after, size, has_rows = [], list[Iterator[bytes]](), 0, False
    for output, column in columns_of(answers, wanted).items():
        if _is_binary(request, output):
            count, parts = column.content()
            after.append(parts)
            size += count
            has_rows |= isinstance(column.values, PaddedRows)
            outputs.append(_output_json(output, column, size=count))
        else:
            outputs.append(_output_json(output, column))
    response = InferenceResponse(
        model_name=name,
        model_version=version,
        id=request.id,
        parameters=parameters_of(answers),
        outputs=[],
    )
    head = response.model_dump_json(exclude_none=True).encode()
    head = head.removesuffix(b"]}") + b",".join(outputs) + b"]}"  # the outputs are the last field
    if not size:
        return Response(head, media_type="application/json")
    headers = {HEADER_LENGTH: str(len(head))}
    parts = chain([head], *after)
    if not has_rows:
        return Response(b"".join(parts), headers=headers, media_type=_BINARY)
    return PartsResponse(parts, _BINARY, headers, len(head) + size, deadline)


def parameters_of(answers: Sequence[DocumentAnswer]) -> dict[str, str]:
    """Return the parameters of a response; the windows of every document are in JSON."""
    first = answers[0].result
    parameters = {"policy": first.policy, "bundle": first.bundle}
    windows = [one.result.windows for one in answers]
    if first.windows is not None:
        parameters["windows"] = to_json(windows).decode()
    return parameters


def _check_outputs(request: InferenceRequest, known: Sequence[str]) -> None:
    for output in request.outputs or ():
        if output.name not in known:
            raise InputError(
                f"Expected outputs of the model, got {output.name[:100]!r}.",
                f"Choose among {', '.join(known)}.",
            )
        if output.parameters and output.parameters.classification:
            raise InputError(
                "The classification extension is not supported.", f"Read {', '.join(known)}."
            )


def _output_json(name: str, column: Column, *, size: int | None = None) -> bytes:
    """Return an output as JSON, with its values unless they have a size in bytes."""
    parameters = None if size is None else {"binary_data_size": size}
    output = OutputTensor(
        name=name, shape=column.shape, datatype=column.datatype, parameters=parameters
    )
    content = output.model_dump_json(exclude_none=True).encode()
    if size is not None:
        return content
    # In parts: the writer holds the interpreter's lock until it is done.
    parts = (to_json(part).removeprefix(b"[").removesuffix(b"]") for part in column.lists())
    return content.removesuffix(b"}") + b',"data":[' + b",".join(parts) + b"]}"


def _extra_tensors(manifest: Manifest) -> list[TensorMetadata]:
    """Return the metadata of the extra inputs."""
    return [
        TensorMetadata(name=extra.name, datatype=_datatype(extra), shape=[-1, *_sizes(extra)])
        for extra in manifest.extra_inputs
    ]


def _check_extra_tensors(
    described: Mapping[str, InputTensor], documents: int, manifest: Manifest
) -> None:
    """Check the types and shapes of the extra inputs before their values are read."""
    tokens = described.get(manifest.main_input)
    width = tokens.shape[1] if tokens is not None else None
    for extra in manifest.extra_inputs:
        expected = f"{_datatype(extra)} {_shown(documents, extra)}"
        tensor = described.get(extra.name)
        if tensor is None and _is_made(extra, described):
            continue
        if tensor is None:
            raise InputError(
                f"The model needs the input {extra.name!r}, {expected}, got none.",
                "Send the tensor beside the documents.",
            )
        kinds = ("FP32",) if extra.dtype == "float32" else ("INT64", "INT32")
        if tensor.datatype not in kinds or not _fits(tensor.shape, documents, width, extra):
            raise InputError(
                f"The input {extra.name!r} must be {expected}, got {tensor.datatype} "
                f"{tensor.shape}.",
                "Send one row for each document.",
            )


def _extra_fields(
    arrays: Mapping[str, Array], documents: Sequence[Document], manifest: Manifest
) -> list[ExtraFields]:
    """Return the extra inputs of each document; of tokens only those that it has."""
    fields: list[dict[str, Array]] = [{} for _ in documents]
    for extra in manifest.extra_inputs:
        if _is_made(extra, arrays):
            continue
        rows = arrays[extra.name]
        if extra.kind == "document":
            rows = rows.reshape(len(documents), *extra.shape(0))
        for index, document in enumerate(documents):
            row = rows[index, ...]
            # The number of tokens of a text is not known yet.
            is_padded = extra.kind == "token" and not isinstance(document, Text)
            fields[index][extra.name] = row[: len(document)] if is_padded else row
    return list(fields)


def _is_made(extra: ExtraInput, given: Container[str]) -> bool:
    """Return whether the tokenizer makes an input of the texts of a pair."""
    return extra.name == TOKEN_TYPES and "text_pair" in given and extra.name not in given


def _datatype(extra: ExtraInput) -> Datatype:
    return "FP32" if extra.dtype == "float32" else "INT64"


def _sizes(extra: ExtraInput) -> list[int]:
    return [-1] if extra.kind == "token" else list(extra.shape(0))


def _shown(documents: int, extra: ExtraInput) -> str:
    sizes = ["tokens" if size == -1 else str(size) for size in _sizes(extra)]
    return f"[{', '.join([str(documents), *sizes])}]"


def _fits(shape: Sequence[int], documents: int, tokens: int | None, extra: ExtraInput) -> bool:
    """Return whether a shape fits; ``tokens`` is None if texts have unknown numbers of tokens."""
    if extra.kind == "token":
        return len(shape) == 2 and shape[0] == documents and tokens in (None, shape[1])
    if extra.width is None:
        return math.prod(shape) == documents  # some clients send [documents, 1]
    return list(shape) == [documents, extra.width]
