"""Tokenizers, in the ``tokenizers`` library's JSON format."""

from tokenizers import Tokenizer

from aftexport.contract import MAX_VOCABULARY
from aftexport.errors import UsageError


def parse_tokenizer(text: str) -> Tokenizer:
    """Reads a tokenizer, with padding and truncation switched off.

    Both are the server's to decide: a tokenizer that truncates would do so silently.

    Raises:
        UsageError: where ``text`` is not the JSON of a tokenizer.
    """
    try:
        tokenizer: Tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise UsageError(
            f"The tokenizer cannot be read: {error}.",
            "Give the tokenizer.json that the tokenizers library writes.",
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def check_vocabulary(size: int) -> None:
    """Raises UsageError for more token ids than a bundle may have."""
    if size > MAX_VOCABULARY:
        raise UsageError(
            f"The model must know at most {MAX_VOCABULARY} token ids, got {size}.",
            "Take the rows of the embedding that no token has out of it.",
        )


def check_tokenizer(text: str, vocab_size: int) -> None:
    """Raises UsageError unless every id the tokenizer can give is one the model knows."""
    if not isinstance(text, str):
        raise UsageError("The tokenizer is not JSON text.", "Give the text of tokenizer.json.")
    tokenizer = parse_tokenizer(text)
    # A post-processor can add ids that the vocabulary does not list.
    added = tokenizer.encode("").ids
    known = tokenizer.get_vocab(with_added_tokens=True).values()
    largest = max([*known, *added], default=-1)
    if largest >= vocab_size:
        raise UsageError(
            f"The tokenizer gives ids up to {largest}, the model knows {vocab_size}.",
            "Give the tokenizer the model was trained with.",
        )
