import numpy as np
import torch
from torch import Tensor, nn

from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.lowering.to_onnx import lower
from aftexport.passes.finish import finish

ROWS = {
    "ordinary": (0.3, -1.0, 2.0, 0.0),
    "over 88": (-500.0, 100.0, 3.0, 1000.0),
    "before a maximum": (1.0, 2.0, 1e4, 1e6),
    "nothing": (-np.inf, -np.inf, -np.inf, -np.inf),
    "nothing first": (-np.inf, 1.0, -np.inf, 2.0),
    "infinite": (1.0, np.inf, -np.inf, 5.0),
    "largest": (-3e38, 3e38, -3e38, 3e38),
}


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ROWS), 4)
        with torch.no_grad():
            self.embedding.weight.copy_(torch.tensor(list(ROWS.values())))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return torch.cat([x.logcumsumexp(2), x.logcumsumexp(1), x.flip(2).logcumsumexp(-1)], 2)


def test_sums_are_pytorchs_over_both_axes() -> None:
    module = Sums().eval()
    engine = OnnxRuntimeEngine(finish(lower(capture(module))).SerializeToString())
    ids = np.stack([np.arange(len(ROWS)), np.arange(len(ROWS))[::-1]])
    with torch.inference_mode():
        expected = module.double()(torch.from_numpy(ids.copy())).numpy()
    np.testing.assert_allclose(engine.run({"input_ids": ids})["logits"], expected, rtol=1e-6)
