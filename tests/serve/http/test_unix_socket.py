"""A server that listens at a Unix socket and at several addresses."""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import httpx
import pytest
from clients import ANSWER, GET, http, read_to_end
from servers import serving

from aftexport.errors import UsageError
from aftserve import server
from aftserve.http.listeners import bind_unix, listen
from aftserve.settings import Settings

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "AF_UNIX"), reason="the system has no Unix sockets"
)


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    with TemporaryDirectory() as folder:  # a path of pytest may be too long for a socket
        yield Path(folder) / "socket"


@pytest.fixture(scope="module")
def address(
    bundle_folder: Path, path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    log = tmp_path_factory.mktemp("unix") / "log"
    hosts = ("--host", "127.0.0.1", "--host", "127.0.0.2")
    options = ("--uds", str(path), *hosts, "--log-level", "error")  # the addresses are not hidden
    with serving(bundle_folder, log, *options) as (address, process):
        yield address
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(str(path))
            waiting.sendall(GET)
            process.send_signal(signal.SIGTERM)
            assert ANSWER in read_to_end(waiting)
        assert process.wait(60) == 0
    assert not path.exists()
    assert f" and unix:{path} " in log.read_text("utf-8")
    assert "Traceback" not in log.read_text("utf-8")


def test_unix_socket_answers(address: str, path: Path) -> None:
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
        for length in (1, 4000):
            answer = client.post("/infer", json={"text": "a" * length})
            assert answer.json()["tokens_total"] == length
        assert client.get("/info", headers={"Host": "other.example"}).status_code == 403


def test_half_closed_unix_connection_is_answered(address: str, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(path))
        connection.sendall(GET)
        connection.shutdown(socket.SHUT_WR)
        assert ANSWER in read_to_end(connection)


def test_every_host_answers(address: str) -> None:
    port = urlsplit(address).port
    for host in ("127.0.0.1", "127.0.0.2"):
        assert http.get(f"http://{host}:{port}/info").status_code == 200


def test_port_taken_during_start_leaves_no_path(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process listens at the port after the server has bound it."""
    unused = path.with_name("unused")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = str(other.getsockname()[1])

        def listen_late(listeners: list[socket.socket], backlog: int) -> None:
            other.listen()
            listen(listeners, backlog)

        monkeypatch.setattr(server, "listen", listen_late)
        words = ["a.bundle", "--host", "127.0.0.1", "--port", port, "--uds", str(unused)]
        with pytest.raises(UsageError, match=rf"listen at 127\.0\.0\.1, port {port} "):
            server.open_listeners(Settings.read(words), 1)
    assert not unused.exists()


def test_server_keeps_path_of_another(bundle_folder: Path, path: Path, tmp_path: Path) -> None:
    """The path of a server is removed, and another process listens there before its end."""
    taken = path.with_name("taken")
    options = ("--uds", str(taken), "--host", "127.0.0.1")
    with serving(bundle_folder, tmp_path / "log", *options) as (_, process):
        taken.unlink()
        with bind_unix(taken, 1) as other:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(taken))
            other.remove_path()
    assert not taken.exists()
