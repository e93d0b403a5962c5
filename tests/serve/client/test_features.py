"""Documents of features by every method of the client, against a real server."""

import json
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from input_models import FEATURES, MEAN, SCALE
from servers import Stub, listening

from aftserve.client import (
    BusyError,
    Client,
    InvalidRequestError,
    NotAllowedError,
    Result,
    ServerError,
    TooLongError,
)
from aftserve.client.request import ArrayBody

MAX_TOKENS = 450_000
"""Maximum of the session's server of features."""


@pytest.fixture
def asking(feature_server: str) -> Iterator[Client]:
    with Client(feature_server) as client:
        yield client


def measured(tokens: int) -> Any:
    return np.random.default_rng(tokens).normal(MEAN, SCALE, (tokens, FEATURES))


def test_failed_document_does_not_stop_others(asking: Client) -> None:
    documents = [measured(2), measured(MAX_TOKENS + 1), np.full((1, FEATURES), np.nan), measured(4)]
    first, long, bad, last = asking.infer_each(features=documents)
    assert isinstance(first, Result)
    assert isinstance(last, Result)
    assert isinstance(long, TooLongError)
    assert isinstance(bad, InvalidRequestError)
    assert "got nan for the feature" in bad.detail


@pytest.mark.parametrize("status", [401, 404, 429])
def test_error_of_server_stops_all(status: int) -> None:
    """Only an error of one document is yielded."""

    class Handler(Stub):
        def post(self, body: bytes) -> None:
            assert body.startswith(b"\x93NUMPY")
            assert len(body) == 128 + 4 * 2 * FEATURES
            self.answer(status, b'{"detail": "no"}')

    with listening(Handler) as address, Client(address, retries=0) as client:
        answers = client.infer_each(features=[measured(2)])
        if status == 429:
            (answer,) = answers
            assert isinstance(answer, BusyError)
            return
        with pytest.raises(NotAllowedError if status == 401 else InvalidRequestError):
            next(answers)


def test_extra_inputs_are_sent_beside_features() -> None:
    """The server has a place for them in JSON only."""
    contents = list[Any]()

    class Handler(Stub):
        def post(self, body: bytes) -> None:
            contents.append([json.loads(line) for line in body.splitlines()])
            self.answer(404, b'{"detail": "no"}')

    one, given = measured(2), {"static": [1]}
    with listening(Handler) as address, Client(address, retries=0) as client:
        with pytest.raises(InvalidRequestError):
            list(client.infer_each(features=[one], inputs=[given]))
        with pytest.raises(InvalidRequestError), client.stream(features=one, inputs=given):
            pass
    assert contents == [
        [{"input_features": one.tolist(), "inputs": given}],
        [{"input_features": [one.tolist()], "inputs": [given]}],
    ]


def test_exactly_one_kind_is_given(asking: Client) -> None:
    with pytest.raises(TypeError, match="exactly one"):
        list(asking.infer_each())
    with pytest.raises(TypeError, match="exactly one"):
        list(asking.infer_each(["text"], features=[measured(1)]))
    with pytest.raises(TypeError, match="exactly one"), asking.stream():
        pass
    with pytest.raises(TypeError, match="exactly one"), asking.stream("a", features=measured(1)):
        pass


def test_other_arrays_are_refused(asking: Client) -> None:
    with pytest.raises(ValueError, match="must be an array of numbers"):
        list(asking.infer_each(features=[np.zeros(3)]))
    with (
        pytest.raises(ServerError, match="got float32"),
        asking.stream(features=np.zeros((3, 9))),
    ):
        pass


@pytest.mark.parametrize("tokens", [0, 1, 70_000])
def test_body_is_a_file_of_numpy(tokens: int) -> None:
    array = np.random.default_rng(0).standard_normal((tokens, 5))
    body = ArrayBody(array)
    for _ in range(2):  # a retry sends it again
        content = b"".join(body)
        assert len(content) == len(body)
        np.testing.assert_array_equal(np.load(BytesIO(content)), array.astype(np.float32))
    assert (len(content) - 4 * array.size) % 64 == 0


@pytest.mark.parametrize("value", [np.zeros(3), np.zeros((1, 2, 3)), np.array([["a"]]), [[1.0]], 5])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="must be an array of numbers"):
        ArrayBody(value)
