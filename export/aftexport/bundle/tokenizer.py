"""Tokenizers, in the ``tokenizers`` library's JSON format."""

from tokenizers import Tokenizer

from aftexport.contract import MAX_VOCABULARY
from aftexport.errors import UsageError


def parse_tokenizer(text: str) -> Tokenizer:
    """Read a tokenizer, with padding and truncation switched off.

    The server decides on both: a tokenizer with truncation would cut documents silently.

    Raises:
        UsageError: if ``text`` is not the JSON of a tokenizer.
    """
    try:
        tokenizer: Tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise UsageError(
            f"The tokenizer cannot be read: {error}.",
            "Give a tokenizer.json written by the tokenizers library.",
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def check_vocabulary(size: int) -> None:
    """Check the number of token ids of a model.

    Raises:
        UsageError: if the number exceeds the maximum of a bundle.
    """
    if size > MAX_VOCABULARY:
        raise UsageError(
            f"The model must have at most {MAX_VOCABULARY} token ids, got {size}.",
            "Remove the unused rows from the embedding.",
        )


def check_tokenizer(text: str, vocab_size: int) -> None:
    """Check that the model knows every id of a tokenizer.

    Raises:
        UsageError: if ``text`` is not a tokenizer, or one of its ids is ``vocab_size`` or more.
    """
    if (largest := largest_id(text)) >= vocab_size:
        raise UsageError(
            f"The tokenizer's ids must be below the model's {vocab_size}, got {largest}.",
            "Give the tokenizer of the training.",
        )


def largest_id(text: str) -> int:
    """Return the largest id of a tokenizer.

    Raises:
        UsageError: if ``text`` is not a tokenizer.
    """
    if not isinstance(text, str):
        raise UsageError(
            f"The tokenizer must be JSON text, got a {type(text).__name__}.",
            "Give the text of tokenizer.json.",
        )
    tokenizer = parse_tokenizer(text)
    # A post-processor can add ids that the vocabulary does not list.
    added_ids = tokenizer.encode("").ids
    listed_ids = tokenizer.get_vocab(with_added_tokens=True).values()
    return max([*listed_ids, *added_ids], default=-1)
