"""Models with recurrent layers in naive loops go through the whole export.

``tests/serve/end_to_end/test_recurrent_models.py`` has GLA, RetNet and models of transformers.
"""

from pathlib import Path

import naive_linear_attention as naive
import numpy as np
import pytest
from commands import run_here
from naive_linear_attention import check_bundle
from sampling import any_case

from aftexport.bundle.bundle import CHUNKED, Bundle
from aftexport.chunked.runner import ChunkedModel
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.pipeline.export import export


@pytest.mark.table(keep=0.25, by=any_case)
@pytest.mark.parametrize("name", ["lightning", "delta_rule", "gated_delta_rule"])
def test_factory_is_exported(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = "from naive_linear_attention import build as build_by_name\n\n\n"
    code = f"{source}def build():\n    return build_by_name({name!r})\n"
    (tmp_path / f"factory_of_{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    bundle = export(factory=f"factory_of_{name}:build", out=tmp_path / "out", max_length=512)
    check_bundle(bundle, naive.build(name), masked=False)
    assert run_here(["verify", bundle.path], capsys).code == 0
    check_chunks(bundle)


def check_chunks(bundle: Bundle) -> None:
    """Compare a document in chunks with the whole one: all layers of the model are recurrent."""
    plan = bundle.manifest.chunked
    assert plan is not None
    assert all(stage.recurrence for stage in plan.stages)
    ids = np.random.default_rng(0).integers(1, naive.VOCABULARY, (1, 300))
    inputs = {"input_ids": ids, "lengths": np.array([300])}
    whole = OnnxRuntimeEngine(bundle.model_path, threads=1).run(inputs)["logits"]
    chunked = ChunkedModel(bundle.path / CHUNKED, plan, threads=1, chunk_tokens=37)
    np.testing.assert_allclose(chunked.run(ids[0])["logits"], whole, atol=1e-5, rtol=1e-5)
