"""The choice of heads and of logits with evidence, without a server."""

import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from bundles import resealed

from aftexport.bundle.bundle import Bundle
from aftexport.bundle.manifest import Manifest
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import InputError
from aftexport.heads import HEADS, Head
from aftexport.system.contract import EXPLAINED
from aftserve.errors import DocumentTooLongError
from aftserve.model.answers import InlineTokens
from aftserve.model.classifier import Classifier
from aftserve.model.documents import check_evidence
from aftserve.model.wanted import EVERY_HEAD, AnswerOptions, ChosenLogit, Wanted, choices


def manifest_of(bundle_folder: Path, heads: dict[str, Head], **changes: object) -> Manifest:
    """Return the manifest of the tests' bundle with other heads."""
    offsets = {name: (0.0,) * head.width for name, head in heads.items() if not head.is_per_token}
    update = {"heads": heads, "evidence_heads": offsets or None}
    manifest: Manifest = Bundle.open(bundle_folder).manifest.model_copy(update=update | changes)
    return manifest


@pytest.fixture(scope="module")
def heads() -> dict[str, Head]:
    def head(task: str, width: int, *names: str) -> Head:
        return HEADS[task].of_width(width, names or None)

    return {
        "tags": head("token_classification", 2, "O", "spam"),
        "spam": head("binary_classification", 1, "ham", "spam"),
        "flags": head("multi_label_classification", 3, "late", "ham", "a:b"),
        "size": head("regression", 2, "late", "wide"),
        "vector": head("feature_extraction", 4),
    }


def explained(manifest: Manifest, *names: str) -> list[ChosenLogit]:
    return [*AnswerOptions(spans=1, explain=names).wanted(manifest).explained]


def test_names_choose_logits(bundle_folder: Path, heads: dict[str, Head]) -> None:
    manifest = manifest_of(bundle_folder, heads)
    assert explained(manifest, "spam") == [ChosenLogit("spam", 0, 0, sign=1)]
    assert explained(manifest, "spam:ham") == [ChosenLogit("spam", 0, 0, sign=-1)]
    assert explained(manifest, "a:b", "wide") == [
        ChosenLogit("flags", 3, 2),
        ChosenLogit("size", 5, 1),
    ]
    assert explained(manifest, "flags:late", "flags:late") == [ChosenLogit("flags", 1, 0)]
    assert explained(manifest, "size") == [ChosenLogit("size", 4, 0), ChosenLogit("size", 5, 1)]
    assert [one.must_hold for one in explained(manifest, "flags")] == [True] * 3
    assert choices(manifest) == [
        "spam", "flags", "size", "a:b", "wide", "spam:ham", "spam:spam", "flags:late", "flags:ham",
        "flags:a:b", "size:late", "size:wide",
    ]  # fmt: skip


def test_every_choice_is_accepted(bundle_folder: Path) -> None:
    """The OpenAPI document names the choices; a head without evidence shares labels."""
    multi, single = HEADS["multi_label_classification"], HEADS["single_label_classification"]
    heads: dict[str, Head] = {
        "plain": single.of_width(3, ("yes", "no", "able")),
        "able": single.of_width(3, ("yes", "same", "other")),
        "same": multi.of_width(2, ("same", "yes or no")),
        "other": multi.of_width(2, ("same", "able:yes")),
    }
    able = {name: (0.0,) * head.width for name, head in heads.items() if name != "plain"}
    manifest = manifest_of(bundle_folder, heads, evidence_heads=able)
    assert explained(manifest, "yes") == [ChosenLogit("able", 0, 0)]
    assert explained(manifest, "able")[0].index is None
    names = [*heads, *(label for head in heads.values() for label in head.names)]
    forms = [f"{head}:{label}" for head in heads for label in heads[head].names]
    accepted = set()
    for name in (*names, *forms):
        with suppress(InputError):
            explained(manifest, name)
            accepted.add(name)
    assert accepted == {*choices(manifest)}
    # A label of two outputs, the name of one of them, and a form that is a label too.
    assert not accepted & {"same", "able:yes", "plain", "no", "plain:yes"}


def test_repeated_names_of_many_labels_take_no_time(bundle_folder: Path) -> None:
    labels = tuple(f"label {number}" for number in range(10_000))
    head = HEADS["multi_label_classification"].of_width(len(labels), labels)
    manifest = manifest_of(bundle_folder, {"flags": head})
    options = AnswerOptions(spans=1, explain=[labels[-1]] * 256)
    (first,) = options.wanted(manifest).explained
    assert first.index == 9_999
    begin = time.thread_time()
    for _ in range(20):
        options.wanted(manifest)
    assert (time.thread_time() - begin) / 20 < 0.01  # scans of the labels take 0.2 s
    replaced = manifest.model_copy(update={"heads": {"flags": HEADS[head.task].of_width(2, None)}})
    with pytest.raises(InputError, match="got 'label 9999'"):
        options.wanted(replaced)


def test_chosen_label_has_default_passages() -> None:
    assert AnswerOptions(0, ["a"]).spans == AnswerOptions(explain=["a"]).spans == 5
    assert AnswerOptions(2, ["a"]).spans == 2
    assert AnswerOptions().spans == 0


