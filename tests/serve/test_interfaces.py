"""Every interface gives the answers of ``Predictor``, for every kind of head.

The server runs each document in a run of its own, with one thread as ``Predictor``, so that the
numbers are equal in all bits.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import served_heads
import torch
from calibrations import calibration, details
from clients import http
from grpc_servers import GrpcServer, serving_grpc
from load.every_head import Document
from load.interfaces import write_binary, write_call, write_texts

from aftexport.bundle.bundle import Bundle
from aftexport.calibration.calibrated_bundle import write_calibrated
from aftexport.heads.calibration import Scaling
from aftexport.nn import DocumentClassifier
from aftserve.batch import output
from aftserve.batch.answering import OfflineClassifier
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
LINES = "application/x-ndjson"
SCALING = Scaling(log_temperature=0.5, slope=-0.02)
CALIBRATIONS = {
    "every head": {
        "topic": calibration(SCALING, above=0.6),
        "paid": calibration(SCALING, above=0.9),
        "flags": calibration(
            SCALING, Scaling(log_temperature=-0.4, bias=0.3), method="platt", above=0.7
        ),
    },
    "one label": {"logits": calibration(SCALING, above=0.5)},
}
HEADS = {"every head": (*served_heads.HEADS,), "one label": ("logits",)}
"""The heads of each model."""
DOCUMENT = "document"
"""The name of the fields beside the heads, which are compared as an answer of their own."""
ONE_LABEL, LABELS = ("topic", "paid", "logits"), ("topic", "paid", "flags", "logits")


def documents(first: int) -> list[Document]:
    """Return the texts as documents; the load rig sends those with even numbers as token ids."""
    found = []
    for number, text in enumerate(TEXTS, first):
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        found.append(Document(number, text, ids))
    return found


@dataclass(frozen=True)
class Served:
    """A bundle, its server, and the answers of ``Predictor`` for texts and for token ids."""

    bundle: Bundle
    server: GrpcServer
    of_texts: list[Heads]
    of_ids: list[Heads]

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.bundle.path.stem

    def post(self, path: str, content: Any, kind: str = "application/json", **headers: str) -> Any:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"Content-Type": kind, **headers}
        response = http.post(f"{self.server.http}{path}", content=body, headers=headers)
        assert response.status_code == 200, response.text
        return response


@contextmanager
def serving_bundle(bundle: Bundle) -> Iterator[Served]:
    log = bundle.path.with_suffix(".log")
    with Predictor(bundle.path, threads=1) as predictor:
        of_texts = [heads_of(asdict(predictor(text))) for text in TEXTS]
        of_ids = [heads_of(asdict(one)) for d in documents(0) for one in predictor([d.ids])]
    with serving_grpc(bundle.path, log, "--budget-tokens", "1", "--threads", "1") as server:
        yield Served(bundle, server, of_texts, of_ids)
    assert "Traceback" not in log.read_text("utf-8")


@pytest.fixture(scope="module")
def every(
    bundle_folder: Path, heads_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Served]]:
    """Calibrated bundles of both models, and their servers."""
    folder, sources = tmp_path_factory.mktemp("interfaces"), (heads_bundle, bundle_folder)
    first, second = (
        write_calibrated(Bundle.open(source), folder / f"{i}.bundle", calibrations, details())
        for i, (source, calibrations) in enumerate(zip(sources, CALIBRATIONS.values(), strict=True))
    )
    with serving_bundle(first) as one, serving_bundle(second) as other:
        yield {"every head": one, "one label": other}


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
    return {DOCUMENT: document, **(found.get("heads") or {"logits": flat})}


def as_json(served: Served, field: str, values: Sequence[Any]) -> list[Heads]:
    results = served.post("/infer", {field: values}).json()["results"]
    return [heads_of(one) for one in results]


def as_single_json(served: Served) -> list[Heads]:
    return [heads_of(served.post("/infer", {"text": text}).json()) for text in TEXTS]


def as_body(served: Served, kind: str) -> list[Heads]:
    return [heads_of(served.post("/infer", t.encode(), kind).json()) for t in TEXTS]


def as_arrays(served: Served) -> list[Heads]:
    found = []
    for one in documents(0):
        file = BytesIO()
        np.save(file, one.ids)
        answer = served.post("/infer", file.getvalue(), "application/x-npy")
        found.append(heads_of(answer.json()))
    return found


def as_lines(served: Served) -> list[Heads]:
    body = "\n".join(json.dumps({"text": text}) for text in TEXTS).encode()
    return [heads_of(json.loads(one)) for one in served.post("/infer", body, LINES).iter_lines()]


def as_parts(served: Served) -> list[Heads]:
    found = []
    for text in TEXTS:
        response = served.post("/infer", {"text": text}, Accept=LINES)
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
        return [heads_of(asdict(one)) for one in client.infer(TEXTS)]


def by_client_lines(served: Served) -> list[Heads]:
    with Client(served.server.http) as client:
        answers = client.infer_each(TEXTS, batch_size=2)
        return [heads_of(asdict(one)) for one in answers]  # type: ignore[call-overload]


def by_client_stream(served: Served) -> list[Heads]:
    found = []
    with Client(served.server.http) as client:
        for text in TEXTS:
            with client.stream(text) as answer:
                parts = json.dumps([asdict(part) for part in answer])
                whole = heads_of(asdict(answer.result))
            found.append(joined(whole, json.loads(parts, object_hook=without_none)))
    return found


def as_rows(served: Served) -> list[Heads]:
    """Return the rows that ``aftserve batch`` writes, without its processes."""
    manifest = served.bundle.manifest
    options = (str(served.bundle.path), "--threads", "1", "--budget-tokens", "1")
    outcomes = [*OfflineClassifier(Settings.read(options)).answer(TEXTS)]
    columns = output.schema(manifest.heads, None, manifest.calibration)
    table = output.table(None, outcomes, columns, policy="exact", bundle=served.bundle.digest)
    return [single_precision(heads_of(row)) for row in table.to_pylist()]


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


def as_tensors(served: Served, write: Callable[..., Any], first: int) -> list[Heads]:
    path = f"/v2/models/{served.name}/infer"
    message = write(served.name, documents(first))
    response = served.post(path, message.body, **dict(message.headers))
    size = int(response.headers.get("Inference-Header-Content-Length", len(response.content)))
    content, rest = json.loads(response.content[:size]), response.content[size:]
    tensors = {}
    for one in content["outputs"]:
        values = one.get("data")
        if values is None:
            length = one["parameters"]["binary_data_size"]
            values, rest = decoded(one["datatype"], rest[:length]), rest[length:]
        tensors[one["name"]] = typed(one["datatype"], values).reshape(one["shape"])
    assert not rest
    return rows_of(tensors)


def as_call(served: Served, first: int) -> list[Heads]:
    message = write_call(served.name, documents(first))
    with grpc.insecure_channel(served.server.grpc) as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        response = MESSAGES["ModelInferResponse"].FromString(call(message.body))
    tensors = {}
    for one, content in zip(response.outputs, response.raw_output_contents, strict=True):
        values = typed(one.datatype, decoded(one.datatype, content))
        tensors[one.name] = values.reshape(one.shape)
    return rows_of(tensors)


DTYPES = {"FP32": np.float32, "INT64": np.int64, "BOOL": np.bool_, "BYTES": object}


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


def vllm(served: Served) -> list[Heads]:
    responses = dict(by_output(served, "/classify", {"model": served.name, "input": TEXTS}))
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


def tei_labels(served: Served) -> list[Heads]:
    responses = dict(by_output(served, "/predict", {"inputs": [[text] for text in TEXTS]}))
    return [{n: rows[row] for n, rows in responses.items()} for row in range(len(TEXTS))]


def tei_form(head: str, fields: Fields) -> list[Fields]:
    rows = [{"score": score, "label": label} for label, score in fields["scores"].items()]
    return sorted(rows, key=lambda row: -row["score"])


def tei_vectors(served: Served) -> list[Heads]:
    rows = served.post("/embed", {"inputs": TEXTS}).json()
    return [{"embedding": row} for row in rows]


def decisions(served: Served) -> list[Heads]:
    heads = {n: h.names for n, h in served.bundle.manifest.heads.items() if n in ONE_LABEL}
    questions = [
        {"type": "choice", "name": name, "instructions": "", "choices": [{"value": v} for v in vs]}
        for name, vs in heads.items()
    ]
    flags = served_heads.FLAGS if "flags" in served.bundle.manifest.heads else ()
    questions += [{"type": "predicate", "name": name, "instructions": ""} for name in flags]
    found = []
    for text in TEXTS:
        body = {"model": served.name, "input": text, "questions": questions}
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
    """An interface.

    Attributes:
        ask: a function that returns the answers of the server for all documents.
        form: a function of a head and of its answer by ``Predictor``, in the interface's form.
        is_text: whether the documents are sent as texts, which spans then have.
        heads: the heads that the interface has a form for; None for all.
    """

    ask: Callable[[Served], list[Heads]]
    form: Callable[[str, Fields], Any] = lambda head, fields: fields
    is_text: bool = True
    heads: Sequence[str] | None = None


INTERFACES = {
    "JSON text": Interface(as_single_json),
    "JSON texts": Interface(lambda served: as_json(served, "texts", TEXTS)),
    "JSON ids": Interface(
        lambda served: as_json(served, "input_ids", [one.ids.tolist() for one in documents(0)]),
        is_text=False,
    ),
    "text": Interface(lambda served: as_body(served, "text/plain")),
    "bytes": Interface(
        lambda served: as_body(served, "application/octet-stream"), is_text=False,
        heads=HEADS["every head"],
    ),
    "npy": Interface(as_arrays, is_text=False),
    "lines": Interface(as_lines),
    "streamed parts": Interface(as_parts),
    "client": Interface(by_client),
    "client lines": Interface(by_client_lines),
    "client stream": Interface(by_client_stream),
    "batch rows": Interface(as_rows, lambda _, fields: single_precision(fields)),
    "tensors": Interface(
        lambda served: as_tensors(served, write_texts, 1), tensors_of
    ),
    "binary tensors": Interface(
        lambda served: as_tensors(served, write_binary, 0), tensors_of,
        is_text=False,
    ),
    "gRPC texts": Interface(lambda served: as_call(served, 1), tensors_of),
    "gRPC ids": Interface(lambda served: as_call(served, 0), tensors_of, is_text=False),
    "vLLM": Interface(vllm, vllm_form, heads=LABELS),
    "TEI labels": Interface(tei_labels, tei_form, heads=LABELS),
    "TEI vectors": Interface(tei_vectors, lambda _, one: one["vector"], heads=["embedding"]),
    "decisions": Interface(decisions, decision_form, heads=LABELS),
}  # fmt: skip
CASES = [
    pytest.param(name, model, head, id=f"{name}-{model}-{head}")
    for name, one in INTERFACES.items()
    for model, heads in HEADS.items()
    for head in (*heads, DOCUMENT)
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


def by_pytorch(head: str, output: torch.Tensor) -> dict[str, Any]:
    """Compute the numbers of an answer in float64."""
    match head:
        case "topic" | "logits":
            return {"scores": output.softmax(0)}
        case "paid":
            return {"scores": torch.cat([-output, output]).sigmoid()}
        case "flags":
            return {"scores": output.sigmoid()}
        case "age":
            return {"values": output * 12.5 + 40}
        case "tags":
            places = output.argmax(1).tolist()
            return {"scores": output.softmax(1).amax(1), "labels": places}
        case "embedding":
            return {"vector": output / output.norm()}
    return {"vectors": output}


@pytest.mark.parametrize(("model", "head"), [(m, head) for m in HEADS for head in HEADS[m]])
def test_predictor_equals_pytorch(
    model: str, head: str, every: dict[str, Served], classifier: DocumentClassifier
) -> None:
    for one, answer in zip(documents(0), every[model].of_ids, strict=True):
        if model == "one label":
            ids = torch.tensor([one.ids.tolist()])
            with torch.inference_mode():
                output = classifier(ids, torch.tensor([ids.shape[1]]))[0].double()
        else:
            output = served_heads.outputs(one.ids.tolist())[head]
        found = tensors_of(head, answer[head])
        for field, expected in by_pytorch(head, output).items():
            np.testing.assert_allclose(found[field], expected, rtol=1e-4, atol=1e-4)
        if head in ONE_LABEL:
            scores = answer[head]["scores"]
            assert answer[head]["label"] == max(scores, key=scores.get)
        if head == "flags":
            limits = zip(answer[head]["scores"].items(), (0.5, 0.9), strict=True)
            assert answer[head]["labels"] == [n for (n, score), limit in limits if score >= limit]


@pytest.mark.parametrize("model", HEADS)
def test_metadata_lists_tensors(model: str, every: dict[str, Served]) -> None:
    served = every[model]
    path = f"{served.server.http}/v2/models/{served.name}"
    message = write_texts(served.name, documents(1))
    found = served.post(f"/v2/models/{served.name}/infer", message.body).json()["outputs"]
    known = http.get(path).json()["outputs"]
    kinds = ("name", "datatype")
    assert [[one[n] for n in kinds] for one in found] == [[one[n] for n in kinds] for one in known]
    for one, other in zip(found, known, strict=True):
        pairs = zip(one["shape"], other["shape"], strict=True)
        assert all(size == known or known == -1 for size, known in pairs)
