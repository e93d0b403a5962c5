"""Model files of several kinds, read without running the code in them.

There are seven kinds: the project's own checkpoint (``save``); a state dict, possibly beside an
optimizer's, with a factory for the module; a ``torch.export`` program; a folder of
``config.json`` and ``model.safetensors``, of this project or of the transformers library; a folder
of sentence-transformers, which has ``modules.json`` or the settings of a CrossEncoder; and, only if
the user allows it, a pickled module.
"""

import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.export import ExportedProgram

from aftexport.bundle.bundle import refuse_bundle
from aftexport.checkpoint.checkpoint import Checkpoint
from aftexport.checkpoint.classifier_file import FORMAT, read_checkpoint, read_folder
from aftexport.checkpoint.cross_encoder import is_cross_encoder, read_cross_encoder
from aftexport.checkpoint.holders import module_in, state_dict_in
from aftexport.checkpoint.program_archive import check_members, is_program_archive, load_program
from aftexport.checkpoint.sentence_folder import read_sentence_folder
from aftexport.checkpoint.torch_file import TorchFile, damaged_error, read_torch_file
from aftexport.checkpoint.transformers_class import (
    MODEL_TYPE,
    MODULES,
    read_config,
    refuse_unneeded_trust,
)
from aftexport.checkpoint.transformers_folder import read_transformers_folder
from aftexport.checkpoint.weights import load_weights, refuse_unusable, unwrapped
from aftexport.errors import CheckpointError, UsageError
from aftexport.heads.declared_task import declared_beside, declared_in
from aftexport.options import Factory, ModelSource, StrPath, as_source, with_options
from aftexport.system.arguments import import_callable


def load(
    model: StrPath | Callable[..., Any] | ModelSource | None = None, **options: Any
) -> Checkpoint:
    """Read a model file of any of the seven kinds, or call a factory.

    Args:
        model: the file or folder; an ``nn.Module``, or a callable without arguments that returns
            one; or a whole source.
        options: the other fields of ``ModelSource``, by name.

    Raises:
        CheckpointError: if the file cannot be used; names file, reason and remedy.
        UsageError: if an option does not suit the file, or the callable of a factory cannot be
            used.
        TypeError: if an option has an unknown name.
    """
    (source,) = with_options("load", options, as_source(model))
    source.check()
    checkpoint = _load(source)
    return checkpoint.with_declared(declared_beside(source.file, checkpoint.module))


def _load(source: ModelSource) -> Checkpoint:
    path, allow_pickle = source.file, source.allow_pickle
    if path is None:
        return _from_factory(source)
    try:
        if not path.exists():
            raise CheckpointError(path, "no such file or folder", "Check the path.")
        refuse_bundle(path)
        refuse_distributed(path)
        refuse_unneeded_trust(path, source)
        if path.is_dir():
            if allow_pickle:
                raise _unneeded_pickle(path)
            return _load_folder(path, source)
        if path.name.endswith(INDEX_SUFFIX):
            refuse_shards(path.parent)
        if allow_pickle and (path.suffix == ".safetensors" or is_program_archive(path)):
            raise _unneeded_pickle(path)
        if path.suffix == ".safetensors":
            return _from_state_dict(path, safetensors.torch.load_file(path), source)
        if is_program_archive(path):
            if source.factory:
                raise _unneeded_factory("a .pt2 program", source)
            return Checkpoint(path, "torch.export program", program=load_program(path))
        refuse_other_formats(path)
        return _load_torch_file(path, source)
    except SafetensorError as error:
        raise CheckpointError(
            path, f"not a complete safetensors file ({error})", "Copy or download it again."
        ) from error
    except OSError as error:
        raise CheckpointError(
            path, f"cannot be read ({error.strerror})", "Check its name and its permissions."
        ) from error


def _load_folder(path: Path, source: ModelSource) -> Checkpoint:
    if source.factory:
        refuse_shards(path)
        raise _unneeded_factory(
            "a folder with its own configuration",
            source,
            "; or give the file model.safetensors to load it into the factory's module",
        )
    if is_cross_encoder(path):
        return read_cross_encoder(path, source)
    if (path / MODULES).is_file():
        return read_sentence_folder(path, source)
    config = read_config(path)
    if MODEL_TYPE in config:
        return read_transformers_folder(path, config, source)
    refuse_shards(path)
    return read_folder(path, config)


def _from_factory(source: ModelSource) -> Checkpoint:
    given = source.factory
    module = unwrapped(given if isinstance(given, nn.Module) else call_factory(source))
    refuse_unusable(source.name, module)
    return Checkpoint(source.name, f"module of {source.factory_name}", module)


def _load_torch_file(path: Path, source: ModelSource) -> Checkpoint:
    file = read_torch_file(path, factory=source.factory_name, allow_pickle=source.allow_pickle)
    declared = declared_in(str(path), file.content)
    checkpoint = _read_content(path, file, source).with_declared(declared)
    if source.allow_pickle and not file.is_unpickled:
        raise _unneeded_pickle(path)
    return checkpoint


