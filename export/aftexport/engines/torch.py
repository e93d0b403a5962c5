"""PyTorch: the reference every other engine is compared with."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from aftexport.engines import RunStoppedError, Stop, Tensors
from aftexport.errors import EngineError


class TorchEngine:
    """A module run as it is.

    Args:
        module: in the precision it is to be run in; put in evaluation mode.
        input_names: the arguments of its forward, in order.
        threads: of one operator; 0 for PyTorch's own choice.
    """

    name = "torch"

    def __init__(
        self, module: nn.Module, input_names: tuple[str, ...], *, threads: int = 0
    ) -> None:
        # A captured program refuses: it was captured in the mode it is in.
        with suppress(NotImplementedError):
            module.eval()
        self._module = module
        self._threads = threads
        self.input_names = input_names

    def run(self, inputs: Tensors, stop: Stop | None = None) -> dict[str, NDArray[np.generic]]:
        """Runs the module once, to its end; see ``Engine.run``."""
        if stop is not None and stop.requested:
            raise RunStoppedError
        arguments = [torch.from_numpy(np.asarray(inputs[name])) for name in self.input_names]
        try:
            with torch.inference_mode(), _threads(self._threads):
                logits = self._module(*arguments)
        except Exception as error:  # a module of others raises anything
            raise EngineError(
                f"The PyTorch model failed: {error}.", "Check that it takes this batch and length."
            ) from error
        if not isinstance(logits, torch.Tensor):
            raise EngineError(
                f"The model's forward returns a {type(logits).__name__}.",
                "Wrap it in a module that returns the logits [batch, classes] alone.",
            )
        if logits.dtype == torch.bfloat16:  # numpy has none
            logits = logits.float()
        return {"logits": logits.numpy()}

    def release(self) -> None:
        """Does nothing: PyTorch keeps no memory between runs on the CPU."""


@contextmanager
def _threads(count: int) -> Iterator[None]:
    # They are the whole process's, and results depend on them in the last digit.
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
