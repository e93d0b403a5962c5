"""The choice of a model's heads: from a file, options or the checkpoint, never by a guess."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from pydantic import TypeAdapter, ValidationError

from aftexport.bundle.golden import Array, Case
from aftexport.errors import TraceError, UsageError
from aftexport.heads import HEADS, AnyHead, Head
from aftexport.system.validation import problem

_SAME_NUMBERS = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten")
_PROBABILITIES = ("Sigmoid", "HardSigmoid", "Softmax")


@dataclass(frozen=True)
class HeadOptions:
    """The declaration of heads by the user's options, and by the model file (``own_*``)."""

    task: str | Mapping[str, str] | None = None
    labels: Sequence[str] | None = None
    head_file: Path | None = None
    own_task: str | None = None
    own_labels: Sequence[str] | None = None
    own_heads: Mapping[str, Head] | None = None

    def task_of(self, output: str, outputs: Sequence[str]) -> str | None:
        """Return the declared task of one of the outputs; None without one.

        Raises:
            UsageError: if a declaration for one output has several to choose from.
        """
        if isinstance(self.task, Mapping):
            return self.task.get(output)
        if len(outputs) == 1:
            return self.task or self.own_task
        if self.task is not None or self.own_task is not None:
            given = f"--task {self.task}" if self.task else f"{self.own_task} from the model file"
            raise UsageError(
                f"Expected a task for each of the outputs {', '.join(outputs)}, got {given}.",
                f"Add --task {output}=TASK and so on, or describe every output in --heads.",
            )
        return None

    def own_head(self, output: str) -> Head | None:
        """Return the checkpoint's head for an output, if no option declares another."""
        is_declared = output in self.task if isinstance(self.task, Mapping) else self.task
        if is_declared or self.labels is not None or self.own_heads is None:
            return None
        return self.own_heads.get(output)

    def check(self, outputs: Sequence[str]) -> None:
        """Check the names of the options against those of the outputs.

        Raises:
            UsageError: if an option names an output that the model lacks, or labels could be of
                several outputs.
        """
        if isinstance(self.task, Mapping) and (unknown := self.task.keys() - set(outputs)):
            raise UsageError(
                f"--task must name outputs of the model, {', '.join(outputs)}, got "
                f"{', '.join(sorted(unknown))}.",
                "Correct the name, or leave it out.",
            )
        if self.labels is not None and len(outputs) > 1:
            raise UsageError(
                f"--labels needs a model with one output, got {', '.join(outputs)}.",
                "Give the names of each output in a --heads file.",
            )


def choose_heads(outputs: Mapping[str, Array], options: HeadOptions) -> dict[str, Head]:
    """Return the head of each output ``[batch, width]`` or ``[batch, tokens, width]``, in order.

    Raises:
        TraceError: if an output has another rank.
        UsageError: if a task is not declared and could be several, or a head does not fit.
    """
    for name, output in outputs.items():
        if output.ndim not in (2, 3):
            raise TraceError(
                "Expected [batch], [batch, width], [batch, tokens] or [batch, tokens, width] for "
                f"the output {name!r}, got shape {list(output.shape)}.",
                "Return one row for each document or each token. For other models, use "
                "torch.onnx.export and aftexport fuse.",
            )
    if options.head_file is not None:
        return _from_file(options.head_file, outputs)
    options.check([*outputs])
    heads = {}
    for name, output in outputs.items():
        if (own := options.own_head(name)) is not None:
            heads[name] = own
            continue
        option = "--task " if len(outputs) == 1 else f"--task {name}="
        task = options.task_of(name, [*outputs]) or _usual_task(name, output, option)
        kind = HEADS[task]
        names = options.labels
        if names is None and len(outputs) == 1 and kind.is_named:
            names = options.own_labels
        heads[name] = kind.of_output(output.shape, names)
    return heads


