"""Saved classifiers of layers with fixed decays."""

from pathlib import Path

import pytest
import torch

import aftexport
from aftexport.nn import ClassifierConfig, DocumentClassifier


@pytest.mark.parametrize("mechanism", ["retention", "lightning_attention", "gated_delta_net"])
def test_loaded_model_equals_saved_one(mechanism: str, tmp_path: Path) -> None:
    """A loaded model starts without numbers, so those of fixed decays come from the file too."""
    config = ClassifierConfig(
        vocab_size=30, num_labels=3, dim=16, depth=1, num_heads=2, ffn_dim=32, mechanism=mechanism
    )
    model = DocumentClassifier(config).eval()
    aftexport.save(tmp_path / "model.pt", model=model)
    loaded = aftexport.load(tmp_path / "model.pt").module
    assert loaded is not None
    ids, lengths = torch.randint(1, 30, (2, 9)), torch.tensor([9, 4])
    assert torch.equal(loaded(ids, lengths), model(ids, lengths))
