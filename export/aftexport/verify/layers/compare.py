"""The comparison of every intermediate tensor with PyTorch, and the first one out of tolerance."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from aftexport.bundle.golden import Array, Case
from aftexport.engines.cast_graph import has_bfloat16, widen
from aftexport.engines.onnxruntime import OnnxRuntimeEngine, Provider, operator_paths
from aftexport.operators.domain import DOMAIN
from aftexport.parity.comparison import Differences
from aftexport.parity.layers import Layer, Layers
from aftexport.system.onnx_files import MODEL, read_model, write_model
from aftexport.verify.layers.blame import find_blame
from aftexport.verify.layers.torch_program import Program


def compare_layers(
    path: Path,
    program: Program,
    case: Case,
    *,
    bound: float,
    fused: bool = True,
    provider: Provider = "cpu",
) -> Layers:
    """Compare every tensor of the served graph that PyTorch computes too."""
    model = read_model(path)
    if has_bfloat16(model):
        widen(model)  # ONNX Runtime runs bfloat16 graphs in float32
    names = [name for node in model.graph.node for name in node.output if name in program]
    expected = program.run(names, case.inputs)
    probe = _Probe(model, case.inputs, fused=fused, provider=provider)
    observed, altered = probe.observe([name for name in names if name in expected])
    counting = {name: program.counting(name, case.inputs) for name in observed}
    paths = operator_paths(path, provider=provider) if fused else {}
    producers = {name: node for node in model.graph.node for name in node.output}
    layers = []
    for name, value in observed.items():
        node = producers[name]
        error = Differences.between(value, expected[name], counting[name]).error
        way = "standard operator"
        if node.domain == DOMAIN:
            way = "fused kernel" if paths.get(node.op_type) == "fused" else "portable body"
        layers.append(
            Layer(name, program.module(name), node.op_type, way, error, not error <= bound)
        )
    first = next((layer for layer in layers if layer.outside), None)
    blame = None
    if first is not None:
        blame = find_blame(
            model,
            program,
            {**case.inputs, **observed},
            first.tensor,
            path={layer.tensor: layer.path for layer in layers},
            counting=counting,
            bound=bound,
            provider=provider,
        )
    unmatched = [
        name
        for node in model.graph.node
        for name in node.output
        if name not in program and not name.startswith("val_")
    ]
    return Layers(case.name, bound, layers, altered, unmatched, blame)


class _Probe:
    """An observer of the tensors inside a graph that runs as it is served."""

    def __init__(
        self,
        model: onnx.ModelProto,
        inputs: Mapping[str, Array],
        *,
        fused: bool,
        provider: Provider,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._fused = fused
        self._provider: Provider = provider
        self._served = self._run([])

    def observe(self, names: Sequence[str]) -> tuple[dict[str, Array], list[str]]:
        """Return the tensors of these names in order, and the tensors that change the fusion.

        An output cannot be fused away. If marking tensors as outputs changes the result, the
        tensors are halved repeatedly until single tensors are left.
        """
        seen, altered = dict[str, Array](), list[str]()
        left = [[name for name in names if name not in self._served]]
        while left:
            marked = left.pop()
            tensors = self._run(marked)
            is_same = all(
                np.array_equal(tensors.pop(name), output, equal_nan=True)
                for name, output in self._served.items()
            )
            if is_same or len(marked) == 1:
                seen |= tensors
                altered += [] if is_same else marked
            else:
                half = len(marked) // 2
                left += [marked[half:], marked[:half]]
        seen |= self._served
        return {name: seen[name] for name in names}, altered

    def _run(self, marked: Sequence[str]) -> dict[str, Array]:
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in marked)
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), model)
            engine = OnnxRuntimeEngine(
                Path(folder) / MODEL, fused=self._fused, provider=self._provider
            )
            return engine.run(self._inputs)
