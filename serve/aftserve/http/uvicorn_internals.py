"""Parts of uvicorn that it does not promise to keep: those of a connection's protocol."""

from aftexport.system.internals.versions import Versions

VERSIONS = Versions("uvicorn", "0.46", "0.54")

with VERSIONS.named():
    from uvicorn._types import ASGI3Application
    from uvicorn.protocols.http.flow_control import FlowControl
    from uvicorn.protocols.http.httptools_impl import (
        STATUS_LINE,
        HttpToolsProtocol,
        RequestResponseCycle,
    )

ATTRIBUTES = (
    "FlowControl.pause_reading",
    "FlowControl.resume_reading",
    "HttpToolsProtocol._start_asgi_task",
    "HttpToolsProtocol._unset_keepalive_if_required",
    "HttpToolsProtocol.on_body",
    "HttpToolsProtocol.on_header",
    "HttpToolsProtocol.on_headers_complete",
    "HttpToolsProtocol.on_message_begin",
    "HttpToolsProtocol.on_message_complete",
    "HttpToolsProtocol.on_response_complete",
    "HttpToolsProtocol.shutdown",
    "HttpToolsProtocol.timeout_keep_alive_handler",
    "HttpToolsProtocol().cycle",
    "HttpToolsProtocol().expect_100_continue",
    "HttpToolsProtocol().flow",
    "HttpToolsProtocol().headers",
    "HttpToolsProtocol().loop",
    "HttpToolsProtocol().parser",
    "HttpToolsProtocol().pipeline",
    "HttpToolsProtocol().scheme",
    "HttpToolsProtocol().scope",
    "HttpToolsProtocol().timeout_keep_alive_task",
    "HttpToolsProtocol().transport",
    "HttpToolsProtocol().url",
    "RequestResponseCycle().disconnected",
    "RequestResponseCycle().keep_alive",
    "RequestResponseCycle().message_event",
    "RequestResponseCycle().more_body",
    "RequestResponseCycle().response_complete",
    "RequestResponseCycle().response_started",
    "RequestResponseCycle().scope",
)
"""Attributes of these parts that this package uses; after ``()``, those of an instance."""

__all__ = [
    "STATUS_LINE",
    "ASGI3Application",
    "FlowControl",
    "HttpToolsProtocol",
    "RequestResponseCycle",
]
