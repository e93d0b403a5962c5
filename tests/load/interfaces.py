"""The interfaces of a server: a request of each, and the answers that its response carries."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from served_heads import FLAGS, TOPICS

from aftserve.grpc.wire_types import MESSAGES, SERVICE
from load.every_head import Document

Found = dict[str, Any]
"""The fields of ``every_head.Expected`` that a response carries for one document."""


@dataclass(frozen=True)
class Message:
    """A request or a response."""

    body: bytes  # or the protobuf message of gRPC
    # Those of a response are in lower case.
    headers: Mapping[str, str] = field(default_factory=dict)


def json_message(**fields: Any) -> Message:
    """Return a message with an object of JSON."""
    return Message(json.dumps(fields).encode())


_LENGTH = "inference-header-content-length"
_TENSOR_FIELDS = {
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
        for name, key in _TENSOR_FIELDS.items():
            head, _, _ = name.partition(".")
            values = arrays[name][row]
            one.setdefault(head, {})[key] = values[:used] if head == "tags" else values
        for head in ("topic", "paid"):
            one[head]["label"] = arrays[f"{head}.label"][row]
        one["tags"]["spans"] = json.loads(arrays["tags.spans"][row])
        found.append(one)
    return found


_FIELDS = {
    "topic": ("label", "scores"),
    "paid": ("label", "scores"),
    "flags": ("labels", "scores"),
    "age": ("values",),
    "tags": ("labels", "scores", "spans"),
    "embedding": ("vector",),
}
"""The fields of each head in an answer of ``/infer``."""
_LINES = "application/x-ndjson"


@dataclass(frozen=True)
class Interface:
    """An interface."""

    name: str
    path: str  # {model} stands for the name of the model
    write: Callable[[str, Sequence[Document]], Message]  # a request about documents to a model
    # The answers in order, empty where the queue was too long. It raises ValueError, KeyError,
    # TypeError or IndexError for a response of another form.
    read: Callable[[Message], list[Found]]
    route: str | None = None  # path in the metrics, if it is not path without a query
    max_documents: int = 3  # of a request
    is_by_document: bool = False  # each document of a request may be answered by another bundle
    names_model: bool = False  # in its requests

    @property
    def is_grpc(self) -> bool:
        """Whether a request is a call of gRPC."""
        return self.path.startswith(f"/{SERVICE}/")

    @property
    def counted_path(self) -> str:
        """The path in the metrics."""
        return self.route or self.path.partition("?")[0]


def _texts(documents: Sequence[Document]) -> list[str]:
    return [one.text for one in documents]


def _ids(documents: Sequence[Document]) -> list[list[int]]:
    return [one.ids.tolist() for one in documents]


def _result(answer: Any) -> Found:
    heads = answer["heads"]
    found = {name: {one: heads[name][one] for one in fields} for name, fields in _FIELDS.items()}
    return {**found, "bundle": answer["bundle"], "tokens_total": answer["tokens_total"]}


def _write_text(model: str, documents: Sequence[Document]) -> Message:
    return Message(documents[0].text.encode(), {"Content-Type": "text/plain"})


def _read_one(response: Message) -> list[Found]:
    return [_result(json.loads(response.body))]


def _write_several(model: str, documents: Sequence[Document]) -> Message:
    if documents[0].number % 2:
        return json_message(texts=_texts(documents))
    return json_message(input_ids=_ids(documents))


def _read_several(response: Message) -> list[Found]:
    return [_result(one) for one in json.loads(response.body)["results"]]


def _write_lines(model: str, documents: Sequence[Document]) -> Message:
    lines = [
        json_message(text=one.text) if one.number % 2 else json_message(input_ids=one.ids.tolist())
        for one in documents
    ]
    return Message(b"\n".join(line.body for line in lines), {"Content-Type": _LINES})


def _read_lines(response: Message) -> list[Found]:
    lines = map(json.loads, response.body.splitlines())
    return [{} if _is_refused(line) else _result(line) for line in lines]


def _is_refused(line: Any) -> bool:
    """Return whether the queue was too long for a line."""
    return bool(line.get("status") == 429 and line["retry_after"] > 0)


def _write_streamed(model: str, documents: Sequence[Document]) -> Message:
    return Message(json_message(text=documents[0].text).body, {"Accept": _LINES})


def _read_streamed(response: Message) -> list[Found]:
    first, *parts, last = map(json.loads, response.body.splitlines())
    if last != {"complete": True, "lines": len(parts) + 1}:
        raise ValueError(f"the last line is {last}")
    tags: dict[str, list[Any]] = {"labels": [], "scores": [], "spans": []}
    for part in parts:
        if part["head"] != "tags":
            continue
        if "start_token" in part and part["start_token"] != len(tags["labels"]):
            raise ValueError(f"token {part['start_token']} follows {len(tags['labels'])} tokens")
        for name in tags.keys() & part.keys():
            tags[name] += part[name]
    first["heads"]["tags"] = tags
    return [_result(first)]


def _write_classify(model: str, documents: Sequence[Document]) -> Message:
    return json_message(model=model, input=_texts(documents))


def _read_classify(response: Message) -> list[Found]:
    rows = json.loads(response.body)["data"]
    return [{"topic": {"label": one["label"], "columns": np.array(one["probs"])}} for one in rows]


def _write_predict(model: str, documents: Sequence[Document]) -> Message:
    return json_message(inputs=[[text] for text in _texts(documents)])


def _read_predict(response: Message) -> list[Found]:
    found: list[Found] = []
    for rows in json.loads(response.body):
        if rows != sorted(rows, key=lambda row: -row["score"]):
            raise ValueError(f"the largest score is not first: {rows}")
        scores = {row["label"]: row["score"] for row in rows}
        found.append({"topic": {"label": rows[0]["label"], "scores": scores}})
    return found


def _write_embed(model: str, documents: Sequence[Document]) -> Message:
    return json_message(inputs=_ids(documents))


def _read_embed(response: Message) -> list[Found]:
    return [{"embedding": {"vector": one}} for one in json.loads(response.body)]


def _write_decisions(model: str, documents: Sequence[Document]) -> Message:
    choice = {"type": "choice", "instructions": "", "choices": [{"value": t} for t in TOPICS]}
    flags = [{"type": "predicate", "instructions": "", "name": name} for name in FLAGS]
    return json_message(model=model, input=documents[0].text, questions=[choice, *flags])


def _read_decisions(response: Message) -> list[Found]:
    topic, *flags = json.loads(response.body)["answers"]
    scores = {row["value"]: row["probability"] for row in topic["probabilities"]}
    columns = np.array([one["probability"] for one in flags])
    return [{"topic": {"label": topic["choice"], "scores": scores}, "flags": {"columns": columns}}]


_TENSORS = "/v2/models/{model}/infer"
_TENSORS_ROUTE = "/v2/models/{name}/infer"
INTERFACES = (
    Interface("JSON", "/infer", _write_several, _read_several),
    Interface("text", "/infer", _write_text, _read_one, max_documents=1),
    Interface("lines", "/infer", _write_lines, _read_lines, max_documents=5, is_by_document=True),
    Interface("streamed parts", "/infer", _write_streamed, _read_streamed, max_documents=1),
    Interface(
        "tensors in JSON", _TENSORS, write_texts, read_outputs,
        _TENSORS_ROUTE, names_model=True,
    ),
    Interface(
        "binary tensors", _TENSORS, write_binary, read_outputs,
        _TENSORS_ROUTE, names_model=True,
    ),
    Interface(
        "gRPC", f"/{SERVICE}/ModelInfer", write_call, read_call,
        names_model=True,
    ),
    Interface(
        "vLLM", "/classify?output=topic", _write_classify, _read_classify, names_model=True
    ),
    Interface("TEI labels", "/predict?output=topic", _write_predict, _read_predict),
    Interface("TEI vectors", "/embed", _write_embed, _read_embed),
    Interface(
        "decisions", "/v1/decisions", _write_decisions, _read_decisions, max_documents=1,
        names_model=True,
    ),
)  # fmt: skip
