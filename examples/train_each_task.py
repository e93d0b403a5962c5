"""Train, export and serve one small model for each task, and compare the server with PyTorch.

The documents are made up: random words, with some words of invoices, letters and reports among
them. Run it from the root of the repository with

    pip install '.[cpu,client,torch]'
    python examples/train_each_task.py --steps 30 --out build/examples/tasks

``problem_type`` declares the task of a model, ``task_loss`` is its loss, and the server reads the
task from the bundle. The values of the regression are standardized for training; a file of heads
gives the server their scale, offset and unit. The targets of the vectors are those of documents
with the same signs. For each task the example prints the first and the last loss, and the first of
the numbers that the server and PyTorch compute for new documents.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

import aftexport
from aftexport.nn import ClassifierConfig, DocumentClassifier, task_loss
from aftserve.client import Client, Result

SIGNS = {
    "invoice": ["amount", "payable", "total"],
    "letter": ["dear", "regards", "yours"],
    "report": ["figure", "results", "summary"],
}
FILLER = ["the", "of", "and", "to", "in", "we", "for", "on", "with", "at", "by", "from"]
NAMES: dict[str, list[str] | None] = {
    "single_label_classification": list(SIGNS),  # the kind with the most words
    "multi_label_classification": list(SIGNS),  # every kind with a word
    "binary_classification": ["other", "invoice"],  # whether there is a word of an invoice
    "regression": ["signs"],  # the percentage of words that are signs
    "token_classification": ["O", *SIGNS],  # the kind of each word
    "feature_extraction": None,  # a vector, close to that of a document with the same signs
}
BATCH = 32
MAX_SHOWN = 4


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer that gives each known word an id; 0 stands for other words."""
    words = ["[UNK]", *FILLER, *(word for signs in SIGNS.values() for word in signs)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def make_documents(task: str, count: int, dice: random.Random) -> tuple[list[str], Any]:
    """Return texts and their targets, in the shape that ``task_loss`` expects for the task.

    The targets of feature_extraction are texts, whose vectors are the targets.
    """
    texts, targets = [], []
    for _ in range(count):
        counts = dice.sample([0, 0, 2, 4, 8], len(SIGNS))  # the maximum is unique
        signs = [
            word
            for words, repeats in zip(SIGNS.values(), counts, strict=True)
            for word in dice.choices(words, k=repeats)
        ]
        words = mixed(signs, dice)
        texts.append(" ".join(words))
        targets.append({
            "single_label_classification": counts.index(max(counts)),
            "multi_label_classification": [number > 0 for number in counts],
            "binary_classification": counts[0] > 0,
            "regression": [100 * sum(counts) / len(words)],
            "token_classification": torch.tensor([kind_of(word) for word in words]),
            "feature_extraction": " ".join(mixed(signs, dice)),
        }[task])  # fmt: skip
    if task == "feature_extraction":
        return texts, targets
    if task == "token_classification":
        return texts, nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-100)
    return texts, torch.tensor(targets)


def mixed(signs: list[str], dice: random.Random) -> list[str]:
    """Return the words of a document with these signs."""
    words = signs + dice.choices(FILLER, k=dice.randrange(8, 32))
    dice.shuffle(words)
    return words