def check_rows(cases: Sequence[Case]) -> None:
    """Check that outputs have a row for each document, or one for each of its tokens.

    Raises:
        TraceError: if an output has other rows, such as one for each token and one more.
    """
    for case in cases:
        for name, output in case.outputs.items():
            width = cases[0].outputs[name].shape[-1:]
            if output.ndim > 1 and output.shape[-1:] != width:
                raise TraceError(
                    f"Expected the same number of values of the output {name!r} for documents of "
                    f"every length, got {width[0]} and {output.shape[-1]}.",
                    "Return one row for each document, [batch, width], or one for each token, "
                    "[batch, tokens, width].",
                )
            rows = case.shape[: output.ndim - 1]
            if output.ndim in (2, 3) and output.shape[:-1] != rows:
                raise TraceError(
                    f"Expected rows {list(rows)} of the output {name!r} for documents "
                    f"{list(case.shape)}, got {list(output.shape[:-1])}.",
                    "Return one row for each document, [batch, width], or one for each token of "
                    "the document, [batch, tokens, width].",
                )


def _usual_task(name: str, output: Array, option: str) -> str:
    """Return the task of several numbers for a document without a declared task."""
    if output.ndim == 3:
        label = f"{option}token_classification for a label of each token, "
        raise UsageError(
            f"Expected a declared task for the output {name!r} with a row for every token, got "
            "none.",
            f"Add {label if output.shape[2] > 1 else ''}{option}regression for its values, or "
            f"{option}feature_extraction for its vector.",
        )
    if output.shape[1] < 2:
        raise UsageError(
            f"Expected a declared task for the output {name!r} with {output.shape[1]} logit, got "
            "none.",
            f"Add {option}binary_classification for the sigmoid of one logit and two labels, "
            f"{option}multi_label_classification for one label, or {option}regression for the "
            "value itself.",
        )
    return "single_label_classification"


def _from_file(path: Path, outputs: Mapping[str, Array]) -> dict[str, Head]:
    heads = read_heads(path)
    if set(heads) != set(outputs):
        expected = ", ".join(map(repr, outputs))
        noun = "the output" if len(outputs) == 1 else "each of the outputs"
        raise UsageError(
            f"{path}: expected a head for {noun} {expected}, got "
            f"{', '.join(map(repr, heads)) or 'none'}.",
            f"Describe exactly {expected}.",
        )
    for name, output in outputs.items():
        head = heads[name]
        if head.width != output.shape[-1]:
            raise UsageError(
                f"{path}: expected a head for {output.shape[-1]} logits of {name!r}, got one for "
                f"{head.width}.",
                "Describe every logit of the model.",
            )
        if head.is_per_token != (output.ndim == 3):
            rows = "every token" if output.ndim == 3 else "every document"
            raise UsageError(
                f"{path}: expected a head for {name!r} that answers for {rows}, got {head.task}.",
                "Describe the output by another task; or, for regression and feature_extraction, "
                f'set "per_token": {str(output.ndim == 3).lower()}.',
            )
    return {name: heads[name] for name in outputs}


def check_outputs(model: onnx.ModelProto, heads: Mapping[str, Head]) -> None:
    """Check that a model returns logits, not the result of a sigmoid or a softmax.

    Raises:
        UsageError: if a head would apply its sigmoid or softmax to the result of one.
    """
    producers = {output: node for node in model.graph.node for output in node.output}
    for name, head in heads.items():
        if head.takes_probabilities:
            continue
        node = producers.get(name)
        while node is not None and node.op_type in _SAME_NUMBERS:
            node = producers.get(node.input[0])
        if node is not None and node.domain == "" and node.op_type in _PROBABILITIES:
            raise UsageError(
                f"Expected logits for {name!r}, got the result of {node.op_type}: the scores of "
                f"{head.task} are a {head.meaning}, which the server computes itself.",
                f"Return the input of {node.op_type} from forward.",
            )


_HEADS = TypeAdapter(dict[str, AnyHead])
_MAX_BYTES = 16 << 20
_EXAMPLE = (
    '{"logits": {"task": "multi_label_classification", "labels": ["a", "b"], '
    '"thresholds": [0.5, 0.7]}}'
)


def read_heads(path: Path) -> Mapping[str, Head]:
    """Read a JSON file of heads, as ``manifest.json`` has them.

    Raises:
        UsageError: if it cannot be read, or a head is not valid; the error names the field.
    """
    example = f"Write it as {_EXAMPLE}."
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise UsageError(
                f"{path}: expected at most {_MAX_BYTES} bytes of JSON, got {size}.", example
            )
        return _HEADS.validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}).", "Check the path.") from error
    except ValidationError as error:
        raise UsageError(f"{path}: {problem(error)}.", example) from error
