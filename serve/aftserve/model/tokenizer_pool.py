"""Threads for the work on texts: the tokenizer and the evidence."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

import numpy as np

from aftserve.http.clients import current_client
from aftserve.http.loop_turns import LoopTurns
from aftserve.model.classifier import Classifier
from aftserve.model.token_marks import TokenMarks
from aftserve.types import Document, Tokens

T = TypeVar("T")

_THREADS = 2
_INLINE_NUMBERS = 1 << 14
"""Checking up to so many token ids or values of features takes less than a millisecond."""
_LONG_CHARACTERS = 1 << 16
"""Longer texts share one thread of their own, so that shorter ones do not wait for them."""


class TokenizerPool:
    """A pool of threads for work on documents outside the event loop.

    Work for a client that has left continues, and its thread must still count as busy. So the pool
    is not anyio's, which would start another thread.

    Args:
        turns: the turns of requests on the event loop, in which short texts are tokenized.
    """

    def __init__(self, turns: LoopTurns) -> None:
        self._turns = turns
        self._threads = ThreadPoolExecutor(_THREADS, "tokenizer")
        self._long_thread = ThreadPoolExecutor(1, "long-tokenizer")
        self._client_turns = WeakValueDictionary[tuple[str, bool], asyncio.Semaphore]()

    async def encode(self, classifier: Classifier, text: str) -> tuple[Tokens, TokenMarks | None]:
        """Return the checked tokens of a text and their marks; see ``Classifier.encode_marked``."""
        if len(text) <= classifier.inline_characters:
            await self._turns.take()
            return classifier.encode_inline(text)
        return await self.run(text, partial(classifier.encode_marked, text))

    async def check(self, classifier: Classifier, document: Document) -> Tokens:
        """Return the checked tokens of token ids or features; see ``Classifier.check``."""
        if _count_numbers(document) <= _INLINE_NUMBERS:
            await self._turns.take()
            return classifier.check(document)
        return await self.run(document, partial(classifier.check, document))

    async def run(self, document: Document, work: Callable[[], T]) -> T:
        """Return the result of ``work`` on a document; work that has begun cannot be cancelled."""
        is_long = len(document) > _LONG_CHARACTERS
        threads, most = (self._long_thread, 1) if is_long else (self._threads, 2 * _THREADS)
        # The threads' queue has little work of each client, so clients take turns.
        key = current_client.get().name, is_long
        async with self._client_turns.setdefault(key, asyncio.Semaphore(most)):
            return await asyncio.get_running_loop().run_in_executor(threads, work)


def _count_numbers(document: Document) -> int:
    """Return the numbers of a document that are to be checked; 0 for features that were checked."""
    if isinstance(document, np.ndarray):
        return document.size
    if not isinstance(document, list) or not document:
        return 0
    first = document[0]
    return len(document) * (len(first) if isinstance(first, list | np.ndarray) else 1)
