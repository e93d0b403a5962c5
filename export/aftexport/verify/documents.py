"""The user's inputs of a comparison: documents from a file, and random documents."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    """Read documents, one JSON object per line with ``text`` or ``input_ids``.

    Args:
        path: the file.
        manifest: the manifest of the model.
        tokenizer: the tokenizer of the bundle; None if the bundle has no tokenizer.

    Returns:
        The model's inputs of each document, by a name with the number of the line.

    Raises:
        UsageError: if a line is invalid; the message has the number of the line.
    """
    documents = {}
    for number, line in lines_of(path):
        try:
            ids = ids_of(object_of(line), manifest, tokenizer)
            documents[f"document {number}"] = as_inputs([ids], manifest)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{path}, line {number}: {error}.",
                'Give {"text": "..."} or {"input_ids": [...]} on each line.',
            ) from error
    if not documents:
        raise UsageError(f"{path} has no documents.", "Give one JSON object per line.")
    return documents


def lines_of(path: Path) -> list[tuple[int, str]]:
    """Return the lines of a file that are not blank, with their numbers.

    Raises:
        UsageError: if the file is not UTF-8.
    """
    try:
        # Do not use splitlines, because a JSON string may contain Unicode line breaks.
        lines = path.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} must be UTF-8 text.", "Convert the file to UTF-8.") from error
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def object_of(line: str) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        ValueError: if it is not one.
        RecursionError: if it is too deep.
    """
    content = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError("expected a JSON object")
    return content


def ids_of(
    content: Mapping[str, Any], manifest: Manifest, tokenizer: Tokenizer | None
) -> list[int]:
    """Return the checked token ids of a document with ``text`` or ``input_ids``.

    Raises:
        ValueError: if they do not fit the model.
    """
    ids = content.get("input_ids")
    text = content.get("text")
    if ids is None:
        if not isinstance(text, str):
            raise ValueError(
                "expected text or input_ids, got neither"
                if text is None
                else f"text must be a string, got {type(text).__name__}"
            )
        if tokenizer is None:
            raise ValueError("expected input_ids, got text, but the bundle has no tokenizer")
        ids = tokenizer.encode(text).ids
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError("input_ids must be a list of whole numbers")
    if not ids:
        raise ValueError("expected at least one token, got no tokens")
    if outside := [token for token in ids if not 0 <= token < manifest.vocab_size]:
        raise ValueError(f"token ids must be from 0 to {manifest.vocab_size - 1}, got {outside[0]}")
    if manifest.max_tokens is not None and len(ids) > manifest.max_tokens:
        raise ValueError(f"expected at most {manifest.max_tokens} tokens, got {len(ids)}")
    return ids


def random_documents(lengths: Sequence[int], manifest: Manifest) -> dict[str, Inputs]:
    """Return one document of random tokens for each length, with a fixed seed.

    Raises:
        UsageError: if the model does not accept a length.
    """
    generator = np.random.default_rng(0)
    max_tokens = min(manifest.max_tokens or MAX_TOKENS, MAX_TOKENS)
    documents = {}
    for length in lengths:
        if length > max_tokens:
            raise UsageError(
                f"--lengths must be at most {max_tokens} for this model, got {length}.",
                f"Give {max_tokens} or less.",
            )
        ids = generator.integers(0, manifest.vocab_size, length, np.int64)
        documents[f"{length} random tokens"] = as_inputs([ids], manifest)
    return documents


def as_inputs(documents: Sequence[Sequence[int] | Array], manifest: Manifest) -> Inputs:
    """Return the model's inputs for documents of token ids, padded on the right."""
    lengths = [len(ids) for ids in documents]
    padded = np.zeros((len(documents), max(lengths)), np.int64)
    for row, ids in zip(padded, documents, strict=True):
        row[: len(ids)] = ids
    inputs = {"input_ids": padded, "lengths": np.array(lengths, np.int64)}
    return {name: inputs[name] for name in manifest.inputs}
