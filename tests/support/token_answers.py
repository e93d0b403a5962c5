"""Answers for the tokens of a document, as the server has them after a run."""

import numpy as np

from aftexport.heads import Head, TokenClassification, TokenHead
from aftserve.model.documents import DocumentAnswer, TokenAnswers
from aftserve.schemas import DocumentResult, Timings

TAGS = TokenClassification(labels=("O", "B-name", "I-name"))


def answer_of(head: TokenHead, tokens: int, first: int = 0) -> DocumentAnswer:
    """Return the answer of a head for random logits of ``tokens`` tokens after ``first`` others."""
    decoder = head.decoder()
    decoder.add(np.random.default_rng(3).normal(0, 4, (tokens, head.width)))
    heads: dict[str, Head] = {"head": head}
    result = DocumentResult(
        bundle="digest",
        heads={},
        tokens_total=tokens + first,
        tokens_used=tokens,
        truncated=first > 0,
        policy="tail",
        timings=Timings(
            tokenize_seconds=0, queue_seconds=0, inference_seconds=0, predicted_seconds=0
        ),
    )
    tokens_of = TokenAnswers(heads, {"head": decoder.finish()}, first, None, None)
    return DocumentAnswer(result, tokens_of)
