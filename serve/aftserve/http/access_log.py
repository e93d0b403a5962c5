"""One log line for each request."""

import logging
import re
import time
import uuid
from typing import Any

from prometheus_client import Counter
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("aftserve.request")

_NAME = re.compile(rb"[\w.:/=+-]{1,128}")
_HEADER = b"x-request-id"


def note(request: HTTPConnection, **fields: Any) -> None:
    """Adds fields to the request's line."""
    request.state.fields.update(fields)


class RequestLog:
    """ASGI middleware: names each request, times it, counts and logs its response.

    The name is the client's ``X-Request-ID`` where that is one.

    Args:
        app: the application.
        responses: counts them by path and status.
        names: whether the response gets the name; not where somebody in front sees to it.
    """

    def __init__(self, app: ASGIApp, responses: Counter, *, names: bool) -> None:
        self._app = app
        self._responses = responses
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # By the connection with the first byte: headers that trickle are part of a client's wait.
        started = scope["state"].setdefault("started", time.monotonic())
        given = dict(scope["headers"]).get(_HEADER, b"")
        name = given if _NAME.fullmatch(given) else uuid.uuid4().hex.encode()
        fields: dict[str, Any] = {"request_id": name.decode()}
        scope["state"]["fields"] = fields
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._names:
                    headers = [*message.get("headers", ()), (_HEADER, name)]
                    message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        finally:
            status = status or 500  # an error that no handler knows
            # The route's, not the request's: that would make a series for each that is asked.
            path = getattr(scope.get("route"), "path", "other")
            self._responses.labels(path, str(status)).inc()
            fields["seconds"] = round(time.monotonic() - started, 6)
            asked = scope["raw_path"].decode("ascii", "backslashreplace")
            logger.info("%s %s %d", scope["method"], asked, status, extra={"fields": fields})
