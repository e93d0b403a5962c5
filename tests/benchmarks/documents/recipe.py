"""The recipe: train a model that uses the whole document.

Short documents come first, as long as a window. Then the lengths grow far beyond it, so that the
model learns to keep a fact that stands in one place of a long document. Each step has one length,
and about as many tokens as any other step.

The layers of ``aftexport.nn`` have no absolute positions, so documents of the test may be longer
than all documents of the training.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from aftexport.nn import ClassifierConfig, DocumentClassifier, task_loss
from benchmarks.documents.compose import Dice, Document, Draw, Task


@dataclass(frozen=True)
class Recipe:
    """The choices of a training."""

    mechanism: str = "linear_attention"
    pooling: str = "attention"
    dim: int = 96
    depth: int = 2
    seconds: float = 120.0  # of processor time
    stages: tuple[tuple[float, int], ...] = ((0.5, 512), (0.2, 2_048), (0.2, 8_192), (0.1, 32_768))
    """The share of the time, and the greatest length, of each stage."""
    min_tokens: int = 128
    tokens_per_step: int = 8_192
    learning_rate: float = 3e-3
    checks: int = 8  # how often the documents of the validation are answered
    patience: int = 3  # checks without progress in the last stage, until the training stops

    def config(self, task: Task, vocabulary: int) -> ClassifierConfig:
        """Return the configuration of the model."""
        return ClassifierConfig(
            mechanism=self.mechanism,
            vocab_size=vocabulary,
            num_labels=len(task.columns),
            dim=self.dim,
            depth=self.depth,
            ffn_dim=2 * self.dim,
            pooling=self.pooling,
            problem_type=task.problem_type,
        )


@dataclass(frozen=True)
class Trained:
    """A model with the weights of its best check, and the course of its training."""

    model: DocumentClassifier
    steps: int
    tokens: int
    losses: tuple[float, ...]  # of each check


def train(
    task: Task,
    draw: Draw,  # draws a document of the training
    validation: Sequence[Document],
    vocabulary: int,
    recipe: Recipe = Recipe(),
    seed: int = 0,
) -> Trained:
    """Train a model by a recipe."""
    dice = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = DocumentClassifier(recipe.config(task, vocabulary))
    nn.init.normal_(model.embedding.weight, std=0.02)
    loss_of = make_loss(task, [draw(recipe.stages[0][1], dice) for _ in range(500)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    best, losses = copy.deepcopy(model.state_dict()), [math.inf]
    start, steps, tokens, waiting = time.process_time(), 0, 0, 0
    while (progress := (time.process_time() - start) / recipe.seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(progress)
        documents = draw_batch(draw, recipe, progress, dice)
        model.train()
        loss = loss_of(*_run(model, documents))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps, tokens = steps + 1, tokens + sum(len(each.ids) for each in documents)
        if progress * recipe.checks >= len(losses):
            losses.append(_validate(model, validation, loss_of))
            is_best = losses[-1] == min(losses)
            best = copy.deepcopy(model.state_dict()) if is_best else best
            is_last = _stage(recipe, progress) == len(recipe.stages) - 1
            waiting = waiting + 1 if is_last and not is_best else 0
            if waiting == recipe.patience:
                break
    if _validate(model, validation, loss_of) > min(losses):
        model.load_state_dict(best)
    return Trained(model.eval(), steps, tokens, tuple(losses[1:]))


def make_loss(task: Task, documents: Sequence[Document]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss; a rare label counts more where it holds, by the root of its odds."""
    if task.problem_type != "multi_label_classification":
        return lambda logits, targets: task_loss(task.problem_type, logits, targets)
    shares = np.mean([each.target for each in documents], 0).clip(1e-3, 0.5)
    weights = torch.tensor(np.sqrt((1 - shares) / shares), dtype=torch.float32)
    return nn.BCEWithLogitsLoss(pos_weight=weights)


def _schedule(progress: float) -> float:
    """Return the factor of the learning rate: a short warm-up, then a cosine down to 0."""
    return min(1.0, (progress + 0.002) / 0.05) * (1 + math.cos(math.pi * progress)) / 2


def _stage(recipe: Recipe, progress: float) -> int:
    """Return the number of the stage, from 0."""
    ends = np.cumsum([share for share, _ in recipe.stages[:-1]])
    return int(np.searchsorted(ends, progress, side="right"))


def draw_batch(draw: Draw, recipe: Recipe, progress: float, dice: Dice) -> list[Document]:
    """Draw documents of one length, which is drawn between the least and the stage's greatest."""
    greatest = recipe.stages[_stage(recipe, progress)][1]
    length = int(math.exp(dice.uniform(math.log(recipe.min_tokens), math.log(greatest))))
    count = min(64, max(1, recipe.tokens_per_step // length))
    return [draw(length, dice) for _ in range(count)]


def _run(model: DocumentClassifier, documents: Sequence[Document]) -> tuple[Tensor, Tensor]:
    """Return the logits and the targets of documents."""
    ids = [torch.from_numpy(each.ids).long() for each in documents]
    lengths = torch.tensor([len(each) for each in ids])
    targets = torch.from_numpy(np.stack([each.target for each in documents]))
    if model.config.problem_type == "single_label_classification":
        targets = targets.argmax(1)
    elif model.config.problem_type == "binary_classification":
        targets = targets[:, 0]
    else:
        targets = targets.float()
    return model(nn.utils.rnn.pad_sequence(ids, batch_first=True), lengths), targets


def _validate(
    model: DocumentClassifier,
    documents: Sequence[Document],
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> float:
    """Return the mean loss of documents, which are run one by one."""
    model.eval()
    with torch.inference_mode():
        return float(np.mean([loss_of(*_run(model, [each])).item() for each in documents]))
