"""Every interface gives the answers of ``Predictor``, for every kind of head and of document.

The server runs each document in a run of its own, with one thread as ``Predictor``, so that the
numbers are equal in all bits.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import input_models
import numpy as np
import pytest
import served_heads
import torch
from calibrations import calibration, details
from clients import http
from grpc_servers import GrpcServer, serving_grpc
from numpy.typing import NDArray
from torch import Tensor

from aftexport.bundle.bundle import Bundle
from aftexport.calibration.calibrated_bundle import write_calibrated
from aftexport.extra_inputs import ExtraValues, sample_values
from aftexport.heads.calibration import Scaling
from aftexport.nn import DocumentClassifier
from aftserve.batch import output
from aftserve.batch.answering import OfflineClassifier
from aftserve.batch.local_run import lines_of
from aftserve.batch.rows import Row
from aftserve.client import Client
from aftserve.grpc.wire_types import MESSAGES, SERVICE
from aftserve.predictor import Predictor
from aftserve.settings import Settings

Fields = dict[str, Any]
"""The fields of the answer of a head, as /infer has them in JSON."""
Heads = dict[str, Any]
"""The answer of each head for a document, in the form of an interface."""

TEXTS = ["An invoice from Zoë 😀.", "a", "Pay by 3 May, or the contract ends. " * 260]
"""The last has more tokens than two parts of a streamed answer."""
IDS = [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in TEXTS]
LINES = "application/x-ndjson"
SCALING = Scaling(log_temperature=0.5, slope=-0.02)
FLAG_SCALINGS = (SCALING, Scaling(log_temperature=-0.4, bias=0.3))
CALIBRATIONS = {
    "every head": {
        "topic": calibration(SCALING, above=0.6),
        "paid": calibration(SCALING, above=0.9),
        "flags": calibration(*FLAG_SCALINGS, method="platt", above=0.7),
    },
    "one label": {"logits": calibration(SCALING, above=0.5)},
}
HEADS = {
    "every head": (*served_heads.HEADS,),
    "one label": ("logits",),
    "extra inputs": ("logits",),
    "features": ("logits",),
}
"""The heads of each model."""
QUERIES: dict[str, Fields] = {
    "every head": {"evidence": 2, "evidence_check": 1, "explain": ["urgent", "age"]},
    "one label": {"evidence": 2, "evidence_tokens": 9},
    "features": {"evidence": 2, "evidence_check": 2},
}
"""The evidence that requests to /infer ask for, of each model that has some."""
DOCUMENT, EVIDENCE = "document", "evidence"
"""The names of fields beside the heads, which are compared as answers of their own."""
ONE_LABEL, LABELS = ("topic", "paid", "logits"), ("topic", "paid", "flags", "logits")
PLAIN = ("every head", "one label")
OF_TEXTS = (*PLAIN, "extra inputs")


@dataclass(frozen=True)
class Served:
    """A bundle, its server, and the answers of ``Predictor`` for texts and for ids or features."""

    model: str
    bundle: Bundle
    server: GrpcServer
    documents: list[NDArray[Any]]
    """Token ids ``[T]``, or features ``[T, F]``."""
    extras: list[ExtraValues] | None
    of_texts: list[Heads]
    of_ids: list[Heads]

    @property
    def name(self) -> str:
        return self.bundle.path.stem

    @property
    def form(self) -> str:
        return "input_features" if self.documents[0].ndim == 2 else "input_ids"

    @property
    def query(self) -> Fields:
        return QUERIES.get(self.model, {})

    @property
    def inputs(self) -> list[Fields] | None:
        return self.extras and [one.to_json() for one in self.extras]

    def singles(self) -> list[Fields]:
        """Return a body for each document, a text if the model takes texts."""
        found: list[Fields] = [{"text": text} for text in TEXTS]
        if self.form == "input_features":
            found = [{self.form: one.tolist()} for one in self.documents]
        extras = [{}] * len(found) if self.inputs is None else [{"inputs": i} for i in self.inputs]
        return [one | extra for one, extra in zip(found, extras, strict=True)]

    def infer(self, content: Any, kind: str = "application/json", **headers: str) -> Any:
        return self.post("/infer", content, kind, self.query, **headers)

    def post(
        self, path: str, content: Any, kind: str = "application/json",
        query: Fields | None = None, **headers: str,
    ) -> Any:  # fmt: skip
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"Content-Type": kind, **headers}
        address = f"{self.server.http}{path}"
        response = http.post(address, content=body, headers=headers, params=query)
        assert response.status_code == 200, response.text
        return response


@contextmanager
def serving_bundle(model: str, bundle: Bundle, log: Path) -> Iterator[Served]:
    documents, extras = IDS, None
    if bundle.manifest.features is not None:
        noise = np.random.default_rng(0).standard_normal((9000, input_models.FEATURES))
        values = (noise * input_models.SCALE + input_models.MEAN).astype(np.float32)
        documents = [values[:7], values[7:8], values]
    elif bundle.manifest.extra_inputs:
        generator = np.random.default_rng(0)
        extras = [sample_values(bundle.manifest.extra_inputs, generator, len(ids)) for ids in IDS]
    of_texts, of_ids = list[Heads](), list[Heads]()
    with Predictor(bundle.path, threads=1) as predictor:
        for number, text in enumerate(TEXTS):
            options = QUERIES.get(model, {})
            inputs = extras and extras[number].to_json()
            if bundle.manifest.features is None:
                of_texts.append(heads_of(asdict(predictor(text, inputs=inputs, **options))))
            (one,) = predictor([documents[number]], inputs=extras and [inputs], **options)
            of_ids.append(heads_of(asdict(one)))
    with serving_grpc(bundle.path, log, "--budget-tokens", "1", "--threads", "1") as server:
        yield Served(model, bundle, server, documents, extras, of_texts or of_ids, of_ids)
    assert "Traceback" not in log.read_text("utf-8")


@pytest.fixture(scope="module")
def every(
    bundle_folder: Path, heads_bundle: Path, extra_bundle: Path, feature_bundle: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Served]]:  # fmt: skip
    """A server of each model; two of the bundles are calibrated."""
    folder = tmp_path_factory.mktemp("interfaces")
    sources = dict(
        zip(HEADS, (heads_bundle, bundle_folder, extra_bundle, feature_bundle), strict=True)
    )
    with ExitStack() as stack:
        found = {}
        for number, (model, source) in enumerate(sources.items()):
            bundle = Bundle.open(source)
            if model in CALIBRATIONS:
                place = folder / f"{number}.bundle"
                bundle = write_calibrated(bundle, place, CALIBRATIONS[model], details())
            log = folder / f"{number}.log"
            found[model] = stack.enter_context(serving_bundle(model, bundle, log))
        yield found


def without_none(content: Fields) -> Fields:
    return {name: value for name, value in content.items() if value is not None}


def heads_of(answer: Mapping[str, Any]) -> Heads:
    """Return the fields of each head; a model with one label has its fields beside the others."""
    found = json.loads(json.dumps(answer), object_hook=without_none)
    fields = ("tokens_total", "tokens_used", "truncated", "policy", "bundle")
    document = {name: found[name] for name in fields}
    flat = {
        name: found[name] for name in ("label", "scores", "calibrated", "abstain") if name in found
    }
    evidence = found.get("evidence", found.get("explained"))
    return {DOCUMENT: document, EVIDENCE: evidence, **(found.get("heads") or {"logits": flat})}


def as_json(served: Served, form: str) -> list[Heads]:
    values = TEXTS if form == "texts" else [one.tolist() for one in served.documents]
    body = {form: values} | ({} if served.inputs is None else {"inputs": served.inputs})
    return [heads_of(one) for one in served.infer(body).json()["results"]]


def as_instances(served: Served) -> list[Heads]:
    path = f"/v1/models/{served.name}:predict"
    response = served.post(path, {"instances": served.singles()}, query=served.query)
    return [heads_of(one) for one in response.json()["predictions"]]


def as_invocations(served: Served) -> list[Heads]:
    responses = [served.post("/invocations", one, query=served.query) for one in served.singles()]
    return [heads_of(one.json()) for one in responses]


def as_single_json(served: Served) -> list[Heads]:
    return [heads_of(served.infer(one).json()) for one in served.singles()]


def as_body(served: Served, kind: str) -> list[Heads]:
    return [heads_of(served.infer(text.encode(), kind).json()) for text in TEXTS]


def as_arrays(served: Served) -> list[Heads]:
    found = []
    for one in served.documents:
        file = BytesIO()
        np.save(file, one)
        found.append(heads_of(served.infer(file.getvalue(), "application/x-npy").json()))
    return found


def as_lines(served: Served) -> list[Heads]:
    body = "\n".join(map(json.dumps, served.singles())).encode()
    return [heads_of(json.loads(one)) for one in served.infer(body, LINES).iter_lines()]


def as_parts(served: Served) -> list[Heads]:
    found = []
    for one in served.singles():
        response = served.infer(one, Accept=LINES)
        assert response.headers["content-type"] == LINES
        first, *parts, last = map(json.loads, response.iter_lines())
        assert last == {"complete": True, "lines": len(parts) + 1}
        found.append(joined(heads_of(first), parts))
    return found


def joined(heads: Heads, parts: Sequence[Fields]) -> Heads:
    """Join the parts of a streamed answer to whole answers of the heads."""
    for part in parts:
        head = heads.setdefault(part["head"], {})
        if "start_token" in part:
            assert part["start_token"] == len(head.get("labels", head.get("vectors", ())))
            assert len(part.get("labels", part.get("vectors"))) <= 4096
        for field in part.keys() - {"head", "start_token"}:
            head.setdefault(field, []).extend(part[field])
    return heads


def by_client(served: Served) -> list[Heads]:
    with Client(served.server.http) as client:
        if served.form == "input_features":
            found = [client.infer(features=one, **served.query) for one in served.documents]
        else:
            found = client.infer(TEXTS, inputs=served.inputs, **served.query)
    return [heads_of(asdict(one)) for one in found]


def by_client_lines(served: Served) -> list[Heads]:
    inputs = served.extras and [{**one.document, **one.tokens} for one in served.extras]
    given: Any = {"documents": TEXTS, "inputs": inputs, "batch_size": 2}
    if served.form == "input_features":
        given = {"features": served.documents}
    with Client(served.server.http) as client:
        found: Any = client.infer_each(**given, **served.query)
        return [heads_of(asdict(one)) for one in found]


def by_client_stream(served: Served) -> list[Heads]:
    found = []
    with Client(served.server.http) as client:
        for number, text in enumerate(TEXTS):
            given: Any = {"document": text, "inputs": served.inputs and served.inputs[number]}
            if served.form == "input_features":
                given = {"features": served.documents[number]}
            with client.stream(**given, **served.query) as answer:
                parts = json.dumps([asdict(part) for part in answer])
                whole = heads_of(asdict(answer.result))
            found.append(joined(whole, json.loads(parts, object_hook=without_none)))
    return found


def as_rows(served: Served) -> list[Heads]:
    """Return the rows that ``aftserve batch`` writes, without its processes."""
    manifest = served.bundle.manifest
    documents: Any = served.documents if served.form == "input_features" else TEXTS
    options = (str(served.bundle.path), "--threads", "1", "--budget-tokens", "1")
    outcomes = [*OfflineClassifier(Settings.read(options)).answer(documents, served.inputs)]
    columns = output.schema(manifest.heads, None, manifest.calibration)
    table = output.table(None, outcomes, columns, policy="exact", bundle=served.bundle.digest)
    return [single_precision(heads_of(row)) for row in table.to_pylist()]


def as_predict_lines(served: Served) -> list[Heads]:
    """Return the answers in the lines of ``aftserve predict``."""
    documents: Any = served.documents if served.form == "input_features" else TEXTS
    inputs = served.inputs or [{}] * len(documents)
    rows: Any = map(Row, range(len(documents)), documents, inputs)
    loaded = OfflineClassifier(Settings.read([str(served.bundle.path), "--threads", "1"]))
    lines = lines_of(loaded, rows, strict=True, on_done=lambda _: None)
    return [heads_of(json.loads(line)) for line, _ in lines]


def single_precision(value: Any) -> Any:
    match value:
        case dict():
            return {name: single_precision(one) for name, one in value.items()}
        case list():
            return [*map(single_precision, value)]
        case float():
            return float(np.float32(value))
        case _:
            return value


def tensors_for(served: Served, *, is_text: bool) -> dict[str, NDArray[Any]]:
    """Return the input tensors of all documents; their padding is outside the range of values."""
    arrays = {"text": np.array(TEXTS, object)}
    if not is_text:
        lengths = np.array([len(one) for one in served.documents])
        arrays = {served.form: padded(served.documents), "lengths": lengths}
    for one in served.bundle.manifest.extra_inputs:
        every = served.extras or []
        if one.kind == "token":
            arrays[one.name] = padded([extra.tokens[one.name] for extra in every])
        else:
            arrays[one.name] = np.stack([extra.document[one.name] for extra in every])
    return arrays


def padded(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    found = np.full((len(rows), max(map(len, rows)), *rows[0].shape[1:]), 10**6, rows[0].dtype)
    for place, row in zip(found, rows, strict=True):
        place[: len(row)] = row
    return found


def encoded(array: NDArray[Any]) -> bytes:
    if array.dtype != object:
        return array.tobytes()
    texts = [text.encode() for text in array]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def input_of(name: str, array: NDArray[Any], size: int | None = None) -> Fields:
    """Describe a tensor of JSON, or of ``size`` bytes."""
    tensor = {"name": name, "datatype": datatype_of(array), "shape": [*array.shape]}
    if size is None:
        return tensor | {"data": array.ravel().tolist()}
    return tensor | {"parameters": {"binary_data_size": size}}


def as_tensors(served: Served, *, is_text: bool, binary: bool) -> list[Heads]:
    body, inputs = b"", list[Fields]()
    for name, array in tensors_for(served, is_text=is_text).items():
        content = encoded(array) if binary else b""
        inputs.append(input_of(name, array, len(content) if binary else None))
        body += content
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": binary}}).encode()
    kind = "application/octet-stream" if binary else "application/json"
    length = {"Inference-Header-Content-Length": str(len(head))}
    response = served.post(f"/v2/models/{served.name}/infer", head + body, kind, **length)
    size = int(response.headers.get("Inference-Header-Content-Length", len(response.content)))
    answer, rest = json.loads(response.content[:size]), response.content[size:]
    tensors = {}
    for one in answer["outputs"]:
        values = one.get("data")
        if values is None:
            length_of = one["parameters"]["binary_data_size"]
            values, rest = decoded(one["datatype"], rest[:length_of]), rest[length_of:]
        tensors[one["name"]] = typed(one["datatype"], values).reshape(one["shape"])
    assert not rest
    return rows_of(tensors)


def as_call(served: Served, *, is_text: bool) -> list[Heads]:
    """Call gRPC, with texts in ``contents`` and with ids as raw bytes."""
    request = MESSAGES["ModelInferRequest"](model_name=served.name)
    for name, array in tensors_for(served, is_text=is_text).items():
        tensor = request.inputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        if is_text:
            values = getattr(tensor.contents, CONTENTS[tensor.datatype])
            values.extend(one.encode() if array.dtype == object else one for one in array.ravel())
        else:
            request.raw_input_contents.append(encoded(array))
    with grpc.insecure_channel(served.server.grpc) as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        response = MESSAGES["ModelInferResponse"].FromString(call(request.SerializeToString()))
    tensors = {}
    for one, content in zip(response.outputs, response.raw_output_contents, strict=True):
        values = typed(one.datatype, decoded(one.datatype, content))
        tensors[one.name] = values.reshape(one.shape)
    return rows_of(tensors)


DTYPES = {"FP32": np.float32, "INT64": np.int64, "BOOL": np.bool_, "BYTES": object}
CONTENTS = {"FP32": "fp32_contents", "INT64": "int64_contents", "BYTES": "bytes_contents"}


def datatype_of(array: NDArray[Any]) -> str:
    return next(name for name, dtype in DTYPES.items() if array.dtype == dtype)


def typed(datatype: str, values: Any) -> Any:
    return np.array(values, DTYPES[datatype])


def decoded(datatype: str, content: bytes) -> Any:
    if datatype != "BYTES":
        return np.frombuffer(content, DTYPES[datatype])
    strings = []
    while content:
        end = 4 + int.from_bytes(content[:4], "little")
        strings.append(content[4:end].decode())
        content = content[end:]
    return strings


def rows_of(tensors: dict[str, Any]) -> list[Heads]:
    """Return the tensors of each head for each document, without their padding."""
    found: list[Heads] = [{} for _ in TEXTS]
    for name, values in tensors.items():
        head, _, field = name.rpartition(".")
        if field in ("tokens_total", "tokens_used"):
            head = DOCUMENT
        for row, value in enumerate(values):
            if head in served_heads.FOR_TOKENS and field != "spans":
                used = tensors["tokens_used"][row]
                assert (value[used:] == (-1 if field == "labels" else 0)).all()
                value = value[:used]
            fields = found[row].setdefault(head or "logits", {})
            fields[field] = json.loads(value) if field == "spans" else np.array(value).tolist()
    return found


def tensors_of(head: str, fields: Fields) -> Fields:
    """Return an answer as its tensors have it."""
    if head == DOCUMENT:
        return {name: fields[name] for name in ("tokens_total", "tokens_used")}
    found = single_precision(fields)
    for name in fields.keys() & {"scores", "calibrated", "values"}:
        if isinstance(fields[name], dict):
            found[name] = [*found[name].values()]
    if head == "flags":
        found["labels"] = [one in fields["labels"] for one in served_heads.FLAGS]
    if head == "tags":
        found["labels"] = [served_heads.TAGS.index(one) for one in fields["labels"]]
        found["spans"] = fields["spans"]
    return found


def by_output(served: Served, path: str, given: Any) -> Iterator[tuple[str, Any]]:
    """Yield the response of an adapter for each output with labels."""
    heads = [name for name in served.bundle.manifest.heads if name in LABELS]
    for head in heads:
        yield head, served.post(f"{path}?output={head}", given).json()


def vllm(served: Served, given: Sequence[Any]) -> list[Heads]:
    responses = dict(by_output(served, "/classify", {"model": served.name, "input": given}))
    for response in responses.values():
        assert [one.pop("index") for one in response["data"]] == [*range(len(TEXTS))]
    return [{n: one["data"][row] for n, one in responses.items()} for row in range(len(TEXTS))]


def vllm_form(head: str, fields: Fields) -> Fields:
    scores = fields["scores"]
    return {
        "label": fields.get("label", max(scores, key=scores.get)),
        "probs": [*scores.values()],
        "num_classes": len(scores),
    }


def tei_labels(served: Served, given: Sequence[Any]) -> list[Heads]:
    responses = dict(by_output(served, "/predict", {"inputs": given}))
    return [{n: rows[row] for n, rows in responses.items()} for row in range(len(TEXTS))]


def tei_form(head: str, fields: Fields) -> list[Fields]:
    rows = [{"score": score, "label": label} for label, score in fields["scores"].items()]
    return sorted(rows, key=lambda row: -row["score"])


def tei_vectors(served: Served, given: Sequence[Any]) -> list[Heads]:
    rows = served.post("/embed", {"inputs": given}).json()
    return [{"embedding": row} for row in rows]


def decisions(served: Served, given: Sequence[Any]) -> list[Heads]:
    heads = {n: h.names for n, h in served.bundle.manifest.heads.items() if n in ONE_LABEL}
    questions = [
        {"type": "choice", "name": name, "instructions": "", "choices": [{"value": v} for v in vs]}
        for name, vs in heads.items()
    ]
    flags = served_heads.FLAGS if "flags" in served.bundle.manifest.heads else ()
    questions += [{"type": "predicate", "name": name, "instructions": ""} for name in flags]
    found = []
    for document in given:
        body = {"model": served.name, "input": document, "questions": questions}
        answers = served.post("/v1/decisions", body).json()["answers"]
        one = {name: answers.pop(0) for name in heads}
        found.append(one | ({"flags": [each["probability"] for each in answers]} if flags else {}))
    return found


def decision_form(head: str, fields: Fields) -> Any:
    scores = fields["scores"]
    if head == "flags":
        return [*scores.values()]
    return {
        "type": "choice",
        "name": head,
        "choice": fields["label"],
        "confidence": fields["calibrated"][fields["label"]],
        "probabilities": [{"value": n, "probability": p} for n, p in scores.items()],
    }


@dataclass(frozen=True)
class Interface:
    """An interface."""

    ask: Callable[[Served], list[Heads]]
    """A function that returns the answers of the server for all documents."""
    form: Callable[[str, Fields], Any] = lambda head, fields: fields
    """A function of a head and of its answer by ``Predictor``, in the interface's form."""
    models: Sequence[str] = tuple(HEADS)
    is_text: bool = True
    """Whether the documents are sent as texts, which spans then have."""
    heads: Sequence[str] | None = None
    """The heads that the interface has a form for; None for all, and for evidence."""


