import json
from pathlib import Path

import pytest
from memory import NEEDS_PROC
from token_models import Chunks, Tagger, TopicAndTags

from aftexport.bundle.bundle import PARITY, Bundle, check_plan, is_replaceable
from aftexport.bundle.manifest import ChunkedPlan
from aftexport.errors import BundleError, UsageError


def test_bundle_holds_documented_files(bundle_folder: Path) -> None:
    assert {path.name for path in bundle_folder.iterdir()} == {
        "manifest.json", "model.onnx", "model.onnx.data", "chunked.zip", "tokenizer.json",
        "golden.safetensors", "parity.json", "parity.html",
    }  # fmt: skip
    bundle = Bundle.open(bundle_folder)
    assert bundle.manifest.hardware == "any"
    assert bundle.manifest.config is not None
    assert bundle.manifest.config["mechanism"] == "aft_simple"
    assert bundle.tokenizer() is not None
    assert set(bundle.files) == {p.name for p in bundle_folder.iterdir()} - {"manifest.json"}


def test_parity_json_describes_comparison(bundle_folder: Path) -> None:
    record = json.loads((bundle_folder / PARITY).read_text("utf-8"))
    assert record["checked"] is True
    assert all(case["passed"] and case["error"] <= case["bound"] for case in record["cases"])
    shapes = [case["shape"] for case in record["cases"] if case["subject"] == "model"]
    assert [1, 1] in shapes
    assert max(tokens for _, tokens in shapes) >= 4096
    assert max(batch for batch, _ in shapes) >= 3


def test_source_file_is_known_by_content(
    bundle_folder: Path, checkpoint_file: Path, tmp_path: Path
) -> None:
    bundle = Bundle.open(bundle_folder)
    same = tmp_path / "same.pt"
    same.write_bytes(checkpoint_file.read_bytes())
    bundle.check_source(same)
    other = tmp_path / "other.pt"
    other.write_bytes(checkpoint_file.read_bytes() + b"\0")
    with pytest.raises(UsageError, match=r"got .*other\.pt"):
        bundle.check_source(other)


@NEEDS_PROC
def test_unreadable_source_is_refused(bundle_folder: Path) -> None:
    with pytest.raises(UsageError, match="/proc/self/mem cannot be read"):
        Bundle.open(bundle_folder).check_source(Path("/proc/self/mem"))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Chunks:
    return Chunks(TopicAndTags(), tmp_path_factory.mktemp("both"))


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Chunks:
    return Chunks(Tagger(), tmp_path_factory.mktemp("tagger"))


def test_plan_fits_its_archive(both: Chunks, tagger: Chunks) -> None:
    for chunks in (both, tagger):
        check_plan(chunks.path.parent, chunks.path, chunks.plan)
        assert ChunkedPlan.model_validate_json(chunks.plan.model_dump_json()) == chunks.plan


@pytest.mark.parametrize(
    ("model", "changes", "reason"),
    [
        ("both", {"tokens": {}}, "tokens: expected a value, as chunked.zip has tokens.onnx"),
        ("both", {"pooled": {}}, "pooled: expected a value, as chunked.zip has pool.onnx"),
        ("both", {"evidence": False}, "evidence: expected true, as chunked.zip has explain.onnx"),
        ("tagger", {"pooled": {"x": "sum"}}, "pooled: expected none, as chunked.zip has no pool"),
        ("tagger", {"evidence": True}, "evidence: expected false, as chunked.zip has no explain"),
    ],
)
def test_graphs_and_fields_must_agree(
    model: str, changes: dict[str, object], reason: str, request: pytest.FixtureRequest
) -> None:
    chunks: Chunks = request.getfixturevalue(model)
    with pytest.raises(BundleError, match=f"chunked.{reason}"):
        check_plan(chunks.path.parent, chunks.path, chunks.plan.model_copy(update=changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"documents": []}, "expected an output per document or per token, got none"),
        ({"pooled": {}}, "pooled: expected a value for the outputs per document, got none"),
        ({"tokens": {"logits": 3}}, "tokens: expected outputs beside documents, got logits"),
    ],
)
def test_missing_or_double_outputs_are_refused(changes: dict[str, object], reason: str) -> None:
    plan = {"stages": [], "pooled": {"sum_1": "sum"}, "token_bytes": 8, "evidence": True}
    plan |= {"documents": ["logits"], "tokens": {}, "tokens_use_last_stage": False} | changes
    with pytest.raises(ValueError, match=reason):
        ChunkedPlan.model_validate_json(json.dumps(plan))


@pytest.mark.parametrize(
    ("content", "is_ours"),
    [
        ({"schema_version": 3, "files": {"model.onnx": {}}}, True),
        ({"schema_version": 3, "files": {"other": {}}}, False),
        ({"schema_version": 99, "files": {"model.onnx": {}}}, False),
        ({"name": "an extension of a browser"}, False),
    ],
    ids=["earlier version", "other files", "later version", "other program"],
)
def test_bundle_of_earlier_version_may_be_replaced(
    content: object, is_ours: bool, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    assert is_replaceable(tmp_path) is is_ours
