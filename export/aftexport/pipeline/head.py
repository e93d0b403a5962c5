"""The choice of a model's head: from a file, an option or the checkpoint, never by a guess."""

from collections.abc import Sequence
from pathlib import Path

import onnx

from aftexport.bundle.golden import Array
from aftexport.errors import TraceError, UsageError
from aftexport.heads import HEADS, Head
from aftexport.heads.head_file import read_heads

_SAME_NUMBERS = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten")
_PROBABILITIES = ("Sigmoid", "HardSigmoid", "Softmax")


def choose_head(
    output: str,
    logits: Array,
    *,
    task: str | None,
    names: Sequence[str] | None,
    head_file: Path | None,
) -> Head:
    """Return the head of an output.

    Args:
        output: the name of the output.
        logits: the output of one case, which must be ``[batch, width]``.
        task: the task from the user or the checkpoint; None if neither has one.
        names: the names from the user or the checkpoint; None for no names.
        head_file: the file of ``--heads``; None without one.

    Raises:
        TraceError: if the output has another rank.
        UsageError: if the task is not declared and could be several, or the head does not fit.
    """
    if logits.ndim != 2:
        raise TraceError(
            f"Expected logits [batch, width] from the model, got shape {list(logits.shape)}.",
            "Export a model with one output for each document. For other models, use "
            "torch.onnx.export and aftexport fuse.",
        )
    width = logits.shape[1]
    if head_file is not None:
        return _from_file(head_file, output, width)
    if task is None:
        if width < 2:
            raise UsageError(
                f"Expected a declared task for a model with {width} logit, got none.",
                "Add --task binary_classification for the sigmoid of one logit and two labels, "
                "--task multi_label_classification for one label, or --task regression for the "
                "value itself.",
            )
        task = "single_label_classification"
    return HEADS[task].of_width(width, names)


def _from_file(path: Path, output: str, width: int) -> Head:
    heads = read_heads(path)
    if set(heads) != {output}:
        raise UsageError(
            f"{path}: expected a head for the output {output!r}, got "
            f"{', '.join(map(repr, heads)) or 'none'}.",
            f"Name the head {output!r}.",
        )
    head = heads[output]
    if head.width != width:
        raise UsageError(
            f"{path}: expected a head for {width} logits, got one for {head.width}.",
            "Describe every logit of the model.",
        )
    return head


def check_output(model: onnx.ModelProto, head: Head) -> None:
    """Check that a model returns logits, not the result of a sigmoid or a softmax.

    Args:
        model: the exported graph, whose first output has the logits.
        head: the head of that output.

    Raises:
        UsageError: if the head would apply its sigmoid or softmax to the result of one.
    """
    if head.takes_probabilities:
        return
    producers = {output: node for node in model.graph.node for output in node.output}
    node = producers.get(model.graph.output[0].name)
    while node is not None and node.op_type in _SAME_NUMBERS:
        node = producers.get(node.input[0])
    if node is not None and node.domain == "" and node.op_type in _PROBABILITIES:
        raise UsageError(
            f"Expected logits, got the result of {node.op_type}: the scores of {head.task} are a "
            f"{head.meaning}, which the server computes itself.",
            f"Return the input of {node.op_type} from forward.",
        )
