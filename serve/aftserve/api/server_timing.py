"""The header ``Server-Timing``, which browsers show beside the time of a request."""

from collections.abc import Mapping

from fastapi import Request


def add_server_timing(request: Request, stages: Mapping[str, float]) -> None:
    """Add the stages of a request to its response.

    Args:
        request: the request.
        stages: longest seconds of a document in each stage, by name.
    """
    value = ", ".join(f"{name};dur={1000 * seconds:.3f}" for name, seconds in stages.items())
    request.state.headers[b"server-timing"] = value.encode()
