"""Vectors are those of the model, and their error is an angle and a length."""

import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aftexport.errors import UsageError
from aftexport.heads import FeatureExtraction
from aftexport.heads.feature_extraction import TokenVectors

VECTORS = arrays(np.float64, (5, 4), elements=st.floats(-1e6, 1e6, width=32))


@given(VECTORS)
def test_normalized_vectors_are_those_of_pytorch(vectors: Any) -> None:
    head = FeatureExtraction(dimensions=4, normalize=True)
    expected = torch.nn.functional.normalize(torch.from_numpy(vectors), dim=-1)
    np.testing.assert_allclose(head.scores(vectors), expected, rtol=1e-12, atol=1e-300)
    assert FeatureExtraction(dimensions=4).scores(vectors) is vectors


@given(VECTORS, VECTORS)
def test_error_bounds_angle_and_length(output: Any, expected: Any) -> None:
    head = FeatureExtraction(dimensions=4)
    for one, wanted in zip(output, expected, strict=True):
        error = head.score_error(one[None], wanted[None])
        lengths = np.linalg.norm(one), np.linalg.norm(wanted)
        if min(lengths) < 1e-3:
            continue
        assert abs(lengths[0] - lengths[1]) <= error * lengths[1] * (1 + 1e-9)
        cosine = np.dot(one, wanted) / (lengths[0] * lengths[1])
        if error < 1:
            assert cosine > 0
            assert 1 - cosine**2 <= error**2 * (1 + 1e-9) + 1e-9
    assert head.flips(output, expected) == (0, None)


def test_error_is_relative_to_length() -> None:
    head = FeatureExtraction(dimensions=2)
    expected = np.array([[3.0, 4.0], [0.0, 0.0]])
    assert head.score_error(expected + np.diag([0.5, 0.0]), expected) == 0.1
    assert head.score_error(expected + np.diag([0.0, 0.25]), expected) == 0.25
    unit = FeatureExtraction(dimensions=2, normalize=True)
    assert unit.score_error(2 * expected, expected) == 0
    assert unit.score_error(-expected, expected) == pytest.approx(2)


def test_document_has_one_vector() -> None:
    head = FeatureExtraction.of_width(2, None)
    assert not head.is_per_token
    assert head.fields == {"vector": "vector"}
    answer = head.answer(np.array([0.25, -1.0]))
    assert answer.model_dump() == {"vector": (0.25, -1.0)}


@pytest.mark.parametrize("open_file", [None, tempfile.TemporaryFile])
@pytest.mark.parametrize("tokens", [0, 1, 9000])
def test_tokens_have_their_vectors(tokens: int, open_file: Any) -> None:
    head = FeatureExtraction.of_output((1, tokens, 3), None)
    assert head.is_per_token
    assert head.fields == {"vectors": "vectors"}
    rows = np.random.default_rng(0).normal(size=(tokens, 3))
    decoder = head.decoder(open_file=open_file)
    for block in np.split(rows, [tokens // 3]):
        decoder.add(block)
    result = decoder.finish()
    assert isinstance(result, TokenVectors)
    assert isinstance(result.vectors, np.memmap) == (open_file is not None and tokens > 0)
    np.testing.assert_array_equal(result.vectors, rows.astype(np.float32))
    part = result.answer(tokens // 2).model_dump()["vectors"]
    np.testing.assert_array_equal(np.reshape(part, (-1, 3)), result.vectors[tokens // 2 :])


def test_vectors_have_no_labels() -> None:
    with pytest.raises(UsageError, match=r"no labels for feature_extraction, got 2.*Leave"):
        FeatureExtraction.of_width(2, ["a", "b"])
