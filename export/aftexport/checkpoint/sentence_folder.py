"""A folder of sentence-transformers: a model of transformers, pooled to a vector of a document."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from aftexport.checkpoint.checkpoint import Checkpoint
from aftexport.checkpoint.sentence_config import (
    ACTIVATIONS,
    DenseConfig,
    Module,
    Normalization,
    Pooling,
    SentenceModel,
    check_normalize,
    read_dense,
    read_max_tokens,
    read_modules,
    read_pooling,
)
from aftexport.checkpoint.transformers_class import VECTORS, TransformersModel, read_config
from aftexport.checkpoint.transformers_folder import read_model
from aftexport.checkpoint.weights import INDEX, PICKLE, WEIGHTS, read_shapes, refuse_unusable
from aftexport.errors import CheckpointError, first_line
from aftexport.options import ModelSource

KIND = "sentence-transformers folder"


def read_sentence_folder(folder: Path, source: ModelSource) -> Checkpoint:
    """Return the model of a folder, in float32, with its tokenizer.

    The library sentence-transformers is not needed.

    Raises:
        CheckpointError: if transformers is missing, or a file cannot be used.
        SafetensorError: if a weight file is not complete.
    """
    transformer, pooling, *others = read_modules(folder)
    limit = read_max_tokens(transformer.folder)
    config = read_config(transformer.folder)
    found = read_model(transformer.folder, config, source, for_vectors=True)
    tokens = TransformersModel(found.model, VECTORS)
    width = _width(transformer.folder, tokens)
    modes = read_pooling(pooling.folder, width)
    stages = _stages(others, width * len(modes))
    limits = [one for one in (tokens.max_length, limit) if one is not None]
    module = SentenceModel(tokens, Pooling(modes), stages, min(limits, default=None))
    refuse_unusable(folder, module)
    return Checkpoint(
        folder,
        f"{KIND} of {type(found.model).__name__}",
        module.eval(),
        tokenizer=found.tokenizer,
        task="feature_extraction",
    )


def _width(folder: Path, tokens: TransformersModel) -> int:
    """Return the width of the tokens' vectors, by a run on two tokens."""
    subject = f"expected {type(tokens.model).__name__} to return {VECTORS} of two tokens"
    remedy = "Give a base class, which returns the vectors of the tokens."
    try:
        with torch.inference_mode():
            shape = tuple(tokens(torch.zeros((1, 2), dtype=torch.int64)).shape)
    except Exception as error:  # the code of the folder can raise any exception
        reason = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise CheckpointError(folder, f"{subject}, got {reason}", remedy) from error
    if len(shape) != 3 or shape[:2] != (1, 2):
        raise CheckpointError(
            folder, f"{subject} in the shape (1, 2, width), got {str(shape)[:80]}", remedy
        )
    return int(shape[-1])


def _stages(modules: Sequence[Module], width: int) -> list[nn.Module]:
    """Return the modules after the pooling, whose vectors have a width."""
    stages: list[nn.Module] = []
    for module in modules:
        if module.kind == "Normalize":
            check_normalize(module.folder)
            stages.append(Normalization())
            continue
        config = read_dense(module.folder, width)
        stages += [_linear(module.folder, config), ACTIVATIONS[config.activation]()]
        width = config.out_features
    return stages


def _linear(folder: Path, config: DenseConfig) -> nn.Linear:
    """Return the linear map of a Dense module, after a check of the shapes in its file."""
    shapes: dict[str, tuple[int, ...]] = {
        "linear.weight": (config.out_features, config.in_features)
    }
    if config.bias:
        shapes["linear.bias"] = (config.out_features,)
    path = folder / WEIGHTS
    if not path.is_file():
        raise CheckpointError(
            folder,
            f"expected {WEIGHTS} for its Dense module, got {_other_weights(folder)}",
            "Save the folder again by a recent version of sentence-transformers: "
            "SentenceTransformer(folder).save_pretrained(other).",
        )
    if (found := read_shapes(path)) != shapes:
        raise CheckpointError(
            folder,
            f"expected the weights {_shown(shapes)}, got {_shown(found)}",
            "Give the configuration and the weights of one training.",
        )
    with safe_open(path, "pt") as file:
        state = {name.removeprefix("linear."): file.get_tensor(name).float() for name in shapes}
    with torch.device("meta"):
        linear = nn.Linear(config.in_features, config.out_features, bias=config.bias)
    linear.load_state_dict(state, assign=True)
    return linear


def _other_weights(folder: Path) -> str:
    """Return a description of the weights in other files, for a message."""
    if (folder / PICKLE).is_file():
        return f"{PICKLE}, a pickle, which can run code when loaded"
    return f"{INDEX}, of several files" if (folder / INDEX).is_file() else "no weights"


def _shown(shapes: object) -> str:
    return str(shapes)[:200]
