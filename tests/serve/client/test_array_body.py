from io import BytesIO
from typing import Any

import numpy as np
import pytest

from aftserve.client.request import ArrayBody


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