NO_EVIDENCE = (*HEADS["every head"], "logits", DOCUMENT)
NUMBERS = [ids.tolist() for ids in IDS]
INTERFACES = {
    "JSON text": Interface(as_single_json, models=OF_TEXTS),
    "JSON texts": Interface(lambda served: as_json(served, "texts"), models=OF_TEXTS),
    "JSON ids": Interface(lambda served: as_json(served, served.form), is_text=False),
    "text": Interface(lambda served: as_body(served, "text/plain"), models=PLAIN),
    "bytes": Interface(
        lambda served: as_body(served, "application/octet-stream"), is_text=False,
        models=("every head",),
    ),
    "npy": Interface(as_arrays, is_text=False, models=(*PLAIN, "features")),
    "lines": Interface(as_lines),
    "instances": Interface(as_instances),
    "invocations": Interface(as_invocations, models=OF_TEXTS),
    "streamed parts": Interface(as_parts, models=OF_TEXTS),
    "client": Interface(by_client),
    "client lines": Interface(by_client_lines),
    "client stream": Interface(by_client_stream),
    "batch rows": Interface(
        as_rows, lambda _, fields: single_precision(fields), heads=NO_EVIDENCE
    ),
    "predict lines": Interface(as_predict_lines, heads=NO_EVIDENCE),
    "tensors": Interface(
        lambda served: as_tensors(served, is_text=True, binary=False), tensors_of,
        models=PLAIN, heads=NO_EVIDENCE,
    ),
    "tensors of ids": Interface(
        lambda served: as_tensors(served, is_text=False, binary=False), tensors_of,
        is_text=False, heads=NO_EVIDENCE,
    ),
    "binary tensors": Interface(
        lambda served: as_tensors(served, is_text=True, binary=True), tensors_of,
        models=PLAIN, heads=NO_EVIDENCE,
    ),
    "binary tensors of ids": Interface(
        lambda served: as_tensors(served, is_text=False, binary=True), tensors_of,
        is_text=False, heads=NO_EVIDENCE,
    ),
    "gRPC texts": Interface(
        lambda served: as_call(served, is_text=True), tensors_of, models=PLAIN,
        heads=NO_EVIDENCE,
    ),
    "gRPC ids": Interface(
        lambda served: as_call(served, is_text=False), tensors_of, is_text=False,
        heads=NO_EVIDENCE,
    ),
} | {
    f"{name}{suffix}": Interface(
        lambda served, ask=ask, given=given: ask(served, given), form, PLAIN, not suffix, heads
    )
    for name, ask, form, heads in (
        ("vLLM", vllm, vllm_form, LABELS),
        ("TEI labels", tei_labels, tei_form, LABELS),
        ("TEI vectors", tei_vectors, lambda _, one: one["vector"], ["embedding"]),
        ("decisions", decisions, decision_form, LABELS),
    )
    for suffix, given in (
        ("", [[text] for text in TEXTS] if name == "TEI labels" else TEXTS), (" of ids", NUMBERS),
    )
}  # fmt: skip
CASES = [
    pytest.param(name, model, head, id=f"{name}-{model}-{head}")
    for name, one in INTERFACES.items()
    for model in one.models
    for head in (*HEADS[model], DOCUMENT, *([EVIDENCE] if model in QUERIES else []))
    if one.heads is None or head in one.heads
]


