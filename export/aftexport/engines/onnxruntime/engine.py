"""A model in ONNX Runtime."""

from collections.abc import Collection
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aftexport.engines import Stop, Tensors
from aftexport.engines.explained_input import padded_choices
from aftexport.engines.onnxruntime.failures import FAILURES, is_out_of_memory, reason
from aftexport.engines.onnxruntime.package import onnxruntime
from aftexport.engines.onnxruntime.providers import PROVIDERS, Provider
from aftexport.engines.onnxruntime.sessions import session, session_options
from aftexport.errors import EngineError
from aftexport.system.contract import EXPLAINED, LENGTHS
from aftexport.system.memory import give_back

_CHOICE_OF_FILE = padded_choices([()])
"""The input for a run without a choice of logits: the largest one, as the file has it."""
_MEMORY_REMEDY = "Send shorter documents or fewer, or lower --memory-budget-mib."
_TYPES = {
    "tensor(int64)": np.int64,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
}
"""The types of a model's inputs by ONNX Runtime's names."""


class OnnxRuntimeEngine:
    """A model in ONNX Runtime, which keeps memory between runs; see ``release``.

    Args:
        model: path of ``model.onnx``, or the serialized model.
        threads: number of threads per operator; 0 for ``usable_cores``.
        fused: whether the provider's kernel library is registered, if it is built.
        provider: the execution provider.
        optimized: whether the runtime may fuse and rearrange operators.

    Raises:
        EngineError: if the runtime lacks the provider, or refuses the model or the
            kernel library.
    """

    name = "onnxruntime"

    def __init__(
        self,
        model: Path | bytes,
        *,
        threads: int = 0,
        fused: bool = True,
        provider: Provider = "cpu",
        optimized: bool = True,
    ) -> None:
        options = session_options(threads)
        if not optimized:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = session(model, options, provider, fused=fused, takes_choice=True)
        self._arenas = PROVIDERS[provider].arenas
        names = [i.name for i in self._session.get_inputs()]
        self.takes_choice = EXPLAINED in names
        self.input_names = tuple(name for name in names if name != EXPLAINED)
        self._output_names = tuple(o.name for o in self._session.get_outputs())

    def run(
        self,
        inputs: Tensors,
        stop: Stop | None = None,
        outputs: Collection[str] | None = None,
    ) -> dict[str, NDArray[np.generic]]:
        """Run the model once; see ``Engine.run``. A stop takes effect between two operators.

        The runtime computes all outputs, and frees the others at once.
        """
        options = _run_options()
        # The runtime checks this option before every operator; the session stays usable.
        stopping = (stop or Stop()).ending(partial(setattr, options, "terminate", True))
        names = [name for name in self._output_names if outputs is None or name in outputs]
        try:
            with stopping:
                results = self._session.run(names, self._with_choice(inputs), options)
        except FAILURES as error:
            raise EngineError(
                f"ONNX Runtime failed: {reason(error)}.",
                _MEMORY_REMEDY if is_out_of_memory(error) else "Check the shapes of the inputs.",
            ) from error
        return dict(zip(names, results, strict=True))

    def release(self) -> None:
        """Return the memory of earlier runs to the system; see ``Engine.release``."""
        options = _run_options()
        # The runtime only shrinks its arenas at the end of a run; this is the shortest run.
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", self._arenas)
        try:
            self._session.run(None, self._with_choice(self._shortest()), options)
        except FAILURES as error:
            raise EngineError(
                f"ONNX Runtime cannot release memory: {reason(error)}.", "Restart the process."
            ) from error
        give_back()

    def _with_choice(self, inputs: Tensors) -> dict[str, NDArray[np.generic]]:
        """Add the choice of the file, the largest logit, unless the inputs have another."""
        if not self.takes_choice or EXPLAINED in inputs:
            return dict(inputs)
        return {**inputs, EXPLAINED: _CHOICE_OF_FILE}

    def _shortest(self) -> Tensors:
        """Return the inputs for one document of one token."""
        inputs: dict[str, NDArray[np.generic]] = {}
        for value in self._session.get_inputs():
            shape = [size if isinstance(size, int) else 1 for size in value.shape]
            inputs[value.name] = np.zeros(shape, _TYPES[value.type])
        return inputs | ({LENGTHS: np.ones(1, np.int64)} if LENGTHS in inputs else {})


def _run_options() -> onnxruntime.RunOptions:
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4  # failures are raised, and a stop is not a failure
    return options
