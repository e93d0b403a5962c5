"""A client of the server; it needs httpx, and neither the server nor torch.

from aftserve.client import Client

with Client("http://localhost:8000") as client:
    print(client.infer("a long document ...").label)
    for answer in client.infer_each(open("documents.txt")):
        print(answer)
"""

from aftserve.client.client import Client
from aftserve.client.errors import (
    BusyError,
    DeadlineError,
    InvalidRequestError,
    NotAllowedError,
    ServerError,
    TooLongError,
    UnavailableError,
)
from aftserve.client.results import Evidence, HeadAnswer, LabelSpan, Result, Span, Timings
from aftserve.client.stream import Part, StreamedAnswer

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
