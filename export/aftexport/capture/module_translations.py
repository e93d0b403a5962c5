"""The replacement of known functions of transformers while a model is captured.

The functions are globals of the library's files and methods of its classes, which the whole process
shares. Only the thread of the capture runs the replacements; every other thread, such as one that
runs the model, runs the library's own functions.
"""

import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftexport.capture.model_inputs import is_given_mask
from aftexport.capture.sparse_attention import (
    attended_by_blocks,
    attended_in_windows,
    classified_by_longformer,
    encoded_by_big_bird,
    encoded_by_longformer,
)
from aftexport.errors import TraceError
from aftexport.nn.functional import (
    causal_depthwise_conv,
    export_forms,
    exported_as,
    recurrent_linear_attention,
)
from aftexport.system.internals.versions import Versions

VERSIONS = Versions("transformers", "5.16", "5.24")
_PLACE = "transformers.models."
_OWN = ("aftexport", "torch")


@dataclass(frozen=True)
class FunctionTranslation:
    """A function of transformers, known by its name and its parameters, and its translation.

    Several files of the library hold copies of one function.
    """

    name: str  # the name of the function in the file of a model, such as ``Class.method``
    parameters: tuple[str, ...]
    # A function of these parameters with the same result, in our operators.
    replacement: Callable[..., Any]
    # Whether torch.export cannot capture the function itself, as one that loops over tokens.
    has_loop: bool = True
    place: str = _PLACE  # the start of the name of the Python module that defines the function

    def fits(self, function: Any) -> bool:
        """Return whether a function has the known place, version and parameters."""
        if not str(getattr(function, "__module__", "")).startswith(self.place):
            return False
        oldest, newest = map(_number, (VERSIONS.oldest, VERSIONS.newest))
        given = tuple(inspect.signature(function).parameters)
        is_known = oldest <= _number(installed_version()) <= newest
        return is_known and given[: len(self.parameters)] == self.parameters


def is_of_transformers(module_name: str) -> bool:
    """Return whether a Python module is the file of a model of transformers."""
    return module_name.startswith(_PLACE)


def is_library_only(model: nn.Module) -> bool:
    """Return whether all classes of a model are those of transformers, torch and aftexport."""
    files = {type(module).__module__ for module in model.modules()}
    packages = {file.partition(".")[0] for file in files}
    return any(map(is_of_transformers, files)) and packages <= {"transformers", *_OWN}


def installed_version() -> str:
    """Return the version of transformers."""
    return version(VERSIONS.library)


