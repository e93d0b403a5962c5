"""The configuration of one output of a model."""

from collections.abc import Sequence
from dataclasses import dataclass

from aftexport.errors import UsageError
from aftexport.heads import HEADS, Head, TokenHead
from aftexport.nn.settings import check_choice, check_count

_POOLINGS = ("mean", "attention", "none")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The configuration of one output of a model.

    Attributes:
        problem_type: the task of the output, by the names of transformers; one of
            ``aftexport.heads.HEADS``.
        num_labels: number of outputs: of classes, of values, or 1 for a binary classification;
            None for feature_extraction, whose vectors have ``dim`` numbers.
        pooling: the reduction of the tokens to one vector, mean or attention; none for the vector
            or the values of each token, in feature_extraction and regression. A
            token_classification pools nothing.

    Raises:
        UsageError: if a value is not one of the choices or not a count, or two values do not fit
            together.
    """

    problem_type: str = "single_label_classification"
    num_labels: int | None = None
    pooling: str = "mean"

    def __post_init__(self) -> None:
        check_choice("problem_type", self.problem_type, tuple(HEADS))
        check_choice("pooling", self.pooling, _POOLINGS)
        is_vector = not HEADS[self.problem_type].is_named
        check_count("num_labels", self.num_labels, is_optional=is_vector)
        if is_vector and self.num_labels is not None:
            raise UsageError(
                f"num_labels must be null for {self.problem_type}, got {self.num_labels}.",
                "Set dim to the number of numbers in a vector.",
            )
        if self.pooling == "none" and not self.is_per_token:
            raise UsageError(
                f"pooling must be mean or attention for {self.problem_type}, got 'none'.",
                "Choose mean or attention.",
            )

    @property
    def is_per_token(self) -> bool:
        """Whether the output has a row for each token of a document."""
        kind = HEADS[self.problem_type]
        if not issubclass(kind, TokenHead):
            return False
        return self.pooling == "none" or not kind.takes_documents

    def head(self, dim: int, names: Sequence[str] | None) -> Head:
        """Return the meaning of the output.

        Args:
            dim: the channels of the model.
            names: the names of the classes or values; None for numbered names.

        Raises:
            UsageError: if the names do not fit.
        """
        width = dim if self.num_labels is None else self.num_labels
        shape = (1, 1, width) if self.is_per_token else (1, width)
        return HEADS[self.problem_type].of_output(shape, names)