def test_evidence_of_a_request_is_limited() -> None:
    """A request of several documents holds the numbers of all of them until it ends."""
    few, many = 1 << 16, 1 << 25
    inline = InlineTokens(explained=32)
    inline.add({}, [few] * 8)
    with pytest.raises(DocumentTooLongError, match=r"at most 16777216 numbers.*got 18874368"):
        inline.add({}, [few])
    with pytest.raises(DocumentTooLongError, match="got 536870912"):
        InlineTokens(explained=32).add({}, [few] * 256)
    InlineTokens(explained=1).add({}, [few] * 256)
    InlineTokens(explained=1).add({}, [many])
    InlineTokens().add({}, [many] * 256)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("late", "one output, got 'late' of flags, size. Send explain=flags:late"),
        ("tags", "The output tags has no evidence: token_classification has no labels or values"),
        ("tags:O", "The output tags has no evidence"),
        ("vector", "feature_extraction has no labels or values of documents. Choose an output"),
        ("vector:1", "The output vector has no evidence"),
        ("", "got ''. Choose one that the model has: ham, spam, late, ham, a:b"),
    ],
)
def test_other_names_are_refused(
    name: str, message: str, bundle_folder: Path, heads: dict[str, Head]
) -> None:
    with pytest.raises(InputError) as refused:
        explained(manifest_of(bundle_folder, heads), name)
    assert message in str(refused.value)


def test_head_without_evidence_has_its_reason(bundle_folder: Path, heads: dict[str, Head]) -> None:
    manifest = manifest_of(
        bundle_folder,
        {name: heads[name] for name in ("flags", "size")},
        evidence_heads={"size": (0.0, 0.0)},
        refused_evidence={"flags": "Tanh stands between"},
    )
    with pytest.raises(InputError, match="flags has no evidence: Tanh stands between"):
        explained(manifest, "flags:ham")
    assert explained(manifest, "size:wide") == [ChosenLogit("size", 1, 1)]


def test_many_labels_are_refused(bundle_folder: Path) -> None:
    labels = HEADS["multi_label_classification"].of_width(40, None)
    manifest = manifest_of(bundle_folder, {"flags": labels})
    with pytest.raises(InputError, match="at most 32 labels or values, got 40 or more"):
        explained(manifest, "flags")
    assert choices(manifest)[0] == labels.names[0]


def test_batch_has_choices_of_its_documents(bundle_folder: Path) -> None:
    """Documents of one run are explained for other labels, for several, or for none."""
    bundle = Bundle.open(bundle_folder)
    classifier = Classifier(bundle, OnnxRuntimeEngine(bundle.model_path))
    labels = bundle.manifest.heads["logits"].names
    documents = [np.arange(count) % 250 for count in (30, 12, 25, 30)]
    options = [("logits:" + labels[2],), (), labels, (labels[0],)]
    wanted = [
        AnswerOptions(spans=1, explain=names).wanted(bundle.manifest) if names else EVERY_HEAD
        for names in options
    ]
    answers = classifier.classify(documents, wanted=wanted)
    assert bundle.manifest.evidence_heads is not None
    offsets = bundle.manifest.evidence_heads["logits"]
    for answer, ids, names in zip(answers, documents, options, strict=True):
        chosen = [name.removeprefix("logits:") for name in names]
        assert [one.name for one in answer.explained] == chosen
        for one in answer.explained:
            index = labels.index(one.name)
            assert one.added.shape == (len(ids),)
            assert one.logit == answer.outputs["logits"][index]
            total = one.added.sum(dtype=np.float64) + offsets[index]
            assert total == pytest.approx(one.logit, abs=1e-4)


def test_long_document_explains_fewer_labels(bundle_folder: Path) -> None:
    bundle = Bundle.open(bundle_folder)
    classifier = Classifier(bundle, OnnxRuntimeEngine(bundle.model_path))
    wanted = Wanted(None, tuple(ChosenLogit("logits", number, number) for number in range(3)))
    check_evidence(classifier, wanted, (1 << 22) // 3)
    with pytest.raises(InputError, match="at most 2 labels or values to explain"):
        check_evidence(classifier, wanted, (1 << 22) // 3 + 1)
    check_evidence(classifier, AnswerOptions(spans=1).wanted(bundle.manifest), 1 << 30)


def test_file_without_choice_has_default_evidence(bundle_copy: Path) -> None:
    """An engine that takes no choice explains the largest logit of the first output."""
    new = Classifier(Bundle.open(bundle_copy), OnnxRuntimeEngine(bundle_copy / "model.onnx"))
    model = onnx.load(bundle_copy / "model.onnx")
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.replace(EXPLAINED, "minus_one")
    for node in model.graph.node:
        node.input[:] = [name.replace(EXPLAINED, "minus_one") for name in node.input]
    onnx.save(model, bundle_copy / "model.onnx")
    bundle = Bundle.open(resealed(bundle_copy))
    engine = OnnxRuntimeEngine(bundle.model_path)
    assert not engine.takes_choice
    old = Classifier(bundle, engine)
    ids = np.arange(40)
    answers = [
        one.classify([ids], wanted=[AnswerOptions(spans=1).wanted(one.manifest)])[0].explained[0]
        for one in (new, old)
    ]
    assert answers[0].name == answers[1].name
    np.testing.assert_array_equal(answers[0].added, answers[1].added)
    chosen = Wanted(None, (ChosenLogit("logits", 1, 1),))
    with pytest.raises(InputError, match="onnxruntime explains only the largest logit"):
        check_evidence(old, chosen, 40)