def _read_content(path: Path, file: TorchFile, source: ModelSource) -> Checkpoint:
    content, factory = file.content, source.factory
    if isinstance(content, dict) and content.get("format") == FORMAT:
        if factory:
            raise _unneeded_factory("a checkpoint with its own configuration", source)
        return read_checkpoint(path, content)
    if file.is_unpickled and not factory:
        module = unwrapped(module_in(path, content))
        refuse_unusable(path, module)
        return Checkpoint(path, "pickled module", module)
    if factory and isinstance(content, nn.Module):
        raise _unneeded_factory("a pickled module", source)
    state = state_dict_in(path, content, is_plain=file.is_plain)
    return _from_state_dict(path, state, source, is_unpickled=file.is_unpickled)


def _from_state_dict(
    path: Path, state: Mapping[str, Tensor], source: ModelSource, *, is_unpickled: bool = False
) -> Checkpoint:
    if source.factory is None:
        raise CheckpointError(
            path,
            "a bare state dict: weights without their module",
            "Add --factory package.module:factory, a callable that returns the module.",
        )
    module = unwrapped(call_factory(source))
    load_weights(path, module, state)
    kind = "pickled state dict" if is_unpickled else "state dict"
    return Checkpoint(path, f"{kind} for {source.factory_name}", module)


def _unneeded_pickle(path: Path) -> UsageError:
    return UsageError(
        f"--allow-pickle is only for a pickled file, got {path}.", "Leave --allow-pickle out."
    )


def _unneeded_factory(subject: str, source: ModelSource, alternative: str = "") -> UsageError:
    return UsageError(
        "--factory is only for weights without a module, got --factory "
        f"{source.factory_name} for {subject}.",
        f"Omit --factory{alternative}.",
    )


def call_factory(source: ModelSource) -> nn.Module:
    """Build the module that a callable, or the name ``package.module:callable``, returns.

    Raises:
        UsageError: if the callable cannot be imported or called, or does not return a module.
    """
    factory, name = source.factory, f"--factory {source.factory_name}"
    assert factory is not None
    if isinstance(factory, nn.Module | ExportedProgram):
        raise UsageError(
            f"{name} must be a callable that returns an nn.Module, got a {type(factory).__name__}.",
            "Write the program by torch.export.save(program, 'model.pt2'), and give the file."
            if isinstance(factory, ExportedProgram)
            else "Load the weights into the module, and give it without the file.",
        )
    target = import_callable(factory, "--factory") if isinstance(factory, str) else factory
    try:
        module = target()
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{name}: the call raised {type(error).__name__}: {error}.",
            _remedy_of_call(factory, error),
        ) from error
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"{name} must return an nn.Module, got a {type(module).__name__}.",
            "Give a callable that returns the module.",
        )
    return module


def _remedy_of_call(factory: Factory, error: BaseException) -> str:
    if not isinstance(factory, str):
        return "Give the module itself, or a callable without required arguments."
    if isinstance(error, TypeError):
        return "Give a callable without required arguments."
    module, _, attribute = factory.partition(":")
    line = f"from {module} import {attribute.partition('.')[0]}; {attribute}()"
    return f"Call it in Python to find the line: {line}."


INDEX_SUFFIX = ".index.json"
"""The suffix of the file that lists the parts of a sharded state dict."""
_PART = ".distcp"
"""The suffix of the parts in a folder of torch.distributed.checkpoint."""


def refuse_shards(folder: Path) -> None:
    """Refuse a folder whose weights are in several files."""
    index = next(iter(sorted(folder.glob(f"*{INDEX_SUFFIX}"))), None)
    if index is not None and not (folder / "model.safetensors").is_file():
        raise CheckpointError(
            folder,
            f"its weights are in several files, which {index.name} lists",
            "Join them: read each by safetensors.torch.load_file into one dict, and write the dict "
            "by save_file.",
        )


def refuse_distributed(path: Path) -> None:
    """Refuse a folder of torch.distributed.checkpoint, or a file of one."""
    folder = path if path.is_dir() else path.parent
    if path.suffix == _PART or (path.is_dir() and any(path.glob(f"*{_PART}"))):
        raise CheckpointError(
            path,
            "a checkpoint of torch.distributed.checkpoint, which holds the weights in parts",
            "Join them: python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            f"{folder} model.pt, and give model.pt with --factory.",
        )


def refuse_other_formats(path: Path) -> None:
    """Refuse a file that torch.save did not write, or that is not complete."""
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        raise CheckpointError(path, "the file is empty", "Save or copy it again.")
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(path, "a Git LFS pointer, not the file", "Run git lfs pull.")
    if path.suffix == ".onnx":
        raise CheckpointError(
            path,
            "an ONNX model, which holds no PyTorch module",
            "Give its PyTorch model; or make a bundle of the file: aftexport FILE --to onnx.",
        )
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
    if names and all(name.endswith(".npy") for name in names):
        raise CheckpointError(
            path,
            "a NumPy archive, which holds no tensors",
            "Save its arrays as tensors: torch.save({name: torch.from_numpy(array) for name, array "
            "in numpy.load(file).items()}, 'model.pt'), and give that file with --factory.",
        )
    if not any(name.endswith("/data.pkl") for name in names):
        raise CheckpointError(
            path, "a zip archive that torch.save did not write", "Give a model file."
        )
