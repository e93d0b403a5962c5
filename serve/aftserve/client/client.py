"""A client that repeats requests until the server answers or the deadline passes."""

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Self, TypeVar, overload

import httpx

from aftserve.client.errors import (
    BusyError,
    DeadlineError,
    InvalidRequestError,
    ServerError,
    TooLongError,
    UnavailableError,
    error_of,
    seconds_of,
)
from aftserve.client.results import Result

T = TypeVar("T")

_JSON = "application/json"
_LINES = "application/x-ndjson"
_FIRST_PAUSE = 0.5
"""Seconds before the first retry of an unreachable server; doubled each time."""
_PROXY_STATUSES = (500, 502, 503, 504)
"""Statuses of a proxy that lost its server; Ray Serve's proxy sends 500."""
_BUSY = 429
_PROXY_PAUSE = 1.0
"""Seconds before a retry if a proxy sends no Retry-After."""
_JITTER = 0.1
_NO_KEY = "The API key has characters that cannot occur in one."
_GRACE = 1.0
"""Seconds after the deadline in which the server's own message about it may arrive."""


class Client:
    """A client that retries when the server says so; threads may share it.

    Args:
        url: URL of the server, ``http://host:port``.
        api_key: API key, if the server requires one.
        deadline: seconds from the call to the answer, with all retries and waits.
        retries: maximum retries if the server is busy, unavailable or unreachable.
        most_wait: maximum seconds of a wait; if the server asks for more, the call fails.

    Raises:
        ValueError: if ``retries`` is negative, or a call's deadline is not finite.
        InvalidRequestError: if ``url`` or ``api_key`` is malformed.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        deadline: float = 300.0,
        retries: int = 4,
        most_wait: float = 60.0,
    ) -> None:
        if retries < 0:
            raise ValueError(f"retries must be at least 0, got {retries}")
        headers = {"X-API-Key": api_key} if api_key is not None else {}
        try:
            self._http = httpx.Client(base_url=url, headers=headers)
        except httpx.InvalidURL as error:
            raise InvalidRequestError(f"{url} is not a valid URL: {error}") from error
        except UnicodeEncodeError:
            raise InvalidRequestError(_NO_KEY) from None
        self._deadline = deadline
        self._retries = retries
        self._most_wait = most_wait

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @overload
    def infer(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self, documents: str, *, evidence: int = 0, deadline: float | None = None
    ) -> Result: ...

    @overload
    def infer(
        self,
        documents: Sequence[str] | Sequence[Sequence[int]],
        *,
        evidence: int = 0,
        deadline: float | None = None,
    ) -> list[Result]: ...

    def infer(
        self,
        documents: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        evidence: int = 0,
        deadline: float | None = None,
    ) -> Result | list[Result]:
        """Classify one text, or several texts or documents of token ids, in one request.

        Args:
            documents: one text, several texts, or several documents of token ids.
            evidence: maximum passages of each document that support its label, up to 100.
            deadline: seconds that replace the client's own.

        Raises:
            ServerError: if a document has no answer; its subclass tells the reason.
        """
        if isinstance(documents, str):
            response = self._ask({"text": documents}, evidence, deadline)
            with _understanding():
                return Result.read(response.json())
        listed = list(documents)
        form = "texts" if all(isinstance(one, str) for one in listed) else "input_ids"
        response = self._ask({form: listed}, evidence, deadline)
        with _understanding():
            return [Result.read(result) for result in response.json()["results"]]

    def infer_each(
        self,
        documents: Iterable[str | Sequence[int]],
        *,
        at_once: int = 64,
        evidence: int = 0,
        deadline: float | None = None,
    ) -> Iterator[Result | ServerError]:
        """Classify any number of documents; one that fails does not stop the others.

        If the server was too busy for some documents of a request, only these are retried. A
        request that is too large is split in two.

        Args:
            documents: texts or token ids; consumed as needed.
            at_once: maximum documents of one request.
            evidence: see ``infer``.
            deadline: seconds for each request, or part of a split one; replaces the client's own.

        Yields:
            A result for each document, in order, or the error of that document.

        Raises:
            ServerError: if a request as a whole has no answer.
            TypeError: if ``documents`` is one text, which would be split into letters.
            ValueError: if ``at_once`` is less than 1.
        """
        if isinstance(documents, str):
            raise TypeError("infer_each takes several documents, infer takes one")
        if at_once < 1:
            raise ValueError(f"at_once must be at least 1, got {at_once}")
        left = iter(documents)
        while batch := list(islice(left, at_once)):
            lines = [_json({"text" if isinstance(one, str) else "input_ids": one}) for one in batch]
            yield from self._ask_each(lines, evidence, deadline)

    def _ask(
        self, content: Mapping[str, Any], evidence: int, deadline: float | None
    ) -> httpx.Response:
        body = _json(content)
        return self._repeat(lambda left: self._try(_JSON, body, evidence, left), deadline)

    def _ask_each(
        self, lines: Sequence[bytes], evidence: int, deadline: float | None
    ) -> Iterator[Result | ServerError]:
        """Yield the answers of all lines; after the last retry, some may be errors."""
        answers: dict[int, Result | ServerError] = {}

        def wanted(number: int) -> bool:
            return number not in answers or isinstance(answers[number], BusyError)

        def ask(left: float) -> None:
            asked = list(filter(wanted, range(len(lines))))
            body = b"\n".join(lines[n] for n in asked)
            response = self._try(_LINES, body, evidence, left)
            with _understanding():
                # Split bytes: splitlines() of a str also splits at other line ends of Unicode.
                found = [_answer(json.loads(line)) for line in response.content.splitlines()]
                if len(found) != len(asked):
                    raise ValueError(f"{len(found)} answers to {len(asked)} documents")
            answers.update(zip(asked, found, strict=True))
            busy = [answer for answer in answers.values() if isinstance(answer, BusyError)]
            if busy:
                raise max(busy, key=lambda error: error.retry_after or 0)

        try:
            self._repeat(ask, deadline)
        except TooLongError as error:  # the request as a whole is too long
            if len(lines) == 1:
                yield error
                return
            half = len(lines) // 2
            for part in (lines[:half], lines[half:]):
                yield from self._ask_each(part, evidence, deadline)
            return
        except ServerError:
            if not answers:
                raise
        yield from (answers[n] for n in range(len(lines)))

    def _repeat(self, ask: Callable[[float], T], deadline: float | None) -> T:
        """Return the result of ``ask``, retried while the server is busy or unavailable."""
        seconds = self._deadline if deadline is None else deadline
        if not math.isfinite(seconds):
            raise ValueError(f"the deadline must be a finite number of seconds, got {seconds}")
        end = time.monotonic() + seconds
        for number in range(self._retries + 1):
            try:
                return ask(end - time.monotonic())
            except (BusyError, UnavailableError) as error:
                wait = error.retry_after
                if wait is None and error.status is None:
                    wait = _FIRST_PAUSE * 2**number
                if wait is None or number == self._retries:
                    raise
                # Spread the retries of many clients that were refused at the same time.
                wait *= 1 + random.uniform(0, _JITTER)
                if wait > self._most_wait or time.monotonic() + wait > end:
                    raise
                time.sleep(wait)
        raise AssertionError  # the last try returns or raises

    def _try(self, kind: str, body: bytes, evidence: int, left: float) -> httpx.Response:
        if left <= 0:
            raise DeadlineError("The deadline passed before the request was sent.")
        path = f"/infer?evidence={evidence}" if evidence else "/infer"
        headers = {"Content-Type": kind, "Deadline-Seconds": f"{left:.6f}"}
        try:
            response = self._post(path, body, headers, left + _GRACE)
        except httpx.TimeoutException as error:
            raise DeadlineError("The server did not answer by the deadline.") from error
        except httpx.UnsupportedProtocol as error:
            base = self._http.base_url
            raise InvalidRequestError(f"{base} is not a valid URL: {error}") from error
        except httpx.LocalProtocolError:
            # The message contains the header, which may be the API key.
            raise InvalidRequestError(_NO_KEY) from None
        except httpx.RequestError as error:
            raise UnavailableError(f"{self._http.base_url}: {error}") from error
        if response.is_success:
            return response
        status, again = response.status_code, response.headers.get("Retry-After")
        if (detail := _detail(response)) is not None:
            raise error_of(status, detail, again)
        if response.has_redirect_location:  # do not send the API key to another address
            target = response.headers["Location"]
            raise InvalidRequestError(
                f"The server redirects to {target[:500]}. Use that URL.", status
            )
        text = response.text[:500] or response.reason_phrase
        wait = seconds_of(again)
        if status in _PROXY_STATUSES:
            raise UnavailableError(text, status, _PROXY_PAUSE if wait is None else wait)
        if status == _BUSY:
            raise BusyError(text, status, _PROXY_PAUSE if wait is None else wait)
        raise error_of(status, text, again)

    def _post(
        self, path: str, body: bytes, headers: Mapping[str, str], seconds: float
    ) -> httpx.Response:
        end = time.monotonic() + seconds
        asking = self._http.stream("POST", path, content=body, headers=headers, timeout=seconds)
        with asking as response:
            response.stream = _Until(end, response.stream)
            response.read()
        return response


class _Until(httpx.SyncByteStream):
    """A body with a deadline; httpx only limits the time between two parts."""

    def __init__(self, end: float, stream: Any) -> None:
        self._end = end
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            if time.monotonic() > self._end:
                raise httpx.ReadTimeout("the answer arrives too slowly")
            yield part

    def close(self) -> None:
        self._stream.close()


@contextmanager
def _understanding() -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ServerError(f"The response is not one of aftserve: {error!r}.") from error


def _answer(content: Mapping[str, Any]) -> Result | ServerError:
    if "label" in content:
        return Result.read(content)
    again = content.get("retry_after")
    return error_of(content["status"], content["detail"], None if again is None else str(again))


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, default=_plain).encode()


def _plain(value: Any) -> Any:
    """Convert an array of token ids to a list."""
    try:
        return value.tolist()
    except AttributeError:
        raise InvalidRequestError(
            f"A document must be text or token ids, got {type(value).__name__}."
        ) from None


def _detail(response: httpx.Response) -> str | None:
    """Return the server's own message; None if the response is not of aftserve."""
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return None
