"""Questions about a document, which the outputs of a model answer.

A model cannot read a question: an output answers the one question that it was trained for. A
question must therefore name an output, or have exactly the labels of one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aftexport.errors import InputError
from aftexport.heads import BinaryClassification, Head, SingleLabelClassification
from aftserve.api.adapters.model_choice import WITH_LABELS
from aftserve.model.results import DocumentAnswer

_EXCLUSIVE = (SingleLabelClassification, BinaryClassification)


@dataclass(frozen=True)
class Labelled:
    """A question for one of several labels, and the output that answers it.

    Attributes:
        head: name of the output.
        labels: its labels, in the order of the question.
    """

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
    """A question whether a label holds, and the output with the label.

    Attributes:
        head: name of the output.
        label: the label.
    """

    head: str
    label: str

    def probability(self, answer: DocumentAnswer) -> float:
        """Return the probability of the label, as /infer has it."""
        probability: float = answer.of_head(self.head).scores[self.label]
        return probability


def find_labels(heads: Mapping[str, Head], name: str | None, labels: Sequence[object]) -> Labelled:
    """Find the output that answers a question for one of several labels.

    Args:
        heads: heads of the model.
        name: name of the question; an output of this name must answer it.
        labels: the labels of the question, in any order.

    Raises:
        InputError: if no output has exactly these labels, or several have.
    """
    exclusive = {n: head for n, head in heads.items() if isinstance(head, _EXCLUSIVE)}
    asked = sorted(map(repr, labels))
    fitting = [
        n
        for n, head in exclusive.items()
        if (name not in heads or n == name) and sorted(map(repr, head.names)) == asked
    ]
    if len(fitting) != 1:
        known = "; ".join(f"{n}: {', '.join(head.names)}" for n, head in exclusive.items())
        raise InputError(
            f"Expected the labels of one output, got {len(fitting)} outputs with these.",
            f"The model has {known or 'no labels that exclude each other'}.",
        )
    return Labelled(fitting[0], tuple(map(str, labels)))


def find_statement(heads: Mapping[str, Head], name: str | None) -> Statement:
    """Find the label whose probability answers a question.

    Args:
        heads: heads of the model.
        name: ``LABEL``, ``OUTPUT:LABEL``, or an output of two labels, for the second.

    Raises:
        InputError: if there is no such label, or several.
    """
    labelled = {n: head for n, head in heads.items() if isinstance(head, WITH_LABELS)}
    found = [
        Statement(n, label)
        for n, head in labelled.items()
        for label in head.names
        if name in (label, f"{n}:{label}")
    ]
    if isinstance(head := heads.get(name or ""), BinaryClassification):
        found = [Statement(name or "", head.names[1])]
    if len(found) != 1:
        known = ", ".join(f"{n}:{label}" for n, head in labelled.items() for label in head.names)
        raise InputError(
            f"Expected the name of one label, got {len(found)} labels of this name.",
            f"The model has {known or 'no labels of documents'}.",
        )
    return found[0]
