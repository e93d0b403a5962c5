"""The user's inputs of a comparison: documents from a file, and random documents."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from aftexport.bundle.features import Features
from aftexport.bundle.golden import Array, random_tokens
from aftexport.bundle.manifest import Manifest
from aftexport.errors import UsageError, panics_as_errors
from aftexport.extra_inputs import (
    TOKEN_TYPES,
    ExtraValues,
    check_values,
    sample_values,
    stacked,
)
from aftexport.system.contract import MAX_TOKENS

Inputs = dict[str, Array]


def read_documents(
    path: Path, manifest: Manifest, tokenizer: Tokenizer | None
) -> dict[str, Inputs]:
    """Return the model's inputs of each document of a JSON lines file, by the number of the line.

    A line has ``text``, ``input_ids`` or, for a model of features, ``input_features``; and the
    extra inputs by name in ``inputs``. An array in a file has the ids, or the features of all
    tokens.

    Raises:
        UsageError: if a line is invalid; the message has the number of the line.
    """
    if path.suffix == ".npy":
        array = _read_array(path, manifest)
        try:
            extras = extras_of({}, manifest, len(array))
        except ValueError as error:
            raise UsageError(f"{path}: {error}.", "Give a file of JSON lines.") from error
        return {path.name: as_inputs([array], manifest, [extras])}
    documents = {}
    for number, line in lines_of(path):
        try:
            content = with_pair(object_of(line), manifest, tokenizer)
            document = document_of(content, manifest, tokenizer)
            extras = extras_of(content, manifest, len(document))
            documents[f"document {number}"] = as_inputs([document], manifest, [extras])
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}, line {number}: {error}.", _line_form(manifest)) from error
    if not documents:
        raise UsageError(f"{path} has no documents.", "Give one JSON object per line.")
    return documents


def with_pair(
    content: dict[str, Any], manifest: Manifest, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return a line with the token ids and types of its pair of texts.

    Raises:
        ValueError: if the model takes pairs and the line has none, or the reverse.
    """
    if not manifest.text_pairs and "text_pair" in content:
        raise ValueError("expected one text for this model, got text_pair too")
    if tokenizer is None or not manifest.text_pairs or "input_ids" in content:
        return content
    text, second = content.get("text"), content.get("text_pair")
    if not isinstance(text, str) or not isinstance(second, str):
        raise ValueError("expected text and text_pair, two strings")
    with _encoding():
        encoded = tokenizer.encode(text, second)
    types = {TOKEN_TYPES: encoded.type_ids} if manifest.typed_pairs else {}
    inputs = {**(content.get("inputs") or {}), **types}
    return {**content, "input_ids": encoded.ids, "inputs": inputs}


def _line_form(manifest: Manifest) -> str:
    more = ', "inputs": {"NAME": ...}' if manifest.extra_inputs else ""
    if manifest.text_pairs:
        return 'Give {"text": "...", "text_pair": "..."} on each line.'
    if manifest.features is not None:
        return f'Give {{"input_features": [[...], ...]{more}}} on each line.'
    return f'Give {{"text": "..."{more}}} or {{"input_ids": [...]{more}}} on each line.'


def lines_of(path: Path) -> list[tuple[int, str]]:
    """Return the lines of a file that are not blank, with their numbers."""
    try:
        # Do not use splitlines, because a JSON string may contain Unicode line breaks.
        lines = path.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} must be UTF-8 text.", "Convert the file to UTF-8.") from error
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def object_of(line: str) -> dict[str, Any]:
    """Return the JSON object of a line; raise ValueError, or RecursionError if it is too deep."""
    content = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError("expected a JSON object")
    return content


def document_of(
    content: Mapping[str, Any],
    manifest: Manifest,
    tokenizer: Tokenizer | None,
    *,
    in_windows: bool = False,  # whether a document may have more tokens than the model takes
) -> Sequence[int] | Array:
    """Return the checked document of a line; raise ValueError if it does not fit the model."""
    document: Sequence[int] | Array
    if manifest.features is None:
        document = _ids(content, manifest, tokenizer)
    else:
        given = content.get("input_features")
        if not isinstance(given, list):
            raise ValueError("expected input_features, a list with the features of each token")
        document = _features(np.array(given), manifest.features)
    _check_length(document, None if in_windows else manifest.max_tokens)
    return document


