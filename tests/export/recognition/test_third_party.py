"""Packages from PyPI, installed beside the tests by ``make build/third_party/installed``."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from .graphs import BATCH, TOKENS, assert_equal, exported, fused, operators, scripted

pytestmark = pytest.mark.filterwarnings("ignore")
FOLDER = Path(__file__).parents[3] / "build" / "third_party"
DIM = 16


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import one of the packages; skip, by name, where it is missing."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)

    def load(name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            pytest.skip(f"{error.name} is not installed: make build/third_party/installed")

    yield load
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def example(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class Heads(nn.Module):
    """A function of ``[B, H, T, d]`` between projections."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend = attend
        self.query, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).reshape(*x.shape[:2], 4, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.attend(q, k, v).transpose(1, 2).reshape(x.shape)


class LabmlLocal(nn.Module):
    """labml's AFTLocal with a mask; tokens first."""

    def __init__(self, layer: nn.Module, *, causal: bool) -> None:
        super().__init__()
        self.layer, self.causal = layer, causal
        nn.init.normal_(layer.pos_bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[0]
        mask = torch.ones(tokens, tokens, dtype=torch.bool)
        mask = mask.tril() if self.causal else mask
        return self.layer(query=x, key=x, value=x, mask=mask[..., None])


def check(
    module: nn.Module,
    expected: list[str],
    *,
    axes: Any = (BATCH, TOKENS),
    export: Callable[..., onnx.ModelProto] = scripted,
) -> None:
    found, model = fused(export(module, example(2, 12, DIM), axes=axes))
    assert operators(found) == expected, found.near_misses
    examples = [example(2, 12, DIM)]
    if axes:
        examples += [example(1, 1, DIM), example(3, 30, DIM)]
    assert_equal(module, model, *examples)


@pytest.mark.parametrize("export", [exported, scripted])
@pytest.mark.parametrize("axes", [(BATCH, TOKENS), ()], ids=["any length", "one length"])
def test_aft_pytorch(package: Any, axes: Any, export: Any) -> None:
    layers = package("aft_pytorch.aft_pytorch")
    check(layers.AFTFull(36, DIM, 8), ["AftFull"], axes=axes, export=export)
    check(layers.AFTSimple(36, DIM, 8), ["AftSimple"], axes=axes, export=export)


def test_aft_pytorch_local_with_band_product(package: Any) -> None:
    layers = package("aft_pytorch.aft_pytorch")

    class Local(layers.AFTFull):
        def __init__(self) -> None:
            super().__init__(36, DIM, 8)
            w = self._parameters.pop("wbias")
            positions = torch.arange(36)
            band = (positions[:, None] - positions).abs() < 4
            self.register_buffer("wbias", (w * band).detach())

    check(Local(), ["AftLocal"])


def test_labml_aft_local(package: Any) -> None:
    layers = package("labml_nn.transformers.aft")
    for causal in (False, True):
        module = LabmlLocal(layers.AFTLocal(DIM, 36, 4), causal=causal)
        found, model = fused(exported(module, example(12, 2, DIM), axes=(TOKENS, BATCH)))
        assert operators(found) == ["CausalAftLocal" if causal else "AftLocal"]
        assert_equal(module, model, example(12, 2, DIM), example(30, 1, DIM))


def test_linear_attention_transformer(package: Any) -> None:
    layers = package("linear_attention_transformer.linear_attention_transformer")
    check(Heads(layers.linear_attn), ["EfficientAttention"])
    check(layers.SelfAttention(DIM, 4, dim_head=4), ["EfficientAttention"])
    model = layers.LinearAttentionTransformer(DIM, 2, 36, heads=4)
    check(model, ["EfficientAttention"] * 2, axes=())


def test_linear_attention_of_images(package: Any) -> None:
    layers = package("linear_attention_transformer.images")
    module = layers.ImageLinearAttention(chan=8, heads=2, key_dim=4, value_dim=4)
    found, model = fused(scripted(module, example(2, 8, 6, 5), axes=(BATCH,)))
    assert operators(found) == ["EfficientAttention"]
    assert_equal(module, model, example(2, 8, 6, 5), example(1, 8, 6, 5))


def test_linear_attention(package: Any) -> None:
    layers = package("linear_attention")
    check(layers.LinearSelfAttention(DIM, 4, False), ["EfficientAttention"])
    check(layers.LinearSelfAttention(DIM, 4, True), ["CausalNormalizedLinearAttention"])
    check(layers.LinearSelfAttention(DIM, 4, False, one_kv_head=True), ["EfficientAttention"])


def test_fast_transformer_pytorch_is_not_fused(package: Any) -> None:
    """It pools other keys."""
    layers = package("fast_transformer_pytorch")

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = layers.FastTransformer(
                num_tokens=50, dim=DIM, depth=1, max_seq_len=36, heads=4, dim_head=4,
                absolute_pos_emb=True,
            )  # fmt: skip

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids, mask=ids > 0)

    found, _ = fused(scripted(Masked(), torch.ones(2, 12, dtype=torch.int64)))
    assert operators(found) == []
