"""Run in a user's environment: save a small classifier, and a plain ONNX file of the same kind."""

import torch
from torch import Tensor, nn

import aftexport
from aftexport.nn import ClassifierConfig, DocumentClassifier


class AftSimple(nn.Module):
    """AFT-simple as other people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        context = (self.key(x).softmax(1) * self.value(x)).sum(1, keepdim=True)
        return self.head((x + self.query(x).sigmoid() * context).mean(1))


torch.manual_seed(0)
config = ClassifierConfig(mechanism="aft_simple", vocab_size=300, num_labels=2, dim=16, depth=1)
aftexport.save("model.pt", model=DocumentClassifier(config).eval(), labels=("letter", "invoice"))
torch.onnx.export(
    AftSimple().eval(),
    (torch.randint(300, (2, 8)),),
    "plain.onnx",
    output_names=["logits"],
    dynamic_shapes=({0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")},),
    verbose=False,
)
