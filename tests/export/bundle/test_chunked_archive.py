"""The plan for documents in chunks fits the graphs in the archive."""

import json

import pytest
from token_models import Chunks, Tagger, TopicAndTags

from aftexport.bundle.chunked_archive import check_plan
from aftexport.bundle.chunked_plan import ChunkedPlan
from aftexport.errors import BundleError


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Chunks:
    return Chunks(TopicAndTags(), tmp_path_factory.mktemp("both"))


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Chunks:
    return Chunks(Tagger(), tmp_path_factory.mktemp("tagger"))


def refused(chunks: Chunks, **changes: object) -> str:
    path = chunks.path
    with pytest.raises(BundleError) as caught:
        check_plan(path.parent, path, chunks.plan.model_copy(update=changes))
    return caught.value.reason


def test_plan_fits_its_archive(both: Chunks, tagger: Chunks) -> None:
    for chunks in (both, tagger):
        check_plan(chunks.path.parent, chunks.path, chunks.plan)
        assert ChunkedPlan.model_validate_json(chunks.plan.model_dump_json()) == chunks.plan


def test_graphs_without_field_are_refused(both: Chunks) -> None:
    assert "chunked.tokens: expected a value, as chunked.zip has tokens.onnx" in refused(
        both, tokens={}
    )
    assert "chunked.pooled: expected a value, as chunked.zip has pool.onnx" in refused(
        both, pooled={}
    )
    assert "chunked.evidence: expected true, as chunked.zip has explain.onnx" in refused(
        both, evidence=False
    )


def test_fields_without_graph_are_refused(tagger: Chunks) -> None:
    assert "chunked.pooled: expected none, as chunked.zip has no pool.onnx" in refused(
        tagger, pooled={"x": "sum"}
    )
    assert "chunked.evidence: expected false, as chunked.zip has no explain.onnx" in refused(
        tagger, evidence=True
    )


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
