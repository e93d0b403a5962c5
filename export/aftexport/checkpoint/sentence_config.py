"""The files of a sentence-transformers folder that describe its modules, and their formulas."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn

from aftexport.checkpoint.transformers_class import MODULES, TransformersModel
from aftexport.errors import CheckpointError
from aftexport.system.files import MAX_SETTINGS_BYTES, read_json, read_json_object

_MIN_TOKENS = 1e-9
"""The smallest divisor of a mean, as in the library."""


POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""The kinds of pooling, in the order in which the library joins them."""


ACTIVATIONS: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (nn.Identity, nn.Tanh, nn.ReLU, nn.Sigmoid, nn.GELU, nn.SiLU)
}


SETTINGS = "config_sentence_transformers.json"


_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""The file of the transformer's settings; its name varies with the age of the folder."""


_MAX_MODULES = 16


_KINDS = ("Transformer", "Pooling", "Dense", "Normalize")


_TYPE = re.compile(r"sentence_transformers\.(?:\w+\.)*(\w+)")


_VECTOR = "sentence_embedding"


_POOLING_FLAGS = dict(
    zip(
        (
            "pooling_mode_cls_token",
            "pooling_mode_max_tokens",
            "pooling_mode_mean_tokens",
            "pooling_mode_mean_sqrt_len_tokens",
            "pooling_mode_weightedmean_tokens",
            "pooling_mode_lasttoken",
        ),
        POOLINGS,
        strict=True,
    )
)


_WIDTHS = ("embedding_dimension", "word_embedding_dimension")


