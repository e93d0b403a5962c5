"""The state space scan of Mamba-2 and of the models that use its layer.

In terms of linear attention, ``C`` is the query, ``B`` the key, and the input times its step the
value; ``A`` times the step is the logarithm of the decay.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from aftexport.capture.module_translations.function_translation import FunctionTranslation
from aftexport.capture.module_translations.state_type import to_state_type
from aftexport.nn.functional import recurrent_linear_attention


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
    steps = to_state_type(dt.clamp(least, None if most == float("inf") else most))
    x = to_state_type(hidden_states)
    output, state = recurrent_linear_attention(
        to_state_type(C),
        to_state_type(B),
        x * steps.unsqueeze(-1),
        decay=A.to(x.dtype) * steps,
        past_state=None if initial_states is None else to_state_type(initial_states).mT,
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
