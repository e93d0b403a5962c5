"""The replacement of known functions of transformers while a model is captured.

The functions are globals of the library's files, which the whole process shares. Only the thread
of the capture runs the replacements; every other thread, such as one that runs the model, runs the
library's own functions.
"""

import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftexport.capture.model_inputs import is_given_mask
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


@dataclass(frozen=True)
class FunctionTranslation:
    """A function of transformers, known by its name and its parameters, and its translation.

    Several files of the library hold copies of one function.
    """

    name: str  # the name of the function in the file of a model
    parameters: tuple[str, ...]
    # A function of these parameters with the same result, in our operators.
    replacement: Callable[..., Any]
    # Whether the function loops over tokens, so that torch.export cannot capture it.
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


TRANSLATIONS = (
    GATED_DELTA_RULE,
    KIMI_DELTA_RULE,
    STATE_SPACE_SCAN,
    CAUSAL_CONVOLUTION,
    CAUSAL_MASK,
)
_LOCK = threading.RLock()


@contextmanager
def translate_functions(model: nn.Module) -> Iterator[None]:
    """Run known functions of a model, and those of ``exported_as``, in their form for an export."""
    with _LOCK, export_forms():  # the files of the library are shared by the whole process
        places = [
            (space, translation.name, space[translation.name], translation)
            for space, translation in _places(model)
            if translation.fits(space[translation.name])
        ]
        for space, name, own, translation in places:
            space[name] = exported_as(translation.replacement)(own)
        try:
            yield
        finally:
            for space, name, own, _ in places:
                space[name] = own


def refuse_unknown_functions(model: nn.Module) -> None:
    """Raise TraceError for a loop over tokens whose form in this version is unknown."""
    for space, translation in _places(model):
        if translation.has_loop and not translation.fits(space[translation.name]):
            raise TraceError(
                f"Expected {translation.name} of {VERSIONS.library} {VERSIONS.oldest} to "
                f"{VERSIONS.newest}, which is translated, got that of {installed_version()}.",
                f"Install {VERSIONS.library} {VERSIONS.newest}, or a newer aftexport.",
            )


def _places(model: nn.Module) -> list[tuple[dict[str, Any], FunctionTranslation]]:
    """Return the globals of the library's files with a recurrence, and their known functions."""
    files = {type(module).__module__ for module in model.modules()}
    spaces = [vars(sys.modules[name]) for name in sorted(files) if is_of_transformers(name)]
    recurrences = {known.name for known in TRANSLATIONS if known.has_loop}
    spaces = [space for space in spaces if not recurrences.isdisjoint(space)]
    return [(space, known) for space in spaces for known in TRANSLATIONS if known.name in space]


def _to_state_type(x: Tensor) -> Tensor:
    """Return a tensor in float32 or float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def switch_off_caches(model: nn.Module) -> None:
    """Make models of transformers inside a module run without a cache; results stay the same.

    Mamba-2 makes one by default, with branches on the number of tokens.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if is_of_transformers(type(module).__module__) and getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]
