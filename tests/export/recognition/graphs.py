"""ONNX graphs of other people's modules, as torch.onnx writes them."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.operators.portable_bodies import attach_bodies
from aftexport.parity import TOLERANCES
from aftexport.recognition.graph.normalize import normalize
from aftexport.recognition.recognizer import recognize
from aftexport.recognition.result import Recognition

BATCH, TOKENS = torch.export.Dim("batch"), torch.export.Dim("tokens", max=35)


def exported(module: nn.Module, example: Tensor, *, axes: Any = (BATCH, TOKENS)) -> onnx.ModelProto:
    """Export a module of one tensor; ``axes`` are its dynamic dims, from the first."""
    shapes = (dict(enumerate(axes)),) if axes else None
    program = torch.export.export(module.eval(), (example,), dynamic_shapes=shapes)
    converted = torch.onnx.export(program, (), dynamo=True, opset_version=20, verbose=False)
    assert converted is not None
    return converted.model_proto


def scripted(module: nn.Module, example: Tensor, *, axes: Any = (BATCH, TOKENS)) -> onnx.ModelProto:
    """Export with torch.onnx's older exporter: other nodes, and thirty times faster.

    ``axes`` may be by dim, too.
    """
    dims = axes if isinstance(axes, Mapping) else dict(enumerate(axes))
    file = io.BytesIO()
    torch.onnx.export(
        module.eval(),
        (example,),
        file,
        dynamo=False,
        opset_version=18,
        input_names=["x"],
        dynamic_axes={"x": {i: str(axis) for i, axis in dims.items()}},
    )
    return onnx.load_from_string(file.getvalue())


def fused(model: onnx.ModelProto) -> tuple[Recognition, onnx.ModelProto]:
    """Return the recognition result and the model with its portable bodies."""
    graph = normalize(model)
    found = recognize(graph)
    return found, attach_bodies(ir.to_proto(graph))


def operators(found: Recognition) -> list[str]:
    return [match.operator for match in found.matches]


def assert_equal(module: nn.Module, model: onnx.ModelProto, *examples: Tensor) -> None:
    """Check that the model equals the module, by its bodies and by the kernels."""
    for kernels in (False, True):
        engine = OnnxRuntimeEngine(model.SerializeToString(), threads=1, fused=kernels)
        (name,) = engine.input_names
        for example in examples:
            (output,) = engine.run({name: example.numpy()}).values()
            with torch.no_grad():
                expected = module(example).numpy()
            scale = max(1.0, float(np.abs(expected).max()))
            assert float(np.abs(output - expected).max()) / scale < TOLERANCES["fp32"].bound
