import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from aftexport.bundle.features import Features
from aftexport.errors import InputError
from aftserve.errors import BusyError
from aftserve.model.feature_tokens import FeatureSpace, FeatureTokens, FeatureWriter

COUNT = 64
FEATURES = Features(names=tuple(map(str, range(COUNT))), mean=(1.0,) * COUNT, scale=(2.0,) * COUNT)
LARGE = 64_000
"""Tokens of 16 MiB."""


def written(tokens: int, space: FeatureSpace, block: int = 1000) -> FeatureTokens:
    writer = FeatureWriter(FEATURES, tokens, space)
    for start in range(0, tokens, block):
        places = np.arange(start, min(start + block, tokens), dtype=np.float32)
        writer.add(np.repeat(places[:, None], COUNT, 1))
    return writer.finish()


@pytest.mark.parametrize("tokens", [1, 999, 5000])
def test_parts_are_read_back(tokens: int, tmp_path: Path) -> None:
    space = FeatureSpace(tmp_path, 1 << 30)
    document = written(tokens, space)
    assert (space.used_bytes > 0) is (tokens == 5000)
    assert len(document) == tokens
    expected = (np.arange(tokens, dtype=np.float32) - 1) / 2
    np.testing.assert_array_equal(document[:][:, 5], expected)
    for part in (slice(0, 1), slice(tokens // 2, tokens), slice(tokens - 1, None), slice(3, 3)):
        np.testing.assert_array_equal(document[part][:, 0], expected[part])
    assert document.tolist()[-1] == [float(expected[-1])] * COUNT
    assert document[:].dtype == np.float32


def test_space_is_bounded_and_given_back(tmp_path: Path) -> None:
    space = FeatureSpace(tmp_path, 3 << 20)
    document = written(8000, space)
    assert space.used_bytes == 8000 * COUNT * 4
    with pytest.raises(BusyError, match="Too many large documents"):
        written(8000, space)
    assert len(written(10, space)) == 10  # a small document takes no space
    assert not list(tmp_path.iterdir())  # the file has no name
    del document
    gc.collect()
    assert space.used_bytes == 0
    again = written(8000, space)
    assert space.used_bytes == again[:].nbytes


def test_refused_document_gives_space_back(tmp_path: Path) -> None:
    space = FeatureSpace(tmp_path, 1 << 30)
    writer = FeatureWriter(FEATURES, LARGE, space)
    writer.add(np.zeros((5, COUNT)))
    bad = np.zeros((4, COUNT))
    bad[2] = np.inf
    with pytest.raises(InputError, match="of token 7"):
        writer.add(bad)
    assert space.used_bytes
    del writer
    gc.collect()
    assert space.used_bytes == 0


def test_memory_is_that_of_a_block(tmp_path: Path) -> None:
    space = FeatureSpace(tmp_path, 1 << 30)
    tracemalloc.start()
    try:
        document = written(LARGE, space)
        for start in range(0, LARGE, 1000):
            document[start : start + 1000].sum()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert space.used_bytes == 16_384_000
    assert peak < 2_500_000
