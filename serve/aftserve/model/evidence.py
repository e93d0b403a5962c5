"""The passages of a document that support a label or raise a value.

The model returns the contribution of each token to a logit (``aftexport.lowering.evidence``). A
passage is a run of tokens that contributes more than as many average tokens. Each of its tokens
costs half the mean absolute deviation: otherwise chance would lengthen a passage up to its maximum,
as a random walk does (Karlin and Altschul, "Methods for assessing the statistical significance of
molecular sequence features by using general scoring schemes", PNAS 1990).

A row of a causal model also holds the tokens before it. So a passage may raise all rows after it,
and the run of raised rows, of any length, stands for the tokens at its beginning.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from aftexport.bundle.manifest import Manifest
from aftserve.model.answers import Added, Answer, ExplainedLogit
from aftserve.model.classifier import Classifier
from aftserve.model.documents import TokenizedDocument
from aftserve.model.wanted import AnswerOptions, Wanted
from aftserve.schemas import DocumentResult, Evidence, EvidenceSpan
from aftserve.types import Document, Text, texts_of

T = TypeVar("T")
FurtherRuns = Generator[tuple[list[TokenizedDocument], Wanted], list[Answer], T]
"""A generator of further documents of a request; it takes their answers."""
_CHOSEN = 100
"""Passages that are chosen at least, so that a request for fewer gets the first of the same."""
_PARTS = 8
"""Parts of a passage that are left out in turn, to find the one that matters most."""
_STANDS_OUT = 2.0
"""Factor to the mean size of a contribution that the tokens of a passage that stands out exceed."""


@dataclass(frozen=True)
class Passage:
    """A run of tokens, and the rows that they raise."""

    start: int
    end: int  # after its last token
    until: int  # after its last row; the same as end, but for a causal model
    added: float  # exact contribution of its rows to the logit
    above: float  # contribution minus that of as many average rows


@dataclass(frozen=True)
class Explained:
    """The evidence of a document for each of its explained logits."""

    evidence: list[Evidence]
    span: Callable[[Passage], EvidenceSpan]  # of a passage of the document


def explain(
    classifier: Classifier,
    document: Document,
    answer: Answer,
    *,
    first: int,
    options: AnswerOptions,
) -> Explained:
    """Return the contributions of a document's tokens to each of its explained logits."""
    encoding, texts = None, tuple[str, ...]()
    if isinstance(document, Text):
        encoding, texts = classifier.encoding(document), texts_of(document)
    is_causal = _is_causal(classifier.manifest)

    def span(passage: Passage) -> EvidenceSpan:
        start, end = first + passage.start, first + passage.end
        place = _characters(encoding, start, end) if encoding is not None else None
        characters: dict[str, Any] = {}
        if place is not None:
            sequence, begin, after = place
            characters = {"start": begin, "end": after, "text": texts[sequence][begin:after]}
            characters["text_pair"] = sequence == 1 if len(texts) == 2 else None
        return EvidenceSpan(
            start_token=start,
            end_token=end,
            contribution=passage.added,
            above_average=passage.above,
            until_token=first + passage.until if is_causal else None,
            **characters,
        )

    explained = []
    for one in answer.explained:
        found = passages(one.added, options.spans, options.span_tokens, is_causal=is_causal)
        evidence = Evidence(
            head=one.head,
            name=one.name,
            logit=one.logit,
            offset=one.offset,
            spread=is_spread(one.added, found),
            spans=[span(passage) for passage in found],
        )
        explained.append(evidence)
    return Explained(explained, span)


def _is_causal(manifest: Manifest) -> bool:
    """Return whether each row of a model holds its token and those before it."""
    plan = manifest.chunked
    if plan is None or not plan.stages:
        return False
    *layers, last = plan.stages
    # A pooling by a softmax is a stage of its own, and the graphs then return no evidence.
    return all(one.causal for one in layers) and (last.causal or bool(layers and not plan.evidence))


def check(
    one: TokenizedDocument, answer: Answer, explained: Explained, options: AnswerOptions
) -> FurtherRuns[None]:
    """Check the first passages of each logit; yields documents to run, and takes their answers.

    If no passage stands out by its contributions, another one is found by deletion.
    """
    if len(one.used) == 1:
        return  # nothing would be left
    for logit, evidence in zip(answer.explained, explained.evidence, strict=True):
        wanted = Wanted(frozenset({logit.head}))
        if evidence.spread:
            start, end = yield from _search(one, logit, wanted, options.span_tokens)
            found = _passage(logit.added.astype(np.float64), start, end, end)
            evidence.spans = [explained.span(found)]
        spans = evidence.spans[: options.checks]
        places = [(span.start_token - one.first, span.end_token - one.first) for span in spans]
        answers = yield [one.without(*place) for place in places], wanted
        for span, other in zip(spans, answers, strict=True):
            span.logit_without = logit.value(other)
            span.drop = logit.logit - span.logit_without


