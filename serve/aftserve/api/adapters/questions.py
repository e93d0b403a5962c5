"""Questions about a document, which the outputs of a model answer.

A model cannot read a question: an output answers the one question that it was trained for. A
question must therefore name an output, or have exactly the labels of one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from aftexport.heads import BinaryClassification, Head, SingleLabelClassification
from aftserve.api.adapters.output_choice import WITH_LABELS
from aftserve.model.results import DocumentAnswer

MAX_QUESTIONS = 400
"""Maximum number of questions in a request."""
IGNORED_INSTRUCTIONS = "Ignored: an output answers its own question."
"""Description of the field that has the text of a question."""
_EXCLUSIVE = (SingleLabelClassification, BinaryClassification)


@dataclass(frozen=True)
class Labelled:
    """A question for one of several labels, and the output that answers it."""

    head: str
    labels: tuple[str, ...]

    def label(self, answer: DocumentAnswer) -> str:
        """Return the label of an answer."""
        label: str = answer.of_head(self.head).label
        return label

    def probabilities(self, answer: DocumentAnswer) -> dict[str, float]:
        """Return the probability of each label, as /infer has it."""
        scores = answer.of_head(self.head).scores
        return {label: scores[label] for label in self.labels}

    def confidence(self, answer: DocumentAnswer) -> float:
        """Return the probability of the answer's label, calibrated if the bundle can."""
        content = answer.of_head(self.head)
        confidence: float = (content.calibrated or content.scores)[content.label]
        return confidence

    def mean_level(self, answer: DocumentAnswer) -> float:
        """Return the mean number of the labels, which count from 0."""
        return sum(i * p for i, p in enumerate(self.probabilities(answer).values()))


@dataclass(frozen=True)
class Statement:
    """A question whether a label holds, and the output with the label."""

    head: str
    label: str

    def probability(self, answer: DocumentAnswer) -> float:
        """Return the probability of the label, as /infer has it."""
        probability: float = answer.of_head(self.head).scores[self.label]
        return probability


class Outputs:
    """The outputs of a model, to find those that answer the questions of a request."""

    def __init__(self, heads: Mapping[str, Head]) -> None:
        self._heads = heads
        self._labels = {
            name: frozenset(head.names)
            for name, head in heads.items()
            if isinstance(head, _EXCLUSIVE)
        }

    def of_labels(self, name: str | None, labels: Sequence[object]) -> list[Labelled]:
        """Return the outputs with these labels in any order; an output of this name has to fit."""
        texts = [label for label in labels if isinstance(label, str)]
        asked = frozenset(texts)
        if not len(asked) == len(texts) == len(labels):
            return []
        return [
            Labelled(output, tuple(texts))
            for output, own in self._labels.items()
            if own == asked and (name not in self._heads or output == name)
        ]

    def of_statement(self, name: str | None) -> list[Statement]:
        """Return the labels that ``LABEL``, ``OUTPUT:LABEL`` or an output of two labels names."""
        if name is None:
            return []
        if isinstance(head := self._heads.get(name), BinaryClassification):
            return [Statement(name, head.names[1])]
        return self._statements.get(name, [])

    @cached_property
    def _statements(self) -> dict[str, list[Statement]]:
        found = dict[str, list[Statement]]()
        for output, head in self._heads.items():
            for label in head.names if isinstance(head, WITH_LABELS) else ():
                for name in (label, f"{output}:{label}"):
                    found.setdefault(name, []).append(Statement(output, label))
        return found