@pytest.fixture(scope="module")
def ask(every: dict[str, Served]) -> Callable[[str, str], list[Heads]]:
    """A function that returns the answers of an interface and of a model, asked once."""
    return cache(lambda name, model: INTERFACES[name].ask(every[model]))


@pytest.mark.parametrize(("name", "model", "head"), CASES)
def test_interface_equals_predictor(
    name: str, model: str, head: str, every: dict[str, Served], ask: Callable[..., list[Heads]]
) -> None:
    interface, served = INTERFACES[name], every[model]
    expected = served.of_texts if interface.is_text else served.of_ids
    found = [answer[head] for answer in ask(name, model)]
    assert found == [interface.form(head, answer[head]) for answer in expected]
    assert all(found)


def by_pytorch(head: str, output: Tensor, tokens: int) -> dict[str, Any]:
    """Compute the numbers of an answer in float64."""
    doublings = float(np.log2(np.clip(tokens, 16, 1024)))
    logs = [one.log_temperature + one.slope * doublings for one in FLAG_SCALINGS]
    scaled = output / np.exp(logs[0])
    match head:
        case "topic" | "logits":
            return {"scores": output.softmax(0), "calibrated": scaled.softmax(0)}
        case "paid":
            both, calibrated = torch.cat([-output, output]), torch.cat([-scaled, scaled])
            return {"scores": both.sigmoid(), "calibrated": calibrated.sigmoid()}
        case "flags":
            bias = torch.tensor([one.bias for one in FLAG_SCALINGS])
            calibrated = output / torch.tensor(logs).exp() + bias
            return {"scores": output.sigmoid(), "calibrated": calibrated.sigmoid()}
        case "age":
            return {"values": output * 12.5 + 40}
        case "tags":
            places = output.argmax(1).tolist()
            return {"scores": output.softmax(1).amax(1), "labels": places}
        case "embedding":
            return {"vector": output / output.norm()}
    return {"vectors": output}


