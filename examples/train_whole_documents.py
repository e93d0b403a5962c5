"""Train a model that uses the whole document, and compare it with one that reads the beginning.

The documents are made up: random words, with two short passages far apart. The question is whether
the passages are of two kinds, so that no single place of a document tells the answer. Run it from
the root of the repository with

    pip install '.[cpu,torch]'
    python examples/train_whole_documents.py --seconds 30 --out build/examples/whole

It prints the accuracy by length, up to 65,536 tokens, where the training ends at 16,384, and writes
a bundle. ``train`` is the recipe of docs/how-to/train-on-whole-documents.md, which says what each
part is worth. Take it with a function of your own that draws documents.
"""

import argparse
import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import aftexport
from aftexport.nn import ClassifierConfig, DocumentClassifier, task_loss

Dice = np.random.Generator


class Sample(Protocol):
    """A document with its answer."""

    @property
    def ids(self) -> NDArray[np.int32]:
        """The token ids ``[T]``."""

    @property
    def target(self) -> NDArray[np.int64]:
        """1 for each label that holds, else 0, ``[num_labels]``."""


Draw = Callable[[int, Dice], Sample]
"""A function that draws a document of a number of tokens."""


@dataclass(frozen=True)
class Recipe:
    """The choices of a training."""

    seconds: float = 120.0  # of processor time
    stages: tuple[tuple[float, int], ...] = ((0.4, 256), (0.3, 1_024), (0.2, 4_096), (0.1, 16_384))
    """The share of the time, and the greatest length, of each stage."""
    min_tokens: int = 64
    tokens_per_step: int = 2_048
    learning_rate: float = 3e-3
    locality: float = 8.0
    """The initial bias of the taps of AFT-conv: a neighbour weighs ``exp(8)`` other tokens."""
    weighs_rare: bool = True
    """Whether a rare label counts more where it holds, among several labels."""
    checks: int = 8  # how often the documents of the validation are answered


@dataclass(frozen=True)
class Trained:
    """A model with the weights of its best check, and the course of its training."""

    model: DocumentClassifier
    steps: int
    tokens: int
    losses: tuple[float, ...]  # of each check


