"""Model files of several kinds, read without running the code in them.

There are five kinds: the project's own checkpoint (``save``); a state dict, possibly beside an
optimizer's, with a factory for the module; a ``torch.export`` program; a folder of
``config.json`` and ``model.safetensors``; and, only if the user allows it, a pickled module.
"""

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.export import ExportedProgram

from aftexport.bundle.tokenizer import check_tokenizer
from aftexport.checkpoint.factory import call_factory
from aftexport.checkpoint.holders import module_in, state_dict_in
from aftexport.checkpoint.program_archive import check_members, is_program_archive, load_program
from aftexport.checkpoint.torch_file import damaged_error, read_torch_file
from aftexport.checkpoint.weights import load_weights, refuse_unusable, unwrapped
from aftexport.errors import AftexportError, CheckpointError, UsageError
from aftexport.heads.exclusive_labels import check_config
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.system.files import replacing_file

FORMAT = "aftexport"
VERSION = 1
_INDEX = ".index.json"
"""The suffix of the file that lists the parts of a sharded state dict."""


@dataclass(frozen=True)
class Checkpoint:
    """A model that was read from a file.

    Attributes:
        path: the file or folder.
        kind: the kind of file, for messages.
        module: the model in float32 or as stored; None for a captured program.
        program: the captured program; None for a module.
        labels: class names in the order of the logits; None if the file has none.
        tokenizer: JSON of the ``tokenizers`` library; None if the file has none.
    """

    path: Path
    kind: str
    module: nn.Module | None = None
    program: ExportedProgram | None = None
    labels: tuple[str, ...] | None = None
    tokenizer: str | None = None


def save(
    path: str | Path,
    *,
    model: DocumentClassifier,
    labels: Sequence[str],
    tokenizer: str | None = None,
) -> None:
    """Write a checkpoint that ``load`` and the ``aftexport`` command read.

    Args:
        path: the file, which is replaced only after the new one is complete.
        model: the model whose configuration and weights are saved.
        labels: class names, one for each logit.
        tokenizer: JSON text of a ``tokenizers.Tokenizer`` (``to_str()``).

    Raises:
        UsageError: if the model is not a ``DocumentClassifier``, or labels or tokenizer do not
            fit it.
    """
    if not isinstance(getattr(model, "config", None), ClassifierConfig):  # torch.compile wraps one
        raise UsageError(
            "Expected a DocumentClassifier, whose configuration a checkpoint holds, got a "
            f"{type(model).__name__}.",
            "Save its state_dict by torch.save, and export that file with --factory "
            "package.module:factory.",
        )
    _check_labels(labels, model.config.num_labels)
    if not all(labels):
        raise UsageError(
            f"Expected a name for each class, got an empty label in {list(labels)}.",
            "Name every class.",
        )
    if tokenizer is not None:
        check_tokenizer(tokenizer, model.config.vocab_size)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "config": model.config.to_dict(),
        "labels": list(labels),
        "tokenizer": tokenizer,
        "state_dict": {name: t.detach().cpu() for name, t in model.state_dict().items()},
    }
    with replacing_file(Path(path)) as aside:
        torch.save(content, aside)


