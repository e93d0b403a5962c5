"""A client of the server, and its answers; ``Client`` needs httpx2, and neither server nor torch.

from aftserve.client import Client

with Client("http://localhost:8000") as client:
    print(client.infer("a long document ...").label)
    for answer in client.infer_each(open("documents.txt")):
        print(answer)
"""

from typing import TYPE_CHECKING, Any

from aftserve.client.results import (
    BusyError,
    DeadlineError,
    Evidence,
    HeadAnswer,
    InvalidRequestError,
    LabelSpan,
    NotAllowedError,
    Part,
    Result,
    ServerError,
    Span,
    StreamedAnswer,
    Timings,
    TooLongError,
    UnavailableError,
)

if TYPE_CHECKING:
    from aftserve.client.client import Client

__all__ = [
    "BusyError",
    "Client",
    "DeadlineError",
    "Evidence",
    "HeadAnswer",
    "InvalidRequestError",
    "LabelSpan",
    "NotAllowedError",
    "Part",
    "Result",
    "ServerError",
    "Span",
    "StreamedAnswer",
    "Timings",
    "TooLongError",
    "UnavailableError",
]


def __getattr__(name: str) -> Any:
    if name == "Client":
        # Only the client needs httpx2: aftserve.Predictor gives the same answers without it.
        from aftserve.client.client import Client

        return Client
    raise AttributeError(f"module 'aftserve.client' has no attribute {name!r}")
