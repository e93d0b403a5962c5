import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

from aftexport.bundle.features import Features
from aftexport.deploy.triton.normalization import add_normalization

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
graph (float[batch, tokens, 2] input_features, bool chosen) => (float[batch, tokens, 2] y) {
    y = If (chosen) <
        then_branch = then () => (float[batch, tokens, 2] a) { a = Identity (input_features) },
        else_branch = else () => (float[batch, tokens, 2] b) { b = Neg (input_features) }
    >
}"""


@pytest.mark.parametrize("mean", [None, (1.5, -2.0)])
@pytest.mark.parametrize("scale", [None, (0.1, 3.0)])
def test_inner_graphs_read_normalized_features(
    mean: tuple[float, ...] | None, scale: tuple[float, ...] | None
) -> None:
    model = parser.parse_model(TEXT)
    features = Features(names=("a", "b"), mean=mean, scale=scale)
    add_normalization(model, features)
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.input] == ["input_features", "chosen"]
    session = onnxruntime.InferenceSession(model.SerializeToString())
    document = np.random.default_rng(0).standard_normal((1, 7, 2), np.float32)
    for chosen, sign in ((True, 1), (False, -1)):
        feeds = {"input_features": document, "chosen": np.array(chosen)}
        [found] = session.run(None, feeds)
        np.testing.assert_array_equal(found[0], sign * features.normalized(document[0]))
