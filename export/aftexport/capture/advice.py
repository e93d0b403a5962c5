"""Advice to the author of a model that torch.export cannot capture."""

import re
from collections.abc import Sequence

from torch import nn

from aftexport.capture.complaints import violation
from aftexport.capture.shape_guards import ShapeGuard
from aftexport.system.contract import FEATURES, IDS, MAX_TOKENS

_RECURRENT = (
    "torch.export captures recurrent layers for one length only: replace them by attention layers."
)
_INSTEAD = {
    "conv1d": "Set its padding to 0 and pad the tokens before it by torch.nn.functional.pad, to at "
    "least the size of its kernel.",
    "max_pool1d": "Call max_pool2d on x.unsqueeze(2): torch.export captures it for every length.",
    "interpolate": "Write mode='area' as means of windows, by differences of cumsum: torch.export "
    "captures it for one size only.",
    "linspace": "Write torch.arange(tokens) / tokens: torch.export captures it for every length.",
    "lstm": _RECURRENT,
    "gru": _RECURRENT,
    "rnn_tanh": _RECURRENT,
    "rnn_relu": _RECURRENT,
}
"""Operator to its replacement, which torch.export captures for every length."""
IN_TORCH = (
    "Slice in that line from the start or in other steps, pad the tokens before the slice, or "
    "write the line in other operators."
)
"""The advice for failures inside torch, see ``complaints.failed_in_torch``."""
BRANCHES = "Remove branches on the number of tokens from forward."
ONE_WAY = "Or export one branch only: --max-length {}."
_TABLE = "Give the table in that line one row for every token."
_PAGE = "docs/how-to/export-your-model.md, Windows"
_RECURRENCES = (
    "For linear attention in chunks, call aftexport.nn.functional.recurrent_linear_attention."
)
_WINDOWS = (
    "Pad the tokens to -(-tokens // w) windows of w tokens, without a branch: multiples of w get "
    f"no padding ({_PAGE}). {_RECURRENCES}"
)
_NUMBERS = {
    "float": "Write tokens ** 0.5, or torch.sym_float(tokens) in place of float(tokens): a Python "
    "float is fixed to one length.",
    "int": "Write the size in integers, tokens // 2 in place of int(tokens * 0.5): a Python int "
    "is fixed to one length.",
    "index": "Write the size in integers, with + - * // and min and max: a Python number is fixed "
    "to one length. math.sqrt(tokens) and math.log(tokens) may scale tensors.",
    "loop": "Replace loops over the tokens by cumsum, or by one operator on windows: both are "
    f"captured for every length ({_PAGE}). {_RECURRENCES}",
}
"""Conversion of a size to a Python number, see ``ShapeGuard.conversion``, to its replacement."""
_FLOAT = (
    "Give that operator a float that is the same for every length, and multiply a tensor by the "
    "float that depends on the length: for scaled_dot_product_attention the query, with scale=1.0."
)
_SCALE = "Give interpolate size=tokens in place of a scale_factor that depends on the length."
_PIECES = ("chunk", "split", "tensor_split", "unbind", "split_with_sizes")


def is_of_pieces(guard: ShapeGuard) -> bool:
    """Return whether a guard fixes the number of pieces of a tensor, which varies with length."""
    return guard.operator.rpartition(".")[2] in _PIECES


def decisive_guard(
    guards: Sequence[ShapeGuard], retry_guards: Sequence[ShapeGuard] = ()
) -> ShapeGuard | None:
    """Return the guard that keeps a model from being captured; None without any guard.

    A guard in one attempt only comes from the branch that torch was told to take, except for a
    branch of the model itself. The same condition may be written differently in both attempts.

    Args:
        guards: the guards of the attempt in which sizes are never 1.
        retry_guards: the guards of the same model in the attempt in which sizes may be 1; empty
            if there was no such attempt.
    """
    if not retry_guards:
        return next(iter([g for g in guards if _restricts(g)] or guards), None)
    restricting = [g for g in retry_guards if _restricts(g)]
    before = {(str(g), g.operator, g.line) for g in guards}
    kept = [g for g in restricting if (str(g), g.operator, g.line) in before]
    own = [g for g in restricting if not g.operator]
    return next(iter(kept or own or restricting or retry_guards))


def _restricts(guard: ShapeGuard) -> bool:
    return guard.excludes("batch") or guard.excludes("tokens")


def remedy(
    model: nn.Module,
    complaint: str,
    guard: ShapeGuard | None = None,
    *,
    has_features: bool = False,
    otherwise: str = "Write it in other operators; branches on values, .item() and .tolist() "
    "cannot be captured.",
) -> tuple[str, bool]:
    """Return the advice for one failure, in the imperative, and whether a maximum length helps too.

    Args:
        model: the model that could not be captured.
        complaint: the message of torch.export, or of the module itself.
        guard: the decisive guard, see ``decisive_guard``.
        has_features: whether the model takes features instead of token ids.
        otherwise: the advice for unknown complaints.
    """
    if (
        advice := _advice_on_module(model, complaint, guard, has_features=has_features)
    ) is not None:
        return advice, False
    if guard is not None and (found := _advice_on_guard(guard)) is not None:
        return found
    if violation(complaint) is not None:
        return "Remove branches on shapes from forward.", True
    return otherwise, False


def _advice_on_module(
    model: nn.Module, complaint: str, guard: ShapeGuard | None, *, has_features: bool
) -> str | None:
    """Return the advice for a failure at any length; None for one that depends on the length."""
    if not has_features and not any(isinstance(module, nn.Embedding) for module in model.modules()):
        return (
            "Add --features N for a module that takes N features of each token. For token ids, put "
            "an nn.Embedding before the module. Or export the module by torch.onnx.export, and run "
            "aftexport fuse."
        )
    if "data is not allocated" in complaint:
        return (
            "Write the reads of single parameter values as tensor operations. For aft-pytorch's "
            "AFTLocal, which rebuilds wbias in every call, use AFTFull's forward with "
            "self.wbias * band: aftexport recognizes AFT-local in it."
        )
    if "in output, which is not a known type" in complaint:
        return (
            "Wrap it in a module that returns one tensor, or a dict or NamedTuple of tensors by "
            "name."
        )
    if guard is not None and guard.excludes("batch"):
        return (
            f"Read the number of documents from {FEATURES if has_features else IDS}.shape, and "
            "remove loops over documents from forward."
        )
    if re.search(r"'SymInt' object has no attribute|of type Sym(Int|Float)", complaint):
        return "Write tokens ** 0.5, or math.log(tokens): NumPy does not accept dynamic sizes."
    return None


def _advice_on_guard(guard: ShapeGuard) -> tuple[str, bool] | None:
    """Return the advice for a guard on the tokens, and whether a maximum length helps too.

    None stands for a guard of unknown origin.
    """
    if guard.conversion:
        return _NUMBERS[guard.conversion], False
    if guard.operator and guard.max_tokens(MAX_TOKENS) is not None:
        return (_WINDOWS, False) if is_of_pieces(guard) else (_TABLE, True)
    if guard.operator and guard.is_of_floats:
        return (_SCALE if guard.operator.endswith(".interpolate") else _FLOAT), False
    if guard.operator:
        advice = _INSTEAD.get(
            guard.operator.rpartition(".")[2],
            "Write that line so that it works for every length from 1 token: pad the tokens to the "
            f"minimum it needs, or to a multiple ({_PAGE}).",
        )
        return advice, False
    return (_WINDOWS, False) if guard.is_of_multiples else None
