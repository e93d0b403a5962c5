"""One or more numbers: the values are the outputs, scaled back to their units."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from annotated_types import Len
from pydantic import BaseModel, ConfigDict, model_validator

from aftexport.heads.answer import Answer, Numbers
from aftexport.heads.feature_extraction import VectorHead
from aftexport.heads.head import Double, check_distinct, numbered


class Value(BaseModel):
    """One value of a regression: ``offset + scale * output``.

    Attributes:
        name: its name.
        unit: its unit; None without one.
        minimum, maximum: the range that it can have, for those who show it; None without a bound.
            An answer outside the range is given as it is.
        scale, offset: what turns the output of the model into the value, the deviation and the
            mean of standardized targets.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: str
    unit: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    scale: float = 1.0
    offset: float = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high = self.minimum, self.maximum
        if low is not None and high is not None and low >= high:
            raise ValueError(f"expected a minimum below the maximum {high}, got {low}")
        if self.scale == 0:
            raise ValueError("expected a scale other than 0, which makes every value the same")
        return self


class ValuesAnswer(Answer):
    """The values of a document.

    Attributes:
        values: each value in its unit.
    """

    values: Numbers


class Regression(VectorHead):
    """Numbers without labels.

    Attributes:
        values: the values in the order of the outputs.
        per_token: whether every token has these values, instead of the document. Its answer then
            has a vector of the values for each token.
    """

    meaning: ClassVar[str] = "values in their units"
    answer_type: ClassVar[type[Answer]] = ValuesAnswer

    task: Literal["regression"] = "regression"
    values: Annotated[tuple[Value, ...], Len(1)]
    per_token: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_distinct("values", self.names)
        return self

    @classmethod
    def of_width(cls, width: int, names: Sequence[str] | None) -> Self:
        """Return a head of ``width`` values without units; see ``Head``."""
        return cls(values=tuple(Value(name=name) for name in numbered(width, names, "value")))

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each value."""
        return tuple(value.name for value in self.values)

    def scores(self, logits: Double) -> Double:
        """Return the values."""
        scale, offset = ([getattr(v, name) for v in self.values] for name in ("scale", "offset"))
        return np.asarray(logits * np.array(scale) + np.array(offset))

    def answer(self, logits: Double) -> Answer:
        """Return each value by its name, or the values of each token."""
        if self.per_token:
            return super().answer(logits)
        return ValuesAnswer(values=dict(zip(self.names, self.scores(logits).tolist(), strict=True)))

    def score_error(self, output: Double, expected: Double) -> float:
        """Return the largest error of a value, relative to its scale or its largest size.

        For a scale of 1 this is the error of the logits.
        """
        values, wanted = self.scores(output), self.scores(expected)
        scale = np.abs([value.scale for value in self.values])
        largest = np.abs(wanted).reshape(-1, self.width).max(0)
        return float((np.abs(values - wanted) / np.maximum(scale, largest)).max())
