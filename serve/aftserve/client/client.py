"""A client that retries a request until the server answers or the deadline passes."""

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, Self, TypeVar, overload

import httpx2

from aftserve.client.request import (
    JSON,
    Array,
    ArrayBody,
    Fields,
    Names,
    Pair,
    check_one_given,
    is_pair,
    line_of,
    path_and_headers,
    query_of,
    single_body,
    to_json,
)
from aftserve.client.results import (
    BusyError,
    Result,
    ServerError,
    StreamedAnswer,
    TooLongError,
    UnavailableError,
    error_of,
)
from aftserve.client.transport import Transport

T = TypeVar("T")

_LINES = "application/x-ndjson"
_FIRST_PAUSE = 0.5
"""Seconds before the first retry of an unreachable server; doubled each time."""
_JITTER = 0.1
_DOCUMENT_STATUSES = (413, 422, 429, 500, 504, 507)
"""Statuses of a response that concern its document, and no other one."""
_GRACE = 1.0
"""Seconds after the deadline in which the server's own error message may still arrive."""


class Client:
    """A client that retries when the server allows it; threads may share it.

    Args:
        url: URL of the server, ``http://host:port``.
        api_key: API key, if the server requires one.
        deadline: maximum seconds from a call to its answer, with all retries and waits.
        retries: maximum retries if the server is busy, unavailable or unreachable.
        max_wait_seconds: maximum wait before a retry; if the server asks for more, the call fails.

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
        max_wait_seconds: float = 60.0,
    ) -> None:
        if retries < 0:
            raise ValueError(f"retries must be at least 0, got {retries}")
        self._transport = Transport(url, api_key)
        self._deadline = deadline
        self._retries = retries
        self._max_wait_seconds = max_wait_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    @overload
    def infer(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self,
        documents: str,
        *,
        inputs: Fields | None = None,
        evidence: int = 0,
        evidence_tokens: int = 64,
        evidence_check: int = 0,
        explain: Names = (),
        outputs: Names = (),
        deadline: float | None = None,
    ) -> Result: ...

    @overload
    def infer(
        self,
        documents: Sequence[str] | Sequence[Pair] | Sequence[Sequence[int]],
        *,
        inputs: Sequence[Fields] | None = None,
        evidence: int = 0,
        evidence_tokens: int = 64,
        evidence_check: int = 0,
        explain: Names = (),
        outputs: Names = (),
        deadline: float | None = None,
    ) -> list[Result]: ...

    @overload
    def infer(
        self,
        *,
        features: Array,
        inputs: Fields | None = None,
        evidence: int = 0,
        evidence_tokens: int = 64,
        evidence_check: int = 0,
        explain: Names = (),
        outputs: Names = (),
        deadline: float | None = None,
    ) -> Result: ...

    def infer(
        self,
        documents: str | Sequence[str] | Sequence[Pair] | Sequence[Sequence[int]] | None = None,
        *,
        features: Array | None = None,
        inputs: Fields | Sequence[Fields] | None = None,
        evidence: int = 0,
        evidence_tokens: int = 64,
        evidence_check: int = 0,
        explain: Names = (),
        outputs: Names = (),
        deadline: float | None = None,
    ) -> Result | list[Result]:
        """Classify one text, or several texts or documents of token ids, in one request.

        Args:
            documents: one text, several texts, several pairs of texts as tuples, or several
                documents of token ids.
            features: one document of features instead, an array ``[tokens, features]``.
            inputs: the extra inputs by name, numbers, lists or arrays: a mapping for one text, a
                list of mappings for several documents. Features are then sent as JSON.
            evidence: maximum passages of each document that support its label, up to 100; with
                ``explain`` or ``evidence_check``, 5 in place of 0.
            evidence_tokens: maximum tokens of a passage.
            evidence_check: number of passages, up to 5, whose document runs again without them.
            explain: labels or values, ``NAME`` or ``OUTPUT:NAME``, that the passages support in
                place of the largest logit; or outputs, for the labels or values of their answers.
            outputs: the outputs to answer; all by default.
            deadline: maximum seconds until the answer; by default the client's deadline.

        Raises:
            ServerError: if a document has no answer; its subclass names the reason.
            TypeError: unless exactly one of ``documents`` and ``features`` is given.
            ValueError: if ``features`` has another shape or type.
        """
        check_one_given(documents, features)
        beside = {} if inputs is None else {"inputs": inputs}
        query = query_of(evidence, evidence_tokens, evidence_check, explain, outputs)
        if features is not None:
            return self._infer_features(features, inputs, query, deadline)
        if isinstance(documents, str):
            response = self._ask({"text": documents, **beside}, query, deadline)
            with _valid_response():
                return Result.read(response.json())
        listed = list(documents or ())
        if listed and all(map(is_pair, listed)):
            texts, seconds = zip(*listed, strict=True)
            content: dict[str, Any] = {"texts": texts, "text_pair": seconds}
        else:
            form = "texts" if all(isinstance(one, str) for one in listed) else "input_ids"
            content = {form: listed}
        response = self._ask(content | beside, query, deadline)
        with _valid_response():
            return [Result.read(result) for result in response.json()["results"]]

    def infer_each(
        self,
        documents: Iterable[str | Pair | Sequence[int]] | None = None,
        *,
        features: Iterable[Array] | None = None,
        inputs: Iterable[Fields] | None = None,
        batch_size: int = 64,
        evidence: int = 0,
        evidence_tokens: int = 64,
        evidence_check: int = 0,
        explain: Names = (),
        outputs: Names = (),
        deadline: float | None = None,
    ) -> Iterator[Result | ServerError]:
        """Classify any number of documents; one that fails does not stop the others.

        If the server is too busy for some documents of a request, only these are retried. A
        request that is too large is split in two. Each document of features has a request of its
        own, unless there are extra inputs: then they are sent as JSON.

        Args:
            documents: texts, pairs of texts as tuples, or token ids; consumed as needed.
            features: documents of features instead, arrays ``[tokens, features]``; consumed as
                needed.
            inputs: the extra inputs of each document; consumed as needed.
            batch_size: maximum documents of one request.
            evidence, evidence_tokens, evidence_check, explain, outputs: see ``infer``.
            deadline: maximum seconds of each request, or of each part of a split request; by
                default the client's deadline.

        Yields:
            A result for each document, in order, or the error of that document.

        Raises:
            ServerError: if a request as a whole has no answer.
            TypeError: if ``documents`` is a single text, or unless exactly one of ``documents`` and
                ``features`` is given.
            ValueError: if ``batch_size`` is less than 1, ``inputs`` has another length, or features
                have another shape or type.
        """
        check_one_given(documents, features)
        if isinstance(documents, str):
            raise TypeError("documents must be several texts or token ids, got one text: use infer")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        query = query_of(evidence, evidence_tokens, evidence_check, explain, outputs)
        if features is not None and inputs is None:
            for array in features:
                yield self._ask_array(ArrayBody(array), query, deadline)
            return
        fields = None if inputs is None else iter(inputs)
        name = None if features is None else "input_features"
        every: Any = documents if features is None else features
        left = (line_of(one, fields, name) for one in every)
        while lines := list(islice(left, batch_size)):
            yield from self._ask_each(lines, query, deadline)
        if fields is not None and next(fields, None) is not None:
            raise ValueError("inputs must have an entry for each document, got more")

    @contextmanager
    def stream(
        self,
        document: str | Pair | Sequence[int] | None = None,
        *,
        features: Array | None = None,
        inputs: Fields | None = None,
        evidence: int = 0,
        evidence_tokens: int = 64,
        evidence_check: int = 0,
        explain: Names = (),
        outputs: Names = (),
        deadline: float | None = None,
    ) -> Iterator[StreamedAnswer]:
        """Classify one document, and read the answers for its tokens as they arrive.

        The memory does not grow with the document. Leaving the block ends the request.

        Args:
            document: a text, a pair of texts as a tuple, or token ids.
            features: a document of features instead, an array ``[tokens, features]``.
            inputs: the extra inputs by name. Features are then sent as JSON.
            evidence, evidence_tokens, evidence_check, explain, outputs: see ``infer``.
            deadline: maximum seconds until the end of the answer; by default the client's
                deadline.

        Yields:
            The answer, which can be iterated once.

        Raises:
            ServerError: if the document has no answer; its subclass names the reason.
            TypeError: unless exactly one of ``document`` and ``features`` is given.
            ValueError: if ``features`` has another shape or type.
        """
        check_one_given(document, features)
        kind, body = single_body(document, features, inputs)
        query = query_of(evidence, evidence_tokens, evidence_check, explain, outputs)
        with ExitStack() as closing:

            def opened(left: float) -> httpx2.Response:
                path, headers = path_and_headers(kind, query, left)
                headers |= {"Accept": _LINES, "Content-Length": str(len(body))}
                response = self._transport.stream(path, body, headers, left + _GRACE)
                return closing.enter_context(response)

            response = self._repeat(opened, deadline)
            with _valid_response():
                answer = StreamedAnswer(self._transport.content(response))
            yield answer

    def _infer_features(
        self, features: Array, inputs: Any, query: str, deadline: float | None
    ) -> Result:
        """Classify one document of features."""
        if inputs is not None:  # a .npy body cannot have them
            content = {"input_features": [features], "inputs": [inputs]}
            response = self._ask(content, query, deadline)
            with _valid_response():
                return Result.read(response.json()["results"][0])
        return self._infer_array(ArrayBody(features), query, deadline)

    def _ask(
        self, content: Mapping[str, Any], query: str, deadline: float | None
    ) -> httpx2.Response:
        body = to_json(content)
        return self._repeat(lambda left: self._post(JSON, body, query, left), deadline)

    def _infer_array(self, body: ArrayBody, query: str, deadline: float | None) -> Result:
        response = self._repeat(
            lambda left: self._post(body.content_type, body, query, left), deadline
        )
        with _valid_response():
            return Result.read(response.json())

    def _ask_array(
        self, body: ArrayBody, query: str, deadline: float | None
    ) -> Result | ServerError:
        """Return the answer for features, or the error that concerns only them."""
        try:
            return self._infer_array(body, query, deadline)
        except ServerError as error:
            if error.status not in _DOCUMENT_STATUSES:
                raise
            return error

    def _ask_each(
        self, lines: Sequence[bytes], query: str, deadline: float | None
    ) -> Iterator[Result | ServerError]:
        """Yield the answers of all lines; after the last retry, some may be errors."""
        answers: dict[int, Result | ServerError] = {}

        def needs_answer(number: int) -> bool:
            return number not in answers or isinstance(answers[number], BusyError)

        def ask(left: float) -> None:
            numbers = list(filter(needs_answer, range(len(lines))))
            body = b"\n".join(lines[n] for n in numbers)
            response = self._post(_LINES, body, query, left)
            with _valid_response():
                # Split bytes: splitlines() of a str also splits at other line ends of Unicode.
                found = [_answer(json.loads(line)) for line in response.content.splitlines()]
                if len(found) != len(numbers):
                    raise ValueError(f"{len(found)} answers to {len(numbers)} documents")
            answers.update(zip(numbers, found, strict=True))
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
                yield from self._ask_each(part, query, deadline)
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
                if wait > self._max_wait_seconds or time.monotonic() + wait > end:
                    raise
                time.sleep(wait)
        raise AssertionError  # the last try returns or raises

    def _post(
        self, content_type: str, body: bytes | ArrayBody, query: str, left: float
    ) -> httpx2.Response:
        """Send a request whose answer must arrive within ``left`` seconds."""
        path, headers = path_and_headers(content_type, query, left)
        headers["Content-Length"] = str(len(body))
        return self._transport.post(path, body, headers, left + _GRACE)


@contextmanager
def _valid_response() -> Iterator[None]:
    """Raise ServerError if reading a response fails within the block."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ServerError(f"The response is not one of aftserve: {error!r}.") from error


def _answer(content: Mapping[str, Any]) -> Result | ServerError:
    if "bundle" in content:
        return Result.read(content)
    again = content.get("retry_after")
    return error_of(content["status"], content["detail"], None if again is None else str(again))
