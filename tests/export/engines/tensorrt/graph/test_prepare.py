"""Graphs of exported models as TensorRT gets them."""

from pathlib import Path

import engines
import numpy as np
import onnx
import pytest
from sampling import any_case

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.engines.tensorrt.graph.prepare import prepare_graph
from aftexport.errors import EngineError
from aftexport.operators.domain import DOMAIN
from aftexport.operators.mechanisms import MECHANISMS


@pytest.mark.table(keep=0.3, by=any_case)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_prepared_graph_computes_same(mechanism: str, tmp_path: Path) -> None:
    bound = {"max_length": 100} if mechanism == "aft_full" else {}
    path = engines.graph(tmp_path, "fp32", mechanism=mechanism, **bound)
    prepared = prepare_graph(onnx.load(path), has_plugins=False)
    onnx.checker.check_model(prepared)
    ids, lengths = np.arange(80).reshape(2, 40) % 50, np.array([40, 13])
    first, second = (
        OnnxRuntimeEngine(model, threads=1, fused=False, optimized=False).run(
            {"input_ids": ids, "lengths": lengths}
        )["logits"]
        for model in (path, prepared.SerializeToString())
    )
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-6)


def test_unused_and_unsorted_nodes(tmp_path: Path) -> None:
    model = onnx.load(engines.graph(tmp_path))
    nodes = list(model.graph.node)
    model.graph.node.add(op_type="Relu", input=["logits"], output=["unused"])
    moved = model.graph.node.pop(0)
    model.graph.node.append(moved)
    prepared = prepare_graph(model, has_plugins=True)
    assert {node.output[0] for node in prepared.graph.node} == {n.output[0] for n in nodes}
    onnx.checker.check_model(prepared)


def test_cycle_is_refused(tmp_path: Path) -> None:
    model = onnx.load(engines.graph(tmp_path))
    attention = next(node for node in model.graph.node if node.domain == DOMAIN)
    producer = next(node for node in model.graph.node if attention.input[0] in node.output)
    producer.input[0] = attention.output[0]
    with pytest.raises(EngineError, match="cannot be prepared for TensorRT: Cycle"):
        prepare_graph(model, has_plugins=True)
