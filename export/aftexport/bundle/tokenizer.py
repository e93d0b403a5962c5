"""Tokenizers, in the ``tokenizers`` library's JSON format.

The tokenizer of raw bytes takes each byte of the UTF-8 text as a token whose id is its value.
"""

import base64
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from math import prod
from typing import Any

from pydantic_core import from_json
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from aftexport.errors import UsageError, panics_as_errors
from aftexport.system.contract import MAX_VOCABULARY

_MAX_GROWTH = 4096
"""Maximum characters into which a tokenizer may turn one character before it is split in tokens."""
_MAX_ADDED_TOKENS = 256
_TEXTS = ("a", "b c", "Hello, world 1!")
"""Texts that show which tokens a tokenizer adds."""
_UNICODE_GROWTH = 18
"""Characters of the longest decomposition in Unicode, of U+FDFA."""
_UNICODE = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "BertNormalizer")
_GROWTH = {
    **dict.fromkeys(("Strip", "StripAccents", "Nmt"), 1),
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength"), 1),
    **dict.fromkeys(("Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"), 1),
    "ByteLevel": 8,  # four bytes, and a space before
    "Metaspace": 2,
}
"""The characters into which each other component turns one character."""


def parse_tokenizer(text: str) -> Tokenizer:
    """Read a tokenizer, with padding and truncation switched off.

    The server decides on both: a tokenizer with truncation would cut documents silently.

    Raises:
        UsageError: if ``text`` is not the JSON of a tokenizer, or if a short text may become very
            long in it.
    """
    try:
        problem = _growth_problem(from_json(text))
        # Not before: the library normalizes added tokens when it reads them.
        with panics_as_errors():
            tokenizer: Tokenizer | None = None if problem else Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise UsageError(
            f"The tokenizer cannot be read: {error}.",
            "Give a tokenizer.json written by the tokenizers library.",
        ) from error
    if tokenizer is None:
        raise UsageError(f"The tokenizer is refused: {problem}.", "Give that of the training.")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _growth_problem(content: Any) -> str | None:
    """Return the reason why a tokenizer may make too much of a short text; None if it may not."""
    growth = _growth_of(content.get("normalizer"), content.get("pre_tokenizer"))
    added, copies = _added_tokens(content.get("post_processor"))
    for_pairs, copies_of_each = _added_tokens(content.get("post_processor"), "pair")
    added, copies = max(added, for_pairs), max(copies, copies_of_each)
    if growth > _MAX_GROWTH:
        return f"expected at most {_MAX_GROWTH} characters for each of a text, got {growth}"
    if added > _MAX_ADDED_TOKENS or copies > 1:
        return (
            f"expected a template with at most {_MAX_ADDED_TOKENS} tokens and one copy of each "
            f"text, got {added} tokens and {copies} copies"
        )
    return None


def normalizer_growth(tokenizer: Tokenizer) -> int:
    """Return the maximum number of characters into which the normalizer turns one character."""
    normalizer = tokenizer.normalizer
    return 1 if normalizer is None else _growth_of(json.loads(normalizer.__getstate__()))


