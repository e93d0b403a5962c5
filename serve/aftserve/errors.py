"""Why a request has no answer, and the status that says so."""

import math

from aftexport.errors import AftexportError, InputError


class DocumentTooLongError(InputError):
    """A document is over a limit of this server. It is refused, never cut."""


class RefusedError(AftexportError):
    """A request that is in order and is not answered all the same.

    Attributes:
        status: of the HTTP response.
        retry_after: seconds after which it is worth asking again; None where it never is.
    """

    status = 503

    def __init__(self, problem: str, remedy: str, retry_after: float | None = None) -> None:
        super().__init__(problem, remedy)
        self.retry_after = None if retry_after is None else max(1, math.ceil(retry_after))

    @property
    def headers(self) -> dict[str, str]:
        """Of the HTTP response."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


class UnauthorizedError(RefusedError):
    """There is no API key, or another one."""

    status = 401

    def __init__(self) -> None:
        super().__init__(
            "This server answers to API keys alone, and has none like this.",
            "Send yours as the header Authorization: Bearer KEY, or X-API-Key: KEY.",
        )

    @property
    def headers(self) -> dict[str, str]:
        """With the scheme, as RFC 9110 has it."""
        return {"WWW-Authenticate": "Bearer"}


class ForbiddenError(RefusedError):
    """The API key is known, and may not do this."""

    status = 403

    def __init__(self) -> None:
        super().__init__(
            "This API key may classify documents, no more.",
            "Use one that aftserve key NAME --admin made.",
        )


class NotFoundError(RefusedError):
    """There is nothing of that name."""

    status = 404


class BusyError(RefusedError):
    """The documents that came before take too long."""

    status = 429


class DeadlineError(RefusedError):
    """The client's deadline passed."""

    status = 504

    def __init__(self) -> None:
        super().__init__(
            "The request was not answered by its deadline.",
            "Give it more time, or send it when the server is less busy.",
        )


class UnavailableError(RefusedError):
    """The server is starting, stopping, or has failed."""


class ClientGoneError(RefusedError):
    """The client left; nobody reads this. The status is the one nginx logs."""

    status = 499

    def __init__(self) -> None:
        super().__init__("The client left.", "Nothing.")
