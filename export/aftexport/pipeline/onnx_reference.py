"""The answers of an ONNX file, the reference where there is no PyTorch."""

from collections.abc import Collection

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from aftexport.engines import Stop, Tensors
from aftexport.engines.cast_graph import widen, widened_bytes
from aftexport.engines.float64_operators import add_float64_operators
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import EngineError, first_line
from aftexport.system.onnx_files import MAX_MODEL_BYTES

_NARROW = (TensorProto.FLOAT, TensorProto.FLOAT16)


class OnnxReference:
    """A model in ONNX Runtime's standard operators, in float64 if it has them all.

    A short run of ``sample`` decides on ``precision``; ``reason`` is that against float64.

    Raises:
        EngineError: if the model cannot run in its own types either.
    """

    name = "onnxruntime"
    takes_choice = False

    def __init__(self, model: onnx.ModelProto, sample: Tensors) -> None:
        self.precision, self.reason = "float64", ""
        self._is_wide = True
        try:
            self._engine = OnnxRuntimeEngine(_widened(model), fused=False)
            self.run(sample)
        except EngineError as error:
            self.precision, self.reason = "float32", first_line(error).rstrip(".")
            self._is_wide = False
            self._engine = OnnxRuntimeEngine(model.SerializeToString(), fused=False)
            self.run(sample)

    def run(
        self,
        inputs: Tensors,
        stop: Stop | None = None,
        outputs: Collection[str] | None = None,
    ) -> dict[str, NDArray[np.generic]]:
        """Run the model once; see ``Engine.run``."""
        given = {
            name: array.astype(np.float64) if self._is_wide and array.dtype.kind == "f" else array
            for name, array in inputs.items()
        }
        return self._engine.run(given, stop, outputs)

    def release(self) -> None:
        """Do nothing: the model lives only during an export."""


def _widened(model: onnx.ModelProto) -> bytes:
    """Return the model in float64."""
    size = widened_bytes(model, _NARROW, TensorProto.DOUBLE)
    if size > MAX_MODEL_BYTES:
        raise EngineError(
            f"Expected a model of at most 2 GiB in float64, got {size / 2**30:.1f} GiB.",
            "Compare it in float32.",
        )
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    widen(wide, _NARROW, TensorProto.DOUBLE)
    add_float64_operators(wide)
    return bytes(wide.SerializeToString())
