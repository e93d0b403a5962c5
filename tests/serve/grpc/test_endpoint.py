"""Deadlines, cancellation, API keys, health, TLS and the end of a server with gRPC."""

import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from select import select

import grpc
import pytest
from altered_bundles import ENDLESS, hanging_bundle
from clients import ANSWER, GET, eventually, metric
from commands import run_python, without
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_servers import (
    GrpcServer,
    call_unread,
    frames,
    ids_request,
    infer_request,
    method,
    serving_grpc,
)
from memory import NEEDS_PROC, resident_mib
from servers import make_certificate, needs_openssl

from aftserve.api.api_keys import make_key
from aftserve.grpc.wire_types import MESSAGES, SERVICE
from aftserve.settings import Settings

MODEL = "endless_model"


@pytest.fixture(scope="module")
def hanging(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endpoint") / f"{MODEL}.bundle"
    return hanging_bundle(Path(shutil.copytree(bundle_folder, folder)))


@pytest.fixture(scope="module")
def served(hanging: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    log = tmp_path_factory.mktemp("endpoint-log") / "log"
    with serving_grpc(hanging, log) as server:
        yield server
        assert "Traceback" not in log.read_text("utf-8")


_CHECK = "/grpc.health.v1.Health/Check"


def running(server: GrpcServer) -> float:
    return metric(server.http, "aftserve_running_documents")


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=15)


def counted(server: GrpcServer, status: str) -> float:
    path = f"/{SERVICE}/ModelInfer"
    return metric(server.http, "aftserve_responses_total", path=path, status=status)


def ended(server: GrpcServer) -> float:
    return counted(server, "DEADLINE_EXCEEDED") + counted(server, "CANCELLED")


def test_deadline_of_call_stops_its_work(served: GrpcServer) -> None:
    with grpc.insecure_channel(served.grpc) as channel:
        with pytest.raises(grpc.RpcError) as raised:
            method(channel, "ModelInfer")(ids_request(MODEL, [ENDLESS]), timeout=1)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        eventually(lambda: running(served) == 0, "the run stops")
        # The client cancels at its deadline, which a busy server can see long before its own.
        eventually(lambda: ended(served) == 1, "the call is counted")


def test_cancelled_call_stops_its_work(served: GrpcServer) -> None:
    before = counted(served, "CANCELLED")
    with grpc.insecure_channel(served.grpc) as channel:
        call = method(channel, "ModelInfer").future(ids_request(MODEL, [ENDLESS]))
        eventually(lambda: running(served) == 1, "the document runs")
        call.cancel()
        eventually(lambda: running(served) == 0, "the run stops")
        eventually(lambda: counted(served, "CANCELLED") == before + 1, "the call is counted")


@contextmanager
def silent_call(channel: grpc.Channel) -> Iterator[grpc.Future]:
    """A call that has sent its headers, and sends no message."""
    end = threading.Event()

    def messages() -> Iterator[bytes]:
        end.wait()
        yield from ()

    call = channel.stream_unary(f"/{SERVICE}/ModelInfer").future(messages())
    try:
        yield call
    finally:
        call.cancel()
        end.set()


def test_message_must_arrive_in_time(bundle_folder: Path, tmp_path: Path) -> None:
    """A call without its message holds the whole buffer, until its time is over."""
    sizes = ("--max-body-mib", "1", "--max-buffered-mib", "1", "--receive-seconds", "2")
    with serving_grpc(bundle_folder, tmp_path / "log", *sizes) as server:
        with grpc.insecure_channel(server.grpc) as channel, silent_call(channel) as silent:
            assert silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "did not arrive within 2 s" in silent.details()
            answer = method(channel, "ModelInfer")(ids_request("model", [5, 6]))
            assert answer.model_name == "model"
        path = f"/{SERVICE}/ModelInfer"
        labels = {"path": path, "status": "DEADLINE_EXCEEDED"}
        assert metric(server.http, "aftserve_responses_total", **labels) == 1


def test_call_without_message_ends_at_stop(bundle_folder: Path, tmp_path: Path) -> None:
    with (
        serving_grpc(bundle_folder, tmp_path / "log") as server,
        grpc.insecure_channel(server.grpc) as channel,
        silent_call(channel) as silent,
    ):
        method(channel, "ModelInfer")(ids_request("model", [5, 6]))  # it comes after the headers
        server.process.send_signal(signal.SIGTERM)
        assert silent.code() is not grpc.StatusCode.OK
        assert server.process.wait(20) == 0  # before --receive-seconds and --shutdown-seconds


@pytest.mark.slow
def test_own_deadline_of_server_has_status(hanging: Path, tmp_path: Path) -> None:
    with (
        serving_grpc(hanging, tmp_path / "log", "--deadline-seconds", "1") as server,
        grpc.insecure_channel(server.grpc) as channel,
    ):
        with pytest.raises(grpc.RpcError) as raised:
            method(channel, "ModelInfer")(ids_request(MODEL, [ENDLESS]))
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "was not answered by its deadline" in raised.value.details()


def test_api_key_is_needed_and_limited(bundle_folder: Path, tmp_path: Path) -> None:
    (key, section), (slow, limited) = make_key("any", None), make_key("slow", "1/hour")
    (tmp_path / "keys").write_text(f"{section}\n{limited}")
    options = ("--api-keys", str(tmp_path / "keys"))
    with (
        serving_grpc(bundle_folder, tmp_path / "log", *options) as server,
        grpc.insecure_channel(server.grpc) as channel,
    ):
        infer, request = method(channel, "ModelInfer"), ids_request("model", [5, 6])
        assert method(channel, "ServerLive")(MESSAGES["ServerLiveRequest"]()).live
        for metadata in (None, [("x-api-key", "wrong")], [("authorization", f"Basic {key}")]):
            with pytest.raises(grpc.RpcError) as raised:
                infer(request, metadata=metadata)
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with silent_call(channel) as silent:  # the key is checked before the message arrives
            assert silent.code() is grpc.StatusCode.UNAUTHENTICATED
        infer(request, metadata=[("authorization", f"Bearer {key}")])
        infer(request, metadata=[("x-api-key", slow)])
        with pytest.raises(grpc.RpcError) as raised:
            infer(request, metadata=[("x-api-key", slow)])
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 3000 < int(dict(raised.value.trailing_metadata())["retry-after"]) <= 3600


def test_two_different_keys_are_refused(bundle_folder: Path, tmp_path: Path) -> None:
    (first, one), (second, two) = make_key("first", None), make_key("second", None)
    (tmp_path / "keys").write_text(f"{one}\n{two}")
    options = ("--api-keys", str(tmp_path / "keys"))
    with (
        serving_grpc(bundle_folder, tmp_path / "log", *options) as server,
        grpc.insecure_channel(server.grpc) as channel,
    ):
        infer, request = method(channel, "ModelInfer"), ids_request("model", [5, 6])
        for name in ("x-api-key", "authorization"):
            start = "Bearer " if name == "authorization" else ""
            keys = [(name, start + first), (name, start + first)]
            infer(request, metadata=keys)
            infer(request, metadata=[*keys, ("authorization", "Basic YTpi")])
            for other in (second, "unknown"):
                for metadata in ([*keys, (name, start + other)], [(name, start + other), *keys]):
                    with pytest.raises(grpc.RpcError) as raised:
                        infer(request, metadata=metadata)
                    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
                    assert "got two different ones" in raised.value.details()
        with pytest.raises(grpc.RpcError) as raised:
            infer(request, metadata=[("x-api-key", first), ("authorization", f"Bearer {second}")])
        assert "got two different ones" in raised.value.details()


@NEEDS_PROC
def test_large_messages_without_key_are_refused(bundle_folder: Path, tmp_path: Path) -> None:
    """Their bytes are refused before memory holds many of them."""
    (tmp_path / "keys").write_text(make_key("any", None)[1])
    options = ("--api-keys", str(tmp_path / "keys"))
    with (
        serving_grpc(bundle_folder, tmp_path / "log", *options) as server,
        ExitStack() as stack,
    ):
        before, most, content = resident_mib(server.process.pid), 0.0, bytes(15 << 20)
        local = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.insecure_channel(server.grpc, options=local) for _ in range(20)]
        calls = [stack.enter_context(one).unary_unary(_CHECK).future(content) for one in channels]
        while not all(call.done() for call in calls):
            most = max(most, resident_mib(server.process.pid))
        assert {call.code() for call in calls} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert most - before < 150  # MiB; 20 messages are 300, and twice that for a moment


