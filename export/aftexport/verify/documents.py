"""The inputs a user asks to compare on: own documents, and lengths."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from aftexport.bundle.golden import Array
from aftexport.bundle.manifest import Manifest
from aftexport.contract import MAX_TOKENS
from aftexport.errors import UsageError

Inputs = dict[str, Array]


def read_documents(
    path: Path, manifest: Manifest, tokenizer: Tokenizer | None
) -> dict[str, Inputs]:
    """Reads documents, one JSON object a line with ``text`` or ``input_ids``.

    Args:
        path: the file.
        manifest: what the model takes.
        tokenizer: of the bundle; None where it has none.

    Returns:
        The model's inputs of each document, by a name that tells the line.

    Raises:
        UsageError: naming the line that cannot be used.
    """
    try:
        # Not splitlines: a JSON string may have line breaks of Unicode in it.
        lines = path.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text.", "Convert it.") from error
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found[f"document {number}"] = as_inputs([_ids(line, manifest, tokenizer)], manifest)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{path}, line {number}: {error}.",
                'Give {"text": "..."} or {"input_ids": [...]} on each line.',
            ) from error
    if not found:
        raise UsageError(f"{path} has no documents.", "Give one JSON object a line.")
    return found


def _ids(line: str, manifest: Manifest, tokenizer: Tokenizer | None) -> list[int]:
    content = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    ids = content.get("input_ids")
    text = content.get("text")
    if ids is None:
        if not isinstance(text, str):
            raise ValueError("no text" if text is None else "its text is no string")
        if tokenizer is None:
            raise ValueError("a text, but the bundle has no tokenizer")
        ids = tokenizer.encode(text).ids
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError("its input_ids are no list of whole numbers")
    if not ids:
        raise ValueError("no tokens")
    if not all(0 <= token < manifest.vocab_size for token in ids):
        raise ValueError(f"a token id outside 0 to {manifest.vocab_size - 1}")
    if manifest.max_tokens is not None and len(ids) > manifest.max_tokens:
        raise ValueError(f"{len(ids)} tokens, the model takes {manifest.max_tokens}")
    return ids


def random_documents(lengths: Sequence[int], manifest: Manifest) -> dict[str, Inputs]:
    """One document of random tokens for each length; the same ones every time.

    Raises:
        UsageError: for a length the model does not take.
    """
    generator = np.random.default_rng(0)
    most = min(manifest.max_tokens or MAX_TOKENS, MAX_TOKENS)
    found = {}
    for length in lengths:
        if length > most:
            raise UsageError(
                f"{length} tokens are more than the model takes.", f"Give {most} or less."
            )
        ids = generator.integers(0, manifest.vocab_size, length, np.int64)
        found[f"{length} random tokens"] = as_inputs([ids], manifest)
    return found


def as_inputs(documents: Sequence[Sequence[int] | Array], manifest: Manifest) -> Inputs:
    """Documents of token ids as the model takes them, padded on the right."""
    lengths = [len(ids) for ids in documents]
    padded = np.zeros((len(documents), max(lengths)), np.int64)
    for row, ids in zip(padded, documents, strict=True):
        row[: len(ids)] = ids
    given = {"input_ids": padded, "lengths": np.array(lengths, np.int64)}
    return {name: given[name] for name in manifest.inputs}
