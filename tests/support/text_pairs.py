"""Models of text pairs with random weights, and the answers of transformers in float64."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import transformers_folders as folders
from numpy.typing import NDArray
from torch import Tensor, nn

from aftexport.pipeline.export import export

QUERY = "Ada met Grace"
PASSAGES = ["in Istanbul, on Tuesday.", "3.14 isn't 22/7", "", "A café, side by side. " * 3]
PAIRS = [(QUERY, passage) for passage in PASSAGES]
NLI = ("entailment", "neutral", "contradiction")
_IDENTITY = "torch.nn.modules.linear.Identity"
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "version 6": ("config_sentence_transformers.json", {"model_type": "CrossEncoder"}),
    "version 5": ("config.json", {"sentence_transformers": {"activation_fn": _IDENTITY}}),
    "version 3": ("config.json", {"sbert_ce_default_activation_function": _IDENTITY}),
}
"""The file by which versions of the library mark a CrossEncoder, and its entries."""


def save(folder: Path, kind: str = "Bert", form: str = "version 6", **settings: Any) -> None:
    """Write a CrossEncoder as a version of the library does."""
    build = folders.xlm_roberta if kind == "XLMRoberta" else getattr(folders, kind.lower())
    config = build(**{"num_labels": 1, **settings})
    folders.save(folder, f"{kind}ForSequenceClassification", config)
    if kind == "Bert":  # the class whose tokenizer returns types
        change(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    change(folder / "tokenizer_config.json", model_max_length=folders.MAX_TOKENS)
    name, entries = FORMS[form]
    change(folder / name, **entries)
    if form == "version 6":
        module = {"idx": 0, "name": "0", "path": ""}
        kind = "sentence_transformers.base.modules.transformer.Transformer"
        (folder / "modules.json").write_text(json.dumps([module | {"type": kind}]))


def change(path: Path, **entries: Any) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | entries))


def logits(folder: Path, pairs: Sequence[tuple[str, str]]) -> NDArray[np.float64]:
    """Return the logits of transformers, which cuts a long pair, for each pair by itself."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).double()
    with torch.inference_mode():
        rows = [
            model.eval()(**tokenizer([one], [two], truncation=True, return_tensors="pt")).logits[0]
            for one, two in pairs  # in lists, as the library takes an empty second text for none
        ]
    return np.stack([row.numpy() for row in rows])


class PairMean(nn.Module):
    """Three labels by the mean of tokens, each with the vector of its type; it has evidence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.types = nn.Embedding(300, 8), nn.Embedding(2, 8)
        self.head = nn.Linear(8, len(NLI))

    def forward(self, input_ids: Tensor, lengths: Tensor, token_type_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        mask = (places < lengths[:, None])[..., None]
        x = (self.words(input_ids) * (1 + self.types(token_type_ids))).masked_fill(~mask, 0)
        logits: Tensor = self.head(x.sum(1) / lengths[:, None].to(x.dtype))
        return logits


def export_nli(out: Path, **options: Any) -> Path:
    """Export ``PairMean`` with the tokenizer of BERT; return the bundle."""
    given = {"tokenizer": folders.wordpiece(), "text_pairs": True, "labels": NLI, **options}
    return export(PairMean, out=out, **given).path
