"""Export a BERT of the library transformers whose attention is linear.

The model is made from a configuration, so that nothing is downloaded. Its layers are those of the
library. An operator of aftexport takes the place of the attention function. Run it from the root of
the repository with

    pip install '.[cpu,torch]' transformers
    python examples/transformers_model.py --out build/examples/bert

It writes ``bert.pt``, a state dict, and exports it to ``bert.bundle``. In the folder of this file,
``aftexport PATH/bert.pt --factory transformers_model:Classifier --to onnx`` does the same. The
weights are random: for a model of your own, train ``Classifier`` before it is saved.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, BertConfig, BertForSequenceClassification

import aftexport
import aftexport.nn  # registers torch.ops.aftexport

FEATURE_MAP = "elu"
EPS = 1e-6


def linear_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    lengths: Tensor,
    **options: object,
) -> tuple[Tensor, None]:
    """Mix the tokens of ``query``, ``key`` and ``value``, each ``[B, heads, T, d]``.

    The library calls it in every layer, with the keyword arguments that the model was given.
    """
    heads = query.shape[1]
    packed = [x.transpose(1, 2).flatten(2) for x in (query, key, value)]
    mixed = torch.ops.aftexport.normalized_linear_attention(
        *packed, lengths, heads, FEATURE_MAP, EPS
    )
    return mixed.unflatten(2, (heads, -1)), None


AttentionInterface.register("aft_linear", linear_attention)


class Classifier(nn.Module):
    """A classifier with the inputs and outputs that the exporter expects."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=1000,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=512,
            num_labels=3,
            attn_implementation="aft_linear",
        )
        self.max_length = config.max_position_embeddings
        self.model = BertForSequenceClassification(config)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Return logits ``[B, labels]`` for ``input_ids [B, T]``, padded on the right."""
        return self.model(input_ids, lengths=lengths).logits


def main() -> None:
    """Save a state dict and export it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("build/examples/bert"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    model = out / "bert.pt"
    torch.save(Classifier().state_dict(), model)
    bundle = aftexport.export(
        model, factory="transformers_model:Classifier", out=out / "bert.bundle"
    )
    print(f"Exported {bundle.path}.")


if __name__ == "__main__":
    main()
