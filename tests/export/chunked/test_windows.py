"""Windows of a document: their places, and one answer in float64 for the outputs of all."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pytest
from mpmath import mp, mpf
from numpy.typing import NDArray

from aftexport.bundle.manifest import Manifest, WindowLayout, WindowPolicy
from aftexport.chunked.windows import DECIDED, Aggregation, Cut, WindowedModel
from aftexport.errors import EngineError, InputError, UsageError
from aftexport.extra_inputs import ExtraInput, ExtraValues
from aftexport.heads import (
    FeatureExtraction,
    Head,
    MultiLabelClassification,
    Regression,
    SingleLabelClassification,
    TokenClassification,
)

LAYOUT = WindowLayout(tokens=12, stride=6, prefix=(1,), suffix=(2, 3))
MULTI = MultiLabelClassification.of_width(2, ("a", "b"))
SAFE = SingleLabelClassification(labels=("safe", "attack", "spam"))
GENERATOR = np.random.default_rng(0)


class Echo:
    """An engine of two heads: logits that depend on the whole window, rows of ids and places."""

    name = "echo"
    takes_choice = False

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.windows: list[list[int]] = []
        self.categories: list[list[int]] = []

    def run(
        self,
        inputs: Mapping[str, NDArray[Any]],
        stop: object = None,
        outputs: Collection[str] | None = None,
    ) -> dict[str, NDArray[Any]]:
        ids = inputs["input_ids"]
        self.shapes.append(ids.shape)
        self.windows += ids.tolist()
        self.categories += inputs.get("kind", ids[:, :0]).tolist()
        assert inputs["lengths"].tolist() == [ids.shape[1]] * len(ids)
        places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        found = {
            "logits": np.stack([np.sin(ids).sum(1), np.cos(ids).sum(1)], 1).astype(np.float32),
            "rows": np.stack([ids, places], 2).astype(np.float32),
        }
        return {name: x for name, x in found.items() if outputs is None or name in outputs}

    def release(self) -> None: ...


def manifest(aggregate: str = "max", layout: WindowLayout = LAYOUT, **changes: Any) -> Manifest:
    policy = WindowPolicy(**layout.model_dump(), aggregate=aggregate, backgrounds={})
    return Manifest.model_construct(
        heads={"logits": MULTI, "rows": FeatureExtraction(dimensions=2, per_token=True)},
        inputs=("input_ids", "lengths", *(e.name for e in changes.get("extra_inputs", ()))),
        windows=policy,
        **{"extra_inputs": (), "batching": True, **changes},
    )


def policy(aggregate: str, background: str | None = None) -> WindowPolicy:
    backgrounds = {} if background is None else {"logits": background}
    return WindowPolicy(**LAYOUT.model_dump(), aggregate=aggregate, backgrounds=backgrounds)


def aggregated(
    rule: WindowPolicy, head: Head, logits: NDArray[np.float64], *, step: int = 1
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """The result for logits of all windows, given in runs of ``step`` windows."""
    cut = Cut(rule, rule.content + rule.stride * (len(logits) - 1))
    whole = Aggregation(rule, {"logits": head})
    for first in range(0, len(logits), step):
        windows = range(first, min(first + step, len(logits)))
        whole.add(cut, windows, {"logits": logits[windows.start : windows.stop]})
    found = whole.results()
    decided = found.get(DECIDED + "logits")
    return found["logits"][0], None if decided is None else decided[0]


def own_weights(rule: WindowPolicy, windows: int) -> NDArray[np.float64]:
    cut = Cut(rule, rule.content + rule.stride * (windows - 1))
    return np.array([end - first for first, end in map(cut.own, range(windows))], np.float64)


@pytest.mark.parametrize("stride", [1, 2, 3, 5, 8, 9])
def test_own_tokens_partition_document(stride: int) -> None:
    layout = WindowLayout(tokens=12, stride=stride, prefix=(1,), suffix=(2, 3))
    for tokens in range(1, 80):
        cut = Cut(layout, tokens)
        places = [range(cut.start(i), cut.start(i) + cut.size) for i in range(len(cut))]
        assert places[-1].stop == tokens
        assert all(len(place) == min(9, tokens) for place in places)
        assert [p.start for p in places[:-1]] == [stride * i for i in range(len(cut) - 1)]
        owners = [i for i in range(len(cut)) for _ in range(*cut.own(i))]
        assert len(owners) == tokens
        for token, owner in enumerate(owners):
            distances = [abs(token - (p.start + p.stop - 1) / 2) for p in places]
            assert token in places[owner]
            assert owner == int(np.argmin(distances))


@pytest.mark.parametrize("tokens", [1, 9, 10, 15, 16, 50, 1000])
@pytest.mark.parametrize("framed", [False, True])
def test_windows_have_frame_and_rows_join(tokens: int, *, framed: bool) -> None:
    content = GENERATOR.integers(4, 90, tokens)
    document = np.array([1, *content, 2, 3]) if framed else content
    engine = Echo()
    found = WindowedModel(manifest(), engine).run(document)
    cut = Cut(LAYOUT, tokens)
    assert engine.windows == [
        [1, *content[cut.start(i) : cut.start(i) + cut.size], 2, 3] for i in range(len(cut))
    ]
    assert all(shape[0] <= 8 for shape in engine.shapes)
    np.testing.assert_array_equal(found["rows"][0, :, 0], document)
    singles = [engine.run({"input_ids": np.array([w]), "lengths": np.array([len(w)])})["logits"]
               for w in engine.windows[: len(cut)]]  # fmt: skip
    np.testing.assert_array_equal(found["logits"][0], np.concatenate(singles).max(0))


def test_token_stands_most_central() -> None:
    found = WindowedModel(manifest(), Echo()).run(GENERATOR.integers(4, 90, 200))["rows"]
    places = found[0, :, 1] - 1  # in the content of 9
    assert places[:2].tolist() == [0, 1]
    assert places[-2:].tolist() == [7, 8]
    assert places[9:-9].min() >= 1  # windows overlap by three tokens
    assert places[9:-9].max() <= 7


def test_runs_are_counted_and_shared() -> None:
    engine = Echo()
    model = WindowedModel(manifest(), engine).in_chunks_of(24)
    document = np.arange(4, 204)
    parts = model.parts(document, outputs=["logits"])
    assert model.count(len(document)) == 1 + sum(1 for _ in parts)
    assert model.run_windows == 4
    assert {shape[0] for shape in engine.shapes[:-1]} == {4}
    assert WindowedModel(manifest(batching=False), engine).run_windows == 1


def test_sink_receives_rows_in_order() -> None:
    blocks: list[NDArray[Any]] = []
    document = np.arange(4, 300)
    found = WindowedModel(manifest(), Echo()).run(document, sinks={"rows": blocks.append})
    assert "rows" not in found
    np.testing.assert_array_equal(np.concatenate(blocks, 1)[0, :, 0], document)


def test_extra_inputs_follow_tokens() -> None:
    kind = ExtraInput(name="kind", kind="token", dtype="int64", maximum=99)
    engine = Echo()
    model = WindowedModel(manifest(extra_inputs=(kind,)), engine)
    ids = np.array([1, *range(4, 24), 2, 3])
    model.run(ids, ExtraValues({}, {"kind": np.arange(50, 50 + len(ids))}))
    assert engine.categories[0] == [50, *range(51, 60), 71, 72]
    assert engine.categories[1] == [50, *range(57, 66), 71, 72]
    model.run(ids[1:-2], ExtraValues({}, {"kind": np.arange(50, 70)}))
    assert engine.categories[-1] == [0, *range(61, 70), 0, 0]


def test_invalid_runs_are_refused() -> None:
    model = WindowedModel(manifest(), Echo())
    with pytest.raises(InputError, match="no tokens"):
        model.run(np.array([], np.int64))
    with pytest.raises(UsageError, match="no evidence"):
        next(model.parts(np.arange(4, 50), evidence=[0]))

    class Broken(Echo):
        def run(self, *given: Any) -> dict[str, NDArray[Any]]:
            return {"logits": np.array([[1.0, np.nan]])}

    with pytest.raises(EngineError, match="finite"):
        WindowedModel(manifest(), Broken()).run(np.arange(4, 9))


@pytest.mark.parametrize("step", [1, 3, 20])
def test_logit_aggregates_are_exact(step: int) -> None:
    logits = GENERATOR.normal(0, 20, (20, 2))
    weights = own_weights(policy("max"), 20)[:, None]
    largest, decided = aggregated(policy("max"), MULTI, logits, step=step)
    np.testing.assert_array_equal(largest, logits.max(0))
    np.testing.assert_array_equal(decided, logits.argmax(0))
    mean, nothing = aggregated(policy("mean"), MULTI, logits, step=step)
    np.testing.assert_allclose(mean, (weights * logits).sum(0) / weights.sum(), rtol=1e-13)
    assert nothing is None
    wide = [[mp.exp(mpf(x)) for x in column] for column in logits.T.tolist()]
    expected = [
        float(mp.log(sum(w * x for w, x in zip(weights[:, 0], one, strict=True)) / weights.sum()))
        for one in wide
    ]
    found, _ = aggregated(policy("logsumexp"), MULTI, logits, step=step)
    np.testing.assert_allclose(found, expected, rtol=1e-13)


@pytest.mark.parametrize("center", [-800.0, -40.0, -34.0, -5.0, 0.0, 3.0, 40.0, 900.0])
def test_noisy_or_is_exact(center: float) -> None:
    with mp.workdps(900):
        logits = GENERATOR.normal(center, 2, (30, 2))
        expected = []
        for column in logits.T.tolist():
            none = mp.fprod(1 / (1 + mp.exp(mpf(x))) for x in column)
            expected.append(float(mp.log((1 - none) / none)))
        found, decided = aggregated(policy("noisy_or"), MULTI, logits, step=7)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        np.testing.assert_array_equal(decided, logits.argmax(0))


@pytest.mark.parametrize("spread", [0.1, 5.0, 60.0])
def test_noisy_or_of_exclusive_labels(spread: float) -> None:
    with mp.workdps(400):
        logits = GENERATOR.normal(0, spread, (11, 3))
        rows = [[mp.exp(mpf(x)) for x in row] for row in logits.tolist()]
        wide = [[x / sum(row) for x in row] for row in rows]
        none = [mp.fprod(1 - row[label] for row in wide) for label in range(3)]
        background = mp.fprod(row[0] for row in wide)
        shares = [1 - none[label] for label in (1, 2)]
        of_others = [(1 - background) * share / sum(shares) for share in shares]
        expected = [float(mp.log(x)) for x in (background, *of_others)]
        found, _ = aggregated(policy("noisy_or", "safe"), SAFE, logits, step=4)
        np.testing.assert_allclose(found - np.logaddexp.reduce(found), expected, rtol=1e-11)
        alike = [float(mp.log((1 - one) / sum(1 - x for x in none))) for one in none]
        found, _ = aggregated(policy("noisy_or"), SAFE, logits, step=4)
        np.testing.assert_allclose(
            found - np.logaddexp.reduce(found), alike, rtol=1e-11, atol=1e-13
        )


def test_vectors_are_means() -> None:
    vectors = GENERATOR.normal(0, 1, (9, 4))
    weights = own_weights(policy("max"), 9)
    found, decided = aggregated(policy("max"), FeatureExtraction(dimensions=4), vectors)
    np.testing.assert_allclose(found, weights @ vectors / weights.sum(), rtol=1e-13)
    assert decided is None


class Payload(Echo):
    """An engine of one head, which finds 20 tokens of 7 only if a window has all of them."""

    def run(self, inputs: Mapping[str, NDArray[Any]], *_: object) -> dict[str, NDArray[Any]]:
        found = (inputs["input_ids"] == 7).sum(1) >= 20
        return {"logits": np.where(found[:, None], [-4.0, 4.0], [6.0, -6.0])}


@pytest.mark.parametrize("aggregate", ["max", "noisy_or"])
def test_label_is_same_wherever_payload_stands(aggregate: str) -> None:
    head = SingleLabelClassification(labels=("safe", "attack"))
    rule = WindowPolicy(
        tokens=512, stride=384, prefix=(1,), suffix=(2,),
        aggregate=aggregate, backgrounds={"logits": "safe"},
    )  # fmt: skip
    own = manifest().model_copy(update={"windows": rule, "heads": {"logits": head}})
    model = WindowedModel(own, Payload())
    borders = [384 * i + shift for i in (1, 64, 129) for shift in (-21, -1, 0, 1, 107, 126)]
    for place in (0, 49_980, *borders, *GENERATOR.integers(0, 49_980, 20)):
        document = np.full(50_000, 5)
        document[place : place + 20] = 7
        found = model.run(document)
        assert head.answer(found["logits"][0]).label == "attack"
        start = Cut(rule, 50_000).start(int(found[DECIDED + "logits"][0, 1]))
        assert start <= place <= start + 490
    assert head.answer(model.run(np.full(50_000, 5))["logits"][0]).label == "safe"


@pytest.mark.parametrize("aggregate", ["max", "noisy_or"])
def test_safe_windows_never_outvote_payload(aggregate: str) -> None:
    """One window of 200 finds something, at every place."""
    for place in range(0, 200, 7):
        logits = np.tile([4.0, -4.0, -5.0], (200, 1))
        logits[place] = [-3.0, 5.0, 0.0]
        found, decided = aggregated(policy(aggregate, "safe"), SAFE, logits, step=8)
        assert found.argmax() == 1
        assert decided is not None
        assert decided[1] == place


def test_single_window_keeps_scores() -> None:
    logits = GENERATOR.normal(0, 10, (1, 3))
    scores = SAFE.scores(logits[0])
    for aggregate in ("max", "mean", "logsumexp", "noisy_or"):
        for background in (None, "safe", "spam"):
            found, _ = aggregated(policy(aggregate, background), SAFE, logits)
            np.testing.assert_allclose(SAFE.scores(found), scores, rtol=1e-12)


def test_shift_of_exclusive_logits_has_no_effect() -> None:
    logits = GENERATOR.normal(0, 3, (9, 3))
    shifted = logits + GENERATOR.normal(0, 50, (9, 1))
    for aggregate in ("max", "mean", "logsumexp", "noisy_or"):
        for background in (None, "attack"):
            results = [
                SAFE.scores(aggregated(policy(aggregate, background), SAFE, x)[0])
                for x in (logits, shifted)
            ]
            np.testing.assert_allclose(results[0], results[1], rtol=1e-9)


@pytest.mark.parametrize(
    ("aggregate", "head", "expected"),
    [
        ("noisy_or", Regression.of_width(1, None), "max or mean"),
        ("logsumexp", Regression.of_width(1, None), "max or mean"),
        (None, MULTI, "expected one"),
        (None, TokenClassification.of_width(3, None), None),
        ("max", FeatureExtraction(dimensions=4), None),
    ],
)
def test_aggregate_fits_head(aggregate: str | None, head: Head, expected: str | None) -> None:
    problem = WindowPolicy(**LAYOUT.model_dump(), aggregate=aggregate).problem_for("logits", head)
    assert problem is None if expected is None else expected in str(problem)


@pytest.mark.parametrize(("tokens", "stride"), [(3, 1), (12, 10), (12, 0)])
def test_layout_without_content_is_refused(tokens: int, stride: int) -> None:
    with pytest.raises(ValueError, match=r"tokens|stride"):
        WindowLayout(tokens=tokens, stride=stride, prefix=(1,), suffix=(2, 3))


def test_many_windows_are_aggregated_exactly() -> None:
    rule = policy("noisy_or")
    whole = Aggregation(rule, {"logits": MULTI})
    cut = Cut(rule, 1 << 18)
    block = np.full((1000, 2), -9.0)
    for first in range(0, len(cut), 1000):
        windows = range(first, min(first + 1000, len(cut)))
        whole.add(cut, windows, {"logits": block[: len(windows)]})
    (found,) = whole.results()["logits"]
    none = -len(cut) * np.log1p(np.exp(-9.0))
    np.testing.assert_allclose(found, np.log(-np.expm1(none)) - none, rtol=1e-11)
