"""Log lines for people or for machines, one of them for each request."""

import json
import logging
import re
import time
import uuid
from typing import Any

from prometheus_client import Counter
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aftexport.report import one_line

logger = logging.getLogger("aftserve.request")

_NAME = re.compile(rb"[\w.:/=+-]{1,128}")
_HEADER = b"x-request-id"


def configure_logging(form: str) -> None:
    """Sends every log record to standard error, one line each.

    Args:
        form: text, or json for one object each.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # Each request has a line of its own, with its name and times.
    logging.getLogger("uvicorn.access").disabled = True


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        return one_line(super().formatMessage(record) + fields)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


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
