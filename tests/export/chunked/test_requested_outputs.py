"""A document in chunks computes the requested outputs only."""

import numpy as np
import pytest
import several_heads
from sampling import fewer

from aftexport.bundle.bundle import CHUNKED
from aftexport.bundle.manifest import ChunkedPlan
from aftexport.capture.capture import capture
from aftexport.chunked.archive import write_chunked
from aftexport.chunked.runner import ChunkedModel
from aftexport.errors import UsageError
from aftexport.lowering.to_onnx import lower

TOKENS = fewer(300, 0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ChunkedModel, ChunkedPlan]:
    path = tmp_path_factory.mktemp("requested") / CHUNKED
    program = capture(several_heads.Tokens().eval())
    plan = write_chunked(path, lower(program), precision="fp32")
    return ChunkedModel(path, plan, threads=1, chunk_tokens=32), plan


@pytest.mark.parametrize("outputs", [["topic"], ["tags"], ["hidden", "topic"]])
def test_outputs_are_those_of_all(
    model: tuple[ChunkedModel, ChunkedPlan], outputs: list[str]
) -> None:
    chunked, _ = model
    ids = np.arange(TOKENS) % several_heads.VOCABULARY
    every = chunked.run(ids)
    found = chunked.run(ids, outputs=outputs)
    assert found.keys() == set(outputs)
    for name in outputs:
        np.testing.assert_array_equal(found[name], every[name])
    stops = sum(1 for _ in chunked.parts(ids, outputs=outputs))
    assert chunked.count(TOKENS, outputs=outputs) == stops + 1


def test_rows_of_tokens_are_not_computed(model: tuple[ChunkedModel, ChunkedPlan]) -> None:
    chunked, plan = model
    assert plan.tokens.keys() == {"tags", "hidden"}
    chunks = -(-TOKENS // 32)
    assert chunked.count(TOKENS) - chunked.count(TOKENS, outputs=["topic"]) == chunks


def test_unknown_outputs_are_refused(model: tuple[ChunkedModel, ChunkedPlan]) -> None:
    chunked, _ = model
    with pytest.raises(UsageError, match="Expected outputs among hidden, tags, topic, got other"):
        chunked.run(np.arange(5), outputs=["other"])