@NEEDS_PROC
def test_many_empty_values_are_refused(served: GrpcServer) -> None:
    """Their parsed form would have a hundred times their bytes."""
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1]}
    request = infer_request(MODEL, {**tensor, "contents": {"bytes_contents": [b""] * (7 << 20)}})
    content = request.SerializeToString()
    before, most = resident_mib(served.process.pid), 0.0
    with grpc.insecure_channel(served.grpc) as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(content)
        while not call.done():
            most = max(most, resident_mib(served.process.pid))
        assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "at most 16384 fields" in call.details()
    assert most - before < 100


def test_slow_small_messages_lose_turns(bundle_folder: Path, tmp_path: Path) -> None:
    """Clients that announce a message without a key hold up no check of the health."""
    with (
        serving_grpc(bundle_folder, tmp_path / "log") as server,
        ExitStack() as stack,
        grpc.insecure_channel(server.grpc) as channel,
    ):
        slow = [
            stack.enter_context(call_unread(server.grpc, _CHECK, b"a", announced_bytes=1 << 20))
            for _ in range(12)
        ]
        serving = health_pb2.HealthCheckResponse.SERVING
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=20).status == serving
        refused = b"Too many messages"
        eventually(
            lambda: any(
                refused in one.recv(1 << 16, socket.MSG_PEEK) for one in select(slow, [], [], 0)[0]
            ),
            "a slow message loses its turn",
        )