TRANSFORMER_SETTINGS: dict[str, tuple[object, ...]] = {
    "do_lower_case": (False, None),
    "transformer_task": ("feature-extraction",),
    "modality_config": (
        {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    ),
    "module_output_name": ("token_embeddings",),
    "processing_kwargs": ({}, None),
    "unpad_inputs": (False, True, None),
    "query_length": (None,),
    "document_length": (None,),
    "query_expansion": (None,),
}
"""The values of settings with which the vectors are those of the model's last layer."""


_REMEDY = (
    "Give a folder whose modules are a Transformer, a Pooling, and any of Dense and Normalize; or "
    "wrap the model in a module and export it with --factory package.module:factory."
)


@dataclass(frozen=True)
class Module:
    """A module of a folder: a Transformer, Pooling, Dense or Normalize."""

    kind: str
    folder: Path


@dataclass(frozen=True)
class DenseConfig:
    """The settings of a Dense module: a linear map and an activation."""

    in_features: int
    out_features: int
    bias: bool
    activation: str


def read_modules(folder: Path) -> tuple[Module, ...]:
    """Return the modules of a folder: a Transformer, a Pooling, and those after it.

    Raises:
        CheckpointError: if there are others, or their vectors would depend on more than the text.
    """
    path = folder / MODULES
    listed = _read_json(path)
    if not isinstance(listed, list) or not 2 <= len(listed) <= _MAX_MODULES:
        raise _unexpected(path, f"a list of 2 to {_MAX_MODULES} modules", listed)
    modules = tuple(_module(path, folder, one) for one in listed)
    kinds = [one.kind for one in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or {*kinds[2:]} - {"Dense", "Normalize"}:
        raise _unexpected(
            path, "a Transformer, a Pooling, and then Dense or Normalize", ", ".join(kinds)
        )
    check_settings(folder, "SentenceTransformer")
    return modules


def read_max_tokens(
    folder: Path, known: Mapping[str, Sequence[object]] = TRANSFORMER_SETTINGS
) -> int | None:
    """Return the maximum tokens in the settings of a transformer; None for none.

    As in the library, model_max_length of the tokenizer counts only without max_seq_length.

    Raises:
        CheckpointError: if a setting would change texts or vectors.
    """
    name = next((name for name in _TRANSFORMER_FILES if (folder / name).is_file()), None)
    limit = None
    if name is not None:
        path = folder / name
        settings = _object(path)
        limit = _limit(path, settings, "max_seq_length")
        _check_known(path, settings, {"max_seq_length": (), **known})
    path = folder / "tokenizer_config.json"
    if limit is None and path.is_file():
        limit = _limit(path, read_json_object(path), "model_max_length")
    # Without a limit, transformers writes a huge number.
    return limit if limit is not None and limit < 1 << 32 else None


def read_pooling(folder: Path, width: int) -> tuple[str, ...]:
    """Return the kinds of pooling.

    Raises:
        CheckpointError: if a kind is unknown, or the width is another one.
    """
    path = folder / "config.json"
    config = _object(path)
    known = {"pooling_mode", "include_prompt", *_WIDTHS, *_POOLING_FLAGS}
    _check_known(path, config, {**dict.fromkeys(known, ()), "include_prompt": (True, False)})
    declared = next((config[name] for name in _WIDTHS if name in config), None)
    if type(declared) is not int or declared != width:
        raise _unexpected(path, f"the width {width} of the model's vectors", declared)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = _flagged(path, config)
    modes = [modes] if isinstance(modes, str) else modes
    if (
        not isinstance(modes, list)
        or not 1 <= len(modes) <= len(POOLINGS)
        or any(mode not in POOLINGS for mode in modes)
    ):
        raise _unexpected(path, f"one or several of {', '.join(POOLINGS)} as pooling_mode", modes)
    return tuple(modes)


def _flagged(path: Path, config: Mapping[str, Any]) -> list[str]:
    """Return the kinds of pooling whose flags are true.

    Without the flag of the mean, version 5.3 of the library adds the mean, and version 5.7 does
    not. If no flag is true, version 5.3 fails, and version 5.7 takes the mean.
    """
    given = {mode: config[flag] for flag, mode in _POOLING_FLAGS.items() if flag in config}
    if wrong := [flag for flag in given.values() if not isinstance(flag, bool)]:
        raise _unexpected(path, "true or false for each kind of pooling", wrong[0])
    before = [mode for mode in POOLINGS if given.get(mode, mode == "mean")]
    since = [mode for mode in POOLINGS if given.get(mode, False)] or ["mean"]
    if before != since:
        raise CheckpointError(
            path,
            "expected pooling_mode_mean_tokens and a kind of pooling that is true, got "
            f"{json.dumps(given)}, which versions of sentence-transformers read differently",
            "Set pooling_mode_mean_tokens as in the training, and one kind of pooling to true.",
        )
    return since


def read_dense(folder: Path, width: int) -> DenseConfig:
    """Return the settings of a Dense module.

    Raises:
        CheckpointError: if a setting is unknown, or the width is another one.
    """
    path = folder / "config.json"
    config = _object(path)
    own = {"in_features": (width,), "out_features": (), "activation_function": ()}
    flags: dict[str, tuple[object, ...]] = {"bias": (True, False), "use_residual": (False,)}
    _check_known(path, config, {**own, **flags, **_of_vector()})
    out = config.get("out_features")
    if type(out) is not int or out < 1 or config.get("in_features") != width:
        sizes = f"in_features {str(config.get('in_features'))[:80]}, out_features {str(out)[:80]}"
        raise _unexpected(path, f"in_features {width} and out_features of at least 1", sizes)
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    name = str(activation).rpartition(".")[2]
    if not str(activation).startswith("torch.nn.") or name not in ACTIVATIONS:
        expected = f"an activation of torch.nn among {', '.join(ACTIVATIONS)}"
        raise _unexpected(path, expected, activation)
    return DenseConfig(width, out, bool(config.get("bias", True)), name)


def check_normalize(folder: Path) -> None:
    """Check that a Normalize module takes the vector of the document.

    Raises:
        CheckpointError: if it takes another one.
    """
    path = folder / "config.json"
    if path.is_file():  # earlier versions of the library write none
        _check_known(path, _object(path), _of_vector())


def _of_vector() -> dict[str, tuple[object, ...]]:
    return {"module_input_name": (_VECTOR,), "module_output_name": (_VECTOR, None)}


def _module(path: Path, folder: Path, entry: object) -> Module:
    if not isinstance(entry, Mapping):
        raise _unexpected(path, "an object for each module", entry)
    kind, place = str(entry.get("type")), entry.get("path", "")
    found = _TYPE.fullmatch(kind)
    if found is None or found[1] not in _KINDS:
        raise _unexpected(path, f"sentence-transformers modules {', '.join(_KINDS)}", kind)
    pure = PurePosixPath(place) if isinstance(place, str) else None
    if pure is None or len(pure.parts) > 1 or pure.is_absolute() or ".." in pure.parts:
        raise _unexpected(path, "the name of a folder beside it as path", place)
    return Module(found[1], folder / pure)


def check_settings(folder: Path, expected: str) -> None:
    """Refuse a folder that puts words before each text, or is of another kind of model."""
    path = folder / SETTINGS
    if not path.is_file():
        return
    settings = _object(path)
    kind = settings.get("model_type", expected)
    if kind != expected:
        raise _unexpected(path, f"model_type {expected}", kind)
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts")
    prompt = prompts.get(str(name)) if isinstance(prompts, Mapping) else None
    if name is not None and prompt != "":
        raise _unexpected(
            path,
            "no default_prompt_name, as a bundle takes texts as they are",
            name,
            "Set it to null, and put the prompt before each text that you send.",
        )


def _limit(path: Path, settings: Mapping[str, Any], name: str) -> int | None:
    value = settings.get(name)
    if value is None or (type(value) is int and value > 0):
        return value
    raise _unexpected(path, f"{name} of at least 1", value)


def _check_known(
    path: Path, config: Mapping[str, Any], known: Mapping[str, Sequence[object]]
) -> None:
    """Refuse settings that are unknown, or have values other than the known ones."""
    for name, value in config.items():
        if name not in known:
            raise _unexpected(path, f"the settings {', '.join(known)}", name)
        if known[name] and value not in known[name]:
            allowed = " or ".join(map(json.dumps, known[name]))
            raise _unexpected(path, f"{name} {allowed}", value)


def _object(path: Path) -> Mapping[str, Any]:
    content = _read_json(path)
    if not isinstance(content, dict):
        raise _unexpected(path, "a JSON object", content)
    return content


def _read_json(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(path, f"no such file, which {MODULES} needs", "Copy it again.")
    return read_json(path, max_bytes=MAX_SETTINGS_BYTES)


def _unexpected(path: Path, expected: str, given: object, remedy: str = _REMEDY) -> CheckpointError:
    return CheckpointError(path, f"expected {expected}, got {str(given)[:80]}", remedy)


class Pooling(nn.Module):
    """A vector of a document for each mode, from those of its tokens, special ones included."""

    def __init__(self, modes: Sequence[str]) -> None:
        super().__init__()
        self._modes = tuple(modes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return ``[batch, modes * width]`` of ``[batch, tokens, width]``; mask 0 is padding."""
        parts = [_pooled(mode, tokens, mask) for mode in self._modes]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class Normalization(nn.Module):
    """Vectors of length 1."""

    def forward(self, vectors: Tensor) -> Tensor:
        """Return vectors ``[batch, width]`` divided by their length."""
        return nn.functional.normalize(vectors, dim=1)


class SentenceModel(nn.Module):
    """A model that takes token ids and a mask, and returns a vector of each document."""

    def __init__(
        self,
        tokens: TransformersModel,
        pooling: Pooling,
        stages: Sequence[nn.Module],
        max_length: int | None,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.pooling = pooling
        self.stages = nn.Sequential(*stages)
        self.max_length = max_length

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return ``[batch, width]``; see ``TransformersModel.forward``."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        vectors: Tensor = self.stages(self.pooling(self.tokens(input_ids, attention_mask), mask))
        return vectors


def _pooled(mode: str, tokens: Tensor, mask: Tensor) -> Tensor:
    is_token = mask[:, :, None] > 0
    weights = mask[:, :, None].to(tokens.dtype)
    if mode == "cls":
        return tokens[:, 0]
    if mode == "max":
        return tokens.masked_fill(~is_token, float("-inf")).amax(1)
    if mode == "lasttoken":
        last = (mask.sum(1) - 1)[:, None, None].expand(-1, 1, tokens.shape[2])
        return tokens.gather(1, last)[:, 0]
    if mode == "weightedmean":
        weights = weights * weights.cumsum(1)  # 1, 2, 3, ...
    total = (tokens.masked_fill(~is_token, 0.0) * weights).sum(1)
    count = weights.sum(1).clamp(min=_MIN_TOKENS)
    return total / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)
