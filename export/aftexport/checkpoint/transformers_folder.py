"""A folder that ``save_pretrained`` of the transformers library wrote: its model and tokenizer.

The model is first built without memory, and the building ends for any configuration.
"""

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from aftexport.checkpoint.checkpoint import Checkpoint
from aftexport.checkpoint.transformers_class import (
    LOGITS,
    VECTORS,
    find_class,
    is_base_class,
    library_options,
    wrapped,
)
from aftexport.checkpoint.weights import WeightFiles, find_weight_files, listed, refuse_unusable
from aftexport.errors import CheckpointError, first_line
from aftexport.extra_inputs import TOKEN_TYPES
from aftexport.options import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


KIND = "transformers folder"
_ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class FoundModel:
    """The model of a folder, in float32, and the JSON of its tokenizer, if it has such a form."""

    model: "PreTrainedModel"
    tokenizer: str | None
    has_types: bool  # whether the library's tokenizer returns the types of tokens


def read_transformers_folder(
    folder: Path, config: Mapping[str, Any], source: ModelSource
) -> Checkpoint:
    """Return the model of a folder, in float32, with its labels and tokenizer.

    No code runs but that of the installed library, and nothing is downloaded.

    Raises:
        CheckpointError: if transformers is missing, or a file cannot be used.
        SafetensorError: if a weight file is not complete.
    """
    found = read_model(folder, config, source)
    model, class_name = found.model, type(found.model).__name__
    has_no_head = is_base_class(class_name)
    module = wrapped(model, VECTORS if has_no_head else LOGITS, has_types=found.has_types)
    refuse_unusable(folder, module)
    return Checkpoint(
        folder,
        f"{KIND} of {class_name}",
        module,
        tokenizer=found.tokenizer,
        task="feature_extraction" if has_no_head else None,
        labels=None if has_no_head else _labels(model),
    )


def read_model(
    folder: Path,
    config: Mapping[str, Any],
    source: ModelSource,
    *,
    for_vectors: bool = False,
) -> FoundModel:
    """Return the model of a folder and its tokenizer; see ``read_transformers_folder``."""
    _check_folder(folder, config)
    files = find_weight_files(folder)
    with _quiet_library():
        found, own = find_class(folder, config, source, for_vectors=for_vectors)
        check_size(folder, found, own, files)
        model = _with_weights(folder, found, own)
        tokenizer, has_types = read_tokenizer(folder, source)
    _check_padding(folder, model.eval())
    return FoundModel(model, tokenizer, has_types)


def _check_folder(folder: Path, config: Mapping[str, Any]) -> None:
    if find_spec("transformers") is None:
        raise CheckpointError(
            folder,
            f"a model of the library transformers, model_type {config.get('model_type')!r}, which "
            "is not installed",
            "Install it: pip install transformers; or give the weights with --factory "
            "package.module:factory.",
        )
    if (folder / _ADAPTER).is_file():
        raise CheckpointError(
            folder,
            f"it holds an adapter ({_ADAPTER}), not a whole model",
            "Load the adapter with peft, call model = model.merge_and_unload(), and save the "
            "result by save_pretrained.",
        )
    if config.get("quantization_config") is not None:
        raise CheckpointError(
            folder / "config.json",
            "its weights are quantized (quantization_config)",
            "Give the folder before the quantization, and choose a precision by --precision.",
        )


def _with_weights(
    folder: Path, found: "type[PreTrainedModel]", config: "PreTrainedConfig"
) -> "PreTrainedModel":
    """Return the model with all its weights from the folder."""
    try:
        model, info = found.from_pretrained(
            str(folder),
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report below names them
        )
    except Exception as error:  # the library checks weights by many exceptions
        raise CheckpointError(
            folder,
            f"transformers cannot load the weights: {first_line(error)}",
            "Give the configuration and the weights of one training.",
        ) from error
    _check_fit(folder, found.__name__, info)
    if unexpected := sorted(info["unexpected_keys"]):
        warnings.warn(
            f"{folder}: {found.__name__} does not use these weights: {listed(unexpected)}.",
            UserWarning,
            stacklevel=2,
        )
    return model


def _check_padding(folder: Path, model: "PreTrainedModel") -> None:
    """Refuse a model that searches for padding and does not know the padding token."""
    if getattr(model.config, "pad_token_id", None) is not None:
        return
    try:
        with torch.inference_mode():
            model(torch.zeros((2, 1), dtype=torch.int64))
    except ValueError as error:
        if "padding token" in str(error):
            raise CheckpointError(
                folder / "config.json",
                f"pad_token_id must be a token id for {type(model).__name__}, which takes the "
                "token before the padding, got null",
                "Add the pad_token_id of the training, or an id that no text ends with.",
            ) from error
    except Exception:  # the capture names the fault, on inputs of several sizes
        return


