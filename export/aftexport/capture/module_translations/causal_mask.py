"""The causal mask of softmax layers in hybrids, which ``is_causal`` of the attention replaces.

Padding follows the tokens of a document, so a token never sees it. Without a mask ``[B, 1, T, T]``,
the attention can run in blocks of queries.
"""

from typing import Any

from torch import Tensor

from aftexport.capture.module_translations.function_translation import FunctionTranslation
from aftexport.capture.padding_mask import is_given_mask

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
