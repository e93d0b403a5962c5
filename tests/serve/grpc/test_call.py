"""Clients of gRPC that do not read their answer, or leave before it."""

import asyncio
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from altered_bundles import ENDLESS, hanging_bundle
from clients import eventually, metric
from grpc_servers import (
    PING,
    GrpcServer,
    call_unread,
    frames,
    ids_request,
    method,
    read_more,
    reset,
    serving_grpc,
)

from aftserve.api.api_keys import make_key
from aftserve.grpc.call import MessageBuffer
from aftserve.grpc.wire_types import MESSAGES, SERVICE

MODEL = "endless_model"
INFER = f"/{SERVICE}/ModelInfer"
SMALL = {
    f"/{SERVICE}/ServerLive": b"",
    f"/{SERVICE}/ServerReady": b"",
    f"/{SERVICE}/ServerMetadata": b"",
    f"/{SERVICE}/ModelReady": b"",
    f"/{SERVICE}/ModelMetadata": MESSAGES["ModelMetadataRequest"](name=MODEL).SerializeToString(),
    f"/{SERVICE}/RepositoryIndex": b"",
    "/grpc.health.v1.Health/Check": b"",
    "/grpc.health.v1.Health/Watch": b"",
}
KEY, SECTION = make_key("admin", None, admin=True)
KEYS = [("x-api-key", KEY)]
RUNNING = "aftserve_running_documents"


@pytest.fixture(scope="module")
def served(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    folder = tmp_path_factory.mktemp("unread")
    bundle = hanging_bundle(Path(shutil.copytree(bundle_folder, folder / f"{MODEL}.bundle")))
    (folder / "keys").write_text(SECTION)
    options = ("--api-keys", str(folder / "keys"), "--receive-seconds", "2")
    with serving_grpc(bundle, folder / "log", *options) as server:
        yield server
        text = (folder / "log").read_text("utf-8")
        assert "ERROR" not in text
        assert "Traceback" not in text


def infer(server: GrpcServer, *ids: int) -> socket.socket:
    return call_unread(server.grpc, INFER, ids_request(MODEL, [*ids]).SerializeToString(), KEYS)


def answered(server: GrpcServer, status: str = "OK") -> float:
    values = {"path": INFER, "status": status}
    return metric(server.http, "aftserve_responses_total", KEY, **values)


def test_unread_answer_ends_its_connection(served: GrpcServer) -> None:
    with ExitStack() as stack:
        calls = [infer(served, 5, 6)]
        calls += [call_unread(served.grpc, path, sent, KEYS) for path, sent in SMALL.items()]
        for one in calls:
            stack.enter_context(one)
        for one in calls:  # each ends, or its socket times out
            assert any(kind != PING for kind, _ in frames(one))


def test_trickled_answer_ends_its_connection(served: GrpcServer) -> None:
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.5):
            read_more(call, 1)

    with infer(served, 5, 6) as call:
        reader = threading.Thread(target=trickle, daemon=True)
        reader.start()
        assert [*frames(call)]
        ended.set()
        reader.join()


def test_departed_clients_are_no_errors(served: GrpcServer) -> None:
    """They leave while the model runs, and while the answer waits for them."""
    for leave in (reset, socket.socket.close):
        with infer(served, ENDLESS) as running:
            eventually(lambda: metric(served.http, RUNNING, KEY) == 1, "the document runs")
            leave(running)
            eventually(lambda: metric(served.http, RUNNING, KEY) == 0, "the run stops")
        before = answered(served)
        with infer(served, 5, 6) as unread:
            eventually(lambda: answered(served) == before + 1, "the call is answered")  # noqa: B023
            leave(unread)
    with grpc.insecure_channel(served.grpc) as channel:  # the log has no error by now
        method(channel, "ModelInfer")(ids_request(MODEL, [5, 6]), metadata=KEYS)


def test_unread_answer_holds_no_model(served: GrpcServer) -> None:
    before = answered(served)
    with infer(served, 5, 6), grpc.insecure_channel(served.grpc) as channel:
        eventually(lambda: answered(served) == before + 1, "the call is answered")
        request = MESSAGES["RepositoryModelUnloadRequest"](model_name=MODEL)
        method(channel, "RepositoryModelUnload")(request, metadata=KEYS, timeout=60)
        load = MESSAGES["RepositoryModelLoadRequest"](model_name=MODEL)
        method(channel, "RepositoryModelLoad")(load, metadata=KEYS, timeout=60)


@pytest.mark.slow
def test_unread_answer_leaves_orderly_end(bundle_folder: Path, tmp_path: Path) -> None:
    request = ids_request("model", [5, 6]).SerializeToString()
    with (
        serving_grpc(bundle_folder, tmp_path / "log", "--shutdown-seconds", "6") as server,
        call_unread(server.grpc, INFER, request),
    ):
        path = {"path": INFER, "status": "OK"}
        eventually(
            lambda: metric(server.http, "aftserve_responses_total", **path), "the call is answered"
        )
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0


async def _settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_caller_waits_for_free_bytes() -> None:
    buffer = MessageBuffer(10)
    await buffer.reserve(10, "a")
    first, second = (asyncio.create_task(buffer.reserve(6, "a")) for _ in range(2))
    await _settle()
    assert not first.done()
    buffer.release(10, "a")
    await _settle()
    assert (first.done(), second.done()) == (True, False)
    buffer.release(6, "a")
    await second


@pytest.mark.parametrize("is_late", [False, True])
async def test_cancelled_caller_holds_no_bytes(is_late: bool) -> None:
    """The cancellation comes before the bytes, or at the same moment."""
    buffer = MessageBuffer(10)
    await buffer.reserve(10, "a")
    waiting = asyncio.create_task(buffer.reserve(6, "a"))
    await _settle()
    if is_late:
        buffer.release(10, "a")
        waiting.cancel()
    else:
        waiting.cancel()
        await _settle()
        buffer.release(10, "a")
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    await asyncio.wait_for(buffer.reserve(10, "a"), 5)
