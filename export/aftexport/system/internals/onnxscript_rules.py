"""Parts of onnxscript: the rewrite rules that torch.onnx applies to every graph."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aftexport.system.internals.versions import Versions

VERSIONS = Versions("onnxscript", "0.7", "0.7.2")

with VERSIONS.named():
    from onnxscript import rewriter
    from onnxscript.rewriter.pattern import RewriteRule
    from onnxscript.rewriter.rules.common import _no_op

    DEFAULT_RULES: tuple[RewriteRule, ...] = rewriter._DEFAULT_REWRITE_RULES
    NO_OP_RULES: tuple[RewriteRule, ...] = tuple(_no_op.rules)
    DROPOUT_RULES: tuple[RewriteRule, ...] = (
        _no_op.dropout_zero_rule,
        _no_op.dropout_inference_rule,
    )

ATTRIBUTES = (
    "_no_op.dropout_inference_rule",
    "_no_op.dropout_zero_rule",
    "_no_op.rules",
    "rewriter._DEFAULT_REWRITE_RULES",
)
"""Attributes of these parts that this module uses."""

_LOCK = threading.RLock()


@contextmanager
def use_rules(rules: tuple[RewriteRule, ...]) -> Iterator[None]:
    """Make ``rules`` the default rules of the whole process during the block."""
    with _LOCK:
        rewriter._DEFAULT_REWRITE_RULES = rules
        try:
            yield
        finally:
            rewriter._DEFAULT_REWRITE_RULES = DEFAULT_RULES
