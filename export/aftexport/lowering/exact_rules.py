"""Rewrite rules for torch.onnx that do not change any number.

onnxscript's rules treat a constant within 1e-8 of 0 as 0 and one within 1e-5 of 1 as 1. They drop
the epsilon of ``x / (y + 1e-9)`` and ``log(x + 1e-10)``, which keeps rows of zeros finite.
"""

from contextlib import AbstractContextManager
from typing import Any

from onnxscript.rewriter.pattern import Constant, RewriteRule

from aftexport.system.internals.onnxscript_rules import (
    DEFAULT_RULES,
    DROPOUT_RULES,
    NO_OP_RULES,
    use_rules,
)


def _exactly(value: int) -> Constant:
    return Constant(value, rel_tol=0, abs_tol=0)


def _identity(op: Any, x: Any, **_: Any) -> Any:
    return op.Identity(x)


_EXACT = (
    *RewriteRule(lambda op, x: op.Mul(x, _exactly(1)), _identity).commute(),
    *RewriteRule(lambda op, x: op.Add(x, _exactly(0)), _identity).commute(),
    RewriteRule(lambda op, x: op.Sub(x, _exactly(0)), _identity),
    RewriteRule(lambda op, x: op.Div(x, _exactly(1)), _identity),
    *DROPOUT_RULES,
)
_INEXACT = frozenset(map(id, NO_OP_RULES))
_RULES = (*_EXACT, *(rule for rule in DEFAULT_RULES if id(rule) not in _INEXACT))


def exactly() -> AbstractContextManager[None]:
    """Limit torch.onnx to rewrite rules that hold for every number, during the block."""
    return use_rules(_RULES)
