"""A model of many mechanisms, to plant faults in: one encoder layer of each of four."""

import torch
from torch import Tensor, nn

from aftexport.nn import ClassifierConfig, EncoderLayer
from aftexport.nn.classifier import MeanPooling

VOCABULARY, DIM, LABELS = 60, 16, 3
MECHANISMS = ("aft_local", "efficient_attention", "fastformer", "dot_product_attention")


class Mixed(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(EncoderLayer(config(name)) for name in MECHANISMS)
        self.norm = nn.LayerNorm(DIM)
        self.pooling = MeanPooling()
        self.head = nn.Linear(DIM, LABELS)
        for parameter in self.parameters():  # no two norms are alike
            parameter.data += 0.1 * torch.randn_like(parameter)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, lengths)
        return self.head(self.pooling(self.norm(x), lengths))


def config(mechanism: str) -> ClassifierConfig:
    return ClassifierConfig(
        mechanism=mechanism, vocab_size=VOCABULARY, num_labels=LABELS, dim=DIM, num_heads=2,
        ffn_dim=24, window=4,
    )  # fmt: skip
