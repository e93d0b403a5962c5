"""Documents of many lengths at once against Triton itself, where it is installed."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from rich.console import Console
from servers import free_port

from aftexport.bundle.bundle import Bundle
from aftexport.deploy.triton import write_repository
from aftexport.engines.onnxruntime import OnnxRuntimeEngine

SERVER = shutil.which("tritonserver")
pytestmark = pytest.mark.skipif(
    SERVER is None, reason="no tritonserver with the backend onnxruntime is on the PATH"
)


@pytest.fixture(scope="module")
def client(
    bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[triton.InferenceServerClient]:
    out = tmp_path_factory.mktemp("repository")
    write_repository(
        Bundle.open(bundle_folder), out, name="toy", mounted=str(out), console=Console()
    )
    port = free_port()
    words = [f"--model-repository={out}", f"--http-port={port}", "--http-address=127.0.0.1",
             "--allow-grpc=false", "--allow-metrics=false"]  # fmt: skip
    log = out.parent / "triton.log"
    with log.open("wb") as file:
        process = subprocess.Popen([str(SERVER), *words], stdout=file, stderr=file)
    client = triton.InferenceServerClient(f"127.0.0.1:{port}", concurrency=16)
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text("utf-8")
            try:
                if client.is_model_ready("toy"):
                    break
            except ConnectionRefusedError:
                time.sleep(0.1)
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait(60)


def request(ids: np.ndarray, lengths: np.ndarray) -> list[triton.InferInput]:
    feeds = {"input_ids": ids, "lengths": lengths[:, None]}
    inputs = []
    for name, array in feeds.items():
        inputs.append(triton.InferInput(name, array.shape, "INT64"))
        inputs[-1].set_data_from_numpy(array.astype(np.int64))
    return inputs


def test_the_golden_cases(client: triton.InferenceServerClient, bundle_folder: Path) -> None:
    for case in Bundle.open(bundle_folder).golden():
        if case.subject == "model":
            inputs = request(case.inputs["input_ids"], case.inputs["lengths"])
            answer = client.infer("toy", inputs)
            np.testing.assert_allclose(answer.as_numpy("logits"), case.outputs["logits"], atol=1e-4)


def test_documents_of_all_lengths_at_once(
    client: triton.InferenceServerClient, bundle_folder: Path
) -> None:
    engine = OnnxRuntimeEngine(bundle_folder / "model.onnx")
    draw = np.random.default_rng(0)
    lengths = draw.choice([1, 7, 64, 64, 64, 200, 500], 200)
    documents = [draw.integers(0, 250, (1, length)) for length in lengths]
    waiting = [client.async_infer("toy", request(ids, np.array([ids.size]))) for ids in documents]
    for ids, answer in zip(documents, waiting, strict=True):
        alone = engine.run({"input_ids": ids, "lengths": np.array([ids.size])})["logits"]
        logits = answer.get_result().as_numpy("logits")
        np.testing.assert_allclose(logits, alone, rtol=1e-4, atol=1e-5)
    [statistics] = client.get_inference_statistics("toy")["model_stats"]
    assert statistics["inference_count"] >= 200
    assert statistics["execution_count"] <= statistics["inference_count"]
