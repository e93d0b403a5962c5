import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from aftexport.lowering.finish import widen_boolean_triangles

TEXT = """<ir_version: 8, opset_import: ["": 18]>
g (bool[n,n] x) => (bool[n,n] y) { y = Trilu<upper=0>(x) }"""


def test_boolean_triangle_becomes_integer_triangle() -> None:
    graph = ir.from_proto(onnx.parser.parse_model(TEXT))
    widen_boolean_triangles(graph.graph)
    model = ir.to_proto(graph)
    assert [node.op_type for node in model.graph.node] == ["Cast", "Trilu", "Cast"]
    onnx.checker.check_model(model, full_check=True)
    mask = np.array([[True, True], [False, True]])
    session = onnxruntime.InferenceSession(model.SerializeToString())
    np.testing.assert_array_equal(session.run(None, {"x": mask})[0], np.tril(mask))
