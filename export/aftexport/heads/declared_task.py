"""The task and names that a configuration declares, as those of the transformers library do."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aftexport.errors import CheckpointError, UsageError
from aftexport.heads import HEADS
from aftexport.system.files import read_json

_PROBLEM_TYPE = "problem_type"
_NAMES = "id2label"
_TASKS = (
    (re.compile(r"token", re.IGNORECASE), "token_classification"),
    (re.compile(r"feature|embed", re.IGNORECASE), "feature_extraction"),
    (re.compile(r"regress", re.IGNORECASE), "regression"),
    (re.compile(r"multi[\W_]*label", re.IGNORECASE), "multi_label_classification"),
    (re.compile(r"binary", re.IGNORECASE), "binary_classification"),
    (re.compile(r"single[\W_]*label", re.IGNORECASE), "single_label_classification"),
)
"""Spellings of problem_type, the field of transformers, with their tasks."""
_ARCHITECTURES = (("ForTokenClassification", "token_classification"),)
"""Ends of names of model classes in transformers, with their tasks.

ForSequenceClassification is missing: one logit may be that of two labels, or a value.
"""
_OTHER_ARCHITECTURES = ("ForQuestionAnswering", "ForMultipleChoice")
"""Ends of names of model classes that no head serves."""
_OTHER_TASKS = re.compile(
    r"multi[\W_]*(target|output|label[\W_]*token)|token[\W_]*multi|span|question", re.IGNORECASE
)
"""Values of problem_type that no head serves."""
_CONFIGS = ("config", "cfg", "args", "hparams", "hyper_parameters", "model_config")
"""Usual names of the settings beside the weights in training scripts."""
_HUB_SUFFIXES = (".safetensors", ".bin")


@dataclass(frozen=True)
class Declaration:
    """The head that a configuration declares; None for what it leaves open."""

    task: str | None = None  # one of HEADS
    labels: tuple[str, ...] | None = None  # names in the order of the logits

    def or_else(self, other: "Declaration") -> "Declaration":
        """Return this declaration, with what only ``other`` declares."""
        return Declaration(self.task or other.task, self.labels or other.labels)


def declared_beside(path: Path | None, module: Any) -> Declaration:
    """Return what a file or folder beside a model, or a ``torch.nn.Module`` of it, declares.

    Raises:
        UsageError: if a configuration declares a task that no head serves.
    """
    # transformers writes config.json beside a file or into a folder.
    declared = Declaration()
    if path is not None and (path.is_dir() or path.suffix in _HUB_SUFFIXES):
        folder = path if path.is_dir() else path.parent
        name = f"{folder / 'config.json'}"
        config = _read_json(folder / "config.json")
        classes = _entry(config, "architectures")
        declared = declared_in(name, config)
        # The configuration of a module may be that of an earlier model, from which it was made.
        for architecture in classes if isinstance(classes, list) else ():
            declared = declared.or_else(_declared_by_class(name, architecture))
    for part in module.modules() if module is not None else ():
        name = f"The configuration of {type(part).__name__}"
        declared = declared.or_else(declared_in(name, part))
        declared = declared.or_else(_declared_by_class("The model's class", type(part).__name__))
    return declared


def declared_in(name: str, config: object) -> Declaration:
    """Return what a configuration, an object or mapping, or one of its entries declares.

    Raises:
        UsageError: if it declares a task that no head serves.
    """
    declared = Declaration()
    for entries in (config, *(_entry(config, holder) for holder in _CONFIGS)):
        found = Declaration(_task_of(name, entries), _labels_of(entries))
        declared = declared.or_else(found)
    return declared


def _task_of(name: str, config: object) -> str | None:
    declared = _entry(config, _PROBLEM_TYPE)
    declared = getattr(declared, "value", declared)  # the value of an enum
    if not isinstance(declared, str):
        return None
    if _OTHER_TASKS.search(declared):
        raise UsageError(
            f"{name}: expected a problem_type of {', '.join(HEADS)}, got {declared[:80]}.",
            "Export a model of one of these tasks.",
        )
    return next((task for spelling, task in _TASKS if spelling.search(declared)), None)


def _declared_by_class(name: str, architecture: object) -> Declaration:
    """Return the task of a model class of transformers; raise UsageError if no head serves it."""
    if not isinstance(architecture, str):
        return Declaration()
    if architecture.endswith(_OTHER_ARCHITECTURES):
        raise UsageError(
            f"{name}: expected a model of {', '.join(HEADS)}, got {architecture[:80]}.",
            "Export a model of one of these tasks.",
        )
    return Declaration(next((t for end, t in _ARCHITECTURES if architecture.endswith(end)), None))


def _labels_of(config: object) -> tuple[str, ...] | None:
    """Return the names of ``id2label``, a field of transformers; None for its numbered names."""
    names = _entry(config, _NAMES)
    if not isinstance(names, Mapping) or not all(isinstance(v, str) for v in names.values()):
        return None
    # In JSON the keys are text.
    numbered = {str(key): name for key, name in names.items()}
    labels = [numbered.get(str(number)) for number in range(len(numbered))]
    if all(label == f"LABEL_{number}" for number, label in enumerate(labels)):
        return None
    return None if None in labels else tuple(label for label in labels if label is not None)


def _entry(config: object, name: str) -> object:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _read_json(path: Path) -> object:
    try:
        return read_json(path)
    except (OSError, CheckpointError):
        return None  # the reader that needs the file reports the problem
