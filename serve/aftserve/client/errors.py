"""Errors of requests to the server."""

import time
from email.utils import parsedate_to_datetime


class ServerError(Exception):
    """The server gave no answer.

    Attributes:
        detail: the problem and its remedy.
        status: status of the HTTP response; None without a response.
        retry_after: seconds after which a retry may succeed; None if it never will.
    """

    def __init__(
        self, detail: str, status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(f"{status}: {detail}" if status else detail)
        self.detail = detail
        self.status = status
        self.retry_after = retry_after


class InvalidRequestError(ServerError):
    """The request is malformed, or the document cannot be classified."""


class TooLongError(InvalidRequestError):
    """A document or the request is over a limit, or takes longer than the deadline by itself."""


class NotAllowedError(ServerError):
    """The API key is missing, wrong, or not allowed to do this."""


class BusyError(ServerError):
    """The queue or the API key's rate was at its limit, also at the last retry."""


class UnavailableError(ServerError):
    """The server cannot be reached, is not ready, or is stopping."""


class DeadlineError(ServerError):
    """The deadline passed."""


_KINDS = {
    401: NotAllowedError,
    403: NotAllowedError,
    413: TooLongError,
    429: BusyError,
    503: UnavailableError,
    504: DeadlineError,
}


def error_of(status: int, detail: str, retry_after: str | None = None) -> ServerError:
    """Return the error of a response, by its status and its Retry-After header."""
    kind = _KINDS.get(status, InvalidRequestError if 400 <= status < 500 else ServerError)
    return kind(detail, status, parse_retry_after(retry_after))


def parse_retry_after(retry_after: str | None) -> float | None:
    """Return the seconds of a Retry-After header, which may be a date; None if malformed."""
    if retry_after is None:
        return None
    if retry_after.isdecimal():
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
