"""Train one small classifier with each kind of layer and save it for the exporter.

The documents are made up: random words, with one word of an invoice or a letter among them. Run it
from the root of the repository with

    pip install '.[cpu,torch]'
    python examples/train_each_layer.py --steps 60 --out build/examples/layers
    aftexport build/examples/layers/aft_local.pt --to onnx

It prints the accuracy on new documents and writes a ``.pt`` file for each kind. The file needs no
code beside it.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

import aftexport
from aftexport.nn import LAYERS, ClassifierConfig, DocumentClassifier

SIGNS = {"invoice": ["amount", "payable", "total"], "letter": ["dear", "regards", "yours"]}
LABELS = list(SIGNS)
FILLER = ["the", "of", "and", "to", "in", "we", "for", "on", "with", "at", "by", "from"]
MAX_WORDS = 48
BATCH = 32


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer that gives each known word an id; 0 stands for other words."""
    words = ["[UNK]", *FILLER, *(word for signs in SIGNS.values() for word in signs)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def make_documents(count: int, dice: random.Random) -> tuple[list[str], torch.Tensor]:
    """Return texts and their labels, int64 ``[count]``."""
    texts, labels = [], []
    for _ in range(count):
        label = dice.randrange(len(LABELS))
        words = dice.choices(FILLER, k=dice.randrange(8, MAX_WORDS))
        words.insert(dice.randrange(len(words) + 1), dice.choice(SIGNS[LABELS[label]]))
        texts.append(" ".join(words))
        labels.append(label)
    return texts, torch.tensor(labels)


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids, padded on the right to the longest text, and the lengths."""
    ids = [torch.tensor(tokenizer.encode(text).ids) for text in texts]
    lengths = torch.tensor([len(one) for one in ids])
    return nn.utils.rnn.pad_sequence(ids, batch_first=True), lengths


def build(layer: str, vocab_size: int) -> DocumentClassifier:
    """Return an untrained classifier with layers of one kind."""
    config = ClassifierConfig(
        mechanism=layer,
        vocab_size=vocab_size,
        num_labels=len(LABELS),
        dim=32,
        depth=1,
        num_heads=4,
        ffn_dim=64,
        window=8,
        max_length=MAX_WORDS if layer == "aft_full" else None,
    )
    return DocumentClassifier(config)


def train(model: DocumentClassifier, tokenizer: Tokenizer, steps: int, dice: random.Random) -> None:
    """Train in place, on new documents in every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(steps):
        texts, labels = make_documents(BATCH, dice)
        loss = nn.functional.cross_entropy(model(*encode(tokenizer, texts)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


@torch.inference_mode()
def accuracy(model: DocumentClassifier, tokenizer: Tokenizer, dice: random.Random) -> float:
    """Return the share of new documents that the model classifies correctly."""
    texts, labels = make_documents(400, dice)
    return (model(*encode(tokenizer, texts)).argmax(1) == labels).float().mean().item()


def main() -> None:
    """Train, judge and save a classifier for each kind of layer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps for each kind")
    parser.add_argument("--out", type=Path, default=Path("build/examples/layers"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    torch.set_num_threads(1)  # threads of so small a model mostly wait for one another
    tokenizer = make_tokenizer()
    for layer in LAYERS:
        torch.manual_seed(0)
        dice = random.Random(0)
        model = build(layer, tokenizer.get_vocab_size())
        train(model, tokenizer, arguments.steps, dice)
        path = arguments.out / f"{layer}.pt"
        aftexport.save(path, model=model, labels=LABELS, tokenizer=tokenizer.to_str())
        print(f"{layer:24}{accuracy(model, tokenizer, dice):6.1%}  {path}")


if __name__ == "__main__":
    main()
