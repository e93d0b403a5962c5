"""Conversion between messages of gRPC and those of ``aftserve.api.open_inference``.

The rules for tensors are in ``aftserve.api.open_inference.messages``, which gets every input as
bytes, as from a client of the extension for binary tensors.
"""

from collections.abc import Sequence
from typing import Any

from aftexport.bundle.manifest import Manifest
from aftexport.errors import InputError
from aftexport.extra_inputs import MAX_INPUTS
from aftserve.api.open_inference import messages, tensors
from aftserve.api.open_inference.columns import columns_of
from aftserve.api.open_inference.schemas import ModelMetadata
from aftserve.grpc.wire_types import MESSAGES
from aftserve.model.results import DocumentAnswer

_CONTENTS = {
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
    request: Any, *, max_documents: int, manifest: Manifest, outputs: Sequence[str]
) -> messages.Message:
    """Check a request by the rules of HTTP.

    Args:
        request: a ModelInferRequest.
        max_documents: maximum number of documents.
        manifest: manifest of the model.
        outputs: names of its outputs.

    Raises:
        RequestValidationError, InputError, DocumentTooLongError: as ``messages.parse``.
    """
    for field, most in _MAX_TENSORS.items():  # before the work for each
        if (count := len(getattr(request, field))) > most:
            raise InputError(
                f"Expected at most {most} {field}, got {count}.", f"Send fewer {field}."
            )
    parts = _input_bytes(request)
    inputs = [
        {
            "name": one.name,
            "shape": list(one.shape[:_MAX_AXES]),
            "datatype": one.datatype,
            "parameters": {"binary_data_size": len(part)},
        }
        for one, part in zip(request.inputs, parts, strict=True)
    ]
    wanted = [
        {"name": one.name, "parameters": _classification(one.parameters)} for one in request.outputs
    ]
    content = {"id": request.id or None, "inputs": inputs, "outputs": wanted or None}
    binary = parts[0] if len(parts) == 1 else b"".join(parts)
    return messages.parse(
        content,
        memoryview(binary),
        max_documents=max_documents,
        manifest=manifest,
        outputs=outputs,
    )


def _input_bytes(request: Any) -> list[bytes]:
    """Return the bytes of each input."""
    raw, inputs = list(request.raw_input_contents), list(request.inputs)
    if not raw:
        return [_contents_bytes(one) for one in inputs]
    if len(raw) != len(inputs):
        raise InputError(
            f"Expected raw_input_contents of {len(inputs)} inputs, got {len(raw)}.",
            "Send the bytes of every input, in the order of inputs.",
        )
    for one in inputs:
        if one.contents.ByteSize():
            raise InputError(
                f"Expected raw_input_contents or contents, got both for {one.name[:100]!r}.",
                "Send raw_input_contents only.",
            )
    return raw


def _contents_bytes(tensor: Any) -> bytes:
    """Return the values of an input as raw bytes."""
    field = _CONTENTS.get(tensor.datatype)
    given = [one.name for one, _ in tensor.contents.ListFields()]
    if field is None:
        return b""  # the datatype is refused with the rest of the request
    if given and given != [field]:
        raise InputError(
            f"Expected {field} of the {tensor.datatype} input {tensor.name[:100]!r}, got "
            f"{', '.join(given)}.",
            f"Send the values in {field}, or all inputs in raw_input_contents.",
        )
    values = getattr(tensor.contents, field)
    if tensor.datatype == "BYTES":
        return b"".join(len(value).to_bytes(4, "little") + value for value in values)
    return tensors.to_bytes(values, tensor.datatype)


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
