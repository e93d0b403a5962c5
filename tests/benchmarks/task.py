"""A whole model and a document: what every contender runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import torch
from numpy.typing import NDArray
from stock_attention import use_stock_attention
from torch import nn

from aftexport.capture.capture import capture
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.nn import ClassifierConfig, DocumentClassifier
from benchmarks.workloads import HEADS, SOFTMAX, TAPS, WINDOW, Workload, plain_form

DEPTH, VOCABULARY = 4, 8_192
FFN_FACTOR = 4
CALIBRATION_DOCUMENTS, CALIBRATION_TOKENS = 8, 1_024


@dataclass(frozen=True, eq=False)
class Model:
    """A classifier in float32 on random weights, and its graphs."""

    module: nn.Module

    @cached_property
    def program(self) -> torch.export.ExportedProgram:
        """The captured program, for every length."""
        return capture(self.module, max_tokens=self.max_length)

    @cached_property
    def lowered(self) -> onnx.ModelProto:
        """The graph with custom operators, before any pass."""
        return lower(self.program)

    @property
    def max_length(self) -> int | None:
        """The maximum tokens of a document; None for any number."""
        length: int | None = getattr(self.module, "max_length", None)
        return length

    def graph(self, precision: str = "fp32") -> onnx.ModelProto:
        """Return the exported graph, as a bundle contains it."""
        return finish(self.lowered, precision=precision)

    @cached_property
    def standard_graph(self) -> onnx.ModelProto:
        """The exported graph with the bodies of custom operators in their place."""
        return onnx.inliner.inline_local_functions(self.graph())

    def calibration(self) -> list[dict[str, NDArray[np.int64]]]:
        """Return documents on which a contender finds the ranges of activations."""
        random = np.random.default_rng(1)
        tokens = min(self.max_length or CALIBRATION_TOKENS, CALIBRATION_TOKENS)
        return [
            {
                "input_ids": random.integers(0, VOCABULARY, (1, tokens)),
                "lengths": np.array([tokens]),
            }
            for _ in range(CALIBRATION_DOCUMENTS)
        ]


@dataclass(frozen=True)
class Task:
    """One model, which documents of other lengths may share, and one document.

    The inputs are ``input_ids [1, T]`` and ``lengths [1]``.
    """

    workload: Workload
    model: Model
    inputs: dict[str, torch.Tensor]

    @property
    def arrays(self) -> dict[str, NDArray[np.int64]]:
        """The inputs as arrays."""
        return {name: tensor.numpy() for name, tensor in self.inputs.items()}

    @property
    def product_multiply_adds(self) -> float:
        """Multiply-adds of the products with weights, without those of the attention itself."""
        dim = self.workload.dim
        return float(DEPTH * self.workload.tokens * (4 + 2 * FFN_FACTOR) * dim**2)


def build(workload: Workload, max_tokens: int | None = None) -> Task:
    """Build the model of a workload and its document, both from a fixed seed.

    ``max_tokens`` is the longest document of AFT-full's model, by default the workload's.
    """
    is_full = workload.mechanism == "aft_full"
    longest = (max_tokens or workload.tokens) if is_full else None
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "input_ids": torch.randint(VOCABULARY, (1, workload.tokens), generator=generator),
        "lengths": torch.tensor([workload.tokens]),
    }
    return Task(workload, _model(workload.mechanism, workload.dim, longest), inputs)


@cache
def _model(mechanism: str, dim: int, max_length: int | None) -> Model:
    torch.manual_seed(0)
    config = ClassifierConfig(
        mechanism="dot_product_attention" if mechanism == SOFTMAX else mechanism,
        vocab_size=VOCABULARY, num_labels=10, dim=dim, depth=DEPTH, num_heads=HEADS,
        ffn_dim=FFN_FACTOR * dim, window=TAPS if mechanism == "aft_conv" else WINDOW,
        max_length=max_length,
    )  # fmt: skip
    module = DocumentClassifier(config).eval()
    use_stock_attention(module)
    for part in module.modules():
        if callable(fold := getattr(part, "fold", None)):
            fold()
    return Model(module)


def logits(model: Callable[..., torch.Tensor], task: Task) -> NDArray[Any]:
    """Run a module on a task's document."""
    with torch.inference_mode():
        return model(**task.inputs).float().numpy()


@contextmanager
def plain_operator(workload: Workload) -> Iterator[None]:
    """Put plain PyTorch in place of the mechanism's operator, which a compiler cannot enter."""
    if workload.mechanism == SOFTMAX:
        yield
        return
    operators, plain = torch.ops.aftexport, plain_form(workload)
    name = workload.operator.torch_op.overloadpacket.__name__
    original, tensors = getattr(operators, name), len(workload.operator.required_inputs)
    setattr(operators, name, lambda *arguments: plain(*arguments[:tensors]))
    try:
        yield
    finally:
        setattr(operators, name, original)
