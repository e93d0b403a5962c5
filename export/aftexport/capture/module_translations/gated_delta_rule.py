"""The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo Hybrid.

Kimi Linear, the Bailing hybrids and GLM-5-Next have it with a decay for each channel of a key.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aftexport.capture.module_translations.function_translation import FunctionTranslation
from aftexport.capture.module_translations.state_type import to_state_type
from aftexport.nn.functional import recurrent_linear_attention

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
    query, key, value, g, beta = (to_state_type(x) for x in (query, key, value, g, beta))
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
