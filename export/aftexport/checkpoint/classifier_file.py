"""Files of the models of ``aftexport.nn``: configuration, weights, labels and tokenizer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from aftexport.bundle.tokenizer import check_tokenizer
from aftexport.checkpoint.checkpoint import Checkpoint
from aftexport.checkpoint.weights import load_weights
from aftexport.errors import AftexportError, CheckpointError, UsageError
from aftexport.heads import Head
from aftexport.nn import (
    ClassifierConfig,
    DocumentClassifier,
    EncoderConfig,
    MultiHeadClassifier,
    MultiHeadConfig,
)
from aftexport.nn.classifier import build_classifier
from aftexport.system.files import replacing_file

FORMAT = "aftexport"
VERSION = 1


def save(
    path: str | Path,
    *,
    model: DocumentClassifier | MultiHeadClassifier,
    labels: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    tokenizer: str | None = None,
) -> None:
    """Write a checkpoint that ``load`` and the ``aftexport`` command read.

    Args:
        path: the file, which is replaced only after the new one is complete.
        model: the model whose configuration and weights are saved.
        labels: the names of the classes, or of the values of a regression; for several outputs,
            those of each output by its name. None for numbered names, and for vectors, which have
            none.
        tokenizer: JSON text of a ``tokenizers.Tokenizer`` (``to_str()``).

    Raises:
        UsageError: if the model is none of this package, or labels or tokenizer do not fit it.
    """
    config = getattr(model, "config", None)  # torch.compile wraps a model
    if not isinstance(config, ClassifierConfig | MultiHeadConfig):
        raise UsageError(
            "Expected a DocumentClassifier, whose configuration a checkpoint holds, got a "
            f"{type(model).__name__}.",
            "Export it without a file by aftexport.export(model); or save its state_dict by "
            "torch.save, and export that file with --factory package.module:factory.",
        )
    _heads(config, labels)
    _check_tokenizer(tokenizer, config)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "config": config.to_dict(),
        "labels": _plain(labels),
        "tokenizer": tokenizer,
        "state_dict": {name: t.detach().cpu() for name, t in model.state_dict().items()},
    }
    with replacing_file(Path(path)) as aside:
        torch.save(content, aside)


def read_checkpoint(path: Path, content: Mapping[str, Any]) -> Checkpoint:
    """Return the model of a checkpoint that ``save`` wrote.

    Raises:
        CheckpointError: if the content cannot be used.
    """
    version = content.get("version")
    if version != VERSION:
        raise CheckpointError(
            path,
            f"the checkpoint must have version {VERSION}, got version {version}",
            "Upgrade aftexport.",
        )
    kinds = (("config", dict), ("state_dict", dict), ("labels", list | dict | None))
    for name, kind in kinds:
        if not isinstance(content.get(name), kind):
            raise CheckpointError(path, f"it has no {name}", "Write it by aftexport.save.")
    return _build(
        path,
        "aftexport checkpoint",
        content["config"],
        content["state_dict"],
        content["labels"],
        content.get("tokenizer"),
    )


def read_folder(folder: Path, config: Mapping[str, Any]) -> Checkpoint:
    """Return the model of a folder of config.json and model.safetensors.

    Raises:
        CheckpointError: if a file is missing or cannot be used.
    """
    weights_path = folder / "model.safetensors"
    if not weights_path.is_file():
        raise CheckpointError(
            folder,
            f"the folder has no {weights_path.name}",
            "Give a folder of config.json and model.safetensors, or a model file.",
        )
    settings = dict(config)
    labels = settings.pop("labels", None)
    tokenizer_path = folder / "tokenizer.json"
    try:
        tokenizer = tokenizer_path.read_text("utf-8") if tokenizer_path.is_file() else None
    except UnicodeDecodeError as error:
        raise CheckpointError(tokenizer_path, "not UTF-8 text", "Copy it again.") from error
    state = safetensors.torch.load_file(weights_path)
    return _build(folder, "config and safetensors", settings, state, labels, tokenizer)


def _build(
    path: Path,
    kind: str,
    config: Mapping[str, Any],
    state: Mapping[str, Any],
    labels: Any,
    tokenizer: Any,
) -> Checkpoint:
    try:
        kinds = MultiHeadConfig if "heads" in config else ClassifierConfig
        parsed = kinds.from_dict(config)
        if parsed.depth > len(state):
            raise UsageError(
                f"depth must be at most the number of weights {len(state)}, got {parsed.depth}.",
                "Give the configuration of the training.",
            )
        # The model has no storage until its shapes match the weights: a configuration cannot
        # make the reader allocate more than the size of the file.
        with torch.device("meta"):
            model = build_classifier(parsed)
        heads = _heads(parsed, labels)
        _check_tokenizer(tokenizer, parsed)
    except AftexportError as error:
        raise CheckpointError(path, error.problem.rstrip("."), error.remedy) from error
    load_weights(path, model, state)
    if heads is not None:
        return Checkpoint(path, kind, model, tokenizer=tokenizer, heads=heads)
    return Checkpoint(path, kind, model, None, tuple(labels) if labels else None, tokenizer)


def _heads(config: EncoderConfig, labels: Any) -> dict[str, Head] | None:
    """Return the heads of a model with several outputs; for one output, check its labels."""
    if isinstance(config, ClassifierConfig):
        config.head_config.head(config.dim, labels)
        return None
    assert isinstance(config, MultiHeadConfig)
    if not isinstance(labels, Mapping | None):
        raise UsageError(
            f"Expected the labels of each output by its name, got a {type(labels).__name__}.",
            f"Give a mapping with the names {', '.join(config.heads)}.",
        )
    return config.meanings(labels)


def _plain(labels: Any) -> Any:
    """Return labels as lists, which a file without code can hold."""
    if isinstance(labels, Mapping):
        return {name: list(given) for name, given in labels.items()}
    return None if labels is None else list(labels)


def _check_tokenizer(tokenizer: str | None, config: EncoderConfig) -> None:
    """Raise UsageError if a tokenizer does not fit a model."""
    if tokenizer is None:
        return
    if config.vocab_size is None:
        raise UsageError(
            "Expected no tokenizer for a model of features, got one.", "Leave the tokenizer out."
        )
    check_tokenizer(tokenizer, config.vocab_size)