def _search(
    one: TokenizedDocument, logit: ExplainedLogit, wanted: Wanted, max_tokens: int
) -> FurtherRuns[tuple[int, int]]:
    """Return the part of a document without which the logit is lowest, by parts of parts."""
    start, end = 0, len(one.used)
    while end - start > max_tokens or end - start == len(one.used):
        cuts = np.linspace(start, end, min(_PARTS, end - start) + 1).astype(int).tolist()
        parts = list(pairwise(cuts))
        answers = yield [one.without(*part) for part in parts], wanted
        start, end = parts[int(np.argmin([logit.value(other) for other in answers]))]
    return start, end


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


def _characters(encoding: Encoding, start: int, end: int) -> tuple[int, int, int] | None:
    """Return the text of a run of tokens, 1 for the second, its first character and its end.

    None for a run without characters, or one from one text into the other. The tokens are looked
    up one by one, because a list of all tokens would hold the GIL for long.
    """

    def shown(tokens: Iterable[int]) -> tuple[int, int, int] | None:
        for token in tokens:
            place, sequence = encoding.token_to_chars(token), encoding.token_to_sequence(token)
            # A token that the tokenizer inserted has no characters.
            if place and place[0] < place[1]:
                return sequence or 0, *place
        return None

    first, last = shown(range(start, end)), shown(reversed(range(start, end)))
    return (*first[:2], last[2]) if first and last and first[0] == last[0] else None


def passages(
    added: Added, max_spans: int, max_tokens: int, *, is_causal: bool = False
) -> list[Passage]:
    """Return the passages that contribute most above average, the largest first."""
    wide = added.astype(np.float64)
    max_rows = len(added) if is_causal else max_tokens
    found = [
        _passage(wide, start, min(start + max_tokens, until), until)
        for start, until in _runs(wide - wide.mean(), max(max_spans, _CHOSEN), max_rows)
    ]
    return sorted(found, key=lambda passage: -passage.above)[:max_spans]


def _passage(wide: NDArray[np.float64], start: int, end: int, until: int) -> Passage:
    """Return a passage with the contribution of its rows."""
    total = float(wide[start:until].sum())
    return Passage(start, end, until, total, total - (until - start) * float(wide.mean()))


def is_spread(added: Added, found: Sequence[Passage]) -> bool:
    """Return whether no passage stands out among the contributions of all tokens."""
    if not found:
        return True
    first, wide = found[0], added.astype(np.float64)
    tokens, rows = first.end - first.start, first.until - first.start
    # A steady rise over the document stays below the factor, as chance mostly does.
    if first.above < _STANDS_OUT * float(np.abs(wide).mean()) * tokens:
        return True
    # The rows after a passage that raises them are as high as its own. In a steady rise they are
    # higher.
    own = float(wide[first.start : first.end].mean() - wide.mean())
    return own < first.above / rows / 2


def _runs(above: NDArray[np.float64], runs: int, max_tokens: int) -> list[tuple[int, int]]:
    """Return disjoint runs of tokens, each the one of the highest score beside those before it."""
    sizes = np.abs(above)
    least = np.finfo(np.float32).eps * sizes.max()  # below it are rounding errors
    sums = np.concatenate([[0.0], np.cumsum(above - sizes.mean() / 2)])
    # For each token: the highest score of a run that starts with it.
    scores = _window_maxima(sums[1:], max_tokens) - sums[:-1]
    found: list[tuple[int, int]] = []
    while len(found) < runs and scores[first := int(scores.argmax())] > least:
        last = min(first + max_tokens, *(start for start, _ in found if start > first), len(above))
        end = first + 1 + int(sums[first + 1 : last + 1].argmax())
        start = end - 1 - int(sums[first:end][::-1].argmin())  # the shortest of equal runs
        # The runs that start before it end before it.
        low = max(start - max_tokens, *(end for _, end in found if end <= start), 0)
        scores[low:start] = np.maximum.accumulate(sums[start:low:-1])[::-1] - sums[low:start]
        scores[start:end] = -np.inf
        found.append((start, end))
    return found


def _window_maxima(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Return the maximum of each value and the ``width - 1`` after it, as far as there are."""
    # By van Herk and Gil-Werman: a window is the end of a block and the beginning of the next.
    width = min(width, len(values))
    padded = np.pad(values, (0, -len(values) % width + width), constant_values=-np.inf)
    blocks = padded.reshape(-1, width)
    ends = np.maximum.accumulate(blocks[:, ::-1], axis=1)[:, ::-1].ravel()[: len(values)]
    beginnings = np.maximum.accumulate(blocks, axis=1).ravel()[width - 1 :][: len(values)]
    return np.maximum(ends, beginnings)
