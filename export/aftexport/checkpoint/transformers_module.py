"""A model of transformers with the inputs and the output of an exported model."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_POSITION_TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
"""Names of tables of learned positions in the library's models."""
_RELATIVE_BIAS = "relative_attention_bias"
"""The name of a table of biases by distance, in the attention of T5 and its kin."""
LOGITS = "logits"
VECTORS = "last_hidden_state"


class TransformersModel(nn.Module):
    """A model that takes token ids and a mask, and returns its logits or its last vectors.

    Segments (``token_type_ids``) keep the library's default, those of one text.

    Args:
        model: the model of the library.
        output: the entry of the result that is returned.

    Attributes:
        max_length: the maximum tokens of a document; None for no limit.
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

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return ``[batch, labels]``, or a row for each token.

        Args:
            input_ids: int64 ``[batch, tokens]``.
            attention_mask: int64 ``[batch, tokens]``, 1 for a token and 0 for padding.
        """
        result: Any = self.model(input_ids=input_ids, attention_mask=attention_mask)
        value: Tensor = result[self._output]
        return value


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
