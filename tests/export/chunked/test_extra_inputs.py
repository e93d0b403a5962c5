"""A document with extra inputs has the same answer as a whole, in chunks and in PyTorch."""

from pathlib import Path

import input_models
import numpy as np
import pytest
import torch
from sampling import any_case
from torch import Tensor, nn

from aftexport.bundle.bundle import CHUNKED
from aftexport.bundle.manifest import ChunkedPlan
from aftexport.capture.capture import capture
from aftexport.capture.input_spec import input_spec
from aftexport.capture.model_spec import InputSpec
from aftexport.capture.reference_module import ReferenceModule
from aftexport.chunked.archive import write_chunked
from aftexport.chunked.runner import ChunkedModel
from aftexport.chunked.token_flow import NotChunkable
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.engines.torch import TorchEngine
from aftexport.extra_inputs import parse_inputs, sample_values
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.parity import TOLERANCES

STATIC = {"static": f"vector:{input_models.WIDTH}"}
MODELS = {
    "events": (input_models.Events, "aft_simple", input_models.INPUTS),
    "events in a window": (input_models.Events, "aft_local", input_models.INPUTS),
    "late vector": (input_models.Late, "fastformer", STATIC),
    "repeated vector": (input_models.Repeated, "linear_attention", STATIC),
    "repeated vector in a window": (input_models.Repeated, "aft_conv", STATIC),
}


def exported(
    module: nn.Module, inputs: dict[str, str], folder: Path
) -> tuple[InputSpec, OnnxRuntimeEngine, ChunkedPlan]:
    extras = parse_inputs(inputs)
    program = capture(module.eval(), extras=extras)
    lowered = lower(program)
    plan = write_chunked(folder / CHUNKED, lowered, precision="fp32")
    whole = OnnxRuntimeEngine(finish(lowered).SerializeToString(), threads=1)
    return input_spec(program, extras=extras), whole, plan


@pytest.mark.table(keep=0.4, by=any_case)
@pytest.mark.parametrize("name", MODELS)
def test_chunks_equal_whole_and_torch(name: str, tmp_path: Path) -> None:
    kind, mechanism, inputs = MODELS[name]
    module = kind(mechanism)
    spec, whole, plan = exported(module, inputs, tmp_path)
    reference = TorchEngine(ReferenceModule(module, spec.names), spec.names)
    generator = np.random.default_rng(0)
    bound = TOLERANCES["fp32"].bound
    for tokens in (1, 7, 4097):
        ids = generator.integers(0, spec.vocab_size or 0, tokens)
        extras = sample_values(spec.extras, generator, tokens)
        given = {"input_ids": ids[None], "lengths": np.array([tokens]), **extras.batch()}
        expected = reference.run(given)["logits"]
        assert np.abs(whole.run(given)["logits"] - expected).max() <= bound
        for chunk_tokens in {max(1, tokens // 3), 512}:
            chunks = ChunkedModel(tmp_path / CHUNKED, plan, threads=1, chunk_tokens=chunk_tokens)
            found = chunks.run(ids, extras)["logits"]
            assert np.abs(found - expected).max() <= bound, (tokens, chunk_tokens)


def test_extra_inputs_change_the_answer(tmp_path: Path) -> None:
    spec, _, plan = exported(input_models.Events(), input_models.INPUTS, tmp_path)
    model = ChunkedModel(tmp_path / CHUNKED, plan, threads=1, chunk_tokens=8)
    ids = np.arange(40)
    extras = sample_values(spec.extras, np.random.default_rng(0), 40)
    before = model.run(ids, extras)["logits"]
    for name, values in {**extras.document, **extras.tokens}.items():
        saved = values.copy()
        values[...] = 1 - values if name == "static" else (values + 1) % 3
        assert np.abs(model.run(ids, extras)["logits"] - before).max() > 1e-3, name
        values[...] = saved


class Scaled(input_models.Late):
    """Divides a number of the document by its length."""

    def forward(self, input_ids: Tensor, lengths: Tensor, static: Tensor) -> Tensor:
        rate = static / input_ids.shape[1]
        x = self.embedding(input_ids) * rate.sum(1)[:, None, None]
        pooled = self.pooling(self.encoder(x, lengths), lengths)
        return self.head(torch.cat([pooled, static], 1))


def test_numbers_of_whole_length_need_whole_document(tmp_path: Path) -> None:
    with pytest.raises(NotChunkable, match="length"):
        exported(Scaled(), STATIC, tmp_path)
