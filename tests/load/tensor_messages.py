"""Requests and responses of the Open Inference Protocol: JSON, binary tensors, and gRPC."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aftserve.grpc.wire_types import MESSAGES
from load.every_head import Document
from load.messages import Found, Message, json_message

_LENGTH = "inference-header-content-length"
_FIELDS = {
    "topic.scores": "columns",
    "paid.scores": "columns",
    "flags.labels": "holds",
    "flags.scores": "columns",
    "age.values": "columns",
    "tags.labels": "holds",
    "tags.scores": "columns",
    "embedding.vector": "columns",
}
"""The field of each tensor of numbers."""
_DTYPES = {"FP32": np.float32, "INT64": np.int64, "BOOL": np.bool_}


def write_texts(model: str, documents: Sequence[Document]) -> Message:
    """Write a request of texts in JSON."""
    return json_message(inputs=[_text_tensor(documents) | {"data": [d.text for d in documents]}])


def write_binary(model: str, documents: Sequence[Document]) -> Message:
    """Write a request of token ids in binary tensors, for outputs in binary tensors."""
    arrays = _padded(documents)
    inputs = [
        _ids_tensor(name, array) | {"parameters": {"binary_data_size": array.nbytes}}
        for name, array in arrays.items()
    ]
    head = json_message(inputs=inputs, parameters={"binary_data_output": True}).body
    body = head + b"".join(array.tobytes() for array in arrays.values())
    return Message(body, {_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"})


def write_call(model: str, documents: Sequence[Document]) -> Message:
    """Write a ModelInferRequest: of texts in ``contents``, or of token ids as raw bytes."""
    request = MESSAGES["ModelInferRequest"](model_name=model)
    if documents[0].number % 2:
        contents = {"bytes_contents": [one.text.encode() for one in documents]}
        request.inputs.add(**_text_tensor(documents), contents=contents)
    else:
        for name, array in _padded(documents).items():
            request.inputs.add(**_ids_tensor(name, array))
            request.raw_input_contents.append(array.tobytes())
    return Message(request.SerializeToString())


def read_outputs(response: Message) -> list[Found]:
    """Read a response of JSON, which binary tensors may follow."""
    size = int(response.headers.get(_LENGTH, len(response.body)))
    content, rest = json.loads(response.body[:size]), response.body[size:]
    arrays = {}
    for output in content["outputs"]:
        name, datatype, shape = output["name"], output["datatype"], output["shape"]
        if (data := output.get("data")) is None:
            length = output["parameters"]["binary_data_size"]
            data, rest = _decoded(datatype, shape, rest[:length]), rest[length:]
        elif datatype != "BYTES":
            data = np.array(data, _DTYPES[datatype]).reshape(shape)
        arrays[name] = data
    if rest:
        raise ValueError(f"{len(rest)} bytes follow the tensors")
    return _rows(content["parameters"]["bundle"], arrays)


def read_call(response: Message) -> list[Found]:
    """Read a ModelInferResponse."""
    message = MESSAGES["ModelInferResponse"].FromString(response.body)
    tensors = zip(message.outputs, message.raw_output_contents, strict=True)
    arrays = {one.name: _decoded(one.datatype, one.shape, content) for one, content in tensors}
    return _rows(message.parameters["bundle"].string_param, arrays)


def _text_tensor(documents: Sequence[Document]) -> dict[str, Any]:
    return {"name": "text", "datatype": "BYTES", "shape": [len(documents)]}


def _ids_tensor(name: str, array: NDArray[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": "INT64", "shape": [*array.shape]}


def _padded(documents: Sequence[Document]) -> dict[str, NDArray[Any]]:
    lengths = np.array([len(one.ids) for one in documents])
    ids = np.zeros((len(documents), lengths.max()), np.int64)
    for row, one in zip(ids, documents, strict=True):
        row[: len(one.ids)] = one.ids
    return {"input_ids": ids, "lengths": lengths}


def _decoded(datatype: str, shape: Sequence[int], content: bytes) -> Any:
    if datatype != "BYTES":
        return np.frombuffer(content, _DTYPES[datatype]).reshape(shape)
    strings = []
    while content:
        end = 4 + int.from_bytes(content[:4], "little")
        strings.append(content[4:end].decode())
        content = content[end:]
    return strings


def _rows(bundle: str, arrays: dict[str, Any]) -> list[Found]:
    """Return the row of each document in all tensors, without its padding."""
    found = []
    for row, used in enumerate(arrays["tokens_used"]):
        one: Found = {"bundle": bundle, "tokens_total": int(arrays["tokens_total"][row])}
        for name, field in _FIELDS.items():
            head, _, _ = name.partition(".")
            values = arrays[name][row]
            one.setdefault(head, {})[field] = values[:used] if head == "tags" else values
        for head in ("topic", "paid"):
            one[head]["label"] = arrays[f"{head}.label"][row]
        one["tags"]["spans"] = json.loads(arrays["tags.spans"][row])
        found.append(one)
    return found
