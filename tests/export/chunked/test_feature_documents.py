"""A document of features in chunks has the answer of the whole document."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from input_models import FEATURES, Sensors, Undeclared
from numpy.typing import NDArray
from torch import Tensor, nn

from aftexport.bundle.bundle import CHUNKED
from aftexport.bundle.manifest import ChunkedPlan
from aftexport.capture.capture import capture
from aftexport.chunked.archive import write_chunked
from aftexport.chunked.runner import ChunkedModel
from aftexport.lowering.to_onnx import lower
from aftexport.parity import TOLERANCES

MECHANISMS = ("aft_simple", "aft_local", "fastformer", "linear_attention")


class Scaled(Undeclared):
    """Divides a sum over the tokens by their number, read from the shape of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.projection(x))
        return self.head(x.sum(1) / x.shape[1])


class Recorder:
    """A document that records the longest part that is read from it."""

    def __init__(self, tokens: NDArray[np.float32]) -> None:
        self._tokens = tokens
        self.longest = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, tokens: slice, /) -> NDArray[Any]:
        part = self._tokens[tokens]
        self.longest = max(self.longest, len(part))
        return part


def chunked(module: nn.Module, folder: Path) -> tuple[Path, ChunkedPlan]:
    program = capture(module.eval(), num_features=FEATURES)
    return folder / CHUNKED, write_chunked(folder / CHUNKED, lower(program), precision="fp32")


def features(tokens: int) -> NDArray[np.float32]:
    return np.random.default_rng(tokens).standard_normal((tokens, FEATURES), np.float32)


@pytest.fixture(scope="module", params=MECHANISMS)
def sensors(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[nn.Module, Path, ChunkedPlan]:
    module = Sensors(request.param)
    path, plan = chunked(module, tmp_path_factory.mktemp("features"))
    return module.double().eval(), path, plan


@pytest.mark.parametrize("tokens", [1, 7, 4097])
def test_chunks_equal_whole_document(
    sensors: tuple[nn.Module, Path, ChunkedPlan], tokens: int
) -> None:
    module, path, plan = sensors
    document = features(tokens)
    with torch.inference_mode():
        wide = torch.from_numpy(document).double()[None]
        expected = module(wide, torch.tensor([tokens])).numpy()
    for chunk_tokens in (max(1, tokens // 3), 512):
        model = ChunkedModel(path, plan, threads=1, chunk_tokens=chunk_tokens)
        found = model.run(document)["logits"]
        assert np.abs(found - expected).max() <= TOLERANCES["fp32"].bound


@pytest.mark.parametrize("kind", [Undeclared, Scaled, Sensors])
def test_no_part_has_whole_document(kind: type[nn.Module], tmp_path: Path) -> None:
    module = kind()
    path, plan = chunked(module, tmp_path)
    document = Recorder(features(4097))
    model = ChunkedModel(path, plan, threads=1, chunk_tokens=256)
    found = model.run(document)["logits"]
    given = [torch.from_numpy(features(4097))[None], torch.tensor([4097])]
    with torch.inference_mode():
        expected = module(*given[: 2 if kind is Sensors else 1]).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert document.longest <= 256 + 8


def test_mapped_file_is_a_document(tmp_path: Path) -> None:
    module = Sensors()
    path, plan = chunked(module, tmp_path)
    np.save(tmp_path / "document.npy", features(300))
    document = np.load(tmp_path / "document.npy", mmap_mode="r")
    model = ChunkedModel(path, plan, threads=1, chunk_tokens=64)
    np.testing.assert_array_equal(model.run(document)["logits"], model.run(features(300))["logits"])
