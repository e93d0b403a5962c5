"""A server of any ASGI application in this process, behind connections of ``aftserve``."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from clients import eventually
from prometheus_client import Counter

from aftserve.http.connection import Connection
from aftserve.observability.health import Health


async def no_content(scope: Any, receive: Any, send: Any) -> None:
    """Answer with status 204."""
    await send({"type": "http.response.start", "status": 204})
    await send({"type": "http.response.body"})


@contextmanager
def running(app: Any, seconds: float = 60, **options: Any) -> Iterator[uvicorn.Server]:
    """Serve an application in this process, behind the connections under test."""
    responses = Counter("responses", "", ["path", "status", "model"], registry=None)
    http = Connection.within(seconds, responses, Health())
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=0,
            http=http,
            ws="none",
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
            **options,
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started, "the server starts")
        yield server
    finally:
        server.should_exit = True
        thread.join()


def address_of(server: uvicorn.Server) -> str:
    host, port = server.servers[0].sockets[0].getsockname()
    return f"http://{host}:{port}"
