"""PyTorch, the reference of every other engine."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from aftexport.capture.model_outputs import named_tensors
from aftexport.engines import RunStoppedError, Stop, Tensors
from aftexport.errors import EngineError, TraceError, first_line
from aftexport.system.contract import main_input


class TorchEngine:
    """A PyTorch module as an engine."""

    name = "torch"
    takes_choice = False

    def __init__(
        self,
        module: nn.Module,  # module in the precision of its runs; it is put in evaluation mode
        input_names: tuple[str, ...],
        *,
        threads: int = 0,  # number of threads per operator; 0 for PyTorch's own choice
        # 2 or 3 for an output of one number per document or token, whose last axis may be left out
        ranks: Mapping[str, int] | None = None,
    ) -> None:
        # A captured program has a fixed mode and raises NotImplementedError.
        with suppress(NotImplementedError):
            module.eval()
        self._module = module
        self._threads = threads
        self._ranks = ranks or {}
        self.input_names = input_names

    def run(
        self, inputs: Tensors, stop: Stop | None = None, outputs: Collection[str] | None = None
    ) -> dict[str, NDArray[np.generic]]:
        """Run the module once; see ``Engine.run``. A stop has no effect during the run."""
        if stop is not None and stop.is_requested:
            raise RunStoppedError
        arguments = [torch.from_numpy(np.asarray(inputs[name])) for name in self.input_names]
        try:
            with torch.inference_mode(), _threads(self._threads):
                result = self._module(*arguments)
        except Exception as error:  # a user's module may raise any exception
            raise EngineError(
                f"The PyTorch model failed: {first_line(error).rstrip('.')}.",
                "Check that the model accepts this batch and length.",
            ) from error
        try:
            tensors = named_tensors(result)
        except TraceError as error:
            raise EngineError(error.problem, error.remedy) from error
        rows = inputs[main_input(self.input_names)].shape[:2]
        # NumPy has no bfloat16.
        return {
            name: self._with_width(
                name, (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy(), rows
            )
            for name, tensor in tensors.items()
            if outputs is None or name in outputs
        }

    def _with_width(
        self, name: str, output: NDArray[np.generic], rows: tuple[int, ...]
    ) -> NDArray[np.generic]:
        """Return an output with the axis of its single number; ``rows`` are batch and tokens."""
        rank = self._ranks.get(name, output.ndim)
        shape = rows[: rank - 1]
        # squeeze() also removes the axes of one document and of one token.
        return (
            output.reshape(*shape, 1)
            if output.ndim < rank and output.size == prod(shape)
            else output
        )

    def release(self) -> None:
        """Do nothing, because PyTorch keeps no memory between runs on the CPU."""


@contextmanager
def _threads(count: int) -> Iterator[None]:
    # The setting is global to the process, and the last digit of results depends on it.
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
