"""The code of a folder of transformers whose class has linear attention, in plain PyTorch."""

CODE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class LinearConfig(PreTrainedConfig):
    model_type = "linear_text"

    def __init__(self, vocab_size=300, hidden_size=16, heads=2, **settings):
        self.vocab_size, self.hidden_size, self.heads = vocab_size, hidden_size, heads
        super().__init__(**settings)


class LinearForSequenceClassification(PreTrainedModel):
    config_class = LinearConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.parts = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size)
                                   for _ in range(3))
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **options):
        x = self.embedding(input_ids)
        batch, tokens, size = x.shape
        heads = self.config.heads
        q, k, v = (part(x).view(batch, tokens, heads, size // heads).transpose(1, 2)
                   for part in self.parts)
        q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
        mask = attention_mask[:, None, :, None].to(x.dtype)
        k = k * mask
        context = k.transpose(2, 3) @ v
        normalizer = q @ k.sum(2).unsqueeze(3) + 1e-6
        y = (q @ context / normalizer).transpose(1, 2).reshape(batch, tokens, size)
        y = (x + y) * attention_mask[:, :, None].to(x.dtype)
        pooled = y.sum(1) / attention_mask.sum(1, keepdim=True).to(x.dtype)
        return SequenceClassifierOutput(logits=self.classifier(pooled))
"""
"""Two classes, of which config.json names the second; importing them leaves a trace."""
AUTO_MAP = {
    "AutoConfig": "modeling_linear.LinearConfig",
    "AutoModelForSequenceClassification": "modeling_linear.LinearForSequenceClassification",
}