def load(path: str | Path, *, factory: str | None = None, allow_pickle: bool = False) -> Checkpoint:
    """Read a model file of any of the five kinds.

    Args:
        path: the file or folder.
        factory: ``package.module:callable`` that builds the module of a state dict.
        allow_pickle: whether to load pickled objects, which runs the code in the file. The module
            among them is used; with a factory, only their weights are used.

    Raises:
        CheckpointError: if the file cannot be used; names file, reason and remedy.
        UsageError: if a factory is given for a file that has its own configuration.
    """
    path = Path(path)
    try:
        if not path.exists():
            raise CheckpointError(path, "no such file or folder", "Check the path.")
        if path.is_dir():
            _refuse_shards(path)
            if factory:
                raise _unneeded_factory(
                    "a folder with its own configuration",
                    factory,
                    "; or give the file model.safetensors to load it into the factory's module",
                )
            return _load_folder(path)
        if path.name.endswith(_INDEX):
            _refuse_shards(path.parent)
        if path.suffix == ".safetensors":
            return _from_state_dict(path, safetensors.torch.load_file(path), factory)
        if is_program_archive(path):
            if factory:
                raise _unneeded_factory("a .pt2 program", factory)
            return Checkpoint(path, "torch.export program", program=load_program(path))
        _refuse_other_formats(path)
        return _load_torch_file(path, factory, allow_pickle)
    except SafetensorError as error:
        raise CheckpointError(
            path, f"not a complete safetensors file ({error})", "Copy or download it again."
        ) from error
    except OSError as error:
        raise CheckpointError(
            path, f"cannot be read ({error.strerror})", "Check its name and its permissions."
        ) from error


def _unneeded_factory(subject: str, factory: str, alternative: str = "") -> UsageError:
    return UsageError(
        f"--factory is only for weights without a module, got --factory {factory} for {subject}.",
        f"Omit --factory{alternative}.",
    )


def _refuse_shards(folder: Path) -> None:
    index = next(iter(sorted(folder.glob(f"*{_INDEX}"))), None)
    if index is not None and not (folder / "model.safetensors").is_file():
        raise CheckpointError(
            folder,
            f"its weights are in several files, which {index.name} lists",
            "Join them: read each by safetensors.torch.load_file into one dict, and write the dict "
            "by save_file.",
        )


def from_factory(factory: str) -> Checkpoint:
    """Return the module that ``package.module:callable`` returns, with its own weights.

    Raises:
        UsageError: if the callable cannot be imported or called, or does not return a module.
        CheckpointError: if weights are NaN.
    """
    path, module = Path(factory.rpartition(":")[2]), unwrapped(call_factory(factory))
    refuse_unusable(path, module)
    return Checkpoint(path, f"module of {factory}", module)


