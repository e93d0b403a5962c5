from functools import partial

import numpy as np
import pytest
import torch

from benchmarks.documents import measures, tables
from benchmarks.documents.compose import (
    CONFLICT,
    WINDOW,
    Document,
    Task,
    draw_many,
    make_tasks,
    windows_of,
)
from benchmarks.documents.contenders import BAG, config_of, ends_of, fit_aggregate, fit_bag
from benchmarks.documents.texts import Data
from train_whole_documents import Recipe, draw_batch, make_loss, train

COUNTS = {128: 20, 512: 20, 2_048: 20, 8_192: 10}


@pytest.fixture(scope="session")
def tasks(data: Data) -> dict[str, Task]:
    return make_tasks(data.labels)


def drawn(data: Data, task: Task, part: str = "test", seed: int = 0) -> list[Document]:
    groups = draw_many(task, data.parts[part], COUNTS, seed)
    assert all(len(own.ids) == tokens for tokens, group in groups.items() for own in group)
    return [each for group in groups.values() for each in group]


def families_in(data: Data, document: Document) -> set[str]:
    """Return the families whose name stands in a document; every text begins with its own."""
    text = data.tokenizer.decode(document.ids.tolist()).lower()
    return {name for name in data.labels if name in text}


def test_contained_families_are_labels(data: Data, tasks: dict[str, Task]) -> None:
    documents = drawn(data, tasks["contains"])
    assert {int(each.target.sum()) for each in documents} >= {0, 1, 2, 3}
    for each in documents:
        labels = {name for name, holds in zip(data.labels, each.target, strict=True) if holds}
        assert families_in(data, each) == labels == {name for name, _, _ in each.places}
        assert each.is_clean == (not labels)


def test_places_hold_texts_of_part(data: Data, tasks: dict[str, Task]) -> None:
    for each in drawn(data, tasks["contains"]):
        for family, start, end in each.places:
            planted = each.ids[start:end].tolist()
            texts = [ids.tolist() for ids in data.parts["test"].families[family]]
            assert any(ids[: len(planted)] == planted for ids in texts)


def test_dominant_family_covers_most(data: Data, tasks: dict[str, Task]) -> None:
    for each in drawn(data, tasks["dominant"]):
        tokens = dict.fromkeys(data.labels, 0)
        for family, start, end in each.places:
            tokens[family] += end - start
        label = data.labels[int(each.target.argmax())]
        second = max(count for family, count in tokens.items() if family != label)
        assert tokens[label] >= 1.4 * second > 0
        assert each.target.sum() == 1


def test_conflict_is_beyond_windows(data: Data, tasks: dict[str, Task]) -> None:
    documents = drawn(data, tasks["conflict"])
    assert {int(each.target[0]) for each in documents} == {0, 1}
    for each in documents:
        (first, _, end), (second, start, _) = each.places
        assert {first, second} <= set(CONFLICT)
        assert each.target[0] == (first != second) == (not each.is_clean)
        assert start - end >= (WINDOW if len(each.ids) >= 4 * WINDOW else 0)


def test_documents_depend_only_on_seed(data: Data, tasks: dict[str, Task]) -> None:
    for task in tasks.values():
        first, again, other = (drawn(data, task, seed=seed) for seed in (0, 0, 1))
        assert all(np.array_equal(a.ids, b.ids) for a, b in zip(first, again, strict=True))
        assert not all(np.array_equal(a.ids, b.ids) for a, b in zip(first, other, strict=True))


