"""A model with several outputs computes each as a model with only that output."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import aftexport
from aftexport.bundle.bundle import Bundle
from aftexport.checkpoint import load
from aftexport.errors import CheckpointError, UsageError
from aftexport.heads import FeatureExtraction, MultiLabelClassification, TokenClassification
from aftexport.nn import (
    ClassifierConfig,
    DocumentClassifier,
    HeadConfig,
    MultiHeadClassifier,
    MultiHeadConfig,
    task_loss,
)
from aftexport.pipeline.export import export

SETTINGS: dict[str, Any] = {"mechanism": "aft_simple", "vocab_size": 40, "dim": 8, "depth": 1}
HEADS: dict[str, HeadConfig] = {
    "type": HeadConfig(problem_type="multi_label_classification", num_labels=3),
    "entities": HeadConfig(problem_type="token_classification", num_labels=5),
    "vector": HeadConfig(problem_type="feature_extraction", pooling="attention"),
    "vectors": HeadConfig(problem_type="feature_extraction", pooling="none"),
}
LABELS = {"type": ["x", "y", "z"], "entities": ["O", "B-A", "I-A", "B-B", "I-B"]}
LENGTHS = torch.tensor([9, 4, 1])


def make_model() -> MultiHeadClassifier:
    torch.manual_seed(5)
    return MultiHeadClassifier(MultiHeadConfig(**SETTINGS, heads=HEADS)).eval()


def documents() -> Tensor:
    return torch.randint(40, (3, 9), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", HEADS)
def test_output_is_that_of_one_head(name: str) -> None:
    model, place = make_model(), list(HEADS).index(name)
    head = HEADS[name]
    config = ClassifierConfig(
        **SETTINGS,
        problem_type=head.problem_type,
        num_labels=head.num_labels,
        pooling=head.pooling,
    )
    alone = DocumentClassifier(config)
    renamed = {
        key.replace(f"heads.{place}.", "head.").replace(f"poolings.{place}.", "pooling."): value
        for key, value in model.state_dict().items()
    }
    alone.load_state_dict({key: renamed[key] for key in alone.state_dict()})
    output, expected = model(documents(), LENGTHS)[name], alone(documents(), LENGTHS)
    assert output.shape == ((3, 9) if head.is_per_token else (3,)) + (head.num_labels or 8,)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_rows_of_tokens_ignore_padding() -> None:
    model = make_model().double()
    together = model(documents(), LENGTHS)["entities"]
    for document, length in enumerate(LENGTHS.tolist()):
        own = slice(document, document + 1)
        alone = model(documents()[own, :length], LENGTHS[own])["entities"]
        torch.testing.assert_close(together[own, :length], alone, rtol=0, atol=1e-12)


def test_all_heads_learn_together() -> None:
    model = make_model().train()
    targets = {
        "type": torch.tensor([[1, 0, 1], [0, 0, 1], [0, 1, 0]]),
        "entities": torch.arange(27).reshape(3, 9) % 5,
        "vector": torch.eye(3, 8),
        "vectors": torch.eye(8)[torch.arange(27).reshape(3, 9) % 4],
    }
    ids = torch.arange(27).reshape(3, 9)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    losses = []
    for _ in range(60):
        outputs = model(ids, LENGTHS)
        parts = {
            name: task_loss(head.problem_type, outputs[name], targets[name], LENGTHS)
            for name, head in model.config.heads.items()
        }
        optimizer.zero_grad()
        torch.stack([*parts.values()]).sum().backward()
        optimizer.step()
        losses.append({name: loss.item() for name, loss in parts.items()})
    for name in HEADS:
        assert losses[-1][name] < losses[0][name] / 2, name


def test_configuration_survives_json() -> None:
    config = make_model().config
    assert MultiHeadConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({}, "at least one output"),
        ({"input_ids": {"num_labels": 2}}, "named by .*got 'input_ids'"),
        ({"a-b": {"num_labels": 2}}, "named by .*got 'a-b'"),
        ({"a": {"num_labels": 0}}, "num_labels must be a positive whole number, got 0"),
        ({"a": {"num_labels": 2, "pooling": "none"}}, "pooling of .* must be one of mean"),
        ({"a": {"num_labels": 2, "width": 3}}, "got width.*Choose from num_labels, pooling"),
        ({"a": {"problem_type": "feature_extraction", "num_labels": 2}}, "num_labels must be null"),
        ({"a": 2}, "heads must be a mapping"),
        ([], "heads must be a mapping"),
    ],
    ids=str,
)
def test_impossible_heads_are_refused(heads: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MultiHeadConfig.from_dict({**SETTINGS, "heads": heads})


def test_saved_model_keeps_its_heads(tmp_path: Path) -> None:
    model = make_model()
    aftexport.save(tmp_path / "model.pt", model=model, labels=LABELS)
    read = load(tmp_path / "model.pt")
    assert read.heads == {
        "type": MultiLabelClassification.of_width(3, LABELS["type"]),
        "entities": TokenClassification.of_width(5, LABELS["entities"]),
        "vector": FeatureExtraction(dimensions=8),
        "vectors": FeatureExtraction(dimensions=8, per_token=True),
    }
    assert isinstance(read.module, MultiHeadClassifier)
    for name, output in read.module.eval()(documents(), LENGTHS).items():
        torch.testing.assert_close(output, model(documents(), LENGTHS)[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a", "b", "c"], "labels of each output by its name, got a list"),
        ({"kind": ["a"]}, "outputs type, entities, .*got those of kind"),
        ({"type": ["a"]}, "Expected 3 different labels"),
        ({"vector": ["a"] * 8}, "no labels for feature_extraction"),
    ],
    ids=str,
)
def test_wrong_labels_are_refused(labels: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        aftexport.save(tmp_path / "model.pt", model=make_model(), labels=labels)
    aftexport.save(tmp_path / "model.pt", model=make_model())
    content = torch.load(tmp_path / "model.pt")
    torch.save({**content, "labels": labels}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "model.pt")


@pytest.mark.slow
def test_saved_model_is_exported(tmp_path: Path) -> None:
    aftexport.save(tmp_path / "model.pt", model=make_model(), labels=LABELS)
    bundle = export(tmp_path / "model.pt")
    heads = bundle.manifest.heads
    assert heads == load(tmp_path / "model.pt").heads
    assert list(heads) == list(HEADS)
    assert Bundle.open(bundle.path).manifest == bundle.manifest
    retold = export(tmp_path / "model.pt", out=tmp_path / "b", task={"type": "regression"})
    assert retold.manifest.heads["type"].task == "regression"
    assert retold.manifest.heads["entities"] == heads["entities"]