def _check_fit(folder: Path, class_name: str, info: Mapping[str, Any]) -> None:
    """Refuse weights that the library would leave random."""
    missing = sorted(info["missing_keys"])
    if is_base_class(class_name):
        missing = [name for name in missing if "pooler" not in name]  # its result is not used
    if missing:
        raise CheckpointError(
            folder,
            f"weights of {class_name} are missing: {listed(missing)}",
            "Give the folder of the trained model, which holds the weights of its head.",
        )
    if wrong := [
        f"{name} {tuple(given)} instead of {tuple(expected)}"
        for name, given, expected in sorted(info["mismatched_keys"])
    ]:
        raise CheckpointError(
            folder,
            f"weights of {class_name} have other shapes: {listed(wrong)}",
            "Give the configuration and the weights of one training.",
        )


def _labels(model: "PreTrainedModel") -> tuple[str, ...] | None:
    """Return the names in id2label, by which a pipeline of the library answers."""
    names = getattr(model.config, "id2label", None)
    if not isinstance(names, Mapping):
        return None
    labels = [names.get(number) for number in range(len(names))]
    is_complete = all(isinstance(label, str) for label in labels)
    return tuple(map(str, labels)) if is_complete else None


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Keep the library's progress bars and reports out of the command's output."""
    from transformers.utils import logging

    before, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if has_bars:
            logging.enable_progress_bar()


_SPARE_NUMBERS = 1 << 26
"""Numbers that modules may compute beside the weights in the files, such as masks."""
_PARTS_PER_WEIGHT = 16
"""Modules and parameters for each weight in the files; models of the library have up to 5."""
_SPARE_PARTS = 1 << 12
_COPIES = 4
"""Parameters that a constructor may replace by shared ones, for each number in the files."""


class _TooLargeError(Exception):
    """A constructor makes more parts than a model of these weights has, as the message."""


def check_size(
    folder: Path, found: "type[PreTrainedModel]", config: "PreTrainedConfig", files: WeightFiles
) -> None:
    """Refuse a configuration of a far larger model than the weights, before memory is taken.

    Raises:
        CheckpointError: if the class refuses the configuration, or the model is too large.
    """
    path = folder / "config.json"
    remedy = "Give the configuration of the training."
    try:
        with torch.device("meta"), _bounded(files):
            empty = found(config)
    except _TooLargeError as error:
        raise CheckpointError(path, str(error), remedy) from error
    except Exception as error:  # a configuration can make a constructor raise any exception
        reason = f"{found.__name__} refuses the configuration: {type(error).__name__}: "
        reason += first_line(error)
        raise CheckpointError(path, reason, remedy) from error
    size = sum(tensor.numel() for tensor in (*empty.parameters(), *empty.buffers()))
    if size > 2 * files.count + _SPARE_NUMBERS:
        raise CheckpointError(path, _numbers(files, f"{size:,}"), remedy)


@contextmanager
def _bounded(files: WeightFiles) -> Iterator[None]:
    """Count the modules and parameters that this thread makes; end a constructor of too many."""
    thread, parts, size = threading.get_ident(), 0, 0
    max_parts = _PARTS_PER_WEIGHT * len(files.shapes) + _SPARE_PARTS
    max_size = _COPIES * files.count + _SPARE_NUMBERS

    def count(_owner: nn.Module, _name: str, part: nn.Module | nn.Parameter | None) -> None:
        nonlocal parts, size
        if threading.get_ident() != thread:  # the hooks are those of the whole process
            return
        parts += 1
        size += part.numel() if isinstance(part, torch.Tensor) else 0
        if parts > max_parts:
            raise _TooLargeError(
                f"expected a model of the {len(files.shapes):,} weights in the files, got more "
                f"than {max_parts:,} modules and parameters"
            )
        if size > max_size:
            raise _TooLargeError(_numbers(files, f"more than {max_size:,}"))

    handles = (
        hooks.register_module_module_registration_hook(count),
        hooks.register_module_parameter_registration_hook(count),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _numbers(files: WeightFiles, size: str) -> str:
    return f"expected a model of the {files.count:,} numbers in the weights, got {size}"


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


def read_tokenizer(folder: Path, source: ModelSource) -> tuple[str | None, bool]:
    """Return the JSON of the folder's tokenizer, and whether the library gets types from it.

    The JSON is None, with a warning, if the tokenizer has no such form. A tokenizer that is given
    in its place has types.
    """
    if not any((folder / name).is_file() for name in _FILES):
        return None, True
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), **library_options(source))
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
        return None, True
    if getattr(tokenizer, "truncation_side", "right") == "left":
        warnings.warn(
            f"{folder}: the tokenizer truncates on the left: start the server with "
            "--long-documents tail to keep the end of long documents.",
            UserWarning,
            stacklevel=2,
        )
    return str(tokenizer.backend_tokenizer.to_str()), TOKEN_TYPES in tokenizer.model_input_names


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
