"""A vector for a document, or for each of its tokens: an embedding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from aftexport.errors import UsageError
from aftexport.heads.answer import Answer, Field, Vector, Vectors
from aftexport.heads.head import Double, Head, numbered
from aftexport.heads.token_head import Column, Decoder, Mask, OpenFile, TokenHead, TokenResult

_MIN_NORM = 1e-12
"""The smallest divisor of a normalization, as in PyTorch: a vector of zeros stays one."""


class VectorAnswer(Answer):
    """The vector of a document.

    Attributes:
        vector: its numbers.
    """

    vector: Vector


class VectorsAnswer(Answer):
    """The vectors of a document's tokens.

    Attributes:
        vectors: the numbers of each token's vector.
    """

    vectors: Vectors


class VectorHead(TokenHead):
    """The meaning of a vector for every document or, if ``per_token``, for every token."""

    # A vector decides nothing. Each kind of head has the field per_token itself, behind its own
    # fields: a manifest lists them in this order.

    takes_probabilities: ClassVar[bool] = True
    takes_documents: ClassVar[bool] = True
    if TYPE_CHECKING:
        per_token: bool

    @classmethod
    def of_output(cls, shape: Sequence[int], names: Sequence[str] | None) -> Self:
        """Return a head for vectors of documents, or of tokens if the output has three axes."""
        return cls.of_width(shape[-1], names).model_copy(update={"per_token": len(shape) == 3})

    @property
    def is_per_token(self) -> bool:
        """Whether every token has a vector."""
        return self.per_token

    @property
    def fields(self) -> dict[str, Field]:
        """The kind of the only field of an answer."""
        return VectorsAnswer.kinds() if self.per_token else super().fields

    def decoder(
        self,
        starts_word: Mask | None = None,
        *,
        is_special: Mask | None = None,
        open_file: OpenFile | None = None,
    ) -> Decoder:
        """Return a decoder of vectors; see ``TokenHead``."""
        return _VectorDecoder(self, open_file)

    def flips(self, output: Double, expected: Double) -> tuple[int, float | None]:
        """Return no flips: vectors decide nothing."""
        return 0, None


class FeatureExtraction(VectorHead):
    """Vectors without labels.

    Attributes:
        dimensions: the number of numbers in a vector.
        per_token: whether every token has a vector, instead of the document.
        normalize: whether vectors are divided by their length, so that a dot product of two is
            the cosine of their angle.
    """

    meaning: ClassVar[str] = "vectors"
    is_named: ClassVar[bool] = False
    answer_type: ClassVar[type[Answer]] = VectorAnswer

    task: Literal["feature_extraction"] = "feature_extraction"
    dimensions: Annotated[int, Ge(1)]
    per_token: bool = False
    normalize: bool = False

    @classmethod
    def of_width(cls, width: int, names: Sequence[str] | None) -> Self:
        """Return a head for vectors of documents as they are; see ``Head``."""
        if names is not None:
            raise UsageError(
                f"Expected no labels for feature_extraction, got {len(names)}.",
                "Leave the labels out: the numbers of a vector have no names.",
            )
        return cls(dimensions=width)

    @property
    def names(self) -> tuple[str, ...]:
        """A numbered name for each dimension."""
        return numbered(self.dimensions, None, "dimension")

    @property
    def width(self) -> int:
        """The number of dimensions."""
        return self.dimensions

    def scores(self, logits: Double) -> Double:
        """Return the vectors."""
        if not self.normalize:
            return logits
        lengths = np.linalg.norm(logits, axis=-1, keepdims=True)
        return np.asarray(logits / np.maximum(lengths, _MIN_NORM))

    def answer(self, logits: Double) -> Answer:
        """Return the vector of a document, or the vectors of its tokens."""
        if self.per_token:
            return super().answer(logits)
        return VectorAnswer(vector=tuple(self.scores(logits).tolist()))

    def score_error(self, output: Double, expected: Double) -> float:
        """Return the largest distance of two vectors, relative to the expected one's length."""
        # It bounds what vectors are used for: the sine of the angle between the two vectors is at
        # most this error, and so is the relative error of the length. A distance from a vector of
        # zeros is not relative.
        wanted = self.scores(expected)
        distances = np.linalg.norm(self.scores(output) - wanted, axis=-1)
        lengths = np.linalg.norm(wanted, axis=-1)
        return float((distances / np.where(lengths > 0, lengths, 1.0)).max(initial=0.0))


@dataclass(frozen=True)
class TokenVectors(TokenResult):
    """The vectors of a document."""

    vectors: NDArray[np.float32]  # float32 [tokens, width]

    def __len__(self) -> int:
        return len(self.vectors)

    def answer(self, start: int = 0, end: int | None = None) -> VectorsAnswer:
        """Return the answer for a part; see ``TokenResult``."""
        return VectorsAnswer(vectors=tuple(map(tuple, self.vectors[start:end].tolist())))


class _VectorDecoder(Decoder):
    """The decoder of a head whose answer has the scores of each token."""

    def __init__(self, head: Head, open_file: OpenFile | None) -> None:
        super().__init__(head.width)
        self._head = head
        self._vectors = Column(np.float32, (head.width,), open_file)

    def _decode(self, rows: Double, first: int) -> None:
        self._vectors.add(self._head.scores(rows))

    def finish(self) -> TokenVectors:
        """Return the scores of all tokens."""
        return TokenVectors(self._vectors.array())
