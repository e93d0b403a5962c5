"""Biases and embeddings of positions are read from those of a chunk's first token on."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sampling import any_case
from token_models import TopicAndTags, document
from torch import Tensor, nn

from aftexport.bundle.bundle import CHUNKED
from aftexport.capture.capture import capture
from aftexport.chunked.archive import write_chunked
from aftexport.chunked.runner import ChunkedModel
from aftexport.lowering.to_onnx import lower
from aftexport.parity import TOLERANCES

MAX_TOKENS = 64


class LearnedPositions(TopicAndTags):
    """Adds an embedding of each position; the mask counts the same positions."""

    def build(self, dim: int) -> None:
        super().build(dim)
        self.positions = nn.Embedding(MAX_TOKENS, dim)

    def encoded(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1])
        valid = (places < lengths[:, None])[..., None]
        x = self.embedding(input_ids) + self.positions(places)
        return self.encoder(x * valid, lengths)


def with_position_biases() -> TopicAndTags:
    module = TopicAndTags("aft_local", depth=1, max_length=MAX_TOKENS)
    with torch.no_grad():
        # Biases that differ by more than the tolerance.
        module.encoder.layers[0].attention.row_factor.mul_(30)
    return module


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize(
    "build", [with_position_biases, lambda: LearnedPositions("aft_simple", depth=1)]
)
def test_chunks_read_rows_of_positions(build: Callable[[], TopicAndTags], tmp_path: Path) -> None:
    module = build()
    program = capture(module, max_tokens=MAX_TOKENS)
    plan = write_chunked(tmp_path / CHUNKED, lower(program), precision="fp32")
    truth = module.double()
    for tokens, chunk_tokens in ((1, 1), (20, 1), (40, 13), (MAX_TOKENS, 20), (MAX_TOKENS, 99)):
        ids = document(tokens)
        with torch.inference_mode():
            expected = truth(torch.from_numpy(ids)[None], torch.tensor([tokens]))
        for fused in (True, False):
            model = ChunkedModel(
                tmp_path / CHUNKED, plan, threads=1, chunk_tokens=chunk_tokens, fused=fused
            )
            found = model.run(ids, evidence=plan.evidence)
            added = found.pop("evidence").sum() + module.topic.bias[found["topic"].argmax()].item()
            assert abs(added - found["topic"].max()) <= TOLERANCES["fp32"].bound
            for name, array in found.items():
                scale = max(1.0, expected[name].abs().max().item())
                error = np.abs(array - expected[name].numpy()).max() / scale
                assert error <= TOLERANCES["fp32"].bound, (name, tokens, chunk_tokens, fused)
