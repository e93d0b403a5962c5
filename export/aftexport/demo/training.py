"""Training on crops of documents, and the accuracy on whole documents beside baselines."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from aftexport.demo.corpus import Document
from aftexport.errors import UsageError
from aftexport.nn import ClassifierConfig, DocumentClassifier, task_loss
from aftexport.nn.config import RECURRENT_LAYERS
from aftexport.system.console import plain_table

_LEARNING_RATE = 5e-3
_WARM_UP = 0.1
_EMBEDDING_STD = 0.02
_SLOWER = 4
"""The training of a recurrence takes at least this many times as long for each token."""


@dataclass(frozen=True)
class Crops:
    """The parts of documents in a step of the training."""

    count: int = 16
    shortest: int = 512  # tokens of a crop; shorter documents are used whole
    longest: int = 1024

    def for_layer(self, mechanism: str) -> Self:
        """Return crops with which a step takes about as long for each kind of layer."""
        if mechanism not in RECURRENT_LAYERS:
            return self
        shortest, longest = (-(-tokens // _SLOWER) for tokens in (self.shortest, self.longest))
        return replace(self, shortest=shortest, longest=longest)


@dataclass(frozen=True)
class Training:
    """The course of a training."""

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
    labels: Sequence[str],  # labels of the model, in the order of its outputs
    *,
    seed: int,
    steps: int,
    max_seconds: float = math.inf,
    crops: Crops = Crops(),
    report: Callable[[float, float], None] = lambda progress, loss: None,
) -> Training:
    """Train in place, on random crops, with AdamW and a cosine schedule.

    The schedule follows the steps, so that a run can be repeated. If the machine is too slow,
    the schedule follows the clock, so that the learning rate still decays completely.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    sizes = crops.for_layer(model.config.mechanism)
    batches = _batches(documents, labels, sizes, torch.Generator().manual_seed(seed))
    model.train()
    start, progress, step = time.monotonic(), 0.0, 0
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * _schedule(progress)
        input_ids, lengths, targets = next(batches)
        loss = task_loss(model.config.problem_type, model(input_ids, lengths), targets)
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
    labels: Sequence[str],
    report: Callable[[], None] = lambda: None,
) -> list[str]:
    """Return the label of each whole document."""
    answers = []
    with torch.inference_mode():
        for document in documents:  # one by one: padding costs more than batching saves
            logits = model(torch.tensor(document.ids)[None], torch.tensor([len(document)]))
            answers.append(labels[int(logits.argmax())])
            report()
    return answers


def _progress(steps: float, seconds: float) -> float:
    # The clock only counts after a third of the time. So a machine that stays within the
    # time limit always follows the steps, and the result depends only on the seed.
    return min(1.0, max(steps, (seconds - 1 / 3) * 3 / 2))


def _schedule(progress: float) -> float:
    return min(1.0, (progress + 0.01) / _WARM_UP) * (1 + math.cos(math.pi * progress)) / 2


def _batches(
    documents: Sequence[Document], labels: Sequence[str], sizes: Crops, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield crops ``[B, T]``, their lengths int64 ``[B]``, and the numbers of their labels."""
    texts = [torch.tensor(document.ids) for document in documents]
    targets = torch.tensor([labels.index(document.label) for document in documents])
    while True:
        order = torch.randperm(len(texts), generator=generator)
        for first in range(0, len(order), sizes.count):
            chosen = order[first : first + sizes.count]
            span = (sizes.shortest, sizes.longest + 1)
            size = int(torch.randint(*span, (1,), generator=generator))
            crops = [_crop(texts[i], size, generator) for i in chosen.tolist()]
            lengths = torch.tensor([len(crop) for crop in crops])
            yield nn.utils.rnn.pad_sequence(crops, batch_first=True), lengths, targets[chosen]


def _crop(tokens: Tensor, size: int, generator: torch.Generator) -> Tensor:
    start = int(torch.randint(max(1, len(tokens) - size + 1), (1,), generator=generator))
    return tokens[start : start + size]


@dataclass(frozen=True)
class HeldOut:
    """Held-out documents."""

    documents: list[Document]
    left_out: int

    @property
    def longest(self) -> Document:
        """The document with the most tokens."""
        return max(self.documents, key=len)


def hold_out(documents: Sequence[Document], limit: int) -> HeldOut:
    """Return the documents of at most ``limit`` tokens."""
    fitting = [document for document in documents if len(document) <= limit]
    if not fitting:
        raise UsageError(
            f"Expected held-out documents of at most {limit:,} tokens, got only longer ones.",
            "Give shorter documents, or choose a mechanism for longer ones.",
        )
    return HeldOut(fitting, len(documents) - len(fitting))


def accuracies(
    train: Sequence[Document], held_out: HeldOut, answers: Mapping[str, Sequence[str]]
) -> Table:
    """Return the accuracies of models beside those of two baselines that see only bytes."""
    documents = held_out.documents
    labels, _ = zip(*Counter(d.label for d in train).most_common(1), strict=True)
    found = {
        "always the most common label": [*labels] * len(documents),
        "logistic regression on bytes": byte_regression(train, documents),
        **answers,
    }
    table = plain_table("classifier", f"accuracy, {len(documents)} held-out documents")
    table.columns[1].justify = "right"
    for classifier, own in found.items():
        right = sum(one == d.label for one, d in zip(own, documents, strict=True))
        table.add_row(classifier, f"{right / len(documents):.1%}")
    return table


def byte_regression(train: Sequence[Document], documents: Sequence[Document]) -> list[str]:
    """Return the answers of a logistic regression on byte frequencies, fitted to ``train``."""
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
    model.fit(byte_frequencies(train), [document.label for document in train])
    return [str(label) for label in model.predict(byte_frequencies(documents))]


def byte_frequencies(documents: Sequence[Document]) -> NDArray[np.float64]:
    """Return the frequency of each byte in each text, float64 ``[len(documents), 256]``."""
    encoded = [np.frombuffer(document.text.encode(), np.uint8) for document in documents]
    return np.stack([np.bincount(text, minlength=256) / text.size for text in encoded])
