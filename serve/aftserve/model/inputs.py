"""From the documents of a request to the tokens that the model runs on."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from aftexport.errors import InputError
from aftexport.extra_inputs import ExtraValues
from aftserve.model.answers import NO_MARKS, Decoding
from aftserve.model.classifier import Classifier
from aftserve.model.evidence_limits import check_evidence
from aftserve.model.token_marks import TokenMarks
from aftserve.model.tokenizer_pool import TokenizerPool
from aftserve.model.wanted import EVERY_HEAD, Wanted
from aftserve.types import Document, ExtraFields, Tokens


@dataclass(frozen=True)
class TokenizedDocument:
    """A document of a request, with its tokens.

    Attributes:
        document: the document as it was sent.
        ids: all tokens of the document.
        used: the tokens that remain after the policy for long documents.
        first: index of the first token in ``used``.
        tokenize_seconds: time of the tokenizer.
        marks: marks of the tokens in ``used``; None for token ids, or if no head needs them.
        extras: extra inputs for the tokens in ``used``.
    """

    document: Document
    ids: Tokens
    used: Tokens
    first: int
    tokenize_seconds: float
    marks: TokenMarks | None
    extras: ExtraValues

    @property
    def decoding(self) -> Decoding:
        """The decoding of the tokens in ``used``."""
        return NO_MARKS if self.marks is None else self.marks.decoding


async def tokenize_documents(
    pool: TokenizerPool,
    classifier: Classifier,
    documents: Sequence[Document],
    given: Sequence[ExtraFields] | None = None,
    wanted: Wanted = EVERY_HEAD,
) -> list[TokenizedDocument]:
    """Tokenize documents, and cut them by the policy for long documents.

    Args:
        pool: threads of the tokenizer.
        classifier: the classifier with the tokenizer and the limits.
        documents: texts or token ids.
        given: extra inputs of each document; None for none.
        wanted: the wanted part of the answers.

    Raises:
        InputError: if a document cannot be classified; the error has the document's index.
    """
    return [
        await tokenize_document(
            pool, classifier, index, document, {} if given is None else given[index], wanted
        )
        for index, document in enumerate(documents)
    ]


async def tokenize_document(
    pool: TokenizerPool,
    classifier: Classifier,
    index: int,
    document: Document,
    given: ExtraFields,
    wanted: Wanted = EVERY_HEAD,
) -> TokenizedDocument:
    """Tokenize a document, and cut it by the policy for long documents.

    Args:
        pool: threads of the tokenizer.
        classifier: the classifier with the tokenizer and the limits.
        index: index of the document in its request, for the error message.
        document: a text or token ids.
        given: its extra inputs.
        wanted: the wanted part of the answer.

    Raises:
        InputError: if the document cannot be classified.
    """
    marks, seconds = None, 0.0
    try:
        if isinstance(document, str):
            classifier.check_text(document)  # before it waits for a thread
            start = time.perf_counter()
            ids, marks = await pool.encode(classifier, document)
            seconds = time.perf_counter() - start
        else:
            ids = await pool.check(classifier, document)
        classifier.check_words(marks, wanted)
        extras = classifier.check_extras(given, len(ids))
        one = cut_document(classifier, document, ids, marks, extras, seconds)
        check_evidence(classifier, wanted, len(one.used))
    except InputError as error:
        raise type(error)(f"document {index}: {error.problem}", error.remedy) from error
    return one


def cut_document(
    classifier: Classifier,
    document: Document,
    ids: Tokens,
    marks: TokenMarks | None,
    extras: ExtraValues,
    seconds: float = 0.0,
) -> TokenizedDocument:
    """Cut a tokenized document by the policy for long documents.

    Args:
        classifier: the classifier with the policy.
        document: the document as it was sent.
        ids: its checked tokens.
        marks: marks of all tokens, if they are known.
        extras: extra inputs for all tokens.
        seconds: time of the tokenizer.
    """
    used = classifier.cut(ids)
    first = len(ids) - len(used) if classifier.policy == "tail" else 0
    if marks is not None:
        marks = marks.part(first, first + len(used))
    extras = extras.part(first, first + len(used))
    return TokenizedDocument(document, ids, used, first, seconds, marks, extras)