def extras_of(content: Mapping[str, Any], manifest: Manifest, tokens: int) -> ExtraValues:
    """Return the checked extra inputs of the field ``inputs``, which other models ignore.

    Raises:
        ValueError: if they do not fit the model.
    """
    given = content.get("inputs") if manifest.extra_inputs else None
    if not isinstance(given, dict | None):
        raise ValueError(f"inputs must be an object, got {type(given).__name__}")
    return check_values(manifest.extra_inputs, given, tokens)


def _read_array(path: Path, manifest: Manifest) -> Array:
    try:
        array = np.load(path, allow_pickle=False)
        if manifest.features is not None:
            document = _features(array, manifest.features)
        else:
            if array.dtype.kind not in "iu" or array.ndim != 1:
                raise ValueError(f"expected ids [tokens], got {array.dtype} {list(array.shape)}")
            document = np.array(_checked_ids(array.tolist(), manifest), np.int64)
        _check_length(document, manifest.max_tokens)
    except (ValueError, EOFError) as error:
        raise UsageError(f"{path}: {error}.", "Write the file by numpy.save.") from error
    return document


def _features(array: Array, features: Features) -> Array:
    if array.dtype.kind not in "fiu" or array.ndim != 2 or array.shape[1] != features.count:
        raise ValueError(
            f"expected numbers [tokens, {features.count}], got {array.dtype} {list(array.shape)}"
        )
    return features.normalized(array)


def _check_length(document: Sequence[int] | Array, most: int | None) -> None:
    if not len(document):
        raise ValueError("expected at least one token, got no tokens")
    if most is not None and len(document) > most:
        raise ValueError(f"expected at most {most} tokens, got {len(document)}")


def _ids(content: Mapping[str, Any], manifest: Manifest, tokenizer: Tokenizer | None) -> list[int]:
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
        with _encoding():
            ids = tokenizer.encode(text).ids
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError("input_ids must be a list of whole numbers")
    return _checked_ids(ids, manifest)


@contextmanager
def _encoding() -> Iterator[None]:
    """Raise ValueError if the tokenizer fails within the block."""
    try:
        with panics_as_errors():
            yield
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"the tokenizer cannot encode the text: {error}") from error


def _checked_ids(ids: list[int], manifest: Manifest) -> list[int]:
    count = manifest.vocab_size or 0
    if outside := [token for token in ids if not 0 <= token < count]:
        raise ValueError(f"token ids must be from 0 to {count - 1}, got {outside[0]}")
    return ids


def random_documents(lengths: Sequence[int], manifest: Manifest) -> dict[str, Inputs]:
    """Return one document of random tokens for each length, with a fixed seed."""
    generator = np.random.default_rng(0)
    max_tokens = min(manifest.max_tokens or MAX_TOKENS, MAX_TOKENS)
    documents = {}
    for length in lengths:
        if length > max_tokens:
            raise UsageError(
                f"--lengths must be at most {max_tokens} for this model, got {length}.",
                f"Give {max_tokens} or less.",
            )
        document = random_document(length, manifest, generator)
        extras = sample_values(manifest.extra_inputs, generator, length)
        documents[f"{length} random tokens"] = as_inputs([document], manifest, [extras])
    return documents


def random_document(tokens: int, manifest: Manifest, generator: np.random.Generator) -> Array:
    """Return random ids ``[tokens]``, or standard normal features ``[tokens, features]``."""
    count = None if manifest.features is None else manifest.features.count
    return random_tokens(generator, (tokens,), vocab_size=manifest.vocab_size, num_features=count)


def as_inputs(
    documents: Sequence[Sequence[int] | Array], manifest: Manifest, extras: Sequence[ExtraValues]
) -> Inputs:
    """Return the model's inputs for documents, padded on the right."""
    lengths = [len(document) for document in documents]
    features = [] if manifest.features is None else [manifest.features.count]
    element = np.dtype(np.float32 if features else np.int64)
    padded = np.zeros((len(documents), max(lengths), *features), element)
    for row, document in zip(padded, documents, strict=True):
        row[: len(document)] = document
    inputs = {
        manifest.main_input: padded,
        "lengths": np.array(lengths, np.int64),
        **stacked(manifest.extra_inputs, extras, max(lengths)),
    }
    return {name: inputs[name] for name in manifest.inputs}
