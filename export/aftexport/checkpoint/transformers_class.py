"""The model class of the transformers library that a folder's config.json names.

``TransformersModel`` gives it the inputs and the output of an exported model.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from aftexport.errors import CheckpointError, UsageError, first_line
from aftexport.extra_inputs import TOKEN_TYPES
from aftexport.options import ModelSource
from aftexport.system.contract import IDS
from aftexport.system.files import read_json, read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


MODULES = "modules.json"
"""The file by which a folder is one of sentence-transformers."""
MODEL_TYPE = "model_type"
"""The entry by which a configuration is one of transformers."""
MAX_LABELS = 1 << 20
MAX_LAYERS = 1 << 12
_TASK_CLASSES = ("ForSequenceClassification", "ForTokenClassification")
_BASE_CLASS = "Model"
_NOT_BASE_CLASSES = ("LMHeadModel", "HeadsModel", "PreTrainedModel", "ForDoubleHeadsModel")
_ENCODERS = ("EncoderModel", "ForTokenClassification")
"""Ends of names of classes without the decoder that their configuration describes."""
_READ_AT_END = tuple(
    f"{stem}{_TASK_CLASSES[0]}" for stem in ("Bart", "MBart", "Mvp", "PLBart", "MT5", "T5", "UMT5")
)
"""Classes that classify a document by its decoder's vector at the last end token."""
_STARTS_WITH_LAST = ("MBart", "PLBart")
"""The starts of the names of those whose decoder begins with the last token."""
_AUTO_MAP = "auto_map"
"""The entry of a configuration that names classes in code of its folder."""
_AUTO_BASE = "AutoModel"
"""The entry of auto_map that names the base class in code of a folder."""
_COUNTS_OF_LAYERS = ("layers", "n_layer", "depth")
_FIXED = {
    "return_dict": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "use_cache": False,
}
"""Settings of a run, which must not change the outputs of the exported model."""
_OF_CODE = ("attn_implementation", "experts_implementation", "kernel_config")
"""Settings that may name code in other places; each also begins with an underscore."""
_FLOAT = "__float__"
"""The only entry of an object by which the library writes a number that JSON lacks."""
_FLOATS = ("NaN", "Infinity", "-Infinity")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json.

    Raises:
        CheckpointError: if it is missing, too large, or not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            folder,
            "the folder has no config.json",
            "Give a folder of config.json and model.safetensors, or a model file.",
        )
    return read_json_object(path)


def find_class(
    folder: Path,
    config: Mapping[str, Any],
    source: ModelSource,
    *,
    for_vectors: bool = False,
) -> tuple[type["PreTrainedModel"], "PreTrainedConfig"]:
    """Return the class that a configuration names, and the configuration in its own type.

    ``for_vectors`` replaces a class with a head by its base class. In code of the folder, it is the
    class that auto_map names AutoModel.

    Raises:
        CheckpointError: if the library lacks the class, no head serves it, or a count in the
            configuration is too large.
    """
    path = folder / "config.json"
    name = _class_name(path, config)
    _check_counts(path, config)
    found = _library_class(name)
    own_code = _code_of(config, name)
    reference = _code_for_vectors(config) if for_vectors else own_code
    if reference and source.trust_remote_code:
        return _class_in_folder(folder, reference, source)
    if found is None and (place := own_code or reference):
        raise _code_error(path, name, place, is_trusted=source.trust_remote_code)
    if found is None:
        raise CheckpointError(
            path,
            f"expected a model class of the transformers library, got {name}",
            "Upgrade transformers, or give the weights with --factory package.module:factory.",
        )
    if for_vectors and not is_base_class(name):
        found = _base_class(path, found)
    own = _configuration(path, found, config)
    _check_text(path, found, own)
    _check_served(path, found.__name__)
    return found, own


def library_options(source: ModelSource) -> dict[str, bool]:
    """Return the options by which the library downloads nothing and runs only permitted code."""
    return {"local_files_only": True, "trust_remote_code": source.trust_remote_code}


