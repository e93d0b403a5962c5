"""The checkpoint in PyTorch, and the options of every contender."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

import aftexport


@dataclass(frozen=True)
class Options:
    """The command-line options of a contender."""

    model: Path
    port: int
    threads: int
    batch: int

    @classmethod
    def read(cls) -> "Options":
        parser = argparse.ArgumentParser()
        parser.add_argument("model", type=Path)
        parser.add_argument("--port", type=int, required=True)
        parser.add_argument("--threads", type=int, required=True)
        parser.add_argument("--batch", type=int, default=1)
        return cls(**vars(parser.parse_args()))


class Model:
    """Model, tokenizer and labels of a checkpoint."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options.threads)
        checkpoint = aftexport.load(options.model)
        assert checkpoint.module is not None
        assert checkpoint.tokenizer is not None
        assert checkpoint.labels is not None
        self._module = checkpoint.module.eval()
        self._tokenizer = Tokenizer.from_str(checkpoint.tokenizer)
        self._labels = checkpoint.labels

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def classify(self, documents: list[list[int]]) -> list[dict[str, float]]:
        """Return the scores of documents from one run, padded to the longest."""
        lengths = torch.tensor([len(ids) for ids in documents])
        padded = torch.zeros(len(documents), int(lengths.max()), dtype=torch.int64)
        for row, ids in zip(padded, documents, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        with torch.inference_mode():
            scores = self._module(padded, lengths).double().softmax(1)
        return [dict(zip(self._labels, row.tolist(), strict=True)) for row in scores]
