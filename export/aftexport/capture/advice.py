"""Advice to the author of a model that torch.export does not capture."""

import re
from collections.abc import Sequence

from torch import nn

from aftexport.capture.complaints import violation
from aftexport.capture.shape_guards import ShapeGuard
from aftexport.contract import MAX_TOKENS

_RECURRENT = "Recurrent layers are captured for one length: put an attention layer in their place."
_INSTEAD = {
    "conv1d": "Give it no padding of its own, and pad the tokens before, by "
    "torch.nn.functional.pad, to as many as its kernel has or more.",
    "max_pool1d": "Call max_pool2d on x.unsqueeze(2), which is captured for every length.",
    "linspace": "Write torch.arange(tokens) / tokens, which is captured for every length.",
    "lstm": _RECURRENT,
    "gru": _RECURRENT,
    "rnn_tanh": _RECURRENT,
    "rnn_relu": _RECURRENT,
}
"""What to write in place of an operator that torch.export does not capture for every length."""
IN_TORCH = (
    "Slice in that line from the start or in other steps, or pad the tokens before; or write it in "
    "other operators."
)
"""The advice where torch itself fails, see ``complaints.failed_in_torch``."""
BRANCHES = "Take branches on the number of tokens out of forward."
ONE_WAY = "Or export the one way: --max-length {}."
_TABLE = "Give the table of that line a row for every token."
_WINDOWS = (
    "Count the windows by -(-tokens // w) and pad to as many, without a branch: that pads nothing "
    "where tokens are a multiple of w (export/README.md, Windows)."
)
_NUMBERS = {
    "float": "Write tokens ** 0.5, or torch.sym_float(tokens) in place of float(tokens): a Python "
    "float holds for one length.",
    "int": "Write the size in integers, tokens // 2 in place of int(tokens * 0.5): a Python int "
    "holds for one length.",
    "index": "Write the size in integers, with + - * // and min and max: a function that needs a "
    "Python number holds for one length. math.sqrt(tokens) and math.log(tokens) may scale tensors.",
    "loop": "Take loops over the tokens out of forward: cumsum does the same for every length, "
    "and so does one operator on windows (export/README.md, Windows).",
}
"""What to write in place of what makes a number of Python of a size."""
_FLOAT = (
    "Give that operator a float that is the same for every length, and multiply a tensor by the "
    "one that is not: of scaled_dot_product_attention the query, with scale=1.0."
)
_PIECES = ("chunk", "split", "tensor_split", "unbind", "split_with_sizes")


def is_of_pieces(taken: ShapeGuard) -> bool:
    """Whether it is the number of pieces of a tensor, which is not the same for every length."""
    return taken.operator.rpartition(".")[2] in _PIECES


def decisive(taken: Sequence[ShapeGuard], again: Sequence[ShapeGuard] = ()) -> ShapeGuard | None:
    """What keeps a model from being captured, of all that torch.export took for given.

    Args:
        taken: with sizes that are never 1.
        again: the same model's, with sizes that may be 1; empty where there was no such attempt.
            What is not in both goes with the way torch is told to go, except a branch of the
            model itself. The same condition may be written differently in either.
    """
    if not again:
        return next(iter([t for t in taken if _restricts(t)] or taken), None)
    restricting = [t for t in again if _restricts(t)]
    before = {(str(t), t.operator, t.line) for t in taken}
    kept = [t for t in restricting if (str(t), t.operator, t.line) in before]
    own = [t for t in restricting if not t.operator]
    return next(iter(kept or own or restricting or again))


def _restricts(taken: ShapeGuard) -> bool:
    return taken.excludes("batch") or taken.excludes("tokens")


def remedy(
    model: nn.Module,
    complaint: str,
    taken: ShapeGuard | None = None,
    one_way: int | None = None,
    *,
    otherwise: str = "Write it in other operators; branches on values, .item() and .tolist() "
    "cannot be captured.",
) -> str:
    """What to do about it.

    Args:
        model: that was to be captured.
        complaint: torch.export's, or the module's own.
        taken: see ``decisive``.
        one_way: the most tokens up to which the model was captured; None where it was not.
        otherwise: where nothing better is known.
    """
    if not any(isinstance(module, nn.Embedding) for module in model.modules()):
        return (
            "A bundle takes input_ids: put an nn.Embedding before the module and a classifier "
            "after it. Or export it by torch.onnx.export, and run aftexport fuse."
        )
    if "data is not allocated" in complaint:
        return (
            "It reads numbers of a parameter one by one, as aft-pytorch's AFTLocal does to rebuild "
            "wbias in every call. Write that as tensor operations, AFTFull's forward with "
            "self.wbias * band: AFT-local is recognised there."
        )
    if "in output, which is not a known type" in complaint:
        return "Wrap it in a module that returns the logits [batch, classes] alone."
    if taken is not None and taken.excludes("batch"):
        return (
            "Take the number of documents from input_ids.shape, and loops over them out of forward."
        )
    if re.search(r"'SymInt' object has no attribute|of type Sym(Int|Float)", complaint):
        return "NumPy takes no size that is free: write tokens ** 0.5, or math.log(tokens)."
    bounded = f" {ONE_WAY.format(one_way)}" if one_way is not None else ""
    if taken is not None and taken.conversion:
        return _NUMBERS[taken.conversion]
    if taken is not None and taken.operator and taken.most_tokens(MAX_TOKENS) is not None:
        return _WINDOWS if is_of_pieces(taken) else _TABLE + bounded
    if taken is not None and taken.operator and taken.is_of_floats:
        return _FLOAT
    if taken is not None and taken.operator:
        return _INSTEAD.get(
            taken.operator.rpartition(".")[2],
            "Write that line so that it does the same for every document, of 1 token too: pad the "
            "tokens to as many as it needs, or to a multiple (export/README.md, Windows).",
        )
    if taken is not None and taken.is_of_multiples:
        return _WINDOWS
    if violation(complaint) is not None:
        return "Take branches on shapes out of forward." + bounded
    return otherwise
