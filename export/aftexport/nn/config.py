"""The configurations of models with one output, and with several."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from aftexport.errors import UsageError
from aftexport.heads import HEADS, Head, TokenHead
from aftexport.nn.encoder_config import (
    EncoderConfig,
    check_choice,
    check_count,
    check_entries,
    required_tokens,
)
from aftexport.system.contract import AXES, EVIDENCE

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


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(EncoderConfig):
    """Configuration of ``DocumentClassifier``.

    The attributes are those of ``EncoderConfig`` and those of ``HeadConfig``.
    """

    num_labels: int | None = None
    pooling: str = "mean"
    problem_type: str = "single_label_classification"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.head_config  # checks its values

    @property
    def head_config(self) -> HeadConfig:
        """The configuration of the output."""
        return HeadConfig(
            problem_type=self.problem_type, num_labels=self.num_labels, pooling=self.pooling
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return a configuration; raise UsageError if a name is unknown or missing."""
        is_vector = values.get("problem_type") == "feature_extraction"
        check_entries(
            cls, values, ["mechanism", *required_tokens(values), *["num_labels"][is_vector:]]
        )
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class MultiHeadConfig(EncoderConfig):
    """Configuration of ``MultiHeadClassifier``.

    The other attributes are those of ``EncoderConfig``.

    Attributes:
        heads: the configuration of each output, by its name.
    """

    heads: Mapping[str, HeadConfig]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.heads:
            raise UsageError("heads must have at least one output, got none.", "Add an output.")
        for name in self.heads:
            if not _NAME.fullmatch(name) or name in (*AXES, EVIDENCE):
                raise UsageError(
                    "heads must be named by 1 to 64 letters, digits and underscores, and not as "
                    f"an input or {EVIDENCE}, got {name[:80]!r}.",
                    "Rename the output.",
                )

    def meanings(self, names: Mapping[str, Any] | None) -> dict[str, Head]:
        """Return the meaning of each output.

        Args:
            names: the names of each output's classes or values; None for numbered names.

        Raises:
            UsageError: if the names do not fit, or are of an unknown output.
        """
        names = {} if names is None else names
        if unknown := sorted(set(names) - set(self.heads)):
            raise UsageError(
                f"Expected labels of the outputs {', '.join(self.heads)}, got those of "
                f"{', '.join(unknown)}.",
                "Correct the name of the output.",
            )
        return {name: head.head(self.dim, names.get(name)) for name, head in self.heads.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return a configuration; raise UsageError if a name is unknown or missing."""
        check_entries(cls, values, ["mechanism", *required_tokens(values), "heads"])
        heads = values["heads"]
        if not isinstance(heads, Mapping) or not all(
            isinstance(h, Mapping) for h in heads.values()
        ):
            raise UsageError(
                "heads must be a mapping of each output's name to its configuration, got "
                f"{str(heads)[:80]}.",
                "Write heads as {name: {problem_type: ..., num_labels: ...}}.",
            )
        for head in heads.values():
            check_entries(HeadConfig, head, [])
        return cls(**{**values, "heads": {name: HeadConfig(**h) for name, h in heads.items()}})
