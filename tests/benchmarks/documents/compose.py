"""The tasks, and documents of a given length that are composed from the texts of a part."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.documents.texts import Ids, Part

WINDOW = 512
CONFLICT = ("gpl", "apache")
"""The families of the task ``conflict``: GPL-2.0 forbids the terms of Apache-2.0."""
Dice = np.random.Generator
Draw = Callable[[int, Dice], "Document"]
"""A function that draws a document of a number of tokens."""
_MAX_FAMILIES = 4
_CLEAN = 0.25
"""The share of documents without any family in the task ``contains``."""
_OWN = 0.7
"""The share of tokens that belong to a family in the task ``dominant``."""


@dataclass(frozen=True)
class Document:
    """A document, its labels, and where its planted texts are."""

    ids: Ids  # [T]
    target: NDArray[np.int64]  # [columns], 1 for a label that holds
    is_clean: bool
    places: tuple[tuple[str, int, int], ...] = ()
    """The family, the first token and the end of each planted text."""


@dataclass(frozen=True)
class Task:
    """A question about documents, and the names of its answers."""

    name: str
    problem_type: str
    labels: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The labels whose scores are judged: of two that exclude each other, the second."""
        return self.labels[1:] if self.problem_type == "binary_classification" else self.labels

    def draw(self, part: Part, tokens: int, dice: Dice) -> Document:
        """Draw a document of a number of tokens."""
        return _DRAWN[self.name](self, part, tokens, dice)

    def document(
        self, part: Part, planted: Sequence[tuple[str, Ids]], tokens: int, dice: Dice, gap: int = 0
    ) -> tuple[Ids, tuple[tuple[str, int, int], ...]]:
        """Place texts in their order among filler, with at least ``gap`` tokens between them."""
        free = tokens - sum(len(ids) for _, ids in planted)
        blocks = _cut(free, len(planted), gap, dice)
        pieces, places, at = [_filler(part, blocks[0], dice)], [], blocks[0]
        for (family, ids), block in zip(planted, blocks[1:], strict=True):
            places.append((family, at, at + len(ids)))
            pieces += [ids, _filler(part, block, dice)]
            at += len(ids) + block
        return np.concatenate(pieces), tuple(places)


def make_tasks(families: Sequence[str]) -> dict[str, Task]:
    """Return the tasks by name."""
    names = tuple(families)
    tasks = (
        Task("contains", "multi_label_classification", names),
        Task("dominant", "single_label_classification", names),
        Task("conflict", "binary_classification", ("no conflict", "conflict")),
    )
    return {task.name: task for task in tasks}


def draw_contains(task: Task, part: Part, tokens: int, dice: Dice) -> Document:
    """Draw a document with texts of none or some families."""
    count = 0 if dice.random() < _CLEAN else int(dice.integers(1, _MAX_FAMILIES + 1))
    numbers = dice.permutation(len(task.labels))[:count]
    limit = max(1, tokens * 3 // 4 // max(1, count))
    planted = [(task.labels[n], _text(part, task.labels[n], limit, dice)) for n in numbers]
    target = np.zeros(len(task.labels), np.int64)
    target[numbers] = 1
    ids, places = task.document(part, planted, tokens, dice)
    return Document(ids, target, is_clean=not count, places=places)


def draw_dominant(task: Task, part: Part, tokens: int, dice: Dice) -> Document:
    """Draw a document of several families, one of which has 1.5 times the tokens of the next."""
    numbers = dice.permutation(len(task.labels))[: dice.integers(2, _MAX_FAMILIES + 1)]
    weights = np.array([1.0, *dice.uniform(0.2, 1 / 1.5, len(numbers) - 1)])
    budgets = (_OWN * tokens * weights / weights.sum()).astype(int).tolist()
    planted = []
    for number, budget in zip(numbers, budgets, strict=True):
        family, rest = task.labels[number], budget
        while rest:
            ids = _text(part, family, rest, dice)
            planted.append((family, ids))
            rest -= len(ids)
    order = dice.permutation(len(planted))
    ids, places = task.document(part, [planted[i] for i in order], tokens, dice)
    target = np.zeros(len(task.labels), np.int64)
    target[numbers[0]] = 1
    return Document(ids, target, is_clean=False, places=places)


def draw_conflict(task: Task, part: Part, tokens: int, dice: Dice) -> Document:
    """Draw a document with two texts, of both families of a conflict or twice of one.

    From four windows on, more tokens than a window lie between the two.
    """
    holds = dice.random() < 0.5
    first, second = dice.permutation(CONFLICT)
    pair = (str(first), str(second if holds else first))
    limit = min(WINDOW, tokens // 4)
    planted = [(family, _text(part, family, limit, dice)) for family in pair]
    gap = WINDOW if tokens >= 4 * WINDOW else 0
    ids, places = task.document(part, planted, tokens, dice, gap)
    return Document(ids, np.array([int(holds)]), is_clean=not holds, places=places)


_DRAWN: Mapping[str, Callable[[Task, Part, int, Dice], Document]] = {
    "contains": draw_contains,
    "dominant": draw_dominant,
    "conflict": draw_conflict,
}


def draw_many(
    task: Task, part: Part, counts: Mapping[int, int], seed: int
) -> dict[int, list[Document]]:
    """Return documents by their length; ``counts`` has the number for each length."""
    return {
        tokens: [
            task.draw(part, tokens, np.random.default_rng([seed, tokens, n])) for n in range(count)
        ]
        for tokens, count in counts.items()
    }


def windows_of(ids: Ids, window: int = WINDOW, stride: int = WINDOW * 3 // 4) -> list[Ids]:
    """Return the overlapping windows of a document; the last one ends with it."""
    last = max(0, len(ids) - window)
    starts = [*range(0, last, stride), last]
    return [ids[start : start + window] for start in starts]


def _text(part: Part, family: str, limit: int, dice: Dice) -> Ids:
    """Return a text of a family of at most ``limit`` tokens; the shortest one may be cut."""
    texts = part.families[family]
    fitting = bisect_right(texts, limit, key=len)
    return texts[int(dice.integers(max(1, fitting)))][:limit]


def _cut(free: int, places: int, gap: int, dice: Dice) -> list[int]:
    """Return the sizes of the blocks around ``places`` texts, which are together ``free``."""
    inner = max(0, places - 1)
    cuts = np.sort(dice.integers(0, free - gap * inner + 1, places))
    blocks = np.diff(np.concatenate([[0], cuts, [free - gap * inner]]))
    blocks[1 : 1 + inner] += gap
    return [int(block) for block in blocks]


def _filler(part: Part, tokens: int, dice: Dice) -> Ids:
    """Return a number of tokens without any family."""
    pieces, rest = [np.zeros(0, np.int32)], tokens
    while rest > 0:
        ids = part.filler[int(dice.integers(len(part.filler)))]
        pieces.append(ids[:rest])
        rest -= len(pieces[-1])
    return np.concatenate(pieces)
