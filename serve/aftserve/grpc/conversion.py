"""Conversion between messages of gRPC and those of ``aftserve.api.open_inference``.

The rules for tensors are in ``aftserve.api.open_inference.messages``, which gets every input as
bytes, as from a client of the extension for binary tensors.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from aftexport.bundle.manifest import Manifest
from aftexport.errors import InputError
from aftexport.extra_inputs import MAX_INPUTS
from aftserve.api.open_inference import messages, tensors
from aftserve.api.open_inference.columns import columns_of
from aftserve.api.open_inference.schemas import Datatype, ModelMetadata
from aftserve.errors import DocumentTooLongError
from aftserve.grpc.infer_request import Contents, InferRequest, expanded_size, read_numbers
from aftserve.grpc.wire_types import MESSAGES
from aftserve.model.results import DocumentAnswer

_CONTENTS: dict[Datatype, str] = {
    "BOOL": "bool_contents",
    "BYTES": "bytes_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
}
"""The field of a tensor's values that are not raw bytes, by its datatype."""
_MAX_TENSORS = {"inputs": 2 + MAX_INPUTS, "outputs": 256}
_MAX_AXES = 4
"""More axes than any input has; further ones are not read."""


def read_request(
    request: InferRequest,
    parts: Sequence[bytes | memoryview],
    *,
    max_documents: int,
    manifest: Manifest,
    outputs: Sequence[str],
) -> messages.Message:
    """Check a request by the rules of HTTP.

    Args:
        request: the request.
        parts: the bytes of its inputs, from ``input_bytes``.
        max_documents: maximum number of documents.
        manifest: manifest of the model.
        outputs: names of its outputs.

    Raises:
        RequestValidationError, InputError, DocumentTooLongError: as ``messages.parse``.
    """
    message = request.message
    inputs = [
        {
            "name": one.name,
            "shape": list(one.shape[:_MAX_AXES]),
            "datatype": one.datatype,
            "parameters": {"binary_data_size": len(part)},
        }
        for one, part in zip(message.inputs, parts, strict=True)
    ]
    wanted = [
        {"name": one.name, "parameters": _classification(one.parameters)} for one in message.outputs
    ]
    content = {"id": message.id or None, "inputs": inputs, "outputs": wanted or None}
    binary = parts[0] if len(parts) == 1 else b"".join(parts)
    return messages.parse(
        content,
        memoryview(binary),
        max_documents=max_documents,
        manifest=manifest,
        outputs=outputs,
    )


def input_bytes(request: InferRequest, max_bytes: int) -> Sequence[bytes | memoryview]:
    """Return the bytes of each input.

    Args:
        request: the request.
        max_bytes: maximum size of all of them.

    Raises:
        InputError: if there are too many tensors, or an input has no or other values.
        DocumentTooLongError: if the values are too large.
    """
    message, raw = request.message, request.raw
    for name, most in _MAX_TENSORS.items():  # before the work for each
        if (count := len(getattr(message, name))) > most:
            raise InputError(f"Expected at most {most} {name}, got {count}.", f"Send fewer {name}.")
    inputs = list(zip(message.inputs, request.contents, strict=True))
    if not raw:
        sizes = (_contents_size(one, contents) for one, contents in inputs)
        if (size := sum(sizes)) > max_bytes:
            raise DocumentTooLongError(
                f"The integers of all inputs must have at most {max_bytes} bytes as INT64, got "
                f"{size}.",
                "Send several smaller requests.",
            )
        return [_contents_bytes(one, contents) for one, contents in inputs]
    if len(raw) != len(inputs):
        raise InputError(
            f"Expected raw_input_contents of {len(inputs)} inputs, got {len(raw)}.",
            "Send the bytes of every input, in the order of inputs.",
        )
    for one, contents in inputs:
        if contents:
            raise InputError(
                f"Expected raw_input_contents or contents, got both for {one.name[:100]!r}.",
                "Send raw_input_contents only.",
            )
    return raw


def _contents_size(tensor: Any, contents: Contents) -> int:
    """Return the number of bytes of an input's numbers; texts take no more than they did."""
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        return 0  # the datatype is refused with the rest of the request
    if contents and [*contents] != [field]:
        raise InputError(
            f"Expected {field} of the {tensor.datatype} input {tensor.name[:100]!r}, got "
            f"{', '.join(contents)}.",
            f"Send the values in {field}, or all inputs in raw_input_contents.",
        )
    values = contents.get(field, ())
    if tensor.datatype == "BYTES":
        return 0
    return expanded_size(values, tensors.dtype_of(tensor.datatype))


def _contents_bytes(tensor: Any, contents: Contents) -> bytes:
    """Return the values of an input as raw bytes."""
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        return b""
    values = contents.get(field, ())
    if tensor.datatype == "BYTES":
        sized = ((len(value).to_bytes(4, "little"), value) for value in values)
        return b"".join(chain.from_iterable(sized))
    return read_numbers(values, tensors.dtype_of(tensor.datatype)).tobytes()


def _classification(given: Any) -> dict[str, Any]:
    """Return the one parameter of an output that matters: those for binary tensors are of JSON."""
    name = "classification"
    kind = given[name].WhichOneof("parameter_choice") if name in given else None
    return {} if kind is None else {name: getattr(given[name], kind)}


def write_response(
    message: messages.Message, answers: Sequence[DocumentAnswer], *, name: str, version: str
) -> bytes:
    """Return the bytes of a ModelInferResponse, whose outputs are raw bytes.

    Args:
        message: the checked request.
        answers: the answers for its documents.
        name, version: name and version of the model.
    """
    request, result = message.request, answers[0].result
    wanted = [output.name for output in request.outputs] if request.outputs else None
    response = MESSAGES["ModelInferResponse"](
        model_name=name, model_version=version, id=request.id or ""
    )
    response.parameters["policy"].string_param = result.policy
    response.parameters["bundle"].string_param = result.bundle
    for output, column in columns_of(answers, wanted).items():
        _, parts = column.content()
        response.outputs.add(name=output, datatype=column.datatype, shape=column.shape)
        response.raw_output_contents.append(b"".join(parts))
    content: bytes = response.SerializeToString()
    return content


def write_metadata(metadata: ModelMetadata) -> bytes:
    """Return the bytes of a ModelMetadataResponse."""
    response = MESSAGES["ModelMetadataResponse"](
        name=metadata.name, versions=metadata.versions, platform=metadata.platform
    )
    for field in ("inputs", "outputs"):
        for one in getattr(metadata, field):
            getattr(response, field).add(name=one.name, datatype=one.datatype, shape=one.shape)
    content: bytes = response.SerializeToString()
    return content
