"""The tokenizer of raw bytes: each byte of the UTF-8 text is a token, and its value is the id."""

from functools import lru_cache

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

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
