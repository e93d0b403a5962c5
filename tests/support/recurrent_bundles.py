"""Bundles of models with recurrent layers, compared with PyTorch."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from aftexport.bundle.bundle import Bundle
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.operators.mechanisms import RECURRENT_OPERATORS

TOKENS = (1, 63, 64, 65, 130)
"""Lengths at both sides of the libraries' chunks of 64 tokens."""


def check_bundle(
    bundle: Bundle, logits_of: Callable[[Tensor, Tensor], Tensor], *, masked: bool
) -> None:
    """Compare a bundle with its model, which runs its own loops over chunks.

    Args:
        bundle: the bundle.
        logits_of: the model.
        masked: whether it takes the mask of a batch instead of the lengths.
    """
    assert bundle.manifest.operators.keys() >= RECURRENT_OPERATORS.keys()
    vocabulary = bundle.manifest.vocab_size
    assert vocabulary is not None
    engine = OnnxRuntimeEngine(bundle.model_path, threads=1)
    generator = torch.Generator().manual_seed(0)
    for tokens in TOKENS:
        lengths = torch.tensor([tokens, (tokens + 1) // 2, max(1, tokens - 1)])
        mask = (torch.arange(tokens) < lengths.unsqueeze(1)).long()
        ids = torch.randint(1, vocabulary, (3, tokens), generator=generator) * mask
        with torch.inference_mode():
            expected = logits_of(ids, mask if masked else lengths).numpy()
        given = engine.run({"input_ids": ids.numpy(), "lengths": lengths.numpy()})["logits"]
        np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-4)