def _number(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


# The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo Hybrid. Kimi Linear, the Bailing hybrids and
# GLM-5-Next have it with a decay for each channel of a key.
_EPS = 1e-6


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    given = query.dtype
    query, key, value, g, beta = (_to_state_type(x) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = _normalized(query), _normalized(key)
    output, state = recurrent_linear_attention(
        query,
        key,
        value,
        decay=g,
        beta=beta,
        past_state=None if initial_state is None else initial_state.to(value.dtype),
    )
    return output.to(given), state if output_final_state else None


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _EPS)


GATED_DELTA_RULE = FunctionTranslation(
    "torch_chunk_gated_delta_rule",
    (
        *("query", "key", "value", "g", "beta", "chunk_size", "initial_state"),
        *("output_final_state", "use_qk_l2norm_in_kernel"),
    ),
    _attended,
)
KIMI_DELTA_RULE = replace(GATED_DELTA_RULE, name="chunk_kimi_delta_attention")


# The state space scan of Mamba-2 and of the models that use its layer. In terms of linear
# attention, C is the query, B the key, and the input times its step the value; A times the step is
# the logarithm of the decay.
def _scanned(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    least, most = dt_limit
    steps = _to_state_type(dt.clamp(least, None if most == float("inf") else most))
    x = _to_state_type(hidden_states)
    output, state = recurrent_linear_attention(
        _to_state_type(C),
        _to_state_type(B),
        x * steps.unsqueeze(-1),
        decay=A.to(x.dtype) * steps,
        past_state=None if initial_states is None else _to_state_type(initial_states).mT,
        scale=1.0,
    )
    if D is not None:
        output = output + D.unsqueeze(-1) * x
    return (output, state.mT) if return_final_states else output


STATE_SPACE_SCAN = FunctionTranslation(
    "mamba2_chunk_scan",
    (
        *("hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias"),
        *("initial_states", "dt_softplus", "dt_limit", "return_final_states"),
    ),
    _scanned,
)


# The causal convolution of each channel before the recurrence.
_ACTIVATIONS = {None: "none", "silu": "silu", "swish": "silu"}


def _convolved(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    own = _ACTIVATIONS.get(activation, "none")
    x = hidden_states.to(weight.dtype).transpose(1, 2)
    output = causal_depthwise_conv(x, weight, bias, activation=own)[0].transpose(1, 2)
    if activation not in _ACTIVATIONS:
        from transformers.activations import ACT2FN  # loaded by the model

        output = ACT2FN[activation](output)
    return output.to(hidden_states.dtype)


CAUSAL_CONVOLUTION = FunctionTranslation(
    "causal_conv1d_fn",
    ("hidden_states", "weight", "bias", "activation"),
    _convolved,
    has_loop=False,
)


# Lightning attention of MiniMax: linear attention whose decay is a constant of each head. The
# library computes it in blocks of tokens.
def _decayed(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    cache: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    mixed = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        mixed = mixed * attention_mask.unsqueeze(-1).to(mixed.dtype)
    heads = mixed.unflatten(2, (self.num_attention_heads, -1)).split(self.head_dim, 3)
    query, key, value = (_to_state_type(x) for x in heads)
    decay = -self.slope_rate.to(value.dtype).flatten().expand(value.shape[:3])
    output, state = recurrent_linear_attention(query, key, value, decay=decay, scale=1.0)
    output = self.norm(output.flatten(2).to(hidden_states.dtype))
    return self.out_proj(self.output_gate(hidden_states).sigmoid() * output), state


LIGHTNING_ATTENTION = FunctionTranslation(
    "MiniMaxLightningAttention.forward",
    ("self", "hidden_states", "position_embeddings", "attention_mask", "cache"),
    _decayed,
)


BIG_BIRD = FunctionTranslation(
    "BigBirdModel.forward",
    ("self", "input_ids", "attention_mask", "token_type_ids"),
    encoded_by_big_bird,
    has_loop=False,
)
BLOCK_SPARSE_ATTENTION = FunctionTranslation(
    "BigBirdBlockSparseAttention.forward",
    ("self", "hidden_states", "band_mask"),
    attended_by_blocks,
    has_loop=False,
)

LONGFORMER = FunctionTranslation(
    "LongformerModel.forward",
    ("self", "input_ids", "attention_mask", "global_attention_mask", "token_type_ids"),
    encoded_by_longformer,
)
LONGFORMER_CLASSIFIER = replace(
    LONGFORMER,
    name="LongformerForSequenceClassification.forward",
    replacement=classified_by_longformer,
)
WINDOW_ATTENTION = FunctionTranslation(
    "LongformerSelfAttention.forward",
    ("self", "hidden_states", "attention_mask", "is_index_masked"),
    attended_in_windows,
)


# The causal mask of softmax layers in hybrids, which is_causal of the attention replaces. Padding
# follows the tokens of a document, so a token never sees it. Without a mask [B, 1, T, T], the
# attention can run in blocks of queries.
_OTHER_MASKS = ("cache", "or_mask_function", "and_mask_function", "block_sequence_ids")
"""Parameters that change the mask."""


def _masked(
    config: Any, inputs_embeds: Tensor, attention_mask: Tensor | None, **others: Any
) -> Any:
    from transformers.masking_utils import create_causal_mask  # loaded by the model

    is_plain = attention_mask is None or is_given_mask(attention_mask)
    is_plain &= all(others.get(name) is None for name in _OTHER_MASKS)
    is_plain &= others.get("allow_is_causal_skip", True)
    is_plain &= config._attn_implementation == "sdpa" and getattr(config, "is_causal", True)
    if is_plain:
        return None
    return create_causal_mask(config, inputs_embeds, attention_mask, **others)


CAUSAL_MASK = FunctionTranslation(
    "create_causal_mask",
    ("config", "inputs_embeds", "attention_mask"),
    _masked,
    has_loop=False,
    place="transformers.masking_utils",
)


# Rotary positions of Qwen3.5, in the three grids of images. Those of text are one row in all grids
# and documents, which the text model expands. Tables of one row are known to the softmax attention.
def _turned(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    is_expanded = position_ids.dim() == 3 and position_ids.stride()[:2] == (0, 0)
    # These types compute frequencies for the longest document.
    if not is_expanded or "dynamic" in self.rope_type or self.rope_type == "longrope":
        library = type(self).forward.__wrapped__
        return library(self, x, position_ids)  # type: ignore[no-any-return]
    angles = position_ids[0, :1, :, None].float() * self.inv_freq.float()
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
    return cos.to(x.dtype), sin.to(x.dtype)


GRID_POSITIONS = FunctionTranslation(
    "Qwen3_5TextRotaryEmbedding.forward",
    ("self", "x", "position_ids"),
    _turned,
    has_loop=False,
)


TRANSLATIONS = (
    GATED_DELTA_RULE,
    KIMI_DELTA_RULE,
    STATE_SPACE_SCAN,
    CAUSAL_CONVOLUTION,
    LIGHTNING_ATTENTION,
    BIG_BIRD,
    BLOCK_SPARSE_ATTENTION,
    LONGFORMER,
    LONGFORMER_CLASSIFIER,
    WINDOW_ATTENTION,
    CAUSAL_MASK,
    GRID_POSITIONS,
)
_UNTRANSLATED = {
    "mamba_selective_scan": "whose decay differs for each channel and each number of the state",
    "rwkv_linear_attention": "whose first term has a weight of its own",
}
"""Recurrences of transformers that no operator computes, each with its difference from ours."""
_LOCK = threading.RLock()


@contextmanager
def translate_functions(model: nn.Module) -> Iterator[None]:
    """Run known functions of a model, and those of ``exported_as``, in their form for an export."""
    with _LOCK, export_forms():  # the files of the library are shared by the whole process
        places = [place for place in _places(model) if place.translation.fits(place.function)]
        for place in places:
            own = exported_as(place.translation.replacement)(place.function)
            setattr(place.owner, place.name, own)
        try:
            yield
        finally:
            for place in places:
                setattr(place.owner, place.name, place.function)


class UntranslatedError(TraceError):
    """A function of transformers has no translation; the remedy names a model or version."""


def refuse_unknown_functions(model: nn.Module) -> None:
    """Raise UntranslatedError for a loop over tokens that is not translated in this version."""
    for file in _library_files(model):
        for name in _UNTRANSLATED.keys() & vars(sys.modules[file]).keys():
            raise UntranslatedError(
                "Expected a recurrence that RecurrentLinearAttention computes, got "
                f"{name} of {VERSIONS.library} ({file}), {_UNTRANSLATED[name]}.",
                "Give a model of a family that docs/models.md lists, such as Mamba-2.",
            )
    for place in _places(model):
        translation = place.translation
        if translation.has_loop and not translation.fits(place.function):
            raise UntranslatedError(
                f"Expected {translation.name} of {VERSIONS.library} {VERSIONS.oldest} to "
                f"{VERSIONS.newest}, which is translated, got that of {installed_version()}.",
                f"Install {VERSIONS.library} {VERSIONS.newest}, or a newer aftexport.",
            )


@dataclass(frozen=True)
class _Place:
    """A known function in a file of the library."""

    owner: Any  # the Python module or the class
    name: str
    function: Callable[..., Any]
    translation: FunctionTranslation


def _places(model: nn.Module) -> list[_Place]:
    """Return the known functions in the files of a model, if a file defines one of its own."""
    found = []
    for file in _library_files(model):
        places = [place for known in TRANSLATIONS if (place := _place(sys.modules[file], known))]
        if any(place.translation.place == _PLACE for place in places):
            found += places
    return found


def _library_files(model: nn.Module) -> list[str]:
    """Return the names of the library's files that define the classes of a model."""
    files = {type(module).__module__ for module in model.modules()}
    return sorted(filter(is_of_transformers, files))


def _place(file: Any, known: FunctionTranslation) -> _Place | None:
    """Return the place of a known function in a file; None without one."""
    *names, name = known.name.split(".")
    owner = reduce(lambda scope, part: vars(scope).get(part, object), names, file)
    function = vars(owner).get(name)
    return _Place(owner, name, function, known) if callable(function) else None


def _to_state_type(x: Tensor) -> Tensor:
    """Return a tensor in float32 or float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def choose_exported_forms(model: nn.Module) -> None:
    """Make models of transformers inside a module run in forms that can be captured.

    The results stay the same. A cache branches on the number of tokens. The other forms of experts
    loop over experts or tokens.
    """
    choose_experts(model, "batched_mm")
    for module, config in _library_modules(model):
        if getattr(config, "use_cache", False):
            config.use_cache = False
        if callable(choose := getattr(module, "set_attention_type", None)):
            choose(config.attention_type)  # BigBird's, which a short document changes


def choose_experts(model: nn.Module, implementation: str) -> None:
    """Choose the library's computation of experts; ``eager`` is the definition, in any type."""
    for _, config in _library_modules(model):
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = implementation


def _library_modules(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the modules of transformers that have a configuration, with it."""
    for module in model.modules():
        if is_of_transformers(type(module).__module__) and hasattr(module, "config"):
            yield module, module.config
