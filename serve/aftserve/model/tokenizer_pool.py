"""Threads for the work on texts: the tokenizer and the evidence."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from aftserve.model.classifier import Classifier
from aftserve.model.token_marks import TokenMarks
from aftserve.types import Document, Tokens

T = TypeVar("T")

_THREADS = 2
_LONG_CHARACTERS = 1 << 16
"""Longer texts share one thread of their own, so that shorter ones do not wait for them."""


class TokenizerPool:
    """A pool of threads for work on documents outside the event loop.

    Work for a client that has left continues, and its thread must still count as busy. So the pool
    is not anyio's, which would start another thread.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "tokenizer")
        self._long_thread = ThreadPoolExecutor(1, "long-tokenizer")

    async def encode(self, classifier: Classifier, text: str) -> tuple[Tokens, TokenMarks | None]:
        """Return the checked tokens of a text and their marks; see ``Classifier.encode_marked``."""
        if len(text) <= classifier.inline_characters:
            return classifier.encode_inline(text)
        return await self.run(text, partial(classifier.encode_marked, text))

    async def run(self, document: Document, work: Callable[[], T]) -> T:
        """Return the result of ``work`` on a document; work that has begun cannot be cancelled."""
        threads = self._long_thread if len(document) > _LONG_CHARACTERS else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, work)
