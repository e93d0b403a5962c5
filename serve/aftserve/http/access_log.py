"""The access log, one line for each request, and HEAD requests and panics as it counts them."""

import logging
import re
import time
import uuid
from collections.abc import Callable, Container
from typing import Any

from prometheus_client import Counter
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aftexport.errors import panics_as_errors
from aftserve.http.clients import client_at, current_client
from aftserve.observability.tracing import request_id

logger = logging.getLogger("aftserve.request")

REQUEST_ID = "x-request-id"
"""The header, and the metadata of gRPC, with the name of a request."""
_NAME = re.compile(r"[\w.:/=+-]{1,128}", re.ASCII)


def add_log_fields(request: HTTPConnection, **fields: Any) -> None:
    """Add fields to the request's log line."""
    request.state.fields.update(fields)


def name_request(given: str) -> str:
    """Name the request of the current task: by its client if well-formed, else a new name."""
    name = given if _NAME.fullmatch(given) else uuid.uuid4().hex
    request_id.set(name)
    return name


class AccessLogMiddleware:
    """ASGI middleware that names and times each request, and counts and logs its response."""

    # The name is the client's ``X-Request-ID`` if that is well-formed. The state of a request has
    # its ``model``, ``headers`` of any response, ``releases`` to call after its end, and the
    # address of its client, which an API key replaces. Requests to ``probes`` are logged at the
    # level of debug, unless they fail. A proxy may send the ``names`` itself.

    def __init__(
        self, app: ASGIApp, responses: Counter, *, names: bool, probes: Container[str] = ()
    ) -> None:
        self._app = app
        self._responses = responses
        self._names = names
        self._probes = probes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The connection sets the time of the first byte, because the client's wait starts there.
        started = scope["state"].setdefault("started", time.monotonic())
        header = REQUEST_ID.encode()
        current_client.set(client_at((scope.get("client") or ("",))[0]))
        name = name_request(dict(scope["headers"]).get(header, b"").decode("latin-1"))
        fields: dict[str, Any] = {"request_id": name}
        added: dict[bytes, bytes] = {header: name.encode()} if self._names else {}
        releases = list[Callable[[], None]]()
        scope["state"] |= {"fields": fields, "headers": added, "releases": releases}
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), *added.items()]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        finally:
            status = status or 500  # an error without a handler
            # Count by the path of the route: paths of requests would create unlimited series.
            path = getattr(scope.get("route"), "path", "other")
            model = scope["state"].get("model", "")
            self._responses.labels(path, str(status), model).inc()
            fields["seconds"] = round(time.monotonic() - started, 6)
            asked = scope["raw_path"].decode("ascii", "backslashreplace")
            is_quiet = path in self._probes and status < 400
            level = logging.DEBUG if is_quiet else logging.INFO
            logger.log(level, "%s %s %d", scope["method"], asked, status, extra={"fields": fields})
            for release in releases:
                release()


class PanicMiddleware:
    """ASGI middleware that lets a panic of a library in Rust be answered as other failures are."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        with panics_as_errors():
            await self._app(scope, receive, send)


class HeadMiddleware:
    """ASGI middleware that answers HEAD like GET; uvicorn omits the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        asked = {**scope, "method": "GET"}
        try:
            await self._app(asked, receive, send)
        finally:
            scope["route"] = asked.get("route")  # responses are counted by route
