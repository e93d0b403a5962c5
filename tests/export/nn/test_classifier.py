import pytest
import torch

from aftexport.nn import LAYERS, ClassifierConfig, DocumentClassifier
from aftexport.nn.classifier import (
    AttentionPooling,
    LogSumExpPooling,
    MaxPooling,
    MeanPooling,
    TopKPooling,
)

from .layers import DIM, documents

LENGTHS = (19, 8, 1, 12)


def make_classifier(mechanism: str, **options: object) -> DocumentClassifier:
    config = ClassifierConfig(
        mechanism=mechanism,
        vocab_size=50,
        num_labels=3,
        dim=12,
        num_heads=3,
        ffn_dim=16,
        window=4,
        bias_rank=5,
        **{"max_length": 20} | options,
    )
    torch.manual_seed(0)
    model = DocumentClassifier(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def batch(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (len(lengths), max(lengths)), generator=generator)
    return ids, torch.tensor(lengths)


every_mechanism = pytest.mark.parametrize("mechanism", LAYERS)


@every_mechanism
@pytest.mark.parametrize("pooling", ["mean", "attention"])
@pytest.mark.parametrize("causal", [False, True], ids=["global", "causal"])
@pytest.mark.parametrize("max_length", [20, None], ids=["bounded", "unbounded"])
def test_document_scores_same_in_padded_batch(
    mechanism: str, pooling: str, causal: bool, max_length: int | None
) -> None:
    if mechanism == "aft_full" and max_length is None:
        return
    model = make_classifier(mechanism, pooling=pooling, causal=causal, max_length=max_length)
    ids, lengths = batch(*LENGTHS)
    together = model(ids, lengths)
    assert together.shape == (4, 3)
    for document, length in enumerate(LENGTHS):
        own = slice(document, document + 1)
        alone = model(ids[own, :length], lengths[own])
        assert (together[own] - alone).abs().max() < 1e-9


@every_mechanism
def test_the_padding_id_does_not_matter(mechanism: str) -> None:
    model = make_classifier(mechanism, pooling="attention")
    ids, lengths = batch(*LENGTHS)
    other = torch.where(torch.arange(19) < lengths[:, None], ids, 49 - ids)
    assert (model(other, lengths) - model(ids, lengths)).abs().max() < 1e-9


@every_mechanism
def test_other_documents_and_tokens_do_matter(mechanism: str) -> None:
    model = make_classifier(mechanism)
    ids, lengths = batch(*LENGTHS)
    changed = ids.clone()
    changed[0, 11] = (ids[0, 11] + 1) % 50
    difference = (model(changed, lengths) - model(ids, lengths)).abs().amax(1)
    assert difference[0] > 1e-6
    assert difference[1:].max() < 1e-12


@every_mechanism
@pytest.mark.parametrize("pooling", ["mean", "attention", "max", "logsumexp", "top_k"])
def test_an_empty_document_has_finite_scores(mechanism: str, pooling: str) -> None:
    k = 3 if pooling == "top_k" else None
    model = make_classifier(mechanism, pooling=pooling, pooling_k=k)
    ids, _ = batch(5, 5)
    assert model(ids, torch.tensor([5, 0])).isfinite().all()
    assert model(ids, torch.tensor([0, 0])).isfinite().all()


@every_mechanism
def test_classifier_learns_two_kinds_of_documents(mechanism: str) -> None:
    model = make_classifier(mechanism).float().train()
    ids, lengths = batch(*LENGTHS)
    labels = torch.tensor([0, 1, 2, 0])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(25):
        loss = torch.nn.functional.cross_entropy(model(ids, lengths), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert model(ids, lengths).argmax(1).tolist() == labels.tolist()


@pytest.mark.parametrize("mechanism", ["aft_full", "aft_local"])
def test_documents_beyond_learned_positions_are_refused(mechanism: str) -> None:
    model = make_classifier(mechanism)
    assert model.max_length == 20
    model(*batch(20))
    with pytest.raises(ValueError, match=r"21 tokens.* at most 20"):
        model(*batch(21))


@pytest.mark.parametrize("mechanism", sorted(set(LAYERS) - {"aft_full"}))
def test_without_learned_positions_any_length_goes(mechanism: str) -> None:
    model = make_classifier(mechanism, max_length=None)
    assert model.max_length is None
    assert model(*batch(150)).isfinite().all()


@every_mechanism
def test_settings_of_configuration_reach_layers(mechanism: str) -> None:
    model = make_classifier(
        mechanism, depth=3, gate="tanh", normalization="scaling", feature_map="relu", causal=True
    )
    assert len(model.encoder.layers) == 3
    for layer in model.encoder.layers:
        attention = layer.attention
        assert attention.causal
        assert getattr(attention, "gate", "tanh") == "tanh"
        assert getattr(attention, "normalization", "scaling") == "scaling"
        assert getattr(attention, "feature_map", "relu") == "relu"
        assert getattr(attention, "num_heads", 3) == 3


def test_mean_takes_only_own_tokens() -> None:
    x, lengths = documents(7, 3, 0)
    pooled = MeanPooling()(x, lengths)
    assert torch.allclose(pooled[0], x[0].mean(0))
    assert torch.allclose(pooled[1], x[1, :3].mean(0))
    assert not pooled[2].any()


def test_attention_pooling_weighs_only_own_tokens() -> None:
    x, lengths = documents(7, 3, 0)
    pooling = AttentionPooling(DIM).double()
    pooled = pooling(x, lengths)
    weight = pooling.score(x[1, :3]).softmax(0)
    assert torch.allclose(pooled[1], (weight * x[1, :3]).sum(0))
    assert pooled[2].isfinite().all()


@pytest.mark.parametrize(
    "pooling",
    [MeanPooling(), MaxPooling(), LogSumExpPooling(), LogSumExpPooling(9), TopKPooling(5)],
    ids=["mean", "max", "learned", "given", "top_k"],
)
def test_gradients_ignore_padding(pooling: torch.nn.Module) -> None:
    x, lengths = documents(7, 3, 0)
    x = x.detach().clone().requires_grad_()
    pooled = pooling.double()(x, lengths)
    assert not pooled[2].any()
    pooled.square().sum().backward()
    assert x.grad[:2].any(2).any(1).all()
    assert not x.grad[1, 3:].any()
    assert not x.grad[2].any()
    assert all(weight.grad.isfinite() and weight.grad for weight in pooling.parameters())


def test_temperature_leads_from_maximum_to_mean() -> None:
    x, lengths = documents(7, 3)
    for temperature, other in ((1e-4, MaxPooling()), (1e4, MeanPooling())):
        pooled = LogSumExpPooling(temperature)(x, lengths)
        assert torch.allclose(pooled, other(x, lengths), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "pooling",
    [MeanPooling(), AttentionPooling(DIM), MaxPooling(), LogSumExpPooling(), TopKPooling(3)],
    ids=lambda p: type(p).__name__,
)
def test_long_16_bit_sums_use_float32(pooling: torch.nn.Module, dtype: torch.dtype) -> None:
    x = torch.full((1, 70_000, DIM), 1.5, dtype=dtype)
    pooled = pooling.to(dtype)(x, torch.tensor([70_000]))
    assert pooled.dtype == dtype
    assert (pooled.float() - 1.5).abs().max() < 0.01
