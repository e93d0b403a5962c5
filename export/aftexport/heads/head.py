"""What a head is: the meaning of one output of a model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from aftexport.errors import UsageError
from aftexport.heads.answer import Answer, Field

Double = NDArray[np.float64]


class Head(BaseModel, ABC):
    """The meaning of one output of a model.

    The output is ``[batch, width]``, or ``[batch, tokens, width]`` for a head that answers for
    every token.

    Attributes:
        task: the kind of the head, by the names of the transformers library.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    meaning: ClassVar[str]
    """The meaning of the numbers in an answer, in a few words."""
    takes_probabilities: ClassVar[bool] = False
    """Whether a model may end in a sigmoid or a softmax: the head computes none itself."""
    is_named: ClassVar[bool] = True
    """Whether a user gives names to the numbers."""
    answer_type: ClassVar[type[Answer]]
    """The type of an answer."""
    task: str

    @classmethod
    @abstractmethod
    def of_width(cls, width: int, names: Sequence[str] | None) -> Self:
        """Return a head with the usual settings.

        Args:
            width: the number of logits of a document.
            names: the names from the user or the model file; None for numbered names.

        Raises:
            UsageError: if the head does not fit the width or the names.
        """

    @classmethod
    def of_output(cls, shape: Sequence[int], names: Sequence[str] | None) -> Self:
        """Return a head with the usual settings for an output of this shape.

        Args:
            shape: the shape ``[batch, width]``, or ``[batch, tokens, width]``.
            names: the names from the user or the model file; None for numbered names.

        Raises:
            UsageError: if the head does not fit the shape or the names.
        """
        head = cls.of_width(shape[-1], names)
        if head.is_per_token != (len(shape) == 3):
            expected = "[batch, tokens, width]" if head.is_per_token else "[batch, width]"
            raise UsageError(
                f"Expected an output {expected} for {head.task}, got shape {list(shape)}.",
                "Choose a task for outputs of this shape: token_classification, regression or "
                "feature_extraction if they have a row for every token.",
            )
        return head

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The name of each number in an answer."""

    @property
    def fields(self) -> dict[str, Field]:
        """The kind of each field that every answer has."""
        return self.answer_type.kinds()

    @property
    def logit_names(self) -> tuple[str, ...]:
        """The name of each logit."""
        return self.names

    @property
    def width(self) -> int:
        """The number of logits of a document, or of each of its tokens."""
        return len(self.logit_names)

    @property
    def is_per_token(self) -> bool:
        """Whether the head answers for every token of a document."""
        return False

    @abstractmethod
    def scores(self, logits: Double) -> Double:
        """Return the numbers of answers ``[..., len(names)]`` for logits ``[..., width]``."""

    @abstractmethod
    def answer(self, logits: Double) -> Answer:
        """Return the answer for one document.

        Args:
            logits: its logits ``[width]``, or ``[tokens, width]`` if ``is_per_token``.
        """

    def score_error(self, output: Double, expected: Double) -> float:
        """Return the error of an answer's numbers for two outputs ``[..., width]``.

        It is bounded as the error of the logits is: a probability moves by at most half of the
        difference of two logits, and by a quarter of that of one.
        """
        return float(np.abs(self.scores(output) - self.scores(expected)).max(initial=0.0))

    @abstractmethod
    def flips(self, output: Double, expected: Double) -> tuple[int, float | None]:
        """Compare the decisions for two outputs ``[..., width]``.

        Returns:
            The number of rows whose decision differs, and the smallest distance of the output from
            another decision than that of ``expected``, in logits; it is negative for a flip. None
            if the head decides nothing.
        """
