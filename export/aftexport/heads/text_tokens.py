"""The tokens of a text: their characters, and the words that they start."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from aftexport.heads.answer import Span
from aftexport.heads.token_head import Mask

_SPACES = [code for code in range(0x3001) if chr(code).isspace()]
"""The code points of white space; Unicode has none above."""


class WordRule:
    """The rule of a tokenizer that tells which tokens start a word.

    It is that of the TokenClassificationPipeline of transformers. A tokenizer that marks the later
    tokens of a word by a prefix, such as ``##``, starts a word by every other token. With other
    tokenizers, a word starts after white space. The pipeline splits words only at the space
    character, and here they end at any white space.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._continues: Mask | None = None
        if prefix := getattr(tokenizer.model, "continuing_subword_prefix", None):
            vocabulary = tokenizer.get_vocab()
            self._continues = np.zeros(max(vocabulary.values()) + 1, bool)
            parts = [number for token, number in vocabulary.items() if token.startswith(prefix)]
            self._continues[parts] = True

    def starts(self, text: str, ids: Sequence[int], begins: NDArray[np.int64]) -> Mask:
        """Return whether each token starts a word.

        Args:
            text: the text.
            ids: the ids of its tokens.
            begins: the index of the first character of each token.
        """
        if self._continues is not None:
            return np.asarray(~self._continues[np.asarray(ids, np.int64)])
        if not text:
            return np.ones(len(begins), bool)
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        is_space = np.isin(codes, _SPACES)
        own = is_space[np.minimum(begins, len(codes) - 1)]
        return np.asarray((begins == 0) | own | is_space[np.maximum(begins - 1, 0)])


@dataclass(frozen=True)
class TextTokens:
    """The tokens of a text.

    Attributes:
        text: the text.
        begins, ends: the index of each token's first character, and of that after its last.
        is_special: whether the tokenizer added the token to the text.
        starts_word: whether the token starts a word.
    """

    text: str
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    is_special: Mask
    starts_word: Mask

    @classmethod
    def of(cls, text: str, encoding: Encoding, rule: WordRule) -> "TextTokens":
        """Return the tokens of a text.

        Args:
            text: the text.
            encoding: its encoding, with offsets.
            rule: the rule of the tokenizer for words.
        """
        offsets = encoding.offsets
        places = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets))
        begins, ends = places.reshape(-1, 2).T
        special = np.array(encoding.special_tokens_mask, bool)
        return cls(text, begins, ends, special, rule.starts(text, encoding.ids, begins))

    def locate(self, span: Span) -> Span:
        """Return a span with its characters, without white space at its ends.

        Tokens without characters do not count; a span of only such tokens is returned as it is. A
        character of several tokens, such as an emoji, belongs to the spans of all of them.
        """
        tokens = slice(span.start_token, span.end_token)
        shown = np.flatnonzero(self.begins[tokens] < self.ends[tokens])
        if not len(shown):
            return span
        start = int(self.begins[tokens][shown[0]])
        end = int(self.ends[tokens][shown[-1]])
        text = self.text[start:end]
        if text.strip():
            start += len(text) - len(text.lstrip())
            text = text.strip()
        place = {"start": start, "end": start + len(text), "text": text}
        return span.model_copy(update=place)
