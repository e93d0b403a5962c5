"""The layers of the recurrent family equal the equations of their papers, token by token."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftexport.nn.config import RECURRENT_LAYERS

from .layers import DIM, HEADS, MAKERS, documents, make_layer

Step = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Returns the decayed state and the state after a token, ``[H, dk, dv]``, from that before it."""


def by_heads(x: Tensor) -> Tensor:
    """Return ``x [T, H * d]`` as ``[T, H, d]``."""
    return x.reshape(len(x), HEADS, -1)


def read(query: Tensor, value: Tensor, step: Step, causal: bool) -> Tensor:
    """Return ``q_t S_t``, or ``q_t (S_t + R_t)`` with the decayed state R_t of later tokens."""
    tokens, heads, width = query.shape
    rows = query.new_zeros(tokens, heads, value.shape[-1])
    first = query.new_zeros(heads, width, value.shape[-1])
    state = first
    for t in range(tokens):
        _, state = step(state, t)
        rows[t] = torch.einsum("hk,hkv->hv", query[t], state)
    if causal:
        return rows
    state = first
    for t in reversed(range(tokens)):
        decayed, state = step(state, t)
        rows[t] += torch.einsum("hk,hkv->hv", query[t], decayed)
    return rows


def outer(key: Tensor, value: Tensor) -> Tensor:
    return key[:, :, None] * value[:, None, :]


def decaying(key: Tensor, value: Tensor, decay: Tensor) -> Step:
    """Return the step of a state with the factor ``decay``, ``[T, H, 1]`` or ``[T, H, dk]``."""

    def step(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        decayed = decay[t][:, :, None] * state
        return decayed, decayed + outer(key[t], value[t])

    return step


def correcting(key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Step:
    """Return the step of the gated delta rule; decay and beta are ``[T, H, 1]``."""

    def step(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        decayed = decay[t][:, :, None] * state
        error = value[t] - torch.einsum("hk,hkv->hv", key[t], decayed)
        return decayed, decayed + outer(key[t], beta[t] * error)

    return step


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def convolved(layer: nn.Module, x: Tensor) -> Tensor:
    """Return PyTorch's convolution, padded on the left."""
    convolution = layer.convolution
    taps = convolution.weight.shape[1]
    padded = F.pad(x.T[None], (taps - 1, 0))
    rows = F.conv1d(padded, convolution.weight[:, None], convolution.bias, groups=x.shape[1])
    return F.silu(rows[0].T)


def gated_linear_attention(layer: nn.Module, x: Tensor, causal: bool) -> Tensor:
    query, key, value = (by_heads(f(x)) for f in (layer.query, layer.key, layer.value))
    decay = by_heads(torch.sigmoid(layer.decay(x)) ** (1 / 16))
    rows = read(query * query.shape[-1] ** -0.5, value, decaying(key, value, decay), causal)
    return layer.output(F.silu(layer.output_gate(x)) * rms(rows, layer.norm.weight).flatten(1))


def retention(layer: nn.Module, x: Tensor, causal: bool) -> Tensor:
    query, key, value = (by_heads(f(x)) for f in (layer.query, layer.key, layer.value))
    gamma = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(HEADS)], dtype=x.dtype)
    step = decaying(key, value, gamma[:, None].expand(len(x), -1, -1))
    rows = read(query / query.shape[-1] ** 0.5, value, step, causal)
    normed = F.group_norm(rows.flatten(1), HEADS, layer.norm_weight, layer.norm_bias, 1e-5)
    return layer.output(F.silu(layer.output_gate(x)) * normed)


def lightning_attention(layer: nn.Module, x: Tensor, causal: bool) -> Tensor:
    query, key, value = map(by_heads, F.silu(layer.query_key_value(x)).split(DIM, 1))
    slopes = torch.tensor([2.0 ** (-8 * h / HEADS) for h in range(1, HEADS + 1)], dtype=x.dtype)
    step = decaying(key, value, torch.exp(-slopes)[:, None].expand(len(x), -1, -1))
    rows = read(query, value, step, causal).flatten(1)
    return layer.output(torch.sigmoid(layer.output_gate(x)) * rms(rows, layer.norm.weight))


def delta_rows(layer: nn.Module, x: Tensor, decay: Tensor, causal: bool) -> Tensor:
    parts = convolved(layer, layer.query_key_value(x)).split(DIM, 1)
    query, key, value = map(by_heads, parts)
    query, key = (y / (y.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for y in (query, key))
    beta = torch.sigmoid(layer.beta(x))[..., None]
    rows = read(query / query.shape[-1] ** 0.5, value, correcting(key, value, decay, beta), causal)
    return rms(rows, layer.norm.weight).flatten(1)


def delta_net(layer: nn.Module, x: Tensor, causal: bool) -> Tensor:
    ones = torch.ones(len(x), HEADS, 1, dtype=x.dtype)
    return layer.output(delta_rows(layer, x, ones, causal))


def gated_delta_net(layer: nn.Module, x: Tensor, causal: bool) -> Tensor:
    steps = F.softplus(layer.time_step(x) + layer.decay.dt_bias)
    decay = torch.exp(-layer.decay.A_log.exp() * steps)[..., None]
    return layer.output(F.silu(layer.output_gate(x)) * delta_rows(layer, x, decay, causal))


def mamba2(layer: nn.Module, x: Tensor, causal: bool) -> Tensor:
    inner, size = 2 * DIM, 5
    gate, convolved_from, steps = layer.input(x).split([inner, inner + 2 * size, HEADS], 1)
    values, key, query = convolved(layer, convolved_from).split([inner, size, size], 1)
    steps = F.softplus(steps + layer.decay.dt_bias)
    decay = torch.exp(-layer.decay.A_log.exp() * steps)[..., None]
    heads = by_heads(values)
    shared = [y[:, None].expand(-1, HEADS, -1) for y in (query, key)]
    step = decaying(shared[1], heads * steps[..., None], decay)
    rows = read(shared[0], heads, step, causal) + layer.D * heads
    return layer.output(rms(rows.flatten(1) * F.silu(gate), layer.norm.weight))


PAPERS = {
    f.__name__: f
    for f in (
        gated_linear_attention,
        retention,
        lightning_attention,
        delta_net,
        gated_delta_net,
        mamba2,
    )
}


def test_every_layer_has_its_paper() -> None:
    assert PAPERS.keys() == set(RECURRENT_LAYERS)


@pytest.mark.parametrize("causal", [False, True], ids=["global", "causal"])
@pytest.mark.parametrize("name", PAPERS)
def test_layer_equals_paper(name: str, causal: bool) -> None:
    layer = make_layer(name, causal=causal)
    x, lengths = documents(13, 8)
    found = layer(x, lengths)
    for document, length in enumerate(lengths.tolist()):
        expected = PAPERS[name](layer, x[document, :length], causal)
        assert (found[document, :length] - expected).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["gated_delta_net", "mamba2"])
def test_initial_decay_is_in_range_of_paper(name: str) -> None:
    torch.manual_seed(0)
    steps, decay = MAKERS[name]().decay(torch.zeros(1, 1, HEADS))
    assert (steps > 0.00099).all()
    assert (steps < 0.101).all()
    rates = -decay / steps
    assert (rates >= 1).all()
    assert (rates <= 16.001).all()