def refuse_unneeded_trust(path: Path, source: ModelSource) -> None:
    """Refuse the permission to run code for a file, or for a folder without code."""
    if source.trust_remote_code and not (path.is_dir() and _has_code(path)):
        raise UsageError(
            f"--trust-remote-code is only for a folder whose classes are code in it, got {path}.",
            "Leave --trust-remote-code out.",
        )


def _has_code(folder: Path) -> bool:
    """Return whether a configuration in a folder names classes in code."""
    places = (*folder.glob("*.json"), *folder.glob("*/*.json"))
    names = (MODULES, "config.json", "tokenizer_config.json")
    return any(place.name in names and _names_code(read_json(place)) for place in places)


def _names_code(content: Any) -> bool:
    """Return whether a configuration has ``auto_map``, or modules outside the library."""
    if isinstance(content, list):  # the modules of sentence-transformers
        types = [str(part.get("type")) for part in content if isinstance(part, Mapping)]
        return any(not name.startswith("sentence_transformers.") for name in types)
    return isinstance(content, Mapping) and _AUTO_MAP in content


def is_base_class(name: str) -> bool:
    """Return whether a class has no head: it returns the vectors of the last layer."""
    return name.endswith(_BASE_CLASS) and not name.endswith(_NOT_BASE_CLASSES)


