"""Training on crops of documents, and prediction on whole documents."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aftexport.nn import ClassifierConfig, DocumentClassifier

STEPS = 250
MAX_SECONDS = 110.0
BATCH = 16
CROP = (512, 1024)
"""Minimum and maximum tokens of a crop; shorter documents are used whole."""

_LEARNING_RATE = 5e-3
_WARM_UP = 0.1
_EMBEDDING_STD = 0.02

Document = Sequence[int]
"""The token ids of a document."""


@dataclass(frozen=True)
class Training:
    """The course of a training.

    Attributes:
        steps: number of optimizer steps.
        seconds: wall time.
        was_cut_short: whether the time limit ended the training before its last step.
    """

    steps: int
    seconds: float
    was_cut_short: bool


def build(config: ClassifierConfig, seed: int) -> DocumentClassifier:
    """Build a classifier whose initial weights depend only on ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DocumentClassifier(config)
        # PyTorch's standard deviation of 1 is too large for a few hundred steps.
        nn.init.normal_(model.embedding.weight, std=_EMBEDDING_STD)
    return model


@contextmanager
def _one_thread() -> Iterator[None]:
    # The threads of such a small model mostly wait for each other: beside other work on two
    # cores, two threads took four times as long as one. With one thread, sums also do not
    # depend on the number of cores.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def fit(
    model: DocumentClassifier,
    documents: Sequence[Document],
    targets: Sequence[int],
    *,
    seed: int,
    steps: int = STEPS,
    max_seconds: float = MAX_SECONDS,
    report: Callable[[float, float], None] = lambda progress, loss: None,
) -> Training:
    """Train in place, on random crops, with AdamW and a cosine schedule.

    The schedule follows the steps, so that a run can be repeated. If the machine is too slow,
    the schedule follows the clock, so that the learning rate still decays completely.

    Args:
        model: the classifier to train.
        documents: token ids of each document.
        targets: class of each document.
        seed: seed of the order of documents and of the crops.
        steps: number of optimizer steps.
        max_seconds: maximum wall time of the training.
        report: callback with the progress, 0 to 1, and the loss after each step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    tensors = [torch.tensor(ids) for ids in documents]
    classes = torch.tensor(targets)
    batches = _batches(tensors, torch.Generator().manual_seed(seed))
    model.train()
    start, progress, step = time.monotonic(), 0.0, 0
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * _schedule(progress)
        chosen, input_ids, lengths = next(batches)
        loss = nn.functional.cross_entropy(model(input_ids, lengths), classes[chosen])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        progress = _progress(step / steps, (time.monotonic() - start) / max_seconds)
        report(progress, loss.item())
    model.eval()
    return Training(step, time.monotonic() - start, was_cut_short=step < steps)


@_one_thread()
def predict(
    model: DocumentClassifier,
    documents: Sequence[Document],
    report: Callable[[], None] = lambda: None,
) -> list[int]:
    """Classify whole documents one by one, because padding costs more than batching saves."""
    answers = []
    with torch.inference_mode():
        for ids in documents:
            logits = model(torch.tensor([ids]), torch.tensor([len(ids)]))
            answers.append(int(logits.argmax()))
            report()
    return answers


def _progress(steps: float, seconds: float) -> float:
    # The clock only counts after a third of the time. So a machine that stays within the
    # time limit always follows the steps, and the result depends only on the seed.
    return min(1.0, max(steps, (seconds - 1 / 3) * 3 / 2))


def _schedule(progress: float) -> float:
    return min(1.0, (progress + 0.01) / _WARM_UP) * (1 + math.cos(math.pi * progress)) / 2


def _batches(
    documents: Sequence[Tensor], generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield documents' indices ``[B]``, crops ``[B, T]`` and their lengths ``[B]``, all int64."""
    while True:
        order = torch.randperm(len(documents), generator=generator)
        for first in range(0, len(order), BATCH):
            chosen = order[first : first + BATCH]
            size = int(torch.randint(CROP[0], CROP[1] + 1, (1,), generator=generator))
            crops = [_crop(documents[i], size, generator) for i in chosen.tolist()]
            lengths = torch.tensor([len(crop) for crop in crops])
            yield chosen, nn.utils.rnn.pad_sequence(crops, batch_first=True), lengths


def _crop(document: Tensor, size: int, generator: torch.Generator) -> Tensor:
    start = int(torch.randint(max(1, len(document) - size + 1), (1,), generator=generator))
    return document[start : start + size]
