"""A CrossEncoder of sentence-transformers: a classifier of pairs of texts, with an activation."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aftexport.checkpoint.checkpoint import Checkpoint
from aftexport.checkpoint.sentence_config import (
    SETTINGS,
    TRANSFORMER_SETTINGS,
    check_settings,
    read_max_tokens,
)
from aftexport.checkpoint.transformers_class import MODULES, TransformersModel, read_config
from aftexport.checkpoint.transformers_folder import read_transformers_folder
from aftexport.errors import CheckpointError
from aftexport.options import ModelSource
from aftexport.system.files import read_json, read_json_object

_KIND = "CrossEncoder"
_ACTIVATION = "activation_fn"
_SECTION = "sentence_transformers"
"""The entry of config.json that versions 4 and 5 of the library wrote."""
_OLD_ACTIVATION = "sbert_ce_default_activation_function"
"""The entry of config.json that earlier versions wrote."""
_TASKS = {"Sigmoid": "multi_label_classification", "Identity": "regression"}
"""The task of one logit by its activation."""
_TRANSFORMER = "Transformer"
_OF_PAIRS: dict[str, tuple[object, ...]] = {
    **TRANSFORMER_SETTINGS,
    "transformer_task": ("sequence-classification",),
    "modality_config": ({"text": {"method": "forward", "method_output_name": "logits"}},),
    "module_output_name": ("scores",),
}


def is_cross_encoder(folder: Path) -> bool:
    """Return whether the settings in a folder are those of a CrossEncoder."""
    settings, config = (_object(folder / name) for name in (SETTINGS, "config.json"))
    section = config.get(_SECTION)
    return (
        settings.get("model_type") == _KIND
        or (isinstance(section, Mapping) and _ACTIVATION in section)
        or _OLD_ACTIVATION in config
    )


def read_cross_encoder(folder: Path, source: ModelSource) -> Checkpoint:
    """Return the model of a folder, in float32, with the task of its activation.

    The library sentence-transformers is not needed.

    Raises:
        CheckpointError: if transformers is missing, or a file cannot be used.
        SafetensorError: if a weight file is not complete.
    """
    config = read_config(folder)
    check_settings(folder, _KIND)
    _check_modules(folder)
    limit = read_max_tokens(folder, _OF_PAIRS)
    found = read_transformers_folder(folder, config, source)
    module = found.module
    assert isinstance(module, TransformersModel)
    if not type(module.model).__name__.endswith("ForSequenceClassification"):
        raise CheckpointError(
            folder,
            f"expected a class that ends in ForSequenceClassification for a {_KIND}, got "
            f"{type(module.model).__name__}",
            "Save the model by save_pretrained of its CrossEncoder.",
        )
    limits = [one for one in (module.max_length, limit) if one is not None]
    module.max_length = min(limits, default=None)
    task = _task(folder, config, labels=module.model.config.num_labels)
    return replace(found, kind=f"{_KIND}, {found.kind}", task=task, text_pairs=True)


def _task(folder: Path, config: Mapping[str, Any], *, labels: int) -> str | None:
    """Return the task whose scores are those of the activation; None for that of the class."""
    section = config.get(_SECTION)
    old = section.get(_ACTIVATION) if isinstance(section, Mapping) else None
    given = _object(folder / SETTINGS).get(_ACTIVATION) or old or config.get(_OLD_ACTIVATION)
    name = str(given or ("Sigmoid" if labels == 1 else "Identity")).rpartition(".")[2]
    if name not in _TASKS or (given is not None and not str(given).startswith("torch.nn.")):
        raise CheckpointError(
            folder,
            f"expected the activation torch.nn.Sigmoid or torch.nn.Identity, got {str(given)[:80]}",
            "Save the CrossEncoder with one of them as activation_fn, and apply another one to "
            "the answers.",
        )
    return None if labels > 1 and name == "Identity" else _TASKS[name]


def _check_modules(folder: Path) -> None:
    """Refuse other modules than a model of transformers in the folder itself."""
    path = folder / MODULES
    if not path.is_file():  # versions before 6 of the library write none
        return
    listed = read_json(path)
    modules = listed if isinstance(listed, list) else [listed]
    kinds = [str(one.get("type")) if isinstance(one, Mapping) else str(one) for one in modules]
    if [kind.rpartition(".")[2] for kind in kinds] != [_TRANSFORMER] or modules[0].get("path"):
        raise CheckpointError(
            path,
            f"expected one {_TRANSFORMER} in the folder itself, got {', '.join(kinds)[:200]}",
            "Export a module of your own with --factory package.module:factory.",
        )


def _object(path: Path) -> Mapping[str, Any]:
    return read_json_object(path) if path.is_file() else {}
