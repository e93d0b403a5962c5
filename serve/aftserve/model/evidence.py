"""The passages of a document that speak for its class.

The model says what each token adds to the logit (``aftexport.evidence``). A passage is a run of
tokens that adds more than as many tokens of the document do on average, as much more as any run
that it overlaps: the maximal scoring subsequences of Ruzzo and Tompa ("A linear time algorithm for
finding all maximal scoring subsequences", ISMB 1999), of what each token adds above the average.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding

from aftserve.model.classifier import Added, Answer, Classifier
from aftserve.schemas import Evidence, EvidenceSpan
from aftserve.types import Document


@dataclass(frozen=True)
class Passage:
    """A run of tokens.

    Attributes:
        start, end: its first token, and the one after its last.
        added: by its tokens to the logit, exactly.
        above: how much that is over what as many tokens add on average.
    """

    start: int
    end: int
    added: float
    above: float


def explain(
    classifier: Classifier, document: Document, answer: Answer, *, first: int, most: int
) -> Evidence:
    """What a document's tokens add to the logit of its class.

    Args:
        classifier: that gave the answer.
        document: as it was sent.
        answer: with what each token adds.
        first: of the document's tokens that the model saw.
        most: of the passages.
    """
    assert answer.added is not None  # check_evidence sees to it
    encoding = classifier.encoding(document) if isinstance(document, str) else None
    spans = []
    for passage in passages(answer.added, most):
        start, end = first + passage.start, first + passage.end
        span = EvidenceSpan(
            start_token=start,
            end_token=end,
            contribution=passage.added,
            above_average=passage.above,
        )
        place = _characters(encoding, start, end) if encoding is not None else None
        if place is not None:
            span.start, span.end = place
            span.text = str(document[span.start : span.end])
        spans.append(span)
    return Evidence(logit=float(answer.logits.max()), offset=answer.offset, spans=spans)


def _characters(encoding: Encoding, start: int, end: int) -> tuple[int, int] | None:
    """The first character of a run of tokens, and the one after its last.

    Asked for token by token: the list of all would be made while nothing else runs.
    """

    def shown(tokens: Iterable[int]) -> tuple[int, int] | None:
        places = map(encoding.token_to_chars, tokens)
        # A token that the tokenizer put in has no characters.
        return next((place for place in places if place and place[0] < place[1]), None)

    first, last = shown(range(start, end)), shown(reversed(range(start, end)))
    return (first[0], last[1]) if first and last else None


def passages(added: Added, most: int) -> list[Passage]:
    """The ``most`` passages that add the most above average, in that order."""
    wide = added.astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(wide)])
    above = np.concatenate([[0.0], np.cumsum(wide - wide.mean())])
    found = [
        Passage(start, end, float(sums[end] - sums[start]), float(above[end] - above[start]))
        for start, end in _maximal(above.tolist())
    ]
    return sorted(found, key=lambda passage: -passage.above)[:most]


def _maximal(sums: Sequence[float]) -> list[tuple[int, int]]:
    """The maximal subsequences, of the sums up to each place; a start is that of no lower sum."""
    found: list[tuple[int, int]] = []
    # For each of ``found``, the last one before it whose sum up to its start is lower; -1 for none.
    lower: list[int] = []
    for place in range(len(sums) - 1):
        if sums[place + 1] <= sums[place]:
            continue
        start, end = place, place + 1
        while True:
            before = len(found) - 1
            while before >= 0 and sums[found[before][0]] >= sums[start]:
                before = lower[before]
            if before < 0 or sums[found[before][1]] >= sums[end]:
                break
            # Together they score more than either alone.
            start = found[before][0]
            del found[before:], lower[before:]
        found.append((start, end))
        lower.append(before)
    return found
