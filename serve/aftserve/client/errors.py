"""Why there is no answer."""

import time
from email.utils import parsedate_to_datetime


class ServerError(Exception):
    """There is no answer.

    Attributes:
        detail: one sentence of what is wrong and what helps.
        status: of the HTTP response; None where there was none.
        retry_after: seconds after which the server wants to be asked again, if ever.
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
    """A document or the request is over a limit, or takes longer than the deadline alone."""


class NotAllowedError(ServerError):
    """There is no API key, a wrong one, or one that may not do this."""


class BusyError(ServerError):
    """The queue or the API key's rate was at its bound, at the last try too."""


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
    """The error of a response's status; ``retry_after`` is its header's."""
    kind = _KINDS.get(status, InvalidRequestError if 400 <= status < 500 else ServerError)
    return kind(detail, status, seconds_of(retry_after))


def seconds_of(retry_after: str | None) -> float | None:
    """Of a header ``Retry-After``, which may be a date; None where it is neither."""
    if retry_after is None:
        return None
    if retry_after.isdecimal():
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