@pytest.mark.slow
def test_client_may_send_keepalive_pings(hanging: Path, tmp_path: Path) -> None:
    assert Settings().grpc_min_ping_seconds < 10  # the least that clients of gRPC allow
    pings = [("grpc.keepalive_time_ms", 300), ("grpc.http2.max_pings_without_data", 0)]
    options = ("--grpc-min-ping-seconds", "0.1")
    with (
        serving_grpc(hanging, tmp_path / "log", *options) as server,
        grpc.insecure_channel(server.grpc, options=pings) as channel,
    ):
        with pytest.raises(grpc.RpcError) as raised:
            method(channel, "ModelInfer")(ids_request(MODEL, [ENDLESS]), timeout=3)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.slow
def test_silent_client_is_dead(hanging: Path, tmp_path: Path) -> None:
    """It answers no ping, as a machine that has lost its power."""
    request = ids_request(MODEL, [ENDLESS]).SerializeToString()
    with (
        serving_grpc(hanging, tmp_path / "log", "--grpc-ping-seconds", "1") as server,
        call_unread(server.grpc, f"/{SERVICE}/ModelInfer", request) as call,
    ):
        eventually(lambda: running(server) == 1, "the document runs")
        assert [*frames(call)]  # until the server closes the connection
        eventually(lambda: running(server) == 0, "the run stops")


@pytest.mark.slow
def test_health_service_follows_readiness(bundle_folder: Path, tmp_path: Path) -> None:
    serving, gone = health_pb2.HealthCheckResponse.SERVING, grpc.StatusCode.NOT_FOUND
    with serving_grpc(bundle_folder, tmp_path / "log", "--drain-seconds", "3") as server:
        with grpc.insecure_channel(server.grpc) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for name in ("", SERVICE):
                assert stub.Check(health_pb2.HealthCheckRequest(service=name)).status == serving
            with pytest.raises(grpc.RpcError) as raised:
                stub.Check(health_pb2.HealthCheckRequest(service="other"))
            assert raised.value.code() is gone
            watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=30)
            assert next(watching).status == serving
            others = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=30) for _ in range(50)]
            assert [next(one).status for one in others[:49]] == [serving] * 49
            with pytest.raises(grpc.RpcError, match="which clients share"):
                next(others[49])  # the places that are left are those of other clients
            server.process.send_signal(signal.SIGTERM)
            assert next(watching).status == health_pb2.HealthCheckResponse.NOT_SERVING
            method(channel, "ModelInfer")(ids_request("model", [5, 6]))  # it drains
            assert list(watching) == []
            assert watching.code() is grpc.StatusCode.OK
        assert server.process.wait(20) == 0  # long before --shutdown-seconds


