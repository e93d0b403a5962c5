"""A folder that ``save_pretrained`` of the transformers library wrote."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aftexport.checkpoint.checkpoint import Checkpoint
from aftexport.checkpoint.empty_model import check_size
from aftexport.checkpoint.names import listed
from aftexport.checkpoint.transformers_class import find_class, is_base_class
from aftexport.checkpoint.transformers_module import LOGITS, VECTORS, TransformersModel
from aftexport.checkpoint.transformers_tokenizer import read_tokenizer
from aftexport.checkpoint.weight_files import find_weight_files
from aftexport.checkpoint.weights import refuse_unusable
from aftexport.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

KIND = "transformers folder"
_ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class FoundModel:
    """The model and the tokenizer of a folder.

    Attributes:
        model: the model, in float32.
        tokenizer: JSON of the ``tokenizers`` library; None if the folder has no such tokenizer.
    """

    model: "PreTrainedModel"
    tokenizer: str | None


def read_transformers_folder(
    folder: Path, config: Mapping[str, Any], *, trust_remote_code: bool = False
) -> Checkpoint:
    """Return the model of a folder, in float32, with its labels and tokenizer.

    No code runs but that of the installed library, and nothing is downloaded.

    Args:
        folder: the folder.
        config: the content of its config.json.
        trust_remote_code: whether classes may come from code in the folder, which then runs.

    Raises:
        CheckpointError: if transformers is missing, or a file cannot be used.
        SafetensorError: if a weight file is not complete.
    """
    found = read_model(folder, config, trust_remote_code=trust_remote_code)
    model, class_name = found.model, type(found.model).__name__
    has_no_head = is_base_class(class_name)
    module = TransformersModel(model, VECTORS if has_no_head else LOGITS)
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
    *,
    trust_remote_code: bool = False,
    for_vectors: bool = False,
) -> FoundModel:
    """Return the model of a folder and its tokenizer; see ``read_transformers_folder``.

    Args:
        folder: the folder.
        config: the content of its config.json.
        trust_remote_code: whether classes may come from code in the folder.
        for_vectors: whether the base class of a class with a head is read.
    """
    _check_folder(folder, config)
    files = find_weight_files(folder)
    with _quiet_library():
        found, own = find_class(
            folder, config, trust_remote_code=trust_remote_code, for_vectors=for_vectors
        )
        check_size(folder, found, own, files)
        model = _with_weights(folder, found, own)
        tokenizer = read_tokenizer(folder, trust_remote_code=trust_remote_code)
    _check_padding(folder, model.eval())
    return FoundModel(model, tokenizer)


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
    """Return the model with all its weights from the folder.

    Raises:
        CheckpointError: if weights are missing or do not fit.
    """
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
