"""The header ``Server-Timing``, which browsers show beside the time of a request."""

from collections.abc import Sequence

from fastapi import Request

from aftserve.model.results import DocumentAnswer


def add_server_timing(request: Request, answers: Sequence[DocumentAnswer]) -> None:
    """Name the stages of a request in its response, each by the longest time of a document."""
    timings = [answer.result.timings for answer in answers]
    stages = {
        "tokenize": max(one.tokenize_seconds for one in timings),
        "queue": max(one.queue_seconds for one in timings),
        "compute": max(one.inference_seconds for one in timings),
    }
    value = ", ".join(f"{name};dur={1000 * seconds:.3f}" for name, seconds in stages.items())
    request.state.headers[b"server-timing"] = value.encode()
