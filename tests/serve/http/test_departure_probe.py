"""Clients that leave before their answer, and clients that only end their side."""

import asyncio
import socket
import threading
import time
from typing import Any

import pytest
from clients import BODY, GET, POST, head, raw_connection, read_to_end
from servers import address_of, running

SENT = {
    "GET": (GET, 1),
    "POST": (POST, 1),
    "chunks": (head(None) + b"e\r\n" + BODY + b"\r\n0\r\n\r\n", 1),
    "long body": (head(300_014) + BODY + b" " * 300_000, 1),
    "HTTP/1.0": (POST.replace(b"HTTP/1.1", b"HTTP/1.0"), 1),
    "three": (POST * 3, 3),
    "GET and POST": (GET + POST, 2),
    "incomplete second body": (GET + POST[:-1], 1),
    "incomplete second head": (GET + GET[:-1], 1),
    "incomplete body": (POST[:-1], 0),
    "incomplete head": (GET[:-1], 0),
    "nothing": (b"", 0),
}
"""The bytes before a client ends its side, and the number of answers."""


@pytest.mark.parametrize("at_once", [True, False], ids=["pipelined", "later"])
def test_disconnect_cancels_running_request(at_once: bool) -> None:
    """The running request hears of the disconnect, though another request follows it."""
    runs, left = threading.Event(), threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    with running(app) as server:
        with raw_connection(address_of(server)) as connection:
            connection.sendall(GET * 2 if at_once else GET)
            assert runs.wait(60)
            if not at_once:
                time.sleep(0.2)  # by then the connection reads again
                connection.sendall(GET)
                time.sleep(0.2)
        assert left.wait(60)


@pytest.mark.parametrize(("sent", "answers"), SENT.values(), ids=SENT)
def test_half_closed_client_gets_its_answers(sent: bytes, answers: int, address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert read_to_end(connection).count(b"HTTP/1.1 200 ") == answers


def test_half_closed_client_gets_interim_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has left refuses the interim responses; its request is cancelled."""
    monkeypatch.setattr("aftserve.http.connection._PROBE_SECONDS", 0.05)
    go_on, left = threading.Event(), threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/leave":
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()
            return
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    with running(app) as server, raw_connection(address_of(server)) as connection:
        with raw_connection(address_of(server)) as leaving:
            leaving.sendall(GET.replace(b"/healthz", b"/leave"))
            leaving.shutdown(socket.SHUT_WR)
            assert leaving.recv(len(interim)) == interim
            assert not left.is_set()
        assert left.wait(30)
        connection.sendall(GET)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(len(interim)) == interim
        go_on.set()
        *interims, answer = read_to_end(connection).split(interim)
        assert answer.startswith(b"HTTP/1.1 204 ")
        assert set(interims) <= {b""}
