"""The precision of a model's products, and their methods in the CPU kernels."""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import onnx
from rich.table import Table

from aftexport.engines.peak_memory import product_shares
from aftexport.errors import EngineError
from aftexport.operators.domain import DOMAIN, operator_name
from aftexport.system.console import plain_table
from aftplugins.methods import METHOD_VARIABLE, MethodChoice, MethodVariableError, choose

_WEIGHT_INPUTS = {
    "LayerNormLinear": 3,
    "LayerNormQueryKeyValue": 3,
    "LayerNormFeedForward": 3,
    "LinearResidual": 1,
    "LayerNormFastformer": 3,
}
"""The input of the first weight, whose rows are the width of the operator's products."""
_WITHOUT_WEIGHT = ("AftFull", "CausalAftFull", "SoftmaxAttention")
"""Operators that choose by the products of AFT-full."""
_REDUCED = ("bf16", "int8")
_WIDTH = 256
_SHARE_TOKENS = 512
"""Length of the document whose products are counted: attention has more of a longer one."""


@dataclass(frozen=True)
class ProductShares:
    """The share of each precision in the multiply-adds of one document, the largest first."""

    tokens: int
    shares: dict[str, float]

    @classmethod
    def of(cls, model: onnx.ModelProto, max_tokens: int | None) -> Self | None:
        """Return the shares of a model; None without a product in reduced precision."""
        tokens = min(_SHARE_TOKENS, max_tokens or _SHARE_TOKENS)
        if all(_precision(node) not in _REDUCED for node in model.graph.node):
            return None
        return cls(tokens, product_shares(model, tokens))

    def __str__(self) -> str:
        parts = " and ".join(f"{name} for {share:.1%}" for name, share in self.shares.items())
        return f"{parts} of the multiply-adds of a document of {self.tokens} tokens"


def product_methods(model: Path, precision: str) -> tuple[MethodChoice, ...]:
    """Return the choices for a model's products in reduced precision, each once."""
    if precision not in _REDUCED:
        return ()
    graph = onnx.load(model, load_external_data=False).graph
    wanted = sorted(set(_products(graph)), key=lambda pair: (pair[0], pair[1] or 0))
    choices = [_choice(precision, width) for precision, width in wanted]
    # Widths that differ little have the same choice.
    unique = {(c.precision, c.products): c for c in choices if c is not None}
    return tuple(unique.values())


@contextmanager
def forced_methods(names: Collection[str]) -> Iterator[None]:
    """Let new sessions take the coarsest of these methods that keeps a precision's bound."""
    before = os.environ.pop(METHOD_VARIABLE, None)
    if names:
        os.environ[METHOD_VARIABLE] = ",".join(names)
    try:
        yield
    finally:
        os.environ.pop(METHOD_VARIABLE, None)
        if before is not None:
            os.environ[METHOD_VARIABLE] = before


def usable_methods(precision: str) -> tuple[str, ...]:
    """Return the methods by which this processor computes a reduced precision."""
    if precision not in _REDUCED:
        return ()
    with forced_methods(()):
        choice = _choice(precision, _WIDTH)
    return () if choice is None else choice.methods


def _choice(precision: str, width: int | None) -> MethodChoice | None:
    try:
        return choose(precision, width)
    except MethodVariableError as error:
        raise EngineError(
            f"The kernels cannot choose a method ({error}).", "Unset the variable."
        ) from error


def method_table(choices: Sequence[MethodChoice]) -> Table:
    """Return a table of the choices and the measured rates."""
    table = plain_table("precision", "products", "method", "chosen by", "G multiply-adds/s")
    for choice in choices:
        rates = "\n".join(f"{method} {rate:.1f}" for method, rate in choice.rates.items())
        table.add_row(
            choice.precision, choice.products, _methods(choice), _reason(choice), rates or "-"
        )
    return table


def _methods(choice: MethodChoice) -> str:
    if choice.products != "aft_full":
        return choice.methods[0]
    # The range of the position biases may exclude the methods in integers; float32 is never.
    return ", else ".join(choice.methods[: choice.methods.index("fp32") + 1])


def _reason(choice: MethodChoice) -> str:
    if choice.chosen_by == "measurement" and not choice.kept:
        return "measurement, not cached"
    return choice.chosen_by


def _precision(node: onnx.NodeProto) -> str:
    """Return the precision of the products of a custom node; fp32 for others."""
    given = (a.s.decode() for a in node.attribute if a.name == "precision")
    return next(given, "fp32") if node.domain == DOMAIN else "fp32"


def _products(graph: onnx.GraphProto) -> Iterator[tuple[str, int | None]]:
    """Yield the precision and the width of every product; those of AFT-full have no width."""
    shapes = {tensor.name: tensor.dims for tensor in graph.initializer}
    for node in graph.node:
        precision = _precision(node)
        if precision not in _REDUCED:
            continue
        operator = operator_name(node.op_type)
        if operator in _WITHOUT_WEIGHT:
            yield precision, None
        elif operator in _WEIGHT_INPUTS:
            shape = shapes.get(node.input[_WEIGHT_INPUTS[operator]])
            if shape:
                yield precision, shape[0]