def _refuse_other_formats(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        raise CheckpointError(path, "the file is empty", "Save or copy it again.")
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(path, "a Git LFS pointer, not the file", "Run git lfs pull.")
    if path.suffix == ".onnx":
        raise CheckpointError(path, "already an ONNX model", "Give its PyTorch model.")
    if head.startswith(b"PK"):
        try:
            with zipfile.ZipFile(path) as archive:
                _refuse_other_archives(path, archive.namelist())
                check_members(path, archive, path)
        except CheckpointError:
            raise
        except Exception as error:  # a changed byte can cause any exception
            raise damaged_error(path) from error


def _refuse_other_archives(path: Path, names: Sequence[str]) -> None:
    if any("/code/" in name or name.endswith("/constants.pkl") for name in names):
        raise CheckpointError(
            path,
            "a TorchScript archive, which torch.export cannot read",
            "Save the module's state dict, or a torch.export program.",
        )
    if not any(name.endswith("/data.pkl") for name in names):
        raise CheckpointError(
            path, "a zip archive that torch.save did not write", "Give a model file."
        )


def _load_torch_file(path: Path, factory: str | None, allow_pickle: bool) -> Checkpoint:
    file = read_torch_file(path, factory=factory, allow_pickle=allow_pickle)
    content = file.content
    check_config(str(path), content)
    if isinstance(content, dict) and content.get("format") == FORMAT:
        if factory:
            raise _unneeded_factory("a checkpoint with its own configuration", factory)
        return _from_own_checkpoint(path, content)
    if file.is_unpickled and not factory:
        module = unwrapped(module_in(path, content))
        refuse_unusable(path, module)
        return Checkpoint(path, "pickled module", module)
    if factory and isinstance(content, nn.Module):
        raise _unneeded_factory("a pickled module", factory)
    state = state_dict_in(path, content, is_plain=file.is_plain)
    return _from_state_dict(path, state, factory, is_unpickled=file.is_unpickled)


def _from_own_checkpoint(path: Path, content: Mapping[str, Any]) -> Checkpoint:
    version = content.get("version")
    if version != VERSION:
        raise CheckpointError(
            path,
            f"the checkpoint must have version {VERSION}, got version {version}",
            "Upgrade aftexport.",
        )
    for name, kind in (("config", dict), ("state_dict", dict), ("labels", list)):
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


def _load_folder(folder: Path) -> Checkpoint:
    config_path, weights_path = folder / "config.json", folder / "model.safetensors"
    for required in (config_path, weights_path):
        if not required.is_file():
            raise CheckpointError(
                folder,
                f"the folder has no {required.name}",
                "Give a folder of config.json and model.safetensors, or a model file.",
            )
    try:
        config = json.loads(config_path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(config_path, f"not valid JSON ({error})", "Fix the file.") from error
    if not isinstance(config, dict):
        kind = type(config).__name__
        raise CheckpointError(config_path, f"expected a JSON object, got {kind}", "Fix the file.")
    check_config(str(config_path), config)
    config.pop("problem_type", None)  # check_config accepts only the task of the server
    labels = config.pop("labels", None)
    tokenizer_path = folder / "tokenizer.json"
    try:
        tokenizer = tokenizer_path.read_text("utf-8") if tokenizer_path.is_file() else None
    except UnicodeDecodeError as error:
        raise CheckpointError(tokenizer_path, "not UTF-8 text", "Copy it again.") from error
    state = safetensors.torch.load_file(weights_path)
    return _build(folder, "config and safetensors", config, state, labels, tokenizer)


def _build(
    path: Path,
    kind: str,
    config: Mapping[str, Any],
    state: Mapping[str, Any],
    labels: Any,
    tokenizer: Any,
) -> Checkpoint:
    if "model_type" in config:
        raise CheckpointError(
            path,
            f"a configuration of the library transformers, model_type {config['model_type']!r}",
            "Give the folder's model.safetensors, and --factory package.module:factory, a callable "
            "that returns the module.",
        )
    try:
        parsed = ClassifierConfig.from_dict(config)
        if parsed.depth > len(state):
            raise UsageError(
                f"depth must be at most the number of weights {len(state)}, got {parsed.depth}.",
                "Give the configuration of the training.",
            )
        # The model has no storage until its shapes match the weights: a configuration cannot
        # make the reader allocate more than the size of the file.
        with torch.device("meta"):
            model = DocumentClassifier(parsed)
        if labels is not None:
            _check_labels(labels, model.config.num_labels)
        if tokenizer is not None:
            check_tokenizer(tokenizer, model.config.vocab_size)
    except AftexportError as error:
        raise CheckpointError(path, error.problem.rstrip("."), error.remedy) from error
    load_weights(path, model, state)
    return Checkpoint(path, kind, model, None, tuple(labels) if labels else None, tokenizer)


def _from_state_dict(
    path: Path, state: Mapping[str, Tensor], factory: str | None, *, is_unpickled: bool = False
) -> Checkpoint:
    if factory is None:
        raise CheckpointError(
            path,
            "a bare state dict: weights without their module",
            "Add --factory package.module:factory, a callable that returns the module.",
        )
    module = unwrapped(call_factory(factory))
    load_weights(path, module, state)
    kind = "pickled state dict" if is_unpickled else "state dict"
    return Checkpoint(path, f"{kind} for {factory}", module)


def _check_labels(labels: Any, num_labels: int) -> None:
    if not isinstance(labels, list | tuple) or not all(isinstance(n, str) for n in labels):
        raise UsageError(
            f"Expected a list of names as labels, got {str(labels)[:80]}.",
            "Give one name for each class.",
        )
    if len(labels) != num_labels or len(set(labels)) != num_labels:
        raise UsageError(
            f"Expected {num_labels} different labels, one for each class, got {len(labels)} with "
            f"{len(set(labels))} different names.",
            "Give one name for each class.",
        )
