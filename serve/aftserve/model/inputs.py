"""From the documents of a request to the tokens that the model runs on."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from aftexport.errors import InputError
from aftserve.model.classifier import Classifier
from aftserve.model.tokenizer_pool import TokenizerPool
from aftserve.types import Document, Tokens


@dataclass(frozen=True)
class TokenizedDocument:
    """A document of a request, with its tokens.

    Attributes:
        document: the document as it was sent.
        ids: all tokens of the document.
        used: the tokens that remain after the policy for long documents.
        tokenize_seconds: time of the tokenizer.
    """

    document: Document
    ids: Tokens
    used: Tokens
    tokenize_seconds: float


async def tokenize_documents(
    pool: TokenizerPool,
    classifier: Classifier,
    documents: Sequence[Document],
    *,
    with_evidence: bool,
) -> list[TokenizedDocument]:
    """Tokenize documents, and cut them by the policy for long documents.

    Args:
        pool: threads of the tokenizer.
        classifier: the classifier with the tokenizer and the limits.
        documents: texts or token ids.
        with_evidence: whether to check that the model has evidence for each document.

    Raises:
        InputError: if a document cannot be classified; the error has the document's index.
    """
    tokenized = [
        await tokenize_document(pool, classifier, index, document)
        for index, document in enumerate(documents)
    ]
    inputs = [
        TokenizedDocument(document, ids, classifier.cut(ids), seconds)
        for document, (ids, seconds) in zip(documents, tokenized, strict=True)
    ]
    for one in inputs if with_evidence else ():
        classifier.check_evidence(len(one.used))
    return inputs


async def tokenize_document(
    pool: TokenizerPool, classifier: Classifier, index: int, document: Document
) -> tuple[Tokens, float]:
    """Return a document's checked tokens, and the seconds that the tokenizer took.

    Args:
        pool: threads of the tokenizer.
        classifier: the classifier with the tokenizer and the limits.
        index: index of the document in its request, for the error message.
        document: a text or token ids.

    Raises:
        InputError: if the document cannot be classified.
    """
    try:
        if not isinstance(document, str):
            return classifier.check(document), 0.0
        classifier.check_text(document)  # before it waits for a thread
        start = time.perf_counter()
        ids = await pool.encode(classifier, document)
        return ids, time.perf_counter() - start
    except InputError as error:
        raise type(error)(f"document {index}: {error.problem}", error.remedy) from error
