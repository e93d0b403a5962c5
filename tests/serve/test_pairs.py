"""Pairs of texts in every interface, whose answers are those of ``Predictor``."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import text_pairs
from clients import http
from grpc_servers import GrpcServer, infer_request, serving_grpc
from text_pairs import NLI, PAIRS, PASSAGES, QUERY

from aftexport.bundle.bundle import Bundle
from aftexport.errors import InputError, UsageError
from aftexport.verify.documents import read_documents
from aftserve.batch import documents
from aftserve.cli import main
from aftserve.client import Client, InvalidRequestError
from aftserve.grpc.wire_types import MESSAGES, SERVICE
from aftserve.predictor import Predictor
from aftserve.types import TextPair

SECONDS = [passage for _, passage in PAIRS]
ONE_TEXT = "This model takes pairs of texts, got one text. Send text and text_pair in JSON."


@pytest.fixture(scope="module")
def server(pair_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    log = tmp_path_factory.mktemp("pairs") / "log"
    with serving_grpc(pair_bundle, log, "--budget-tokens", "1", "--threads", "1") as server:
        yield server
    assert "Traceback" not in log.read_text("utf-8")


@pytest.fixture(scope="module")
def expected(pair_bundle: Path) -> list[dict[str, float]]:
    with Predictor(pair_bundle, threads=1) as predictor:
        return [dict(one.heads["logits"].scores) for one in predictor(PAIRS)]


@pytest.fixture(scope="module")
def nli_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_pairs.export_nli(tmp_path_factory.mktemp("nli") / "nli.bundle")


def post(server: GrpcServer, path: str, content: Any, status: int = 200, **headers: str) -> Any:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = {"Content-Type": "application/json", **headers}
    response = http.post(f"{server.http}{path}", content=body, headers=headers, timeout=60)
    assert response.status_code == status, response.text
    return response


def scores_of(results: Any) -> list[dict[str, float]]:
    return [one["heads"]["logits"]["scores"] for one in results]


def test_json_forms_give_answers(server: GrpcServer, expected: list[dict[str, float]]) -> None:
    lists = {"texts": [QUERY] * len(PAIRS), "text_pair": SECONDS}
    assert scores_of(post(server, "/infer", lists).json()["results"]) == expected
    singles = [{"text": one, "text_pair": two} for one, two in PAIRS]
    found = [post(server, "/infer", one).json() for one in singles]
    assert scores_of(found) == expected
    lines = "\n".join(map(json.dumps, singles)).encode()
    kind = {"Content-Type": "application/x-ndjson"}
    found = map(json.loads, post(server, "/infer", lines, **kind).iter_lines())
    assert scores_of(found) == expected
    answer = post(server, "/v1/models/pairs:predict", {"instances": singles}).json()
    assert scores_of(answer["predictions"]) == expected
    assert scores_of([post(server, "/invocations", singles[0]).json()]) == expected[:1]
    batch = [[[list(pair)] for pair in PAIRS], [list(pair) for pair in PAIRS]]
    one = post(server, "/predict", {"inputs": batch[1][0]}).json()
    many = post(server, "/predict", {"inputs": batch[1]}).json()
    assert [{"LABEL_0": row["score"]} for (row,) in many] == expected
    assert one == many[0]


def test_token_ids_give_answers(server: GrpcServer, expected: list[dict[str, float]]) -> None:
    tokenizer = Bundle.open(server_bundle(server)).tokenizer()
    assert tokenizer is not None
    encoded = [tokenizer.encode(*pair) for pair in PAIRS]
    types = [{"token_type_ids": one.type_ids} for one in encoded]
    body = {"input_ids": [one.ids for one in encoded], "inputs": types}
    assert scores_of(post(server, "/infer", body).json()["results"]) == expected


def server_bundle(server: GrpcServer) -> Path:
    return Path(server.process.args[3])  # type: ignore[index]


def test_client_sends_pairs(server: GrpcServer, expected: list[dict[str, float]]) -> None:
    with Client(server.http) as client:
        found = [client.infer(PAIRS), list(client.infer_each(PAIRS, batch_size=3))]
        with client.stream(PAIRS[0]) as answer:
            assert not list(answer)
        found.append([answer.result])
        with pytest.raises(InvalidRequestError, match="got one text"):
            client.infer("a")
    for results in found:
        assert scores_of(map(asdict, results)) == expected[: len(results)]  # type: ignore[call-overload]


def test_tensors_give_answers(server: GrpcServer, expected: list[dict[str, float]]) -> None:
    scores = [np.float32(one["LABEL_0"]) for one in expected]
    texts = {"text": [QUERY] * len(PAIRS), "text_pair": SECONDS}
    described = [
        {"name": name, "datatype": "BYTES", "shape": [len(PAIRS)], "data": values}
        for name, values in texts.items()
    ]
    answer = post(server, "/v2/models/pairs/infer", {"inputs": described}).json()
    outputs = {one["name"]: one["data"] for one in answer["outputs"]}
    np.testing.assert_array_equal(np.float32(outputs["logits.scores"]), scores)
    inputs = [
        {k: v for k, v in one.items() if k != "data"}
        | {"contents": {"bytes_contents": [text.encode() for text in one["data"]]}}
        for one in described
    ]
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        found = call(infer_request("pairs", *inputs).SerializeToString())
    response = MESSAGES["ModelInferResponse"].FromString(found)
    named = dict(
        zip((one.name for one in response.outputs), response.raw_output_contents, strict=True)
    )
    np.testing.assert_array_equal(np.frombuffer(named["logits.scores"], np.float32), scores)
    names = [one["name"] for one in http.get(f"{server.http}/v2/models/pairs").json()["inputs"]]
    assert names == ["text", "text_pair", "input_ids", "lengths", "token_type_ids"]


TYPES = {"token_type_ids": [0]}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/infer", {"text": "a"}, 422, ONE_TEXT),
        ("/infer", b"a", 422, ONE_TEXT),
        ("/infer", {"text_pair": "a"}, 422, "give exactly one of text"),
        ("/infer", {"texts": ["a"], "text_pair": "b"}, 422, "as a list with texts"),
        ("/infer", {"texts": ["a"], "text_pair": ["b", "c"]}, 422, "for each of 1 texts, got 2"),
        ("/infer", {"input_ids": [[2]], "text_pair": ["b"]}, 422, "as a list with texts"),
        ("/infer", {"input_ids": [[2]], "text_pair": []}, 422, "as a list with texts"),
        ("/infer", {"text": "a", "text_pair": []}, 422, "as a list with texts"),
        ("/infer", {"text": "a", "text_pair": "b", "inputs": TYPES}, 422, "Leave token_type_ids"),
        ("/infer", {"text": "a", "text_pair": "b " * 60}, 413, "at most 48 tokens"),
        ("/infer", {"text": "a", "text_pair": "b " * 5000}, 413, "at most 48 tokens"),
        ("/classify", {"input": "a"}, 422, "got one text"),
        ("/predict", {"inputs": ["a", "b", "c"]}, 422, "or two of a pair, got 3 values"),
        ("/v2/models/pairs/infer", {"inputs": [{"name": "text", "datatype": "BYTES",
          "shape": [1], "data": ["a"]}]}, 422, "The inputs must be text and text_pair, or"),
    ],
)  # fmt: skip
def test_other_forms_are_refused(
    path: str, body: Any, status: int, message: str, server: GrpcServer
) -> None:
    kind = {"Content-Type": "text/plain"} if isinstance(body, bytes) else {}
    assert message in post(server, path, body, status, **kind).text


def test_model_of_one_text_refuses_pairs(bundle_folder: Path) -> None:
    with Predictor(bundle_folder) as predictor, pytest.raises(InputError, match="got a pair"):
        predictor([("a", "b")])


def test_labels_and_chunks_of_pairs(nli_bundle: Path) -> None:
    """Three labels of NLI; a pair beyond the memory budget runs in chunks with its types."""
    model, tokenizer = text_pairs.PairMean().double(), Bundle.open(nli_bundle).tokenizer()
    assert tokenizer is not None
    pairs = [*PAIRS, ("Ada met Grace " * 3000, "in Istanbul " * 3000)]
    with Predictor(nli_bundle, memory_budget_mib=1) as predictor:
        answers = predictor(pairs)
        assert answers[-1].tokens_used > predictor._open().classifier.whole_tokens
    for pair, answer in zip(pairs, answers, strict=True):
        one = tokenizer.encode(*pair)
        given = (text_pairs.torch.tensor([x]) for x in (one.ids, one.type_ids))
        ids, types = given
        logits = model(ids, text_pairs.torch.tensor([ids.shape[1]]), types)[0]
        wanted = dict(zip(NLI, logits.softmax(0).tolist(), strict=True))
        assert answer.scores == pytest.approx(wanted, abs=1e-5)


def test_evidence_names_its_text(nli_bundle: Path) -> None:
    with Predictor(nli_bundle) as predictor:
        answers = predictor(PAIRS, evidence=20, evidence_tokens=1)
    spans = [(n, one) for n, a in enumerate(answers) for one in getattr(a.evidence, "spans", ())]
    shown = [(n, one) for n, one in spans if one.text is not None]
    assert {one.text_pair for _, one in shown} == {False, True}
    for number, one in shown:
        assert PAIRS[number][bool(one.text_pair)][one.start : one.end] == one.text
    assert all(one.text_pair is None for _, one in spans if one.text is None)
    with Predictor(nli_bundle) as predictor:
        (wide,) = predictor(PAIRS[:1], evidence=1, evidence_tokens=64, evidence_check=1)
    assert wide.evidence is not None


def test_batch_reads_second_column(pair_bundle: Path, tmp_path: Path) -> None:
    table = {"text": [QUERY, None, "a"], "text_pair": ["b", "c", None]}
    pq.write_table(pa.table(table), tmp_path / "pairs.parquet")
    found = documents.find(tmp_path / "pairs.parquet", text=None, id=None)
    assert found.with_inputs(["text_pair"]).inputs == ("text_pair",)  # type: ignore[attr-defined]
    block = pa.table({"text": table["text"], "input:text_pair": table["text_pair"]})
    first, *others = documents.texts_of(block, 100)
    assert first == TextPair(QUERY, "b")
    assert all(isinstance(one, InputError) for one in others)
    assert list(documents.fields_of(block)) == [{}] * 3
    pq.write_table(pa.table({"text": ["a"], "text_pair": [1]}), tmp_path / "pairs.parquet")
    found = documents.find(tmp_path / "pairs.parquet", text=None, id=None)
    with pytest.raises(UsageError, match=r"'text_pair' of .* must hold strings, got int64"):
        found.with_inputs(["text_pair"])


def test_verify_reads_pairs(pair_bundle: Path, tmp_path: Path) -> None:
    bundle, file = Bundle.open(pair_bundle), tmp_path / "pairs.jsonl"
    tokenizer = bundle.tokenizer()
    assert tokenizer is not None
    file.write_text(json.dumps({"text": QUERY, "text_pair": PASSAGES[0]}))
    (inputs,) = read_documents(file, bundle.manifest, tokenizer).values()
    assert inputs["token_type_ids"].tolist() == [tokenizer.encode(*PAIRS[0]).type_ids]
    file.write_text(json.dumps({"text": QUERY}))
    with pytest.raises(UsageError, match="expected text and text_pair, two strings"):
        read_documents(file, bundle.manifest, tokenizer)


def test_files_of_pairs_are_predicted(
    pair_bundle: Path,
    expected: list[dict[str, float]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"text": QUERY, "text_pair": passage} for passage in SECONDS]
    files = [tmp_path / f"pairs{suffix}" for suffix in (".csv", ".jsonl", ".parquet")]
    table = pa.Table.from_pylist(rows)
    pyarrow.csv.write_csv(table, files[0])
    files[1].write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(table, files[2])
    assert main(["predict", *map(str, (pair_bundle, *files))]) == 0
    scores = scores_of(map(json.loads, capsys.readouterr().out.splitlines()))
    for found, wanted in zip(scores, expected * len(files), strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
