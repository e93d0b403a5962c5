"""Folders as sentence-transformers saves them, and their vectors by its formulas in float64."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers_folders
from numpy.typing import NDArray

WIDTH = 16
_OLD_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def old_pooling(*modes: str) -> dict[str, Any]:
    """Return the configuration of a pooling, as versions of the library before 6 write it."""
    flags = {flag: mode in modes for mode, flag in _OLD_FLAGS.items()}
    return {"word_embedding_dimension": WIDTH, **flags, "include_prompt": True}


def new_pooling(*modes: str) -> dict[str, Any]:
    """Return the configuration of a pooling, as version 6 of the library writes it."""
    mode = modes[0] if len(modes) == 1 else list(modes)
    return {"embedding_dimension": WIDTH, "pooling_mode": mode, "include_prompt": True}


def save(
    folder: Path,
    pooling: dict[str, Any],
    kinds: Sequence[str] = (),
    *,
    class_name: str = "BertModel",
    transformer: str = "",
    width: int = WIDTH,
) -> Any:
    """Write a folder, and return the model of transformers in it.

    ``kinds`` are the modules after the pooling, Dense or Normalize. A Dense halves the width.
    """
    config = transformers_folders.bert()
    model = transformers_folders.save(folder / transformer, class_name, config)
    names = ["Transformer", "Pooling", *kinds]
    places = [transformer, *(f"{i}_{name}" for i, name in enumerate(names[1:], 1))]
    write(folder / places[1] / "config.json", pooling)
    generator = torch.Generator().manual_seed(3)
    for name, place in zip(names[2:], places[2:], strict=True):
        (folder / place).mkdir()
        if name == "Dense":
            weight = torch.randn((width // 2, width), generator=generator)
            dense = {
                "in_features": width,
                "out_features": width // 2,
                "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh",
            }
            write(folder / place / "config.json", dense)
            state = {"linear.weight": weight, "linear.bias": weight[:, 0].clone()}
            safetensors.torch.save_file(state, folder / place / "model.safetensors")
            width //= 2
    entries = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{name}"}
        for i, (name, place) in enumerate(zip(names, places, strict=True))
    ]
    write(folder / "modules.json", entries)
    settings = {"max_seq_length": 24, "do_lower_case": False}
    write(folder / transformer / "sentence_bert_config.json", settings)
    return model


def token_vectors(model: Any, ids: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
    """Return the vectors of the tokens of each document, alone and in float64."""
    with torch.inference_mode():
        found = [model.double()(torch.tensor([one])).last_hidden_state[0].numpy() for one in ids]
    model.float()
    return found


def pooled(rows: NDArray[np.float64], modes: Sequence[str]) -> NDArray[np.float64]:
    """Return the vector of one document by the library's formulas."""
    places = np.arange(1, len(rows) + 1)
    vectors = {
        "cls": rows[0],
        "max": rows.max(0),
        "mean": rows.mean(0),
        "mean_sqrt_len_tokens": rows.sum(0) / np.sqrt(len(rows)),
        "weightedmean": places @ rows / places.sum(),
        "lasttoken": rows[-1],
    }
    return np.concatenate([vectors[mode] for mode in modes])


def after(folder: Path, kinds: Sequence[str], vector: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the vector after the modules that follow the pooling."""
    for number, kind in enumerate(kinds, 2):
        if kind == "Normalize":
            vector = vector / np.linalg.norm(vector)
            continue
        state = safetensors.torch.load_file(folder / f"{number}_{kind}" / "model.safetensors")
        weight, bias = (state[f"linear.{name}"].double().numpy() for name in ("weight", "bias"))
        vector = np.tanh(weight @ vector + bias)
    return vector