def outputs_of(served: Served, number: int, classifier: DocumentClassifier) -> dict[str, Tensor]:
    """Return the outputs of PyTorch for a document."""
    document = torch.from_numpy(served.documents[number])[None]
    lengths = torch.tensor([document.shape[1]])
    with torch.inference_mode():
        match served.model:
            case "every head":
                return served_heads.outputs(document[0].tolist())
            case "one label":
                return {"logits": classifier(document, lengths)[0].double()}
            case "extra inputs":
                assert served.extras is not None
                batch = served.extras[number].batch()
                given = {name: torch.from_numpy(values) for name, values in batch.items()}
                given["static"] = given["static"].double()
                model = input_models.Events().double().eval()
                return {"logits": model(document, lengths=lengths, **given)[0]}
        normalized = (document - torch.tensor(input_models.MEAN)) / torch.tensor(input_models.SCALE)
        return {"logits": input_models.Sensors().double().eval()(normalized.double(), lengths)[0]}


@pytest.mark.parametrize(("model", "head"), [(m, head) for m in HEADS for head in HEADS[m]])
def test_predictor_equals_pytorch(
    model: str, head: str, every: dict[str, Served], classifier: DocumentClassifier
) -> None:
    served = every[model]
    for number, answer in enumerate(served.of_ids):
        output = outputs_of(served, number, classifier)[head]
        found = tensors_of(head, answer[head])
        expected = by_pytorch(head, output, len(served.documents[number]))
        if model not in CALIBRATIONS:
            del expected["calibrated"]
        for field, values in expected.items():
            np.testing.assert_allclose(found[field], values, rtol=1e-4, atol=1e-4)
        scores = answer[head].get("scores")
        if head in ONE_LABEL:
            assert answer[head]["label"] == max(scores, key=scores.get)
        if head == "flags":
            limits = zip(scores.items(), (0.5, 0.9), strict=True)
            assert answer[head]["labels"] == [n for (n, score), limit in limits if score >= limit]