def test_windows_cover_document() -> None:
    for tokens in (1, 511, 512, 513, 896, 897, 5_000):
        ids = np.arange(tokens, dtype=np.int32)
        windows = windows_of(ids)
        assert set(np.concatenate(windows).tolist()) == set(range(tokens))
        assert {len(each) for each in windows} == {min(tokens, WINDOW)}
        assert len(windows) == max(1, -(-(tokens - WINDOW) // 384) + 1)


def test_ends_are_first_and_last_tokens() -> None:
    ids = np.arange(2_000, dtype=np.int32)
    assert ends_of(ids).tolist() == [*range(256), *range(1_744, 2_000)]
    assert ends_of(ids[:300]).tolist() == list(range(300))


def small(tokens: int, *target: int) -> Document:
    return Document(np.zeros(tokens, np.int32), np.array(target), is_clean=not any(target))


def test_learned_aggregate_finds_largest_window(tasks: dict[str, Task]) -> None:
    dice = np.random.default_rng(0)
    targets = dice.integers(0, 2, (200, 3))
    scores = [0.2 * dice.random((dice.integers(2, 9), 3)) for _ in targets]
    for own, target in zip(scores, targets, strict=True):
        own[dice.integers(len(own))] += 0.7 * target
    documents = [small(9, *target) for target in targets.tolist()]
    aggregate = fit_aggregate(scores[:100], documents[:100])
    assert ((aggregate(scores[100:]) > 0.5) == targets[100:]).mean() > 0.99


def test_measures_of_known_scores(tasks: dict[str, Task]) -> None:
    documents = [small(n, *target) for n in (8, 64) for target in
                 ((1, 0, 0), (0, 1, 1), (0, 0, 0), (0, 0, 0))] * 20  # fmt: skip
    targets = np.stack([each.target for each in documents])
    judge = measures.make_judge(tasks["contains"], 0.2 + 0.3 * targets, documents)
    assert 0.2 < judge.threshold <= 0.5
    scores = np.full(targets.shape, 0.1)
    scores[::4, 0] = 0.6  # right
    scores[2::4, 1] = 0.7  # a false alarm, above what is right
    found = judge.measure(scores, documents)
    assert found["f1"] == pytest.approx(2 * 40 / (80 + 120))
    assert found["false_alarms"] == 0.5
    # Recall 0 at 0.7, a third at 0.6 with precision 1/2, and the rest with all else.
    assert found["average_precision"] == pytest.approx(1 / 3 / 2 + 2 / 3 * 120 / 480)


def test_single_label_is_largest_score(tasks: dict[str, Task]) -> None:
    documents = [small(8, 1, 0, 0), small(8, 0, 1, 0)] * 20
    scores = np.array([[0.4, 0.3, 0.3], [0.5, 0.3, 0.2]] * 20)
    judge = measures.make_judge(tasks["dominant"], scores, documents)
    found = judge.measure(scores, documents)
    assert found["f1"] == 0.5
    assert found["false_alarms"] is None


@pytest.mark.parametrize("name", ["contains", "dominant", "conflict"])
def test_calibration_lowers_error(name: str, tasks: dict[str, Task]) -> None:
    task, dice = tasks[name], np.random.default_rng(0)
    width = len(task.columns)
    logits = 3 * dice.standard_normal((600, width))
    chance = 1 / (1 + np.exp(-logits / 3))
    targets = (dice.random(chance.shape) < chance).astype(int)
    scores = 1 / (1 + np.exp(-logits))
    if name == "dominant":
        scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        chance = np.exp(logits / 3) / np.exp(logits / 3).sum(1, keepdims=True)
        targets = np.stack([dice.multinomial(1, own) for own in chance])
    documents = [small(64, *target) for target in targets.tolist()]
    judge = measures.make_judge(task, scores[:300], documents[:300])
    found = judge.measure(scores[300:], documents[300:])
    assert found["error_after"] < 0.1 < 0.12 < found["error_before"]


RECIPE = Recipe(seconds=0.6, stages=((0.5, 64), (0.5, 256)), min_tokens=48,
                tokens_per_step=512, learning_rate=1e-2, checks=3)  # fmt: skip


def test_lengths_grow_by_stage(data: Data, tasks: dict[str, Task]) -> None:
    draw = partial(tasks["contains"].draw, data.parts["train"])
    dice, recipe = np.random.default_rng(0), Recipe()
    for progress, greatest in (
        (0.0, 256),
        (0.39, 256),
        (0.4, 1_024),
        (0.89, 4_096),
        (0.95, 16_384),
    ):
        batches = [draw_batch(draw, recipe, progress, dice) for _ in range(40)]
        lengths = [len(batch[0].ids) for batch in batches]
        assert recipe.min_tokens <= min(lengths) < max(lengths) / 2 <= greatest / 2 < max(lengths)
        assert all(len({len(each.ids) for each in batch}) == 1 for batch in batches)
        assert max(sum(len(each.ids) for each in batch) for batch in batches) <= max(
            recipe.tokens_per_step, greatest
        )


def test_training_keeps_best_weights(data: Data, tasks: dict[str, Task]) -> None:
    task, threads = tasks["contains"], torch.get_num_threads()
    torch.set_num_threads(1)
    draw = partial(task.draw, data.parts["train"])
    checks = draw_many(task, data.parts["valid"], {200: 20}, 0)[200]
    config = config_of("aft_simple", "mean", task, data.tokenizer.get_vocab_size())
    trained = train(config, draw, checks, RECIPE)
    torch.set_num_threads(threads)
    assert trained.steps > 3
    assert not trained.model.training
    logits = [trained.model(torch.from_numpy(each.ids).long()[None], torch.tensor([200]))
              for each in checks]  # fmt: skip
    dice = np.random.default_rng(0)
    loss = make_loss(task.problem_type, draw, RECIPE, dice)
    targets = torch.from_numpy(np.stack([each.target for each in checks])).float()
    assert loss(torch.cat(logits), targets).item() <= min(trained.losses) + 1e-4


def test_bag_of_words_finds_families(data: Data, tasks: dict[str, Task]) -> None:
    task = tasks["contains"]
    draw = partial(task.draw, data.parts["train"])
    answers = fit_bag(draw, RECIPE, data.tokenizer.get_vocab_size(), seed=0, documents=1_000)
    documents = draw_many(task, data.parts["test"], {128: 60}, 0)[128]
    judge = measures.make_judge(task, answers(documents)[BAG], documents)
    assert judge.measure(answers(documents)[BAG], documents)["average_precision"] > 0.75


def test_table_has_mean_of_seeds() -> None:
    common = {"mechanism": "contains", "tokens": 512, "contender": "first", "false_alarms": 0.5,
              "error_before": 0.2, "error_after": 0.1, "average_precision": 1.0}  # fmt: skip
    record = {
        "date": "2026-01-02", "commit": "0123456789ab", "threads": 2, "rounds": 2, "versions": {},
        "processor": {"title": "Some", "vendor": "Maker", "family": 1, "model": 2},
        "package": "package==1", "recipe": {"seconds": 60.0}, "left_out": [],
        "contenders": {"first": {"title": "first 512"}, "absent": {"title": "Absent"}},
        "rows": [common | {"seed": seed, "f1": f1} for seed, f1 in ((0, 0.25), (1, 0.75))],
    }  # fmt: skip
    page = "\n\n".join(tables.record_parts(record))
    assert "| contender | 512 tokens |\n|---|---|\n| first 512 | 0.50 (1.00) |" in page
    assert "| first 512 | 0.50; 0.20, 0.10 |" in page
    assert "Absent" not in page
