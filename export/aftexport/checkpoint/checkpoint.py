"""What a ``model.pt`` may be, and reading it without running what is in it.

Five kinds: the project's own checkpoint (``save``); a bare state dict, or one beside
an optimizer's, with a factory for the module; a ``torch.export`` program; a folder of
``config.json`` and ``model.safetensors``; and, only where the user allows it, a pickled
module.
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
from aftexport.checkpoint.torch_file import damaged, read_torch_file
from aftexport.checkpoint.weights import load_weights, refuse_unusable, unwrapped
from aftexport.errors import AftexportError, CheckpointError, UsageError
from aftexport.heads.exclusive_labels import check_config
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.system.files import replacing_file

FORMAT = "aftexport"
VERSION = 1
_INDEX = ".index.json"
"""How the name ends of what lists the files of a state dict that has several."""


@dataclass(frozen=True)
class Checkpoint:
    """A model as read from a file.

    Attributes:
        path: the file or folder.
        kind: what it was, for people.
        module: the model in float32 or as stored; None for a captured program.
        program: the captured program; None for a module.
        labels: class names in the order of the logits, where the file has them.
        tokenizer: JSON of the ``tokenizers`` library, where the file has it.
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
    """Writes a checkpoint that ``load`` and the ``aftexport`` command read.

    Args:
        path: the file; replaced only once the new one is written whole.
        model: its configuration and weights are kept.
        labels: class names, one for each logit.
        tokenizer: JSON text of a ``tokenizers.Tokenizer`` (``to_str()``).

    Raises:
        UsageError: where the model is no ``DocumentClassifier``, or labels or tokenizer do not fit
            it.
    """
    if not isinstance(getattr(model, "config", None), ClassifierConfig):  # torch.compile wraps one
        raise UsageError(
            f"A {type(model).__name__} is no DocumentClassifier, whose configuration a checkpoint "
            "holds.",
            "Save its state_dict by torch.save, and export that with --factory "
            "package.module:factory.",
        )
    _check_labels(labels, model.config.num_labels)
    if not all(labels):
        raise UsageError("A label is empty.", "Give each class a name.")
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
    """Reads a model file of any of the five kinds.

    Args:
        path: the file or folder.
        factory: ``package.module:callable`` that builds the module of a state dict.
        allow_pickle: load pickled objects, which runs whatever code the file holds. The module
            among them is taken; with a factory, their weights are.

    Raises:
        CheckpointError: with file, reason and remedy.
    """
    path = Path(path)
    try:
        if not path.exists():
            raise CheckpointError(path, "no such file or folder", "Check the path.")
        if path.is_dir():
            _refuse_shards(path)
            if factory:
                raise UsageError(
                    "A folder has its own configuration, and needs no factory.",
                    f"Leave {factory} out; or to load the weights into its module, give the file "
                    "model.safetensors.",
                )
            return _load_folder(path)
        if path.name.endswith(_INDEX):
            _refuse_shards(path.parent)
        if path.suffix == ".safetensors":
            return _from_state_dict(path, safetensors.torch.load_file(path), factory)
        if is_program_archive(path):
            if factory:
                raise UsageError("A .pt2 program needs no factory.", f"Leave {factory} out.")
            return Checkpoint(path, "torch.export program", program=load_program(path))
        _refuse_other_formats(path)
        return _load_torch_file(path, factory, allow_pickle)
    except SafetensorError as error:
        raise CheckpointError(
            path, f"not a whole safetensors file ({error})", "Copy or download it again."
        ) from error
    except OSError as error:
        raise CheckpointError(
            path, f"cannot be read ({error.strerror})", "Check its name and its permissions."
        ) from error


def _refuse_shards(folder: Path) -> None:
    index = next(iter(sorted(folder.glob(f"*{_INDEX}"))), None)
    if index is not None and not (folder / "model.safetensors").is_file():
        raise CheckpointError(
            folder,
            f"its weights are in several files, which {index.name} lists",
            "Join them: safetensors.torch.load_file of each into one dict, and save_file of that.",
        )


def from_factory(factory: str) -> Checkpoint:
    """The module that ``package.module:callable`` returns, with the weights it has.

    Raises:
        UsageError: where it cannot be imported or called, or returns something else.
        CheckpointError: where weights are NaN.
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
        raise CheckpointError(path, "already an ONNX model", "Give the PyTorch model it came from.")
    if head.startswith(b"PK"):
        try:
            with zipfile.ZipFile(path) as archive:
                _refuse_other_archives(path, archive.namelist())
                check_members(path, archive, path)
        except CheckpointError:
            raise
        except Exception as error:  # a changed byte reads as encryption, compression, anything
            raise damaged(path) from error


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
            raise UsageError(
                "The checkpoint has its own configuration, and needs no factory.",
                f"Leave {factory} out.",
            )
        return _from_own_checkpoint(path, content)
    if file.unpickled and not factory:
        module = unwrapped(module_in(path, content))
        refuse_unusable(path, module)
        return Checkpoint(path, "pickled module", module)
    if factory and isinstance(content, nn.Module):
        raise UsageError("A pickled module needs no factory.", f"Leave {factory} out.")
    state = state_dict_in(path, content, plain=file.plain)
    return _from_state_dict(path, state, factory, unpickled=file.unpickled)


def _from_own_checkpoint(path: Path, content: Mapping[str, Any]) -> Checkpoint:
    version = content.get("version")
    if version != VERSION:
        raise CheckpointError(
            path,
            f"written in checkpoint version {version}, this aftexport reads {VERSION}",
            "Upgrade aftexport.",
        )
    for name, kind in (("config", dict), ("state_dict", dict), ("labels", list)):
        if not isinstance(content.get(name), kind):
            raise CheckpointError(path, f"it has no {name}", "Write it with aftexport.save.")
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
        raise CheckpointError(config_path, f"not valid JSON ({error})", "Mend the file.") from error
    if not isinstance(config, dict):
        raise CheckpointError(config_path, "not a JSON object", "Mend the file.")
    check_config(str(config_path), config)
    config.pop("problem_type", None)  # the one that is served
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
                f"depth is {parsed.depth}, but there are only {len(state)} weights.",
                "Give the configuration the weights were trained with.",
            )
        # Without storage until the shapes are known to be those of the weights: a
        # configuration cannot make the reader allocate more than the file holds.
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
    path: Path, state: Mapping[str, Tensor], factory: str | None, *, unpickled: bool = False
) -> Checkpoint:
    if factory is None:
        raise CheckpointError(
            path,
            "a bare state dict: weights without the module they belong to",
            "Add --factory package.module:factory, a callable that returns the module.",
        )
    module = unwrapped(call_factory(factory))
    load_weights(path, module, state)
    kind = "pickled state dict" if unpickled else "state dict"
    return Checkpoint(path, f"{kind} for {factory}", module)


def _check_labels(labels: Any, num_labels: int) -> None:
    if not isinstance(labels, list | tuple) or not all(isinstance(n, str) for n in labels):
        raise UsageError("The labels are not a list of names.", "Give one name for each class.")
    if len(labels) != num_labels or len(set(labels)) != num_labels:
        raise UsageError(
            f"There are {len(set(labels))} different labels for {num_labels} classes.",
            "Give one name for each class.",
        )
