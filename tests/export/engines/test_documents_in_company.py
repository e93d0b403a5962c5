"""A document's layers give the same numbers alone and beside others, bit for bit."""

import numpy as np
import pytest
import tiny_models
import torch
from one_node import open_session
from torch import Tensor, nn

import aftplugins
from aftexport.capture.capture import capture
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.nn import ClassifierConfig, DocumentClassifier

LENGTHS = np.array([31, 70, 1])
MECHANISMS = ("aft_conv", "aft_local", "aft_simple", "efficient_attention", "linear_attention")


class Tokens(nn.Module):
    """The layers of a classifier without its pooling and head, which are ONNX Runtime's."""

    def __init__(self, mechanism: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = {"mechanism": mechanism, "window": 5}
        model = DocumentClassifier(ClassifierConfig(**tiny_models.CONFIG | config))
        self.embedding, self.encoder = model.embedding, model.encoder

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        return self.encoder(self.embedding(input_ids), lengths)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_layers_do_not_depend_on_the_batch(mechanism: str, precision: str) -> None:
    graph = finish(lower(capture(Tokens(mechanism).eval())), precision=precision)
    session = open_session(graph, aftplugins.library("onnxruntime"))
    ids = np.random.default_rng(0).integers(0, tiny_models.VOCABULARY, (len(LENGTHS), max(LENGTHS)))
    together = session.run(None, {"input_ids": ids, "lengths": LENGTHS})[0]
    for row, length, in_company in zip(ids, LENGTHS, together, strict=True):
        inputs = {"input_ids": row[None, :length], "lengths": np.array([length])}
        alone = session.run(None, inputs)[0][0]
        np.testing.assert_array_equal(alone, in_company[:length])