def train(
    config: ClassifierConfig,
    draw: Draw,  # draws a document of the training
    validation: Sequence[Sample],
    recipe: Recipe = Recipe(),
    seed: int = 0,
) -> Trained:
    """Train a model by a recipe."""
    dice = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = build(config, recipe)
    loss_of = make_loss(config.problem_type, draw, recipe, dice)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    best, losses = copy.deepcopy(model.state_dict()), [math.inf]
    start, steps, tokens = time.process_time(), 0, 0
    while (progress := (time.process_time() - start) / recipe.seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(progress)
        samples = draw_batch(draw, recipe, progress, dice)
        model.train()
        loss = loss_of(*_run(model, samples))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps, tokens = steps + 1, tokens + sum(len(each.ids) for each in samples)
        if progress * recipe.checks >= len(losses):
            losses.append(_validate(model, validation, loss_of))
            if losses[-1] == min(losses):
                best = copy.deepcopy(model.state_dict())
    if _validate(model, validation, loss_of) > min(losses):
        model.load_state_dict(best)
    return Trained(model.eval(), steps, tokens, tuple(losses[1:]))


def build(config: ClassifierConfig, recipe: Recipe) -> DocumentClassifier:
    """Build a model whose layers first look at what is near."""
    model = DocumentClassifier(config)
    nn.init.normal_(model.embedding.weight, std=0.02)  # PyTorch's 1 needs many more steps
    for layer in model.encoder.layers:
        if config.mechanism == "aft_conv":
            # By default the layer starts as the mean of all tokens, in which a passage of a long
            # document drowns. This way its filters average neighbours, by their order too.
            nn.init.constant_(layer.attention.beta, recipe.locality)
            nn.init.ones_(layer.attention.gamma)
    return model


def make_loss(
    problem_type: str, draw: Draw, recipe: Recipe, dice: Dice
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss; a rare label counts more where it holds, by the root of its odds."""
    if problem_type != "multi_label_classification" or not recipe.weighs_rare:
        return lambda logits, targets: task_loss(problem_type, logits, targets)
    samples = [draw(recipe.stages[0][1], dice) for _ in range(500)]
    shares = np.mean([each.target for each in samples], 0).clip(1e-3, 0.5)
    weights = torch.tensor(np.sqrt((1 - shares) / shares), dtype=torch.float32)
    return nn.BCEWithLogitsLoss(pos_weight=weights)


def draw_batch(draw: Draw, recipe: Recipe, progress: float, dice: Dice) -> list[Sample]:
    """Draw documents of one length, which is drawn between the least and the stage's greatest."""
    greatest = recipe.stages[_stage(recipe, progress)][1]
    length = int(math.exp(dice.uniform(math.log(recipe.min_tokens), math.log(greatest))))
    count = min(64, max(1, recipe.tokens_per_step // length))
    return [draw(length, dice) for _ in range(count)]


def _schedule(progress: float) -> float:
    """Return the factor of the learning rate: a short warm-up, then a cosine down to 0."""
    return min(1.0, (progress + 0.002) / 0.05) * (1 + math.cos(math.pi * progress)) / 2


def _stage(recipe: Recipe, progress: float) -> int:
    """Return the number of the stage, from 0."""
    ends = np.cumsum([share for share, _ in recipe.stages[:-1]])
    return int(np.searchsorted(ends, progress, side="right"))


def _run(model: DocumentClassifier, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Return the logits and the targets of documents."""
    ids = [torch.from_numpy(each.ids).long() for each in samples]
    lengths = torch.tensor([len(each) for each in ids])
    targets = torch.from_numpy(np.stack([each.target for each in samples]))
    if model.config.problem_type == "single_label_classification":
        targets = targets.argmax(1)
    elif model.config.problem_type == "binary_classification":
        targets = targets[:, 0]
    else:
        targets = targets.float()
    return model(nn.utils.rnn.pad_sequence(ids, batch_first=True), lengths), targets


def _validate(
    model: DocumentClassifier,
    samples: Sequence[Sample],
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> float:
    """Return the mean loss of documents, which are run one by one."""
    model.eval()
    with torch.inference_mode():
        return float(np.mean([loss_of(*_run(model, [each])).item() for each in samples]))


# An example of documents: passages of six words of their kind among random words.
VOCABULARY, KINDS, PASSAGE = 300, 2, 6


@dataclass(frozen=True)
class Document:
    """A made-up document."""

    ids: NDArray[np.int32]
    target: NDArray[np.int64]


def draw_document(tokens: int, dice: Dice) -> Document:
    """Draw a document with two passages, of two kinds or twice of one."""
    differs = int(dice.integers(2))
    first = int(dice.integers(KINDS))
    ids = dice.integers(10 * KINDS, VOCABULARY, tokens, dtype=np.int32)
    half = tokens // 2
    for start, kind in ((0, first), (half, (first + differs) % KINDS)):
        at = start + int(dice.integers(half - PASSAGE))
        ids[at : at + PASSAGE] = 10 * kind + dice.permutation(10)[:PASSAGE]
    return Document(ids, np.array([differs]))


def main() -> None:
    """Train a model, judge it by length, and export it."""
    parser = argparse.ArgumentParser(description="Train a model that uses the whole document.")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the training")
    parser.add_argument("--out", type=Path, default=Path("build/examples/whole"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads mostly wait for each other in a model this small
    config = ClassifierConfig(
        mechanism="aft_conv",
        vocab_size=VOCABULARY,
        num_labels=1,
        dim=48,
        num_heads=8,
        ffn_dim=96,
        pooling="max",
        problem_type="binary_classification",
    )
    dice = np.random.default_rng(1)
    validation = [draw_document(tokens, dice) for tokens in (256, 1_024, 4_096) for _ in range(8)]
    trained = train(config, draw_document, validation, Recipe(seconds=options.seconds))
    print(f"Trained in {trained.steps} steps on {trained.tokens:,} tokens.")
    for tokens in (512, 4_096, 65_536):
        samples = [draw_document(tokens, dice) for _ in range(32)]
        whole, first = (
            np.mean([_is_right(trained.model, each, limit) for each in samples])
            for limit in (tokens, 512)
        )
        print(f"{tokens:6,} tokens: {whole:.0%} right, and {first:.0%} by the first 512.")
    options.out.mkdir(parents=True, exist_ok=True)
    labels = ["one kind", "two kinds"]
    aftexport.save(options.out / "model.pt", model=trained.model, labels=labels)
    aftexport.export(options.out / "model.pt", out=options.out / "model.bundle", force=True)


def _is_right(model: DocumentClassifier, sample: Document, limit: int) -> bool:
    """Return whether a model is right about a document of which it reads ``limit`` tokens."""
    ids = torch.from_numpy(sample.ids[:limit]).long()
    with torch.inference_mode():
        logit = model(ids[None], torch.tensor([len(ids)])).item()
    return (logit > 0) == bool(sample.target[0])


if __name__ == "__main__":
    main()
