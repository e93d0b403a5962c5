"""The code of a folder of transformers with a base class and a class with a head over it."""

from pathlib import Path
from typing import Any

import torch

CODE = """
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput


class OwnConfig(PreTrainedConfig):
    model_type = "own_text"

    def __init__(self, vocab_size=300, hidden_size=16, **settings):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**settings)


class OwnPreTrainedModel(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "encoder"


class OwnModel(OwnPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.map = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **options):
        return BaseModelOutput(last_hidden_state=self.map(self.embedding(input_ids)).tanh())


class OwnForMaskedLM(OwnPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.encoder = OwnModel(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **options):
        rows = self.encoder(input_ids, attention_mask).last_hidden_state
        return MaskedLMOutput(logits=self.head(rows))
"""
AUTO_MAP = {
    "AutoConfig": "modeling_own.OwnConfig",
    "AutoModel": "modeling_own.OwnModel",
    "AutoModelForMaskedLM": "modeling_own.OwnForMaskedLM",
}


def save(folder: Path, auto_map: dict[str, str] = AUTO_MAP, code: str = CODE) -> Any:
    """Write the model with the head and random weights; return its base model.

    Args:
        folder: the folder.
        auto_map: the classes that config.json names.
        code: the code in the folder.
    """
    namespace: dict[str, Any] = {"__name__": "written"}
    exec(CODE, namespace)
    torch.manual_seed(0)
    config = namespace["OwnConfig"](auto_map=auto_map)
    model = namespace["OwnForMaskedLM"](config).eval()
    model.save_pretrained(folder)
    (folder / "modeling_own.py").write_text(code)
    return model.encoder
