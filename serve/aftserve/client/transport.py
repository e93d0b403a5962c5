"""A single request to the server: its response, or an error with the reason."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2

from aftserve.client.results import (
    BusyError,
    DeadlineError,
    InvalidRequestError,
    UnavailableError,
    error_of,
    parse_retry_after,
)

_PROXY_STATUSES = (500, 502, 503, 504)
"""Statuses of a proxy that lost its server; Ray Serve's proxy sends 500."""
_BUSY = 429
_PROXY_PAUSE = 1.0
"""Seconds before a retry if a proxy sends no Retry-After."""
_MALFORMED_KEY = "The API key has characters that cannot occur in one."
_MAX_SHOWN_CHARACTERS = 500


class Transport:
    """The HTTP connections to a server; InvalidRequestError if its URL or key is malformed."""

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {"X-API-Key": api_key} if api_key is not None else {}
        try:
            self._http = httpx2.Client(base_url=url, headers=headers)
        except httpx2.InvalidURL as error:
            raise InvalidRequestError(f"{url} is not a valid URL: {error}") from error
        except UnicodeEncodeError:
            raise InvalidRequestError(_MALFORMED_KEY) from None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def post(
        self, path: str, body: bytes | Iterable[bytes], headers: Mapping[str, str], seconds: float
    ) -> httpx2.Response:
        """Send a request once, and return its successful response, or raise a ServerError."""
        # The response must be complete within ``seconds``. UnavailableError also means that a proxy
        # lost the request.
        with self.stream(path, body, headers, seconds) as response, self._known_errors():
            response.read()
        return response

    @contextmanager
    def stream(
        self, path: str, body: bytes | Iterable[bytes], headers: Mapping[str, str], seconds: float
    ) -> Iterator[httpx2.Response]:
        """Send a request once as ``post``, and yield its response before its content arrives."""
        end = time.monotonic() + seconds
        request = self._http.build_request(
            "POST", path, content=body, headers=headers, timeout=seconds
        )
        with self._known_errors():
            response = self._http.send(request, stream=True)
        try:
            response.stream = _DeadlineStream(end, response.stream)
            if not response.is_success:
                with self._known_errors():
                    response.read()
            _check_status(response)
            yield response
        finally:
            response.close()

    def content(self, response: httpx2.Response) -> Iterator[bytes]:
        """Yield the content of a response of ``stream``; exceptions are those of ``post``."""
        with self._known_errors():
            yield from response.iter_bytes()

    @contextmanager
    def _known_errors(self) -> Iterator[None]:
        """Raise errors of the connection as those of the client."""
        try:
            yield
        except httpx2.TimeoutException as error:
            raise DeadlineError("The server did not answer by the deadline.") from error
        except httpx2.UnsupportedProtocol as error:
            base = self._http.base_url
            raise InvalidRequestError(f"{base} is not a valid URL: {error}") from error
        except httpx2.LocalProtocolError:
            # The message contains the header, which may be the API key.
            raise InvalidRequestError(_MALFORMED_KEY) from None
        except httpx2.RequestError as error:
            raise UnavailableError(f"{self._http.base_url}: {error}") from error


class _DeadlineStream(httpx2.SyncByteStream):
    """A body with a deadline; httpx2 only limits the time between two parts."""

    def __init__(self, end: float, stream: Any) -> None:
        self._end = end
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            if time.monotonic() > self._end:
                raise httpx2.ReadTimeout("the answer arrives too slowly")
            yield part

    def close(self) -> None:
        self._stream.close()


def _check_status(response: httpx2.Response) -> None:
    """Raise the error of a response without success; it may be of a proxy."""
    if response.is_success:
        return
    status, retry_after = response.status_code, response.headers.get("Retry-After")
    if (detail := _detail(response)) is not None:
        raise error_of(status, detail, retry_after)
    if response.has_redirect_location:  # do not send the API key to another address
        target = response.headers["Location"][:_MAX_SHOWN_CHARACTERS]
        raise InvalidRequestError(f"The server redirects to {target}. Use that URL.", status)
    text = response.text[:_MAX_SHOWN_CHARACTERS] or response.reason_phrase
    wait = parse_retry_after(retry_after)
    if status in _PROXY_STATUSES:
        raise UnavailableError(text, status, _PROXY_PAUSE if wait is None else wait)
    if status == _BUSY:
        raise BusyError(text, status, _PROXY_PAUSE if wait is None else wait)
    raise error_of(status, text, retry_after)


def _detail(response: httpx2.Response) -> str | None:
    """Return the server's own message; None if the response is not of aftserve."""
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return None
