"""Documents in, labels out: the tokenizer and the engine of a bundle."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aftexport.bundle import Bundle
from aftexport.engines import Engine
from aftexport.errors import InputError
from aftexport.manifest import MAX_TOKENS


class DocumentTooLongError(InputError):
    """A document has more tokens than this server takes. It is refused, never cut."""


@dataclass(frozen=True)
class Answer:
    """What a document is.

    Attributes:
        label: the class with the largest score.
        scores: probability of every class, by label.
        tokens: the document's tokens, all of which were used.
        inference_seconds: in the engine.
    """

    label: str
    scores: dict[str, float]
    tokens: int
    inference_seconds: float


class Classifier:
    """Tokenizes and classifies, one document at a time.

    Documents are never padded to one another's length: on a CPU batching long
    documents gains nothing, and padding costs as much as the text would.

    Args:
        bundle: a checked bundle.
        engine: its model, loaded.
        max_tokens: refuse longer documents; the bundle's own limit comes first.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        *,
        max_tokens: int | None = None,
    ) -> None:
        self.manifest = bundle.manifest
        self._tokenizer = bundle.tokenizer()
        self._engine = engine
        limits = (self.manifest.max_tokens, max_tokens, MAX_TOKENS)
        self.max_tokens = min(limit for limit in limits if limit is not None)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text.

        Raises:
            InputError: where the bundle has no tokenizer.
        """
        if self._tokenizer is None:
            raise InputError("This model has no tokenizer.", "Send input_ids instead of text.")
        try:
            ids: list[int] = self._tokenizer.encode(text).ids
        except Exception as error:  # the library raises bare Exception and TypeError
            raise InputError(
                "The tokenizer cannot encode the text.",
                "Send Unicode text without lone surrogates, in words the model knows.",
            ) from error
        return ids

    def check(self, ids: Sequence[int]) -> None:
        """Checks the tokens of one document.

        Raises:
            InputError: for an empty document, or an id outside the vocabulary.
            DocumentTooLongError: for more than ``max_tokens``.
        """
        if not ids:
            raise InputError("The document has no tokens.", "Send some text.")
        if len(ids) > self.max_tokens:
            raise DocumentTooLongError(
                f"The document has {len(ids)} tokens, this server takes {self.max_tokens}.",
                "Send a shorter one; it is never truncated silently.",
            )
        vocabulary = self.manifest.vocab_size
        if min(ids) < 0 or max(ids) >= vocabulary:
            bad = next(i for i in ids if not 0 <= i < vocabulary)
            raise InputError(
                f"Token id {bad} is outside the vocabulary.", f"Ids go from 0 to {vocabulary - 1}."
            )

    def classify(self, ids: Sequence[int]) -> Answer:
        """Classifies one checked document.

        Raises:
            EngineError: where the engine fails.
        """
        inputs = {
            "input_ids": np.array([ids], dtype=np.int64),
            "lengths": np.array([len(ids)], dtype=np.int64),
        }
        start = time.perf_counter()
        outputs = self._engine.run({name: inputs[name] for name in self.manifest.inputs})
        seconds = time.perf_counter() - start
        logits = outputs["logits"][0].astype(np.float64)
        weights = np.exp(logits - logits.max())
        scores = weights / weights.sum()
        labels = self.manifest.labels
        return Answer(
            labels[int(scores.argmax())],
            dict(zip(labels, scores.tolist(), strict=True)),
            len(ids),
            seconds,
        )