def kind_of(word: str) -> int:
    """Return the number of the kind whose sign a word is, from 1; 0 for other words."""
    return next((n for n, signs in enumerate(SIGNS.values(), 1) if word in signs), 0)


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return token ids, padded on the right to the longest text, and the lengths."""
    ids = [torch.tensor(tokenizer.encode(text).ids) for text in texts]
    lengths = torch.tensor([len(one) for one in ids])
    return nn.utils.rnn.pad_sequence(ids, batch_first=True), lengths


def train(
    model: DocumentClassifier,
    tokenizer: Tokenizer,
    steps: int,
    scale: tuple[float, float],
    dice: random.Random,
) -> list[float]:
    """Train in place, on new documents in every step.

    Args:
        model: the untrained model.
        tokenizer: the tokenizer of the texts.
        steps: number of optimizer steps.
        scale: deviation and mean by which the targets of a regression are standardized.
        dice: the source of the documents.

    Returns:
        The loss of each step.
    """
    task, (deviation, mean) = model.config.problem_type, scale
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    model.train()
    for _ in range(steps):
        texts, targets = make_documents(task, BATCH, dice)
        if task == "regression":
            targets = (targets - mean) / deviation
        elif task == "feature_extraction":
            targets = model(*encode(tokenizer, targets))
        loss = task_loss(task, model(*encode(tokenizer, texts)), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


@contextmanager
def serving(bundle: Path) -> Iterator[str]:
    """Serve a bundle on a free port, and yield the address."""
    log = bundle.with_suffix(".log")
    words = [sys.executable, "-m", "aftserve", str(bundle), "--port", "0", "--drain-seconds", "0"]
    with log.open("wb") as output:
        server = subprocess.Popen(words, stdout=output, stderr=output)
    try:
        while not (found := re.search(r"running on (http://\S+)", log.read_text("utf-8"))):
            if server.poll() is not None:
                raise RuntimeError(f"Expected a running server, got its end; see {log}.")
            time.sleep(0.05)
        yield found[1]
    finally:
        server.terminate()
        server.wait()


def served_numbers(result: Result) -> dict[str, float]:
    """Return the scores, values or numbers of an answer, by their names."""
    if result.heads is None:  # the labels exclude each other
        return dict(result.scores or {})
    head = result.heads["logits"]
    if isinstance(head.scores, Sequence):  # one for each token
        return {f"token_{place}": score for place, score in enumerate(head.scores)}
    if head.vector is not None:
        return {f"number_{place}": number for place, number in enumerate(head.vector)}
    return dict(head.scores or head.values or {})


@torch.inference_mode()
def pytorch_numbers(
    model: DocumentClassifier, inputs: tuple[Tensor, Tensor], scale: tuple[float, float]
) -> list[list[float]]:
    """Compute the same numbers for each document by PyTorch, in float64."""
    logits = model.double()(*inputs)
    deviation, mean = scale
    if model.config.problem_type == "token_classification":
        scores = logits.softmax(-1).amax(-1)
        return [row[:length].tolist() for row, length in zip(scores, inputs[1], strict=True)]
    numbers: Tensor = {
        "single_label_classification": lambda: logits.softmax(1),
        "multi_label_classification": logits.sigmoid,
        "binary_classification": lambda: torch.cat([-logits, logits], 1).sigmoid(),
        "regression": lambda: logits * deviation + mean,
        "feature_extraction": lambda: logits,
    }[model.config.problem_type]()
    return numbers.tolist()


def export(
    path: Path, model: DocumentClassifier, tokenizer: Tokenizer, scale: tuple[float, float]
) -> Path:
    """Save and export a trained model; return the path of its bundle."""
    task = model.config.problem_type
    names = NAMES[task]
    aftexport.save(path, model=model, labels=names, tokenizer=tokenizer.to_str())
    heads = None
    if task == "regression" and names:
        value = {"name": names[0], "unit": "percent", "minimum": 0.0, "maximum": 100.0,
                 "scale": scale[0], "offset": scale[1]}  # fmt: skip
        heads = path.with_suffix(".heads.json")
        heads.write_text(json.dumps({"logits": {"task": task, "values": [value]}}))
    bundle = aftexport.export(path, heads=heads, force=True, console=Console(quiet=True))
    return bundle.path


def compare(address: str, texts: Sequence[str], expected: Sequence[Sequence[float]]) -> float:
    """Print the first of the server's and of PyTorch's numbers; return the largest difference."""
    largest = 0.0
    with Client(address) as client:
        for result, wanted in zip(client.infer(texts), expected, strict=True):
            numbers = served_numbers(result).items()
            for place, ((name, number), theirs) in enumerate(zip(numbers, wanted, strict=True)):
                if place < MAX_SHOWN:
                    print(f"  {name:10}{number:14.8f}  PyTorch {theirs:14.8f}")
                largest = max(largest, abs(number - theirs))
    return largest


def main() -> None:
    """Train, export, serve and compare a model for each task."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps for each task")
    parser.add_argument("--out", type=Path, default=Path("build/examples/tasks"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    torch.set_num_threads(1)  # threads of so small a model mostly wait for one another
    tokenizer = make_tokenizer()
    for task, names in NAMES.items():
        torch.manual_seed(0)
        dice = random.Random(0)
        config = ClassifierConfig(
            mechanism="aft_simple",
            vocab_size=tokenizer.get_vocab_size(),
            num_labels=1 if task == "binary_classification" else names and len(names),
            problem_type=task,
            dim=32,
            depth=1,
            ffn_dim=64,
        )
        model = DocumentClassifier(config)
        values = make_documents("regression", 256, dice)[1]
        scale = (values.std().item(), values.mean().item())
        losses = train(model, tokenizer, arguments.steps, scale, dice)
        bundle = export(arguments.out / f"{task}.pt", model, tokenizer, scale)
        texts, _ = make_documents(task, 2, dice)
        expected = pytorch_numbers(model, encode(tokenizer, texts), scale)
        print(f"{task}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
        with serving(bundle) as address:
            print(f"  largest difference {compare(address, texts, expected):.1e}")


if __name__ == "__main__":
    main()
