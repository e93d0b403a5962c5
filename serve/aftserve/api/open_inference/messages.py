"""A request's documents, and the response with their results."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response

from aftexport.bundle.manifest import Manifest
from aftexport.errors import InputError
from aftexport.heads import Answer, is_one_label
from aftexport.heads.answer import Field
from aftserve.api.open_inference import tensors
from aftserve.api.open_inference.schemas import (
    Datatype,
    InferenceRequest,
    InferenceResponse,
    InputTensor,
    OutputTensor,
    TensorMetadata,
)
from aftserve.errors import DocumentTooLongError
from aftserve.schemas import DocumentResult
from aftserve.types import Document

HEADER_LENGTH = "Inference-Header-Content-Length"
"""Header with the length of the JSON in bytes, if tensors follow it."""

INPUTS = (
    TensorMetadata(name="text", datatype="BYTES", shape=[-1]),
    TensorMetadata(name="input_ids", datatype="INT64", shape=[-1, -1]),
    TensorMetadata(name="lengths", datatype="INT64", shape=[-1]),
)


_DATATYPES: dict[Field, Datatype] = {"name": "BYTES", "names": "BOOL", "numbers": "FP32"}
"""The datatype of each field of an answer; names are given as whether each of all names holds."""


def outputs_of(manifest: Manifest) -> tuple[TensorMetadata, ...]:
    """Return the outputs of a model.

    They are ``label`` and ``scores`` of one head with one label, else ``HEAD.FIELD``. A calibration
    adds ``calibrated`` and, with a threshold, ``abstain``.
    """
    fields = []
    for name, head in manifest.heads.items():
        start = "" if is_one_label(manifest.heads) else f"{name}."
        fields += [
            TensorMetadata(
                name=f"{start}{field}",
                datatype=_DATATYPES[kind],
                shape=[-1] if kind == "name" else [-1, len(head.names)],
            )
            for field, kind in head.fields.items()
        ]
        calibration = (manifest.calibration or {}).get(name)
        if calibration is not None:
            shape = [-1, len(head.names)]
            fields.append(TensorMetadata(name=f"{start}calibrated", datatype="FP32", shape=shape))
        if calibration is not None and calibration.threshold is not None:
            fields.append(TensorMetadata(name=f"{start}abstain", datatype="BOOL", shape=[-1]))
    return (
        *fields,
        TensorMetadata(name="tokens_total", datatype="INT64", shape=[-1]),
        TensorMetadata(name="tokens_used", datatype="INT64", shape=[-1]),
    )


@dataclass(frozen=True)
class Message:
    """A checked request.

    Attributes:
        request: the JSON of the request.
        documents: texts, or token ids.
    """

    request: InferenceRequest
    documents: Sequence[Document]


def parse(content: Any, binary: memoryview, *, max_documents: int, manifest: Manifest) -> Message:
    """Check a request.

    Args:
        content: its parsed JSON.
        binary: the bytes after the JSON.
        max_documents: maximum number of documents.
        manifest: manifest of the model.

    Raises:
        RequestValidationError: if a field does not follow the protocol.
        InputError: if the tensors are not documents, or a requested output does not exist.
        DocumentTooLongError: if there are too many documents.
    """
    try:
        request = InferenceRequest.model_validate(content)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_input=False)) from None
    _check_outputs(request, [output.name for output in outputs_of(manifest)])
    _check_inputs(request.inputs, max_documents)
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
    return Message(request, _documents(arrays))


def _check_inputs(inputs: Sequence[InputTensor], max_documents: int) -> None:
    """Check the names, types and shapes of the inputs before their values are read."""
    names = [tensor.name[:100] for tensor in inputs]
    if sorted(names) not in (["text"], ["input_ids"], ["input_ids", "lengths"]):
        raise InputError(
            "The inputs must be text, or input_ids, or input_ids and lengths, "
            f"got {', '.join(names)}.",
            "Send text (BYTES), or input_ids (INT64), with lengths (INT64) if rows are padded.",
        )
    described = dict(zip(names, inputs, strict=True))
    first, lengths = described.get("text") or described["input_ids"], described.get("lengths")
    if first.name == "text":
        if first.datatype != "BYTES":
            raise InputError(
                f"The input 'text' must be BYTES, got {first.datatype}.", "Send BYTES."
            )
        count = math.prod(first.shape)
    else:
        if len(first.shape) != 2 or first.datatype == "BYTES":
            raise InputError(
                "The input 'input_ids' must be integers [documents, tokens], "
                f"got {first.datatype} of {len(first.shape)} axes.",
                "Send INT64 of two axes.",
            )
        count = first.shape[0]
    if count == 0:
        raise InputError("The request has no documents.", "Send at least one.")
    if count > max_documents:
        raise DocumentTooLongError(
            f"A request must have at most {max_documents} documents, got {count}.",
            "Send them in several requests.",
        )
    if lengths is not None and (math.prod(lengths.shape) != count or lengths.datatype == "BYTES"):
        raise InputError(
            f"The input 'lengths' must be integers [{count}], "
            f"got {lengths.datatype} of {math.prod(lengths.shape)} values.",
            "Send one INT64 for each document.",
        )


def _documents(arrays: dict[str, tensors.Array]) -> Sequence[Document]:
    if "text" in arrays:
        return [str(text) for text in arrays["text"].ravel()]
    ids = arrays["input_ids"]
    rows, width = ids.shape
    lengths = arrays.get("lengths", np.full(rows, width)).ravel()
    if not ((lengths >= 0) & (lengths <= width)).all():
        bad = next(int(one) for one in lengths if not 0 <= one <= width)
        raise InputError(
            f"The input 'lengths' must be from 0 to {width}, got {bad}.",
            "Send the number of tokens of each row without its padding.",
        )
    return [row[:length].astype(np.int64) for row, length in zip(ids, lengths, strict=True)]


def respond(
    message: Message, results: Sequence[DocumentResult], *, name: str, version: str
) -> Response:
    """Build the response; tensors that are requested as bytes follow the JSON."""
    request = message.request
    columns = _columns(results)
    binary = {
        output.name: output.parameters.binary_data if output.parameters else None
        for output in request.outputs or ()
    }
    all_binary = bool(request.parameters and request.parameters.binary_data_output)
    outputs, after = [], b""
    for output, (datatype, values) in columns.items():
        if binary and output not in binary:
            continue
        shape = [len(results), *np.shape(values)[1:]]
        wanted = binary.get(output)
        if all_binary if wanted is None else wanted:
            part = tensors.to_bytes(values, datatype)
            after += part
            outputs.append(_output(output, shape, datatype, size=len(part)))
        else:
            flat = values if isinstance(values, list) else values.ravel().tolist()
            outputs.append(_output(output, shape, datatype, data=flat))
    response = InferenceResponse(
        model_name=name,
        model_version=version,
        id=request.id,
        parameters={"policy": results[0].policy, "bundle": results[0].bundle},
        outputs=outputs,
    )
    head = response.model_dump_json(exclude_none=True).encode()
    if not after:
        return Response(head, media_type="application/json")
    return Response(
        head + after,
        media_type="application/octet-stream",
        headers={HEADER_LENGTH: str(len(head))},
    )


def _columns(results: Sequence[DocumentResult]) -> dict[str, tuple[Datatype, Any]]:
    """Return the datatype and the values of each output."""
    columns: dict[str, tuple[Datatype, Any]] = {}
    if results[0].heads is None:
        columns["label"] = "BYTES", [r.label for r in results]
        columns["scores"] = "FP32", _numbers([r.scores or {} for r in results])
        if results[0].calibrated is not None:
            columns["calibrated"] = "FP32", _numbers([r.calibrated or {} for r in results])
        if results[0].abstain is not None:
            columns["abstain"] = "BOOL", np.array([r.abstain for r in results])
    else:
        for head in results[0].heads:
            columns |= _head_columns(head, [r.heads[head] for r in results if r.heads])
    columns["tokens_total"] = "INT64", np.array([r.tokens_total for r in results])
    columns["tokens_used"] = "INT64", np.array([r.tokens_used for r in results])
    return columns


def _head_columns(head: str, answers: Sequence[Answer]) -> dict[str, tuple[Datatype, Any]]:
    rows = [answer.model_dump(exclude_none=True) for answer in answers]
    all_names = next(list(value) for value in rows[0].values() if isinstance(value, dict))
    columns: dict[str, tuple[Datatype, Any]] = {}
    for field, first in rows[0].items():
        values = [row[field] for row in rows]
        if isinstance(first, dict):
            columns[f"{head}.{field}"] = "FP32", _numbers(values)
        elif isinstance(first, bool):
            columns[f"{head}.{field}"] = "BOOL", np.array(values)
        elif isinstance(first, str):
            columns[f"{head}.{field}"] = "BYTES", values
        else:
            holds = [[name in names for name in all_names] for names in values]
            columns[f"{head}.{field}"] = "BOOL", np.array(holds)
    return columns


def _numbers(rows: Sequence[Mapping[str, float]]) -> tensors.Array:
    return np.array([list(row.values()) for row in rows], dtype=np.float32)


def _check_outputs(request: InferenceRequest, known: Sequence[str]) -> None:
    for output in request.outputs or ():
        if output.name not in known:
            raise InputError(
                f"There is no output {output.name[:100]!r}.", f"Outputs are {', '.join(known)}."
            )
        if output.parameters and output.parameters.classification:
            raise InputError(
                "The classification extension is not supported.", f"Read {', '.join(known)}."
            )


def _output(
    name: str, shape: list[int], datatype: Datatype, *, size: int | None = None, data: Any = None
) -> OutputTensor:
    parameters = None if size is None else {"binary_data_size": size}
    return OutputTensor(name=name, shape=shape, datatype=datatype, parameters=parameters, data=data)
