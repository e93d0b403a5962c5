"""Asking a server, until it answers or the deadline passes."""

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
"""Seconds before a server that could not be reached is tried again, doubled each time."""
_PROXY_STATUSES = (500, 502, 503, 504)
"""Of a proxy in between that lost the server it had asked; Ray Serve's says 500."""
_BUSY = 429
_PROXY_PAUSE = 1.0
"""Seconds before one is tried again that does not say when."""
_JITTER = 0.1
_NO_KEY = "The API key has characters that no key has."
_GRACE = 1.0
"""Seconds after the deadline in which the server's own word of it may come."""


class Client:
    """Asks a server, again where it says when; of several threads each may use it.

    Args:
        url: of the server, ``http://host:port``.
        api_key: where it asks for one.
        deadline: seconds from the call to the answer, tries and waits included.
        retries: most further tries where the server is busy, unavailable or out of reach.
        most_wait: seconds; where the server says that it takes longer, that is the end.

    Raises:
        ValueError: where ``retries`` is negative; by a call, where the deadline is not finite.
        InvalidRequestError: where ``url`` is no address, or ``api_key`` no key.
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
            raise ValueError(f"retries is {retries}, not 0 or more")
        headers = {"X-API-Key": api_key} if api_key is not None else {}
        try:
            self._http = httpx.Client(base_url=url, headers=headers)
        except httpx.InvalidURL as error:
            raise InvalidRequestError(f"{url} is no address: {error}") from error
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
        """Closes its connections."""
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
        """Classifies one text, or several texts or documents of token ids, in one request.

        Args:
            documents: to classify.
            evidence: most passages of each that speak for its label, up to 100.
            deadline: in place of the client's.

        Raises:
            ServerError: by its kind, where one of them has no answer.
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
        """Classifies any number of documents; one without an answer does not hold up others.

        Those of a request that the server was too busy for are asked again without the others, and
        those of one that was too large in two.

        Args:
            documents: texts or token ids; taken as they are needed.
            at_once: most of one request.
            evidence: see ``infer``.
            deadline: of each request, also of half of one, in place of the client's.

        Yields:
            A result for each document, in order, or the error of that document.

        Raises:
            ServerError: where a request as a whole has no answer.
            TypeError: for one text, which would be taken letter by letter.
            ValueError: where ``at_once`` is none.
        """
        if isinstance(documents, str):
            raise TypeError("infer_each takes several documents, infer takes one")
        if at_once < 1:
            raise ValueError(f"at_once is {at_once}, not 1 or more")
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
        """The answers of all lines; of those that the server was too busy for, the last."""
        answers: dict[int, Result | ServerError] = {}

        def wanted(number: int) -> bool:
            return number not in answers or isinstance(answers[number], BusyError)

        def ask(left: float) -> None:
            asked = list(filter(wanted, range(len(lines))))
            body = b"\n".join(lines[n] for n in asked)
            response = self._try(_LINES, body, evidence, left)
            with _understanding():
                # Of bytes: a text would be cut at every character that Unicode ends a line with.
                found = [_answer(json.loads(line)) for line in response.content.splitlines()]
                if len(found) != len(asked):
                    raise ValueError(f"{len(found)} answers to {len(asked)} documents")
            answers.update(zip(asked, found, strict=True))
            busy = [answer for answer in answers.values() if isinstance(answer, BusyError)]
            if busy:
                raise max(busy, key=lambda error: error.retry_after or 0)

        try:
            self._repeat(ask, deadline)
        except TooLongError as error:  # said of the whole request
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
        """What ``ask`` returns, of the seconds left, once the server is there and not busy."""
        seconds = self._deadline if deadline is None else deadline
        if not math.isfinite(seconds):
            raise ValueError(f"the deadline is {seconds}, not a number of seconds")
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
                # Of many clients that were refused at once, not all come back at once.
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
            raise InvalidRequestError(f"{self._http.base_url} is no address: {error}") from error
        except httpx.LocalProtocolError:
            # What it says holds the header, which may be the API key.
            raise InvalidRequestError(_NO_KEY) from None
        except httpx.RequestError as error:
            raise UnavailableError(f"{self._http.base_url}: {error}") from error
        if response.is_success:
            return response
        status, again = response.status_code, response.headers.get("Retry-After")
        if (detail := _detail(response)) is not None:
            raise error_of(status, detail, again)
        if response.has_redirect_location:  # the API key would go wherever that is
            target = response.headers["Location"]
            raise InvalidRequestError(f"It leads to {target[:500]}, ask there.", status)
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
    """A body that comes by an end; what httpx bounds is the time between two parts of it."""

    def __init__(self, end: float, stream: Any) -> None:
        self._end = end
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            if time.monotonic() > self._end:
                raise httpx.ReadTimeout("the answer comes too slowly")
            yield part

    def close(self) -> None:
        self._stream.close()


@contextmanager
def _understanding() -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ServerError(f"What answered is no aftserve: {error!r}.") from error


def _answer(content: Mapping[str, Any]) -> Result | ServerError:
    if "label" in content:
        return Result.read(content)
    again = content.get("retry_after")
    return error_of(content["status"], content["detail"], None if again is None else str(again))


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, default=_plain).encode()


def _plain(value: Any) -> Any:
    """Token ids that come as an array."""
    try:
        return value.tolist()
    except AttributeError:
        raise InvalidRequestError(f"A document cannot have {type(value).__name__}.") from None


def _detail(response: httpx.Response) -> str | None:
    """What the server says; None where it is not the server that speaks."""
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return None
