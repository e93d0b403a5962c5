"""The task of every bundle: exactly one of several labels holds; scores are a softmax over them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import onnx
from torch import nn

from aftexport.contract import GIVE_TWO_LABELS, MIN_LABELS, ONE_LABEL
from aftexport.errors import UsageError

_OTHER_TASKS = re.compile(r"multi[\W_]*(label|target|output)|regression", re.IGNORECASE)
"""Values of problem_type, a field of transformers, whose scores are not a softmax of the logits."""
_CONFIGS = ("config", "cfg", "args", "hparams", "hyper_parameters", "model_config")
"""Usual names of the settings beside the weights in training scripts."""
_SAME_NUMBERS = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten")
_PROBABILITIES = ("Sigmoid", "HardSigmoid", "Softmax")
_HUB_SUFFIXES = (".safetensors", ".bin")


def check_count(labels: int) -> None:
    """Check the number of labels of a model.

    Raises:
        UsageError: if there are fewer than two labels.
    """
    if labels < MIN_LABELS:
        raise UsageError(
            f"Expected a model with logits for at least {MIN_LABELS} labels, got {labels}: "
            f"{ONE_LABEL}.",
            GIVE_TWO_LABELS,
        )


def check_output(model: onnx.ModelProto) -> None:
    """Check that a model returns logits, not the result of a sigmoid or a softmax.

    Args:
        model: the exported graph, whose first output has the logits.

    Raises:
        UsageError: if its last step is a sigmoid or a softmax: the server would apply its softmax
            to the result.
    """
    producers = {output: node for node in model.graph.node for output in node.output}
    node = producers.get(model.graph.output[0].name)
    while node is not None and node.op_type in _SAME_NUMBERS:
        node = producers.get(node.input[0])
    if node is not None and node.domain == "" and node.op_type in _PROBABILITIES:
        raise UsageError(
            f"Expected logits, got the result of {node.op_type}: the server computes a softmax "
            "over exclusive labels itself.",
            f"Return the input of {node.op_type} from forward. Labels that may hold together are "
            "not served: export such a model by torch.onnx.export.",
        )


def check_task(path: Path, module: nn.Module | None) -> None:
    """Check that the configurations of a model do not declare another task.

    Args:
        path: the file or folder of the model; transformers writes config.json beside or into it.
        module: the model; None for a captured program.

    Raises:
        UsageError: if a configuration declares a regression or labels that may hold together.
    """
    folder = path if path.is_dir() else path.parent
    if path.is_dir() or path.suffix in _HUB_SUFFIXES:
        check_config(f"{folder / 'config.json'}", _read_json(folder / "config.json"))
    for part in module.modules() if module is not None else ():
        check_config(f"The configuration of {type(part).__name__}", part)


def check_config(name: str, config: object) -> None:
    """Check a configuration, and the configurations in it.

    Args:
        name: the name of the configuration for the message.
        config: a mapping or an object with attributes; other objects pass.

    Raises:
        UsageError: if it declares another task.
    """
    for entries in (config, *(_entry(config, holder) for holder in _CONFIGS)):
        declared = _entry(entries, "problem_type")
        declared = getattr(declared, "value", declared)  # the value of an enum
        if isinstance(declared, str) and _OTHER_TASKS.search(declared):
            raise UsageError(
                f"{name}: expected a problem_type of single_label_classification, got "
                f"{declared[:80]}; every score of the server is part of a softmax over exclusive "
                "labels.",
                "Serve this model elsewhere, or export its logits by torch.onnx.export.",
            )


def _entry(config: object, name: str) -> object:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # the reader that needs the file reports the problem
