"""The tokenizer of a folder of transformers, as JSON of the tokenizers library."""

import warnings
from pathlib import Path
from typing import Any

from aftexport.errors import first_line

_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model",
    "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
"""Usual names of a tokenizer's files."""
_SAMPLES = (
    "",
    "Hello, World!  Two spaces\tand a line\nbreak.",
    "Straße, naïve café, cafe\u0301 \u0130stanbul",  # a combining accent, a capital I with a dot
    "日本語と中文 한국어 العربية",
    "👩\u200d👩\u200d👧 🏳️\u200d🌈 👍🏽 \u00a0\u200b",
    "don't can't 3.14 [MASK] <s> </s>",
)
"""Texts on which the JSON must give the ids of the library."""


def read_tokenizer(folder: Path, *, trust_remote_code: bool) -> str | None:
    """Return the JSON of the folder's tokenizer; None, with a warning, if it has no such form.

    Args:
        folder: the folder that save_pretrained wrote.
        trust_remote_code: whether code in the folder may define the tokenizer.
    """
    if not any((folder / name).is_file() for name in _FILES):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
        reason = _reason_against(tokenizer)
    except Exception as error:  # files of many forms, read by several libraries
        reason = f"transformers cannot load it ({first_line(error)})"
    if reason:
        warnings.warn(
            f"{folder}: the tokenizer is left out: {reason}. Give a tokenizer.json by "
            "--tokenizer, or send token ids.",
            UserWarning,
            stacklevel=2,
        )
        return None
    if getattr(tokenizer, "truncation_side", "right") == "left":
        warnings.warn(
            f"{folder}: the tokenizer truncates on the left: start the server with "
            "--long-documents tail to keep the end of long documents.",
            UserWarning,
            stacklevel=2,
        )
    return str(tokenizer.backend_tokenizer.to_str())


def _reason_against(tokenizer: Any) -> str:
    """Return the reason why a bundle cannot have a tokenizer; empty if it can."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return f"{type(tokenizer).__name__} runs in Python, not as a fast tokenizer"
    backend.no_padding()
    backend.no_truncation()
    for sample in _SAMPLES:
        try:
            expected = tokenizer(sample)
        except Exception:  # a vocabulary without an unknown token refuses texts
            continue
        if backend.encode(sample).ids != expected["input_ids"]:
            return f"{type(tokenizer).__name__} changes texts in Python first"
        if any(expected.get("token_type_ids", ())):
            return "its tokens have segments other than 0, which a bundle lacks"
    return ""
