import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from aftexport.bundle.features import Features, read_features
from aftexport.errors import UsageError

NORMALIZED = Features(names=("x", "y"), mean=(1.0, -2.0), scale=(0.5, 4.0))


def written(folder: Path, content: object) -> Path:
    path = folder / "features.json"
    path.write_text(json.dumps(content), "utf-8")
    return path


def test_values_are_normalized_in_float32() -> None:
    rows = np.array([[1.5, 2.0], [0.1, -2.0]])
    found = NORMALIZED.normalized(rows)
    mean, scale = np.float32([1.0, -2.0]), np.float32([0.5, 4.0])
    np.testing.assert_array_equal(found, (rows.astype(np.float32) - mean) / scale)
    assert found.dtype == np.float32


def test_values_without_normalization_stay() -> None:
    rows = np.array([[1, 2]], np.float32)
    found = Features.of_count(2).normalized(rows)
    np.testing.assert_array_equal(found, rows)
    assert not np.shares_memory(found, rows)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_bad_value_error_names_its_place(value: float) -> None:
    with pytest.raises(
        ValueError, match=rf"got {re.escape(str(value))} for the feature 'y' of token 1"
    ):
        NORMALIZED.normalized(np.array([[0, 0], [0, value]]))


def test_overflow_of_normalization_is_refused() -> None:
    features = Features(names=("x",), scale=(1e-30,))
    with pytest.raises(ValueError, match=r"got 1e\+30 for the feature 'x' of token 0"):
        features.normalized(np.array([[1e30]]))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"names": ("x", "x")}, "different name"),
        ({"names": ("x", "")}, "none empty"),
        ({"names": ()}, "at least 1"),
        ({"names": ("x",), "mean": (1.0, 2.0)}, "mean: expected a number for each of 1"),
        ({"names": ("x",), "scale": (0.0,)}, "scale: expected numbers above 0"),
        ({"names": ("x",), "scale": (1e-60,)}, "scale: expected numbers above 0"),
        ({"names": ("x",), "mean": (1e39,)}, "range of float32"),
        ({"names": ("x",), "mean": (float("nan"),)}, "finite"),
    ],
)
def test_inconsistent_features_are_refused(content: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Features(**content)


def test_file_entries_are_optional(tmp_path: Path) -> None:
    read = read_features(written(tmp_path, {"scale": [1.0, 2.0]}))
    assert read == Features(names=("feature_0", "feature_1"), scale=(1.0, 2.0))
    read = read_features(written(tmp_path, {"names": ["a", "b"]}), 2)
    assert read == Features(names=("a", "b"))


@pytest.mark.parametrize(
    ("content", "count", "said"),
    [
        ({}, None, "expected names, mean or scale, got none"),
        ({"names": ["a"]}, 2, "expected 2 features, as the model has, got 1"),
        ({"mean": [1.0, 2.0], "scale": [1.0]}, None, "scale: expected a number for each of 2"),
        ({"name": ["a"]}, None, "name: the field is unknown"),
        ([1], None, "expected"),
    ],
)
def test_bad_file_is_refused(content: object, count: int | None, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        read_features(written(tmp_path, content), count)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json cannot be read"):
        read_features(tmp_path / "none.json")
