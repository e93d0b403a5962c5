"""Folders of sentence-transformers whose model is in code of the folder."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_folders as sentences
import torch

from aftexport.checkpoint import load
from aftexport.errors import CheckpointError

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


def save_own_code(folder: Path, auto_map: dict[str, str], code: str) -> Any:
    """Write a folder whose model, with a head and random weights, is in its own code.

    The base model is returned.
    """
    sentences.save(folder, sentences.new_pooling("mean"), transformer="0_Transformer")
    transformer = folder / "0_Transformer"
    shutil.rmtree(transformer)
    namespace: dict[str, Any] = {"__name__": "written"}
    exec(CODE, namespace)
    torch.manual_seed(0)
    model = namespace["OwnForMaskedLM"](namespace["OwnConfig"](auto_map=auto_map)).eval()
    model.save_pretrained(transformer)
    (transformer / "modeling_own.py").write_text(code)
    return model.encoder


@pytest.mark.filterwarnings("ignore")  # the library warns of the code
def test_vectors_of_own_code_are_of_base_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.json names the class with the head; the library takes AutoModel of auto_map."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    model = save_own_code(folder, AUTO_MAP, CODE)
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        load(folder)
    checkpoint = load(folder, trust_remote_code=True)
    assert checkpoint.kind == "sentence-transformers folder of OwnModel"
    assert checkpoint.module is not None
    with torch.inference_mode():
        found = checkpoint.module.double()(torch.tensor([[2, 8, 9, 3]])).numpy()
    (rows,) = sentences.token_vectors(model, [[2, 8, 9, 3]])
    np.testing.assert_allclose(found[0], sentences.pooled(rows, ["mean"]), atol=1e-12)


HEAD_ONLY = {name: AUTO_MAP[name] for name in ("AutoConfig", "AutoModelForMaskedLM")}


@pytest.mark.parametrize(
    ("auto_map", "change", "message"),
    [
        (HEAD_ONLY, ("", ""), r"expected AutoModel in auto_map.*got only OwnForMaskedLM"),
        (
            AUTO_MAP | {"AutoModel": "modeling_own.OwnForMaskedLM"},
            ("", ""),
            "OwnForMaskedLM to return last_hidden_state .*KeyError: 'last_hidden_state'",
        ),
        (
            AUTO_MAP,
            (".tanh())", ".no_such_function())"),
            "OwnModel to return last_hidden_state .*AttributeError",
        ),
        (AUTO_MAP, (".tanh())", ".sum(1))"), r"shape \(1, 2, width\), got \(1, 16\)"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # the library warns of the code
def test_own_code_without_vectors_is_refused(
    auto_map: dict[str, str],
    change: tuple[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    save_own_code(tmp_path / "model", auto_map, CODE.replace(*change))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "model", trust_remote_code=True)
