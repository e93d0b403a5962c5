"""Rewrite rules for torch.onnx that do not change any number.

onnxscript's rules treat a constant within 1e-8 of 0 as 0 and one within 1e-5 of 1 as 1. They drop
the epsilon of ``x / (y + 1e-9)`` and ``log(x + 1e-10)``, which keeps rows of zeros finite.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onnxscript import rewriter
from onnxscript.rewriter.pattern import Constant, RewriteRule
from onnxscript.rewriter.rules.common import _no_op


def _exactly(value: int) -> Constant:
    return Constant(value, rel_tol=0, abs_tol=0)


def _identity(op: Any, x: Any, **_: Any) -> Any:
    return op.Identity(x)


_EXACT = (
    *RewriteRule(lambda op, x: op.Mul(x, _exactly(1)), _identity).commute(),
    *RewriteRule(lambda op, x: op.Add(x, _exactly(0)), _identity).commute(),
    RewriteRule(lambda op, x: op.Sub(x, _exactly(0)), _identity),
    RewriteRule(lambda op, x: op.Div(x, _exactly(1)), _identity),
    _no_op.dropout_zero_rule,
    _no_op.dropout_inference_rule,
)
_INEXACT = frozenset(map(id, _no_op.rules))
_ORIGINAL = rewriter._DEFAULT_REWRITE_RULES
_RULES = (*_EXACT, *(rule for rule in _ORIGINAL if id(rule) not in _INEXACT))
_LOCK = threading.RLock()


@contextmanager
def exactly() -> Iterator[None]:
    """Limit torch.onnx to rewrite rules that hold for every number, during the block."""
    with _LOCK:  # the rules are shared by the whole process
        rewriter._DEFAULT_REWRITE_RULES = _RULES
        try:
            yield
        finally:
            rewriter._DEFAULT_REWRITE_RULES = _ORIGINAL
