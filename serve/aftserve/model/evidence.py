"""The passages of a document that support a label or raise a value.

The model returns the contribution of each token to a logit (``aftexport.lowering.evidence``). A
passage is a run of tokens that contributes more than as many average tokens. The passages are the
maximal scoring subsequences of the contributions minus their average. The algorithm is by Ruzzo and
Tompa ("A linear time algorithm for finding all maximal scoring subsequences", ISMB 1999).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding

from aftserve.model.answers import Added, Answer
from aftserve.model.classifier import Classifier
from aftserve.schemas import DocumentResult, Evidence, EvidenceSpan
from aftserve.types import Document


@dataclass(frozen=True)
class Passage:
    """A run of tokens."""

    start: int
    end: int  # after its last token
    added: float  # exact contribution of its tokens to the logit
    above: float  # contribution minus that of as many average tokens


def explain(
    classifier: Classifier, document: Document, answer: Answer, *, first: int, max_spans: int
) -> list[Evidence]:
    """Return the contributions of a document's tokens to each of its explained logits."""
    encoding = classifier.encoding(document) if isinstance(document, str) else None

    def span(passage: Passage) -> EvidenceSpan:
        start, end = first + passage.start, first + passage.end
        place = _characters(encoding, start, end) if encoding is not None else None
        characters = {} if place is None else {"start": place[0], "end": place[1]}
        text = None if place is None else str(document[place[0] : place[1]])
        return EvidenceSpan(
            start_token=start,
            end_token=end,
            text=text,
            contribution=passage.added,
            above_average=passage.above,
            **characters,
        )

    return [
        Evidence(
            head=one.head,
            name=one.name,
            logit=one.logit,
            offset=one.offset,
            spans=[span(passage) for passage in passages(one.added, max_spans)],
        )
        for one in answer.explained
    ]


def add_evidence(
    result: DocumentResult, answer: Answer, explained: list[Evidence], *, is_chosen: bool
) -> None:
    """Add the evidence of a document to its result."""
    # is_chosen: whether the request chose the logits; else there is one, the largest
    if is_chosen:
        result.explained = explained
        return
    # Without a choice, the label of the answer is not repeated.
    (largest,) = explained
    is_label = getattr(answer.heads[largest.head or ""], "label", None) == largest.name
    name = None if is_label else largest.name
    result.evidence = largest.model_copy(update={"head": None, "name": name})


def _characters(encoding: Encoding, start: int, end: int) -> tuple[int, int] | None:
    """Return the first character of a run of tokens, and the one after its last.

    The tokens are looked up one by one, because a list of all tokens would hold the GIL for long.
    """

    def shown(tokens: Iterable[int]) -> tuple[int, int] | None:
        places = map(encoding.token_to_chars, tokens)
        # A token that the tokenizer inserted has no characters.
        return next((place for place in places if place and place[0] < place[1]), None)

    first, last = shown(range(start, end)), shown(reversed(range(start, end)))
    return (first[0], last[1]) if first and last else None


def passages(added: Added, max_spans: int) -> list[Passage]:
    """Return the passages that contribute most above average, the largest first."""
    wide = added.astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(wide)])
    above = np.concatenate([[0.0], np.cumsum(wide - wide.mean())])
    found = [
        Passage(start, end, float(sums[end] - sums[start]), float(above[end] - above[start]))
        for start, end in _maximal(above.tolist())
    ]
    return sorted(found, key=lambda passage: -passage.above)[:max_spans]


def _maximal(sums: Sequence[float]) -> list[tuple[int, int]]:
    """Return the maximal scoring subsequences of a sequence, given its running sums."""
    found: list[tuple[int, int]] = []
    # For each range of ``found``: index of the last earlier range with a lower start sum, or -1.
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
            # Merge them: together they score more than each.
            start = found[before][0]
            del found[before:], lower[before:]
        found.append((start, end))
        lower.append(before)
    return found
