import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from aftexport.lowering.optimizer_faults import avoid_optimizer_faults

PROBE = """
import json, sys
import numpy as np
import onnxruntime
onnxruntime.set_default_logger_severity(4)
plain = onnxruntime.SessionOptions()
plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
types = {"tensor(float16)": "e", "tensor(float)": "f", "tensor(double)": "d", "tensor(int64)": "q"}
sizes = {"b": 2, "t": 5}
for path in sys.argv[1:]:
    print(path, flush=True)
    session = onnxruntime.InferenceSession(path)
    given = {}
    for value in session.get_inputs():
        shape = [sizes.get(size, size) for size in value.shape]
        numbers = np.arange(np.prod(shape)).reshape(shape) % 7 - 9
        given[value.name] = numbers.astype(types[value.type])
    results = session.run(None, given)
    expected = onnxruntime.InferenceSession(path, plain).run(None, given)
    for a, b in zip(results, expected):
        np.testing.assert_allclose(a.astype("d"), b.astype("d"), rtol=2e-3)
"""
"""Fails at the first file that a session without options crashes on, refuses or gets wrong."""

HALF, SINGLE, DOUBLE = "float16[b,t,16] x", "float[b,t,16] x", "double[b,t,16] x"
GRAPHS = {
    "half": (HALF, "a=Transpose<perm=[1,0,2]>(x)\n y=MatMul(a,w16)"),
    "half, last axis too": (HALF, "a=Transpose<perm=[1,2,0]>(x)\n y=MatMul(c16,a)"),
    "half, scaled": (HALF, "a=Transpose<perm=[1,0,2]>(x)\n s=Mul(a,h16)\n y=MatMul(s,w16)"),
    "half, no change": (HALF, "a=Transpose<perm=[1,0,2]>(x)\n i=Identity(a)\n y=MatMul(i,w16)"),
    "half, two products": (
        HALF,
        "a=Transpose<perm=[1,0,2]>(x)\n c=MatMul(a,w16)\n d=MatMul(a,w16)\n y=Add(c,d)",
    ),
    "cast": (HALF, "a=Transpose<perm=[1,0,2]>(x)\n c=Cast<to=1>(a)\n y=MatMul(c,w32)"),
    "cast integers": (
        "int64[b,t,16] x",
        "a=Transpose<perm=[1,0,2]>(x)\n c=Cast<to=1>(a)\n y=MatMul(c,w32)",
    ),
    "double": (DOUBLE, "a=Transpose<perm=[0,2,1]>(x)\n y=MatMul(a,x)"),
    "pool of more padding": (
        SINGLE,
        "a=Pad(x,pads)\n y=AveragePool<kernel_shape=[2],strides=[2],pads=[0,0]>(a)",
    ),
    "largest of padding": (
        SINGLE,
        "a=Pad(x,pads,h32)\n c=Pad(a,pads)\n y=MaxPool<kernel_shape=[4],pads=[0,0]>(c)",
    ),
}
CONSTANTS = {
    "w16": np.arange(16 * 48).reshape(16, 48).astype(np.float16) % 5,
    "c16": np.ones((3, 16), np.float16),
    "h16": np.float16(0.5),
    "h32": np.float32(-20),
    "w32": np.ones((16, 48), np.float32),
    "pads": np.array([0, 0, 1, 0, 0, 2]),
}


def rewritten(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model after the rewrite of the parts that the optimizer breaks."""
    changed = ir.from_proto(model)
    avoid_optimizer_faults(changed)
    return ir.to_proto(changed)


def graph(name: str) -> onnx.ModelProto:
    inputs, body = GRAPHS[name]
    element = inputs.partition("[")[0]
    if element == "int64" or name == "cast":
        element = "float"
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> g ({inputs}) => ({element}[p,q,r] y) {{ {body} }}'
    )
    for constant, value in CONSTANTS.items():
        if any(constant in node.input for node in model.graph.node):
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), constant))
    return model


def probe(*paths: Path) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-c", PROBE, *map(str, paths)]
    return subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)


def test_rewritten_graphs_run_in_stock_session(tmp_path: Path) -> None:
    paths = []
    for number, name in enumerate(GRAPHS):
        model = rewritten(graph(name))
        onnx.checker.check_model(model, full_check=True)
        paths.append(tmp_path / f"{number}.onnx")
        onnx.save(model, paths[-1])
    done = probe(*paths)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert len(done.stdout.splitlines()) == len(GRAPHS)


@pytest.mark.parametrize("name", ["half", "largest of padding"])
def test_probe_notices_original_graph(name: str, tmp_path: Path) -> None:
    onnx.save(graph(name), tmp_path / "model.onnx")
    assert probe(tmp_path / "model.onnx").returncode != 0


@pytest.mark.parametrize(
    ("inputs", "body"),
    [
        (SINGLE, "a=Transpose<perm=[1,0,2]>(x)\n y=MatMul(a,w32)"),
        (HALF, "a=Transpose<perm=[0,2,1]>(x)\n y=MatMul(x,a)"),
        (SINGLE, "y=Pad(x,pads)"),
    ],
    ids=["float32", "one rank", "no pooling"],
)
def test_other_graphs_stay_unchanged(
    inputs: str, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GRAPHS, "other", (inputs, body))
    model = onnx.shape_inference.infer_shapes(graph("other"))
    before = ir.to_proto(ir.from_proto(model)).SerializeToString()
    assert rewritten(model).SerializeToString() == before