def _class_name(path: Path, config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(
            path,
            f"expected one model class in architectures, got {str(names)[:80]}",
            "Save the model by save_pretrained of its class, such as "
            "AutoModelForSequenceClassification.",
        )
    return str(names[0])[:200]


def _check_served(path: Path, name: str) -> None:
    if not name.endswith(_TASK_CLASSES) and not is_base_class(name):
        raise CheckpointError(
            path,
            f"expected a class that ends in {' or '.join(_TASK_CLASSES)}, or a base class for "
            f"vectors, got {name}",
            "Save the base model for vectors of tokens, AutoModel.from_pretrained(folder)"
            ".save_pretrained(other); or give the weights with --factory package.module:factory.",
        )


def _check_text(path: Path, found: type["PreTrainedModel"], config: "PreTrainedConfig") -> None:
    """Refuse a class of other inputs, or one whose result is that of a decoder."""
    if found.main_input_name != IDS:
        raise CheckpointError(
            path,
            f"expected a class that takes {IDS}, got {found.__name__}, which takes "
            f"{found.main_input_name}",
            "Export a module of your own with --factory package.module:factory.",
        )
    # The classes for labels of tokens, such as T5ForTokenClassification, have no decoder.
    is_served = found.__name__.endswith(_ENCODERS) or found.__name__ in _READ_AT_END
    if config.is_encoder_decoder and not is_served:
        encoder = re.sub(r"(Model|For[A-Z]\w+)$", _ENCODERS[0], found.__name__)
        raise CheckpointError(
            path,
            f"expected an encoder, got {found.__name__}, whose decoder reads the document too",
            f"Save the encoder: {encoder}.from_pretrained(folder).save_pretrained(other)."
            if _library_class(encoder) is not None
            else "Export a module of your own around the encoder, with --factory "
            "package.module:factory.",
        )


def _check_counts(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse counts by which the library makes a list or a mapping in the configuration.

    The count of modules is checked later, see ``check_size``.
    """
    for name, value in _entries(config):
        is_layers = name.endswith(_COUNTS_OF_LAYERS)
        most = MAX_LABELS if name == "num_labels" else MAX_LAYERS if is_layers else None
        is_count = isinstance(value, int) and not isinstance(value, bool)
        if most is not None and is_count and value > most:
            raise CheckpointError(
                path,
                f"{name} must be at most {most}, got {value}",
                "Give the configuration of the training.",
            )


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _entries(value)
        else:
            yield str(name), value


def _library_class(name: str) -> type["PreTrainedModel"] | None:
    import transformers

    found = getattr(transformers, name, None) if name.isidentifier() else None
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model else None


def _base_class(path: Path, found: type["PreTrainedModel"]) -> type["PreTrainedModel"]:
    """Return the base class of the same configuration."""
    import transformers

    base = transformers.MODEL_MAPPING.get(found.config_class, None)
    if not isinstance(base, type):
        raise CheckpointError(
            path,
            f"expected a class with a base class for vectors, got {found.__name__}",
            "Save the base model, AutoModel.from_pretrained(folder).save_pretrained(other).",
        )
    return base


def _code_of(config: Mapping[str, Any], name: str) -> str | None:
    """Return the place of a class in code that the folder brings; None for the library's own."""
    places = config.get(_AUTO_MAP)
    if not isinstance(places, Mapping):
        return None
    own = [p for p in places.values() if isinstance(p, str) and p.rpartition(".")[2] == name]
    return own[0] if own else None


def _code_for_vectors(config: Mapping[str, Any]) -> str | None:
    """Return the place of the base class in code that the folder brings; None without one."""
    places = config.get(_AUTO_MAP)
    place = places.get(_AUTO_BASE) if isinstance(places, Mapping) else None
    return place if isinstance(place, str) else None


def _code_error(path: Path, name: str, reference: str, *, is_trusted: bool) -> CheckpointError:
    """Return the error for a class in code that may not run, or that has no base class."""
    if is_trusted:
        return CheckpointError(
            path,
            f"expected {_AUTO_BASE} in auto_map, the class of the vectors, got only {name} "
            f"({reference[:200]})",
            f'Call register_for_auto_class("{_AUTO_BASE}") of the base class, and save the model '
            "again.",
        )
    return CheckpointError(
        path,
        f"its class {name} is defined by code ({reference[:200]}), which is not run without "
        "permission",
        "Add --trust-remote-code only if you trust the author of the folder; or give its "
        "weights with --factory package.module:factory.",
    )


def _class_in_folder(
    folder: Path, reference: str, source: ModelSource
) -> tuple[type["PreTrainedModel"], "PreTrainedConfig"]:
    from transformers import AutoConfig, PreTrainedModel
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    try:
        found = get_class_from_dynamic_module(reference, str(folder), local_files_only=True)
        own = AutoConfig.from_pretrained(str(folder), **library_options(source), **_FIXED)
    except Exception as error:  # code of the folder can raise any exception
        raise CheckpointError(
            folder,
            f"its class {reference} cannot be imported: {type(error).__name__}: "
            f"{first_line(error)}",
            "Check that the folder holds all files of the code.",
        ) from error
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise CheckpointError(
            folder,
            f"expected a subclass of PreTrainedModel, got {reference}",
            "Export a module of another kind with --factory package.module:factory.",
        )
    return found, own


def _configuration(
    path: Path, found: type["PreTrainedModel"], config: Mapping[str, Any]
) -> "PreTrainedConfig":
    expected = getattr(found.config_class, MODEL_TYPE, None)
    if config.get(MODEL_TYPE) != expected:
        raise CheckpointError(
            path,
            f"model_type must be {expected!r} for {found.__name__}, got "
            f"{str(config.get(MODEL_TYPE))[:80]!r}",
            "Give the configuration of the training.",
        )
    kept = {
        n: v for n, v in config.items() if n.lstrip("_").removesuffix("_internal") not in _OF_CODE
    }
    try:
        built: PreTrainedConfig = found.config_class.from_dict(_with_floats(kept) | _FIXED)
    except Exception as error:  # the library checks values by many exceptions
        raise CheckpointError(
            path,
            f"transformers refuses the configuration: {type(error).__name__}: {first_line(error)}",
            "Give the configuration of the training.",
        ) from error
    return built


def _with_floats(value: Any) -> Any:
    """Return a value of config.json with the numbers that the library writes as objects."""
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {_FLOAT} and value[_FLOAT] in _FLOATS:
        return float(value[_FLOAT])
    return {name: _with_floats(item) for name, item in value.items()}


_POSITION_TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
"""Names of tables of learned positions in the library's models."""
_RELATIVE_BIAS = "relative_attention_bias"
"""The name of a table of biases by distance, in the attention of T5 and its kin."""
LOGITS = "logits"
VECTORS = "last_hidden_state"


class TransformersModel(nn.Module):
    """A model that takes token ids and a mask, and returns its logits or its last vectors.

    Token types keep the library's default, those of one text.
    """

    def __init__(self, model: "PreTrainedModel", output: str) -> None:
        super().__init__()
        self.model = model
        if any(hasattr(module, _RELATIVE_BIAS) for module in model.modules()):
            # The ONNX exporter of torch 2.13 cannot reshape the result of
            # scaled_dot_product_attention with a bias that requires a gradient.
            model.set_attn_implementation("eager")
        self.max_length = max_tokens(model)
        self._output = output
        self._is_read_at_end = type(model).__name__ in _READ_AT_END

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return ``[batch, labels]``, or a row for each token, of int64 ``[batch, tokens]``."""
        # After a short document BigBird would compute full attention for longer ones, too.
        if callable(choose := getattr(self.model.base_model, "set_attention_type", None)):
            choose(self.model.config.attention_type)
        if self._is_read_at_end:
            return self._read_at_end(input_ids, attention_mask)
        return self._output_of(input_ids=input_ids, attention_mask=attention_mask)

    def _output_of(self, **inputs: Tensor | None) -> Tensor:
        value: Tensor = self.model(**inputs)[self._output]
        return value

    # The library's own forward selects the end tokens of a batch by their values, so it refuses
    # documents with different numbers of them, and cannot be captured.
    def _read_at_end(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the logits by the decoder's vector at the last end token, or last token."""
        model: Any = self.model
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        documents, last = torch.arange(input_ids.shape[0], device=mask.device), mask.sum(1) - 1
        # The decoder reads the tokens after a start token; that of some models is the last token.
        start = (
            input_ids[documents, last]
            if type(model).__name__.startswith(_STARTS_WITH_LAST)
            else torch.full_like(last, model.config.decoder_start_token_id)
        )
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        # A slice without the last token would have no size that torch.export keeps for one token.
        before = input_ids[:, (places - 1).clamp(min=0)]
        read = torch.where(places > 0, before, start.unsqueeze(1))
        vectors = model.base_model(input_ids, attention_mask=attention_mask, decoder_input_ids=read)
        ends = torch.where(input_ids == model.config.eos_token_id, places, -1).amax(1)
        ends = torch.where(ends < 0, last, ends)
        logits: Tensor = model.classification_head(vectors[0][documents, ends])
        return logits


class TypedTransformersModel(TransformersModel):
    """A model that also takes the types of tokens, by which it tells the texts of a pair apart."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the output; int64 ``[batch, tokens]`` types are those of one text by default."""
        if token_type_ids is None:
            return super().forward(input_ids, attention_mask)
        return self._output_of(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
        )


def wrapped(model: "PreTrainedModel", output: str, *, has_types: bool) -> TransformersModel:
    """Return a model with the inputs that it uses; ``has_types``: of those of its tokenizer."""
    has_table = (getattr(model.config, "type_vocab_size", None) or 0) > 1
    takes_types = TOKEN_TYPES in inspect.signature(model.forward).parameters
    is_typed = has_types and has_table and takes_types
    return (TypedTransformersModel if is_typed else TransformersModel)(model, output)


def max_tokens(model: "PreTrainedModel") -> int | None:
    """Return the maximum tokens of a document, by the positions of a model; None for no limit.

    Tables of positions may have rows before the first token, as those of RoBERTa.
    """
    limits = []
    declared = getattr(model.config, "max_position_embeddings", None)
    if isinstance(declared, int) and declared > 0:
        limits.append(declared)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES:
            before = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - max(before, getattr(module, "offset", 0)))
    return min(limits, default=None)
