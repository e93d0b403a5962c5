"""Training on crops of documents, and the outputs for whole documents."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from aftexport.demo.documents import Example, Tokenized
from aftexport.nn import AftLocal, ClassifierConfig, DocumentClassifier, task_loss
from aftexport.nn.encoder_config import RECURRENT_LAYERS

STEPS = 250
MAX_SECONDS = 110.0
IGNORED = -100
"""Target of a token that does not count, and of padding."""

_LEARNING_RATE = 5e-3
_WARM_UP = 0.1
_EMBEDDING_STD = 0.02
_NEAR = 12.0
"""Bias of the token itself: its weight is that of 160,000 tokens without a bias."""
_WIDER = 4
_SLOWER = 4
"""The training of a recurrence takes at least this many times as long for each token."""
_SERIES_SLOPE = 0.3
"""Fall of the bias with a step of a series: a single step is mostly noise."""


@dataclass(frozen=True)
class Crops:
    """The parts of documents in a step of the training.

    Attributes:
        count: number of crops.
        shortest, longest: tokens of a crop; shorter documents are used whole.
    """

    count: int = 16
    shortest: int = 512
    longest: int = 1024

    def for_layer(self, mechanism: str) -> Self:
        """Return crops with which a step takes about as long for each kind of layer."""
        if mechanism not in RECURRENT_LAYERS:
            return self
        shortest, longest = (-(-tokens // _SLOWER) for tokens in (self.shortest, self.longest))
        return replace(self, shortest=shortest, longest=longest)


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
        if config.num_features is None:
            # PyTorch's standard deviation of 1 is too large for a few hundred steps.
            nn.init.normal_(model.embedding.weight, std=_EMBEDDING_STD)
        if config.problem_type == "token_classification":
            _focus_on_neighbors(model)
        elif config.num_features is not None:
            _focus_on_neighbors(model, _SERIES_SLOPE)
    return model


@torch.no_grad()
def _focus_on_neighbors(model: DocumentClassifier, slope: float = 1.0) -> None:
    """Set the biases of aft_local to near tokens first, and in each layer to farther ones.

    The initial bias of nearly 0 is for the mean of a document, which says little about a token.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, AftLocal)]
    for depth, layer in enumerate(layers):
        if layer.max_length is None:
            distances = torch.tensor([abs(offset) for offset in layer.offsets])
            layer.relative_bias.copy_(_NEAR - slope * distances / _WIDER**depth)


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
    examples: Sequence[Example],
    *,
    seed: int,
    crops: Crops = Crops(),
    steps: int = STEPS,
    max_seconds: float = MAX_SECONDS,
    report: Callable[[float, float], None] = lambda progress, loss: None,
) -> Training:
    """Train in place, on random crops, with AdamW and a cosine schedule.

    The schedule follows the steps, so that a run can be repeated. If the machine is too slow,
    the schedule follows the clock, so that the learning rate still decays completely.

    Args:
        model: the classifier to train.
        examples: the documents to train on.
        seed: seed of the order of documents and of the crops.
        crops: the parts of documents in each step.
        steps: number of optimizer steps.
        max_seconds: maximum wall time of the training.
        report: callback with the progress, 0 to 1, and the loss after each step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    batches = _batches(examples, crops, torch.Generator().manual_seed(seed))
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
    documents: Sequence[Tokenized],
    report: Callable[[], None] = lambda: None,
) -> list[NDArray[np.float32]]:
    """Return the outputs for whole documents, one by one: padding costs more than batching saves.

    Returns:
        For each document ``[num_labels]``, or ``[T, num_labels]`` of outputs for each token.
    """
    outputs = []
    with torch.inference_mode():
        for document in documents:
            tokens = torch.tensor(document.ids)[None]
            outputs.append(model(tokens, torch.tensor([tokens.shape[1]]))[0].numpy())
            report()
    return outputs


def _progress(steps: float, seconds: float) -> float:
    # The clock only counts after a third of the time. So a machine that stays within the
    # time limit always follows the steps, and the result depends only on the seed.
    return min(1.0, max(steps, (seconds - 1 / 3) * 3 / 2))


def _schedule(progress: float) -> float:
    return min(1.0, (progress + 0.01) / _WARM_UP) * (1 + math.cos(math.pi * progress)) / 2


def _batches(
    examples: Sequence[Example], sizes: Crops, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield crops ``[B, T]`` or ``[B, T, F]``, their lengths int64 ``[B]``, and their targets."""
    documents = [torch.tensor(example.ids) for example in examples]
    while True:
        order = torch.randperm(len(documents), generator=generator)
        for first in range(0, len(order), sizes.count):
            chosen = order[first : first + sizes.count].tolist()
            span = (sizes.shortest, sizes.longest + 1)
            size = int(torch.randint(*span, (1,), generator=generator))
            places = [_crop(len(documents[i]), size, generator) for i in chosen]
            pairs = list(zip(chosen, places, strict=True))
            crops = [documents[i][start:stop] for i, (start, stop) in pairs]
            targets = [examples[i].target.part(start, stop) for i, (start, stop) in pairs]
            lengths = torch.tensor([len(crop) for crop in crops])
            yield _padded(crops, 0), lengths, _padded(targets, IGNORED)


def _crop(tokens: int, size: int, generator: torch.Generator) -> tuple[int, int]:
    start = int(torch.randint(max(1, tokens - size + 1), (1,), generator=generator))
    return start, min(tokens, start + size)


def _padded(rows: Sequence[Tensor], value: int) -> Tensor:
    if len({row.shape for row in rows}) == 1:
        return torch.stack(list(rows))
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
