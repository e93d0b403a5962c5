"""A model file that needs a factory."""

from pathlib import Path

import pytest
import tiny_models
import torch


@pytest.fixture(scope="session")
def state_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("state") / "weights.pt"
    torch.save(tiny_models.Bag().state_dict(), path)
    return path
