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
from aftserve.client.results import Evidence, HeadAnswer, Result, Span, Timings

__all__ = [
    "BusyError",
    "Client",
    "DeadlineError",
    "Evidence",
    "HeadAnswer",
    "InvalidRequestError",
    "NotAllowedError",
    "Result",
    "ServerError",
    "Span",
    "Timings",
    "TooLongError",
    "UnavailableError",
]