def _growth_of(*parts: Any) -> int:
    """Return the product of the growths of components, with Unicode's own rules counted once."""
    product, unicode, charsmaps = 1, 1, list[int]()
    for part in _components(parts):
        match part:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
                product *= max(1, -(-len(new) // len(old)))
            case {"type": "Replace", "content": str(new)}:  # an expression may match nothing
                product *= 1 + len(new)
            case {"type": "Prepend", "prepend": str(new)}:
                product *= 1 + len(new)
            case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
                charsmaps.append(_longest_entry(base64.b64decode(charsmap)))
            case {"type": str(name)} if name in _GROWTH:
                product *= _GROWTH[name]
            case {"type": str(name)} if name in _UNICODE:
                unicode = _UNICODE_GROWTH
            case _:
                raise ValueError(f"expected a known component with its type, got {str(part)[:80]}")
    # SentencePiece's table has the same rules, so that a table after them adds nothing.
    first, *others = sorted(charsmaps, reverse=True) or [1]
    return product * max(unicode, first) * prod(others)


def _components(parts: Iterable[Any]) -> Iterator[Any]:
    """Yield components of a tokenizer, for a sequence its parts."""
    for part in parts:
        match part:
            case None:
                pass
            case {"type": "Sequence"}:
                for name in ("normalizers", "pretokenizers", "processors"):
                    yield from _components(part.get(name, ()))
            case _:
                yield part


def _longest_entry(charsmap: bytes) -> int:
    """Return the characters of the longest entry of a table of SentencePiece, after its trie."""
    start = 4 + int.from_bytes(charsmap[:4], "little")
    return max(len(entry.decode("utf-8", "replace")) for entry in charsmap[start:].split(b"\0"))


def _added_tokens(post_processor: Any, template: str = "single") -> tuple[int, int]:
    """Return the number of tokens that a tokenizer adds, and the most copies of a text.

    ``template`` is that of one text, "single", or that of two texts, "pair".
    """
    added, copies = 0, 1
    for part in _components([post_processor]):
        match part:
            case {"type": "TemplateProcessing", "special_tokens": special}:
                pieces = part[template]
                names = [one["SpecialToken"]["id"] for one in pieces if "SpecialToken" in one]
                added += sum(len(special[name]["ids"]) for name in names)
                texts = Counter(one["Sequence"]["id"] for one in pieces if "Sequence" in one)
                copies *= max(texts.values(), default=0)
            case {"type": "BertProcessing" | "RobertaProcessing"}:
                added += 4
            case {"type": "ByteLevel"}:
                pass
            case _:
                raise ValueError(f"expected a known component with its type, got {str(part)[:80]}")
    return added, copies


def added_ids(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a tokenizer adds before a text, and those after it.

    Raises:
        UsageError: if they depend on the text, or it knows none of some words.
    """
    words = sorted(tokenizer.get_vocab(with_added_tokens=False))
    found: list[set[tuple[tuple[int, ...], tuple[int, ...]]]] = []
    for text in (*_TEXTS, *words[: len(_TEXTS)], *words[-len(_TEXTS) :]):
        try:
            with panics_as_errors():
                text_ids = tokenizer.encode(text, add_special_tokens=False).ids
                ids = tokenizer.encode(text).ids
        except Exception:  # an unknown word, for which the library raises bare Exception
            continue
        count = len(text_ids)
        if count:
            found.append(
                {
                    (tuple(ids[:start]), tuple(ids[start + count :]))
                    for start in range(len(ids) - count + 1)
                    if ids[start : start + count] == text_ids
                }
            )
    frames = set[Any]().union(*found).intersection(*found)
    if len(frames) != 1:
        raise UsageError(
            "Expected a tokenizer that adds the same tokens to every text, got another one.",
            "Give a tokenizer whose template is fixed, or leave --long-documents out.",
        )
    return frames.pop()


def check_vocabulary(size: int) -> None:
    """Check the number of token ids of a model."""
    if size > MAX_VOCABULARY:
        raise UsageError(
            f"The model must have at most {MAX_VOCABULARY} token ids, got {size}.",
            "Remove the unused rows from the embedding.",
        )


def check_tokenizer(text: str, vocab_size: int) -> None:
    """Check that the model knows every id of a tokenizer."""
    if (largest := largest_id(text)) >= vocab_size:
        raise UsageError(
            f"The tokenizer's ids must be below the model's {vocab_size}, got {largest}.",
            "Give the tokenizer of the training.",
        )


def largest_id(text: str) -> int:
    """Return the largest id of a tokenizer."""
    if not isinstance(text, str):
        raise UsageError(
            f"The tokenizer must be JSON text, got a {type(text).__name__}.",
            "Give the text of tokenizer.json.",
        )
    tokenizer = parse_tokenizer(text)
    # A post-processor can add ids that the vocabulary does not list.
    added_ids = [*tokenizer.encode("").ids, *tokenizer.encode("", "").ids]
    listed_ids = tokenizer.get_vocab(with_added_tokens=True).values()
    return max([*listed_ids, *added_ids], default=-1)


def largest_pair_type(text: str) -> int:
    """Return the largest type that a tokenizer gives to the tokens of two texts.

    Raises:
        UsageError: if it has no post-processor, which joins two texts.
    """
    tokenizer = parse_tokenizer(text)
    if tokenizer.post_processor is None:
        raise UsageError(
            "Expected a tokenizer whose post-processor joins two texts, got one without.",
            "Give the tokenizer of the training by --tokenizer, or leave --text-pairs out.",
        )
    types = {0}
    for second in ("", *_TEXTS, *sorted(tokenizer.get_vocab(with_added_tokens=False))[:1]):
        with suppress(Exception), panics_as_errors():  # an unknown word, as in added_ids
            types.update(tokenizer.encode("", second).type_ids)
    return max(types)


BYTES = "bytes"
"""The name of this tokenizer in place of a file."""

# ByteLevel writes these bytes as their Latin-1 characters, and the others, in order, as the
# characters from 256.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose ids are the bytes of a text in UTF-8, 0 to 255.

    Each character is a word of its own, so that the tokens of a character have one word index and
    the offsets of that character. The time grows linearly with the text.
    """
    others = (byte for byte in range(256) if byte not in _PRINTABLE)
    symbols = {byte: chr(256 + place) for place, byte in enumerate(others)}
    vocabulary = {symbols.get(byte, chr(byte)): byte for byte in range(256)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    characters = Split(Regex(r"[\s\S]"), "isolated")
    symbols_of_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = Sequence([characters, symbols_of_bytes])
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def is_byte_tokenizer(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer of a bundle is that of ``byte_tokenizer``."""
    return bool(tokenizer.to_str() == _text())


@lru_cache(maxsize=1)
def _text() -> str:
    return str(byte_tokenizer().to_str())
