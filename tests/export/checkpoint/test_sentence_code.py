"""Folders of sentence-transformers whose model is in code of the folder."""

import shutil
from pathlib import Path
from typing import Any

import encoder_code
import numpy as np
import pytest
import sentence_folders as sentences
import torch

from aftexport.checkpoint import load
from aftexport.errors import CheckpointError


def save_own_code(folder: Path, auto_map: dict[str, str], code: str) -> Any:
    """Write a folder whose model is in its own code; return the base model."""
    sentences.save(folder, sentences.new_pooling("mean"), transformer="0_Transformer")
    shutil.rmtree(folder / "0_Transformer")
    return encoder_code.save(folder / "0_Transformer", auto_map, code)


@pytest.mark.filterwarnings("ignore")  # the library warns of the code
def test_vectors_of_own_code_are_of_base_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.json names the class with the head; the library takes AutoModel of auto_map."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    model = save_own_code(folder, encoder_code.AUTO_MAP, encoder_code.CODE)
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        load(folder)
    checkpoint = load(folder, trust_remote_code=True)
    assert checkpoint.kind == "sentence-transformers folder of OwnModel"
    assert checkpoint.module is not None
    with torch.inference_mode():
        found = checkpoint.module.double()(torch.tensor([[2, 8, 9, 3]])).numpy()
    (rows,) = sentences.token_vectors(model, [[2, 8, 9, 3]])
    np.testing.assert_allclose(found[0], sentences.pooled(rows, ["mean"]), atol=1e-12)


HEAD_ONLY = {name: encoder_code.AUTO_MAP[name] for name in ("AutoConfig", "AutoModelForMaskedLM")}


@pytest.mark.parametrize(
    ("auto_map", "change", "message"),
    [
        (HEAD_ONLY, ("", ""), r"expected AutoModel in auto_map.*got only OwnForMaskedLM"),
        (
            encoder_code.AUTO_MAP | {"AutoModel": "modeling_own.OwnForMaskedLM"},
            ("", ""),
            "OwnForMaskedLM to return last_hidden_state .*KeyError: 'last_hidden_state'",
        ),
        (
            encoder_code.AUTO_MAP,
            (".tanh())", ".no_such_function())"),
            "OwnModel to return last_hidden_state .*AttributeError",
        ),
        (encoder_code.AUTO_MAP, (".tanh())", ".sum(1))"), r"shape \(1, 2, width\), got \(1, 16\)"),
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
    save_own_code(tmp_path / "model", auto_map, encoder_code.CODE.replace(*change))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "model", trust_remote_code=True)
