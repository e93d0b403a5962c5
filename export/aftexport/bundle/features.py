"""The features of a model whose tokens are vectors instead of ids."""

from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from annotated_types import Len
from numpy.typing import NDArray
from pydantic import ConfigDict, ValidationError, model_validator

from aftexport.errors import UsageError
from aftexport.system.contract import MAX_FEATURES
from aftexport.system.validation import StrictModel, problem

_MAX_BYTES = 16 << 20
_MAX_FLOAT = float(np.finfo(np.float32).max)
_EXAMPLE = 'Write it as {"names": ["x", "y"], "mean": [0.0, 1.5], "scale": [1.0, 0.2]}.'


class Features(StrictModel):
    """The features of each token, with their normalization."""

    model_config = ConfigDict(allow_inf_nan=False)

    names: Annotated[tuple[str, ...], Len(1, MAX_FEATURES)]
    # numbers by which values are normalized before the model runs, in float32 as `(x - mean) /
    # scale`; None for 0 and 1
    mean: tuple[float, ...] | None = None
    scale: tuple[float, ...] | None = None

    @classmethod
    def of_count(cls, count: int) -> Self:
        """Return ``count`` features with default names and without normalization."""
        return cls(names=default_names(count))

    @property
    def count(self) -> int:
        """The number of features of a token."""
        return len(self.names)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if len(set(self.names)) != self.count or not all(self.names):
            raise ValueError("names: expected a different name for each feature, none empty")
        for field in ("mean", "scale"):
            numbers = getattr(self, field)
            if numbers is None:
                continue
            if len(numbers) != self.count:
                raise ValueError(
                    f"{field}: expected a number for each of {self.count} features, got "
                    f"{len(numbers)}"
                )
            if any(abs(number) > _MAX_FLOAT for number in numbers):
                raise ValueError(f"{field}: expected numbers in the range of float32")
        if self.scale is not None and any(np.float32(number) <= 0 for number in self.scale):
            raise ValueError("scale: expected numbers above 0 in float32")
        return self

    def normalized(self, rows: NDArray[Any], *, first: int = 0) -> NDArray[np.float32]:
        """Return the model's input for values of tokens ``[n, count]``, numbered from ``first`` on.

        Raises:
            ValueError: if a value, or a normalized value, is not a finite float32.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            values = rows.astype(np.float32)
            self._check_finite(values, rows, first)
            if self.mean is not None:
                values -= np.array(self.mean, np.float32)
            if self.scale is not None:
                values /= np.array(self.scale, np.float32)
        self._check_finite(values, rows, first)
        return values

    def _check_finite(self, values: NDArray[np.float32], rows: NDArray[Any], first: int) -> None:
        if np.isfinite(values).all():
            return
        token, feature = (int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise ValueError(
            f"expected finite float32 values, got {float(rows[token, feature])} for the feature "
            f"{self.names[feature]!r} of token {first + token}"
        )


class _FeatureFile(StrictModel):
    """The content of a file of features, in which every entry is optional."""

    model_config = ConfigDict(allow_inf_nan=False)

    names: tuple[str, ...] | None = None
    mean: tuple[float, ...] | None = None
    scale: tuple[float, ...] | None = None


def default_names(count: int) -> tuple[str, ...]:
    """Return a name for each of ``count`` features."""
    return tuple(f"feature_{index}" for index in range(count))


def read_features(path: Path, count: int | None = None) -> Features:
    """Read a JSON file with ``names``, ``mean`` and ``scale`` of features, each optional."""
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise UsageError(
                f"{path}: expected at most {_MAX_BYTES} bytes of JSON, got {size}.", _EXAMPLE
            )
        content = _FeatureFile.model_validate_json(path.read_bytes())
        sizes = [len(x) for x in (content.names, content.mean, content.scale) if x is not None]
        if count is None and not sizes:
            raise UsageError(f"{path}: expected names, mean or scale, got none.", _EXAMPLE)
        number = count if count is not None else sizes[0]
        names = content.names if content.names is not None else default_names(number)
        features = Features(names=names, mean=content.mean, scale=content.scale)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}).", "Check the path.") from error
    except ValidationError as error:
        raise UsageError(f"{path}: {problem(error)}.", _EXAMPLE) from error
    if features.count != number:
        raise UsageError(
            f"{path}: expected {number} features, as the model has, got {features.count}.",
            "Describe every feature of the model.",
        )
    return features
