"""AFT-local with a bias for each position runs in chunks as a whole document does."""

from pathlib import Path

import numpy as np
import torch
from token_models import TopicAndTags, document

from aftexport.bundle.bundle import CHUNKED
from aftexport.capture.capture import capture
from aftexport.chunked.archive import write_chunked
from aftexport.chunked.runner import ChunkedModel
from aftexport.lowering.to_onnx import lower
from aftexport.parity import TOLERANCES

MAX_TOKENS = 64


def test_chunks_read_rows_of_positions(tmp_path: Path) -> None:
    module = TopicAndTags("aft_local", depth=1, max_length=MAX_TOKENS)
    with torch.no_grad():
        for layer in module.encoder.layers:
            layer.attention.row_factor.mul_(30)  # biases that differ by more than the tolerance
    program = capture(module, max_tokens=MAX_TOKENS)
    plan = write_chunked(tmp_path / CHUNKED, lower(program), precision="fp32")
    assert [(stage.left, stage.right) for stage in plan.stages] == [(3, 3)]
    truth = module.double()
    for tokens, chunk_tokens in ((1, 1), (20, 1), (40, 13), (MAX_TOKENS, 20), (MAX_TOKENS, 99)):
        ids = document(tokens)
        with torch.inference_mode():
            expected = truth(torch.from_numpy(ids)[None], torch.tensor([tokens]))
        for fused in (True, False):
            model = ChunkedModel(
                tmp_path / CHUNKED, plan, threads=1, chunk_tokens=chunk_tokens, fused=fused
            )
            found = model.run(ids)
            for name, array in found.items():
                scale = max(1.0, expected[name].abs().max().item())
                error = np.abs(array - expected[name].numpy()).max() / scale
                assert error <= TOLERANCES["fp32"].bound, (name, tokens, chunk_tokens, fused)
