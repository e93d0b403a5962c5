"""The places and words of a text's tokens, for heads that answer for every token."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from aftexport.heads.token_head import Mask
from aftserve.model.answers import Decoding
from aftserve.types import Text, texts_of

_NO_CHARACTERS = (0, 0)


@dataclass(frozen=True)
class TokenMarks:
    """The marks of a text's tokens."""

    # Index of each token's first character, and of the one after its last, [T, 2]; both are 0 for
    # a token without characters.
    characters: NDArray[np.uint32]
    is_special: Mask  # whether the tokenizer added each token to the text
    starts_word: Mask | None  # None if no head needs words

    @property
    def decoding(self) -> Decoding:
        """The decoding of the tokens."""
        return Decoding(self.starts_word, self.is_special if self.is_special.any() else None)

    def part(self, start: int, end: int) -> Self:
        """Return the marks of some of the tokens; their characters keep their index."""
        words = None if self.starts_word is None else self.starts_word[start:end]
        return type(self)(self.characters[start:end], self.is_special[start:end], words)


class TokenMarker:
    """The marks of texts by a tokenizer.

    A token starts a word where it does for the TokenClassificationPipeline of transformers. With a
    tokenizer whose later parts of words have a prefix, such as WordPiece's ``##``, a token is such
    a part if its name is longer than its characters. With other tokenizers, a token starts a word
    at the beginning of the text and beside a space.
    """

    def __init__(self, tokenizer: Tokenizer, *, with_words: bool) -> None:
        self._tokenizer = tokenizer
        self._with_words = with_words

    def marks(self, text: Text, encoding: Encoding) -> TokenMarks:
        """Return the marks of the tokens of a text or a pair; other threads can run meanwhile."""
        count = len(encoding)
        # Look tokens up one by one: a list of all their places would hold the GIL for long.
        places = map(encoding.token_to_chars, range(count))
        flat = chain.from_iterable(place or _NO_CHARACTERS for place in places)
        characters = np.fromiter(flat, np.uint32, 2 * count).reshape(count, 2)
        special = (encoding.token_to_sequence(token) is None for token in range(count))
        is_special = np.fromiter(special, np.bool_, count)
        words = None
        if self._with_words:
            words = np.fromiter(self._starts(text, encoding, characters), np.bool_, count)
        return TokenMarks(characters, is_special, words)

    def _starts(
        self, text: Text, encoding: Encoding, characters: NDArray[np.uint32]
    ) -> Iterator[bool]:
        unknown, has_prefix, texts = self._unknown_id, self._has_prefix, texts_of(text)
        places = map(tuple, characters)
        for token, (id, (start, end)) in enumerate(zip(encoding.ids, places, strict=True)):
            if id == unknown:
                yield True
            elif has_prefix:
                yield self._lengths[id] == end - start
            else:
                own = texts[encoding.token_to_sequence(token) or 0]
                yield start == 0 or " " in own[start - 1 : start + 1]

    @cached_property
    def _has_prefix(self) -> bool:
        return bool(getattr(self._tokenizer.model, "continuing_subword_prefix", None))

    @cached_property
    def _unknown_id(self) -> int | None:
        model = json.loads(self._tokenizer.to_str())["model"]
        if model.get("unk_id") is not None:
            return int(model["unk_id"])
        name = model.get("unk_token")
        return None if name is None else self._tokenizer.token_to_id(name)

    @cached_property
    def _lengths(self) -> dict[int, int]:
        """The characters of each token's name."""
        return {id: len(name) for name, id in self._tokenizer.get_vocab().items()}