def test_unread_watch_holds_up_no_call(bundle_folder: Path, tmp_path: Path) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    with (
        serving_grpc(bundle_folder, tmp_path / "log") as server,
        call_unread(server.grpc, "/grpc.health.v1.Health/Watch") as unread,
        grpc.insecure_channel(server.grpc) as channel,
    ):
        assert unread.recv(65536)  # the server has begun to answer
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(3):
            assert stub.Check(health_pb2.HealthCheckRequest(), timeout=20).status == serving
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


def test_stop_answers_accepted_calls(bundle_folder: Path, tmp_path: Path) -> None:
    with serving_grpc(bundle_folder, tmp_path / "log", "--threads", "1") as server:
        with grpc.insecure_channel(server.grpc) as channel:
            infer = method(channel, "ModelInfer")
            calls = [infer.future(ids_request("model", [7] * 100_000)) for _ in range(8)]
            eventually(
                lambda: metric(server.http, "aftserve_waiting_documents") >= 4, "documents wait"
            )
            accepted = metric(server.http, "aftserve_waiting_documents")
            server.process.send_signal(signal.SIGTERM)
            codes = [call.code() for call in calls]
        assert server.process.wait(30) == 0
    # UNAVAILABLE: the call arrived after the server had stopped to accept calls.
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    assert codes.count(grpc.StatusCode.OK) >= accepted


@pytest.mark.slow
def test_second_signal_ends_calls(hanging: Path, tmp_path: Path) -> None:
    with (
        serving_grpc(hanging, tmp_path / "log") as server,
        grpc.insecure_channel(server.grpc) as channel,
        connect(server.http) as idle,
    ):
        idle.sendall(GET)
        received = b""
        while ANSWER not in received:
            part = idle.recv(65536)
            assert part, received
            received += part
        call = method(channel, "ModelInfer").future(ids_request(MODEL, [ENDLESS]))
        eventually(lambda: running(server) == 1, "the document runs")
        server.process.send_signal(signal.SIGINT)
        eventually(lambda: "gRPC refuses" in server.log.read_text("utf-8"), "it stops", seconds=5)
        assert idle.recv(65536) == b""  # HTTP ends beside gRPC, whose call still runs
        assert not call.done()
        server.process.send_signal(signal.SIGINT)
        assert call.code() is not grpc.StatusCode.OK
        server.process.wait(20)


@pytest.mark.slow
@needs_openssl
def test_certificate_is_that_of_https(bundle_folder: Path, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "grpc")
    options = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    with (
        serving_grpc(bundle_folder, tmp_path / "log", *options) as server,
        grpc.secure_channel(server.grpc, credentials) as channel,
    ):
        assert method(channel, "ServerLive")(MESSAGES["ServerLiveRequest"](), timeout=30).live


def test_taken_port_is_an_error(bundle_folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ("--port", "0", "--grpc-port", port)
        done = run_python("-m", "aftserve", bundle_folder, *words, cwd=tmp_path)
    assert done.code == 2
    assert f"gRPC: The server cannot listen at 127.0.0.1, port {port}" in done.err


def test_port_of_http_is_an_error(bundle_folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    done = run_python(
        "-m", "aftserve", bundle_folder, "--port", port, "--grpc-port", port, cwd=tmp_path
    )
    assert done.code == 2
    assert f"Expected two ports, got {port} for --port and for --grpc-port" in done.err


def test_missing_package_is_named(bundle_folder: Path, tmp_path: Path) -> None:
    words = (bundle_folder, "--grpc-port", "0")
    done = without(["grpc"], "aftserve", *words, cwd=tmp_path)
    assert done.code == 2
    assert "needs grpc, which is not installed" in done.err
    assert "[grpc]" in done.err
