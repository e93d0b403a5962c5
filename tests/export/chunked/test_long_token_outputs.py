"""Outputs per token of long documents are right, and their memory is bounded."""

from pathlib import Path

import numpy as np
import pytest
from token_models import Array, Chunks, Encoded, Outputs, Tagger, TopicAndTags, document
from torch import Tensor, nn

from aftexport.bench.benchmark import peak_mib
from aftexport.nn.config import RECURRENT_LAYERS

MECHANISMS = ("aft_conv", "aft_local", "aft_simple", "efficient_attention", "fastformer",
              "linear_attention", *RECURRENT_LAYERS)  # fmt: skip
MILLION = 1_000_000
LABELS_MIB = MILLION * 9 * 4 / (1 << 20)


@pytest.mark.table(keep=0.03, by=lambda mechanism, causal: mechanism in RECURRENT_LAYERS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_65537_tokens_equal_whole(mechanism: str, causal: bool, tmp_path: Path) -> None:
    Chunks(TopicAndTags(mechanism, causal=causal), tmp_path).check(document(65_537))


def test_million_labels_within_budget(tmp_path: Path) -> None:
    """Beside the joined labels, memory does not depend on the length."""
    chunks = Chunks(Tagger(), tmp_path)
    model, ids = chunks.model(), document(MILLION)
    count = [0]

    def add(rows: Array) -> None:
        count[0] += rows.shape[1]

    model.run(ids[:100_000])
    in_blocks = peak_mib(lambda: model.run(ids, sinks={"tags": add}))
    joined = peak_mib(lambda: model.run(ids))
    if in_blocks is None or joined is None:
        pytest.skip("the kernel keeps no count of the highest resident memory")
    assert count == [MILLION]
    assert in_blocks < 32
    assert joined < 32 + LABELS_MIB < 512


class Wide(Encoded):
    """A vector of 768 numbers for each token."""

    def build(self, dim: int) -> None:
        self.wide = nn.Linear(dim, 768)

    def outputs(self, x: Tensor, lengths: Tensor) -> Outputs:
        return {"vectors": self.wide(x)}


def test_wide_output_streams_to_file(tmp_path: Path) -> None:
    chunks, path = Chunks(Wide(), tmp_path), tmp_path / "vectors"
    model, ids = chunks.model(), document(65_537)

    def write(tokens: int) -> None:
        with path.open("wb") as file:
            model.run(ids[:tokens], sinks={"vectors": lambda rows: file.write(rows.tobytes())})

    write(20_000)
    short, long = peak_mib(lambda: write(20_000)), peak_mib(lambda: write(ids.size))
    if short is None or long is None:
        pytest.skip("the kernel keeps no count of the highest resident memory")
    assert long < short + 16  # the file has 192 MiB
    found = np.memmap(path, np.float32, "r", shape=(ids.size, 768))
    truth = chunks.expected(ids)["vectors"][0]
    assert np.abs(found - truth).max() <= 1e-4 * np.abs(truth).max()
    path.unlink()
