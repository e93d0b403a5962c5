"""Errors of requests, and the HTTP status of each."""

import logging
import math
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager

from aftexport.errors import AftexportError, EngineError, InputError

logger = logging.getLogger(__name__)


@contextmanager
def document_failures(*expected: type[Exception]) -> Iterator[None]:
    """Raise an unexpected exception of one document as an EngineError, so that others go on."""
    # A panic of a library in Rust is a BaseException. The caller handles ``expected`` ones; the log
    # has the traceback of others.
    try:
        yield
    except (AftexportError, CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except expected:
        raise
    except BaseException as error:
        logger.exception("a document failed unexpectedly")
        raise EngineError(
            f"The document failed unexpectedly: {type(error).__name__}.", "See the server's log."
        ) from error


_OTHER_FILES = {
    b"%PDF-": "Extract the text of the PDF document first, for example by pdftotext.",
    b"PK\x03\x04": "Save the document, such as a .docx file, as plain text first.",
    b"\xd0\xcf\x11\xe0": "Save the Office document as plain text first.",
    b"\xff\xfe": "Convert it: iconv -f utf-16 -t utf-8.",
    b"\xfe\xff": "Convert it: iconv -f utf-16 -t utf-8.",
}
"""How to get the text of a file that is not UTF-8, by its first bytes."""


def utf8_remedy(content: bytes) -> str:
    """Return how to make text in UTF-8 of bytes that are not."""
    found = (remedy for mark, remedy in _OTHER_FILES.items() if content.startswith(mark))
    return next(found, "Convert it to UTF-8: iconv -f latin1 -t utf-8 does so for Latin-1.")


class DocumentTooLongError(InputError):
    """A document is over a limit of this server; it is refused, never cut."""


class RefusedError(AftexportError):
    """A refusal of a request for a reason other than its documents.

    Attributes:
        status: status of the HTTP response.
        retry_after: seconds after which a retry may succeed; None if it never will.
    """

    status = 503

    def __init__(self, problem: str, remedy: str, retry_after: float | None = None) -> None:
        super().__init__(problem, remedy)
        self.retry_after = None if retry_after is None else max(1, math.ceil(retry_after))

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the HTTP response."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


class UnauthorizedError(RefusedError):
    """The API key is missing or unknown, or there are two."""

    status = 401

    def __init__(self, problem: str = "This server requires a valid API key.") -> None:
        super().__init__(
            problem,
            "Send yours as the header Authorization: Bearer KEY, or X-API-Key: KEY.",
        )

    @property
    def headers(self) -> dict[str, str]:
        """Headers with the authentication scheme, as RFC 9110 requires."""
        return {"WWW-Authenticate": "Bearer"}


class ForbiddenError(RefusedError):
    """The API key is valid but not allowed to do this."""

    status = 403

    def __init__(self) -> None:
        super().__init__(
            "This API key may only classify documents.",
            "Use a key made by aftserve key NAME --admin.",
        )


class NotFoundError(RefusedError):
    """The requested resource does not exist."""

    status = 404


class BusyError(RefusedError):
    """The queue, the API key's rate or the buffer for bodies is at its limit."""

    status = 429


class DeadlineError(RefusedError):
    """The client's deadline passed."""

    status = 504

    def __init__(self) -> None:
        super().__init__(
            "The request was not answered by its deadline.",
            "Allow more time, or retry when the server is less busy.",
        )


class UnavailableError(RefusedError):
    """The server is starting, stopping, or has failed."""


class ClientGoneError(RefusedError):
    """The client has left; nginx uses the same status for this."""

    status = 499

    def __init__(self) -> None:
        super().__init__("The client left.", "Keep the connection open until the answer.")
