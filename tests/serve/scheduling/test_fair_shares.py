"""A client with few documents beside one that fills the queue."""

import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from altered_bundles import hanging_bundle
from clients import eventually
from grpc_servers import GrpcServer, ids_request, serving_grpc

from aftserve.api.api_keys import make_key
from aftserve.grpc.wire_types import SERVICE

_CONNECTIONS = 4


@dataclass(frozen=True)
class Shared:
    """A server, and its keys by their owners."""

    server: GrpcServer
    keys: dict[str, str]

    def post(self, owner: str, content: bytes, kind: str = "application/json") -> httpx.Response:
        headers = {"X-API-Key": self.keys[owner], "Content-Type": kind}
        url = f"{self.server.http}/infer"
        return httpx.post(url, content=content, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def shared(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """A server whose runs take milliseconds, and whose queue holds a tenth of a second of work."""
    folder = tmp_path_factory.mktemp("shares")
    bundle = hanging_bundle(Path(shutil.copytree(bundle_folder, folder / "model.bundle")))
    made = {
        owner: make_key(owner, None, tokens=tokens)
        for owner, tokens in {"greedy": None, "light": None, "limited": "6/hour"}.items()
    }
    file = folder / "keys.toml"
    file.write_text("\n\n".join(section for _, section in made.values()))
    options = ("--api-keys", str(file), "--max-queue-seconds", "0.1", "--threads", "1")
    with serving_grpc(bundle, folder / "log", *options) as server:
        yield Shared(server, {owner: key for owner, (key, _) in made.items()})


@pytest.fixture
def flooded(shared: Shared) -> Iterator[Counter[int]]:
    """The same server under one key's load; yields the statuses of that key's requests."""
    statuses, ended = Counter[int](), threading.Event()
    body = json.dumps({"input_ids": [[5] * 20] * 16}).encode()

    def flood() -> None:
        while not ended.is_set():
            statuses[shared.post("greedy", body).status_code] += 1

    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        floods = [pool.submit(flood) for _ in range(_CONNECTIONS)]
        try:
            eventually(lambda: statuses[429], "the key's share of the queue is full")
            yield statuses
        finally:
            ended.set()
    for one in floods:
        one.result()


def test_light_key_is_answered_beside_greedy(shared: Shared, flooded: Counter[int]) -> None:
    document = json.dumps({"input_ids": [[7] * 20]}).encode()
    line = json.dumps({"input_ids": [7] * 20}).encode() + b"\n"
    request = ids_request("model", [7] * 20).SerializeToString()
    metadata = [("x-api-key", shared.keys["light"])]
    with grpc.insecure_channel(shared.server.grpc) as channel:
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        for _ in range(4):
            refused = flooded[429]
            assert shared.post("light", document).status_code == 200
            lines = shared.post("light", line * 2, "application/x-ndjson")
            assert [json.loads(one).get("status") for one in lines.text.splitlines()] == [None] * 2
            assert infer(request, metadata=metadata, timeout=60)
            eventually(lambda: flooded[429] > refused, "the greedy key is refused again")  # noqa: B023
    assert flooded[200]


def test_tokens_of_key_are_limited(shared: Shared) -> None:
    document = json.dumps({"input_ids": [[7] * 4]}).encode()
    assert shared.post("limited", document).status_code == 200
    answer = shared.post("limited", document)
    assert answer.status_code == 429
    assert 0 < int(answer.headers["retry-after"]) <= 1200
    assert "6 per 1 hour in tokens" in answer.json()["detail"]
    assert shared.post("light", document).status_code == 200
    request = ids_request("model", [7] * 4).SerializeToString()
    with grpc.insecure_channel(shared.server.grpc) as channel:
        with pytest.raises(grpc.RpcError) as refusal:
            channel.unary_unary(f"/{SERVICE}/ModelInfer")(
                request, metadata=[("x-api-key", shared.keys["limited"])], timeout=60
            )
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
