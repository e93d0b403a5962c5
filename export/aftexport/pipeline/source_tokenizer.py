"""The tokenizer of an export: of the file, of an option, or that of bytes."""

from pathlib import Path

from aftexport.bundle.tokenizer import BYTES, byte_tokenizer, check_tokenizer, check_vocabulary
from aftexport.capture.model_spec import InputSpec
from aftexport.errors import UsageError


def tokenizer_text(own: str | None, path: str | Path | None) -> str | None:
    """Return the content of a tokenizer.json; None without a tokenizer.

    Args:
        own: the tokenizer of the model file.
        path: the path of another tokenizer, or the word ``bytes``; None takes that of the file.

    Raises:
        UsageError: if the file of the path cannot be read.
    """
    if path is None:
        return own
    if path == BYTES:  # a Path of this name is a file
        return str(byte_tokenizer().to_str())
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--tokenizer {path}: {error}.", "Check the path.") from error


def check_ids(spec: InputSpec, tokenizer: str | None) -> None:
    """Check the number of token ids of a model, and its tokenizer.

    Raises:
        UsageError: if there are too many ids, the tokenizer has other ids, or the model takes
            features and has a tokenizer.
    """
    if spec.vocab_size is not None:
        check_vocabulary(spec.vocab_size)
        if tokenizer is not None:
            check_tokenizer(tokenizer, spec.vocab_size)
    elif tokenizer is not None:
        raise UsageError(
            "Expected no tokenizer for a model of features, got one.", "Leave --tokenizer out."
        )
