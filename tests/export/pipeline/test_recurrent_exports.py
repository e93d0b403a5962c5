"""Models with recurrent layers go through the whole export, and their bundles equal PyTorch."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import naive_linear_attention as naive
import numpy as np
import pytest
import recurrent_models as models
import torch
import transformers_folders as folders
from commands import run_here
from torch import nn

from aftexport.bundle.bundle import CHUNKED, Bundle
from aftexport.chunked.runner import ChunkedModel
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.pipeline.export import export

TOKENS = (1, 63, 64, 65, 130)


def naive_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return naive.NaiveClassifier(name).eval()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mamba2": partial(models.build, "mamba2"),
    **{name: partial(naive_model, name) for name in naive.ATTENTIONS},
}


def check_bundle(bundle: Bundle, model: nn.Module, vocabulary: int, *, masked: bool) -> None:
    """Compare the bundle with the model, which runs its own loops over chunks."""
    operators = {"RecurrentLinearAttention", "CausalDepthwiseConv"}
    assert operators <= bundle.manifest.operators.keys()
    engine = OnnxRuntimeEngine(bundle.model_path, threads=1)
    generator = torch.Generator().manual_seed(0)
    for tokens in TOKENS:
        lengths = torch.tensor([tokens, (tokens + 1) // 2, max(1, tokens - 1)])
        mask = (torch.arange(tokens) < lengths.unsqueeze(1)).long()
        ids = torch.randint(1, vocabulary, (3, tokens), generator=generator) * mask
        with torch.inference_mode():
            expected = model(ids, mask if masked else lengths).numpy()
        given = engine.run({"input_ids": ids.numpy(), "lengths": lengths.numpy()})["logits"]
        np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_factory_is_exported(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = (
        "from test_recurrent_exports import MODELS\n\n\ndef build():\n    return MODELS[NAME]()\n"
    )
    (tmp_path / f"factory_of_{name}.py").write_text(f"NAME = {name!r}\n{source}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    bundle = export(factory=f"factory_of_{name}:build", out=tmp_path / "out", max_length=512)
    vocabulary = models.VOCABULARY if name == "mamba2" else naive.VOCABULARY
    check_bundle(bundle, MODELS[name](), vocabulary, masked=name == "mamba2")
    assert run_here(["verify", bundle.path], capsys).code == 0
    check_chunks(bundle, vocabulary)


def check_chunks(bundle: Bundle, vocabulary: int) -> None:
    """Compare a document in chunks with the whole one: all layers of the model are recurrent."""
    plan = bundle.manifest.chunked
    assert plan is not None
    assert all(stage.recurrence for stage in plan.stages)
    ids = np.random.default_rng(0).integers(1, vocabulary, (1, 300))
    inputs = {"input_ids": ids, "lengths": np.array([300])}
    whole = OnnxRuntimeEngine(bundle.model_path, threads=1).run(inputs)["logits"]
    chunked = ChunkedModel(bundle.path / CHUNKED, plan, threads=1, chunk_tokens=37)
    np.testing.assert_allclose(chunked.run(ids[0])["logits"], whole, atol=1e-5, rtol=1e-5)


def test_folder_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = models.qwen3_5_config(max_position_embeddings=512, **folders.named(folders.LABELS))
    folder = tmp_path / "model"
    own = folders.save(folder, "Qwen3_5TextForSequenceClassification", config)
    bundle = export(folder, out=tmp_path / "out")
    assert bundle.manifest.source["kind"].endswith("Qwen3_5TextForSequenceClassification")

    class Logits(nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return own(input_ids=ids, attention_mask=mask).logits

    check_bundle(bundle, Logits(), models.VOCABULARY, masked=True)
    assert run_here(["verify", bundle.path], capsys).code == 0