@pytest.mark.parametrize(
    ("model", "head"), [(m, head) for m, d in CALIBRATIONS.items() for head in d]
)
def test_uncertain_answers_abstain(model: str, head: str, every: dict[str, Served]) -> None:
    served = every[model]
    threshold = CALIBRATIONS[model][head].threshold
    assert threshold is not None
    for answer in (one[head] for one in served.of_ids):
        held = answer.get("labels", [answer.get("label")])
        sure = [p if name in held else 1 - p for name, p in answer["calibrated"].items()]
        least = min(sure) if head == "flags" else answer["calibrated"][answer["label"]]
        assert answer["abstain"] is (least < threshold.confidence)
    info = http.get(f"{served.server.http}/info").json()["head_calibrations"]
    assert info[head] == CALIBRATIONS[model][head].model_dump(mode="json")


@pytest.mark.parametrize("model", HEADS)
def test_metadata_lists_tensors(model: str, every: dict[str, Served]) -> None:
    served = every[model]
    path = f"{served.server.http}/v2/models/{served.name}"
    known = http.get(path).json()
    inputs = tensors_for(served, is_text=False)
    if model != "features":
        inputs = tensors_for(served, is_text=True) | inputs
    wanted = {name: (datatype_of(array), array.ndim) for name, array in inputs.items()}
    found = {one["name"]: (one["datatype"], len(one["shape"])) for one in known["inputs"]}
    assert found == wanted
    single = json.dumps({"inputs": [input_of(*one) for one in inputs.items() if one[0] != "text"]})
    outputs = served.post(f"/v2/models/{served.name}/infer", single.encode()).json()["outputs"]
    for one, other in zip(outputs, known["outputs"], strict=True):
        assert [one[n] for n in ("name", "datatype")] == [other[n] for n in ("name", "datatype")]
        pairs = zip(one["shape"], other["shape"], strict=True)
        assert all(size == known or known == -1 for size, known in pairs)
