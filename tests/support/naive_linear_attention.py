"""Linear attentions in loops over chunks or tokens, as flash-linear-attention's naive files have.

Each has a second form in our operator, which runs while the model is captured.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftexport.bundle.bundle import Bundle
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.nn.functional import (
    causal_depthwise_conv,
    exported_as,
    recurrent_linear_attention,
)
from aftexport.operators.mechanisms import RECURRENT_OPERATORS

CHUNK = 64
VOCABULARY = 64
_WIDTH, _HEADS, _DIM = 16, 2, 8
_KERNEL = 4


def _gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return recurrent_linear_attention(q, k, v, decay=g)[0]


@exported_as(_gated)
def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Gated linear attention, token by token; ``g [B, T, H, dk]``."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outputs = torch.zeros_like(v)
    for t in range(q.shape[1]):
        written = k[:, t, :, :, None] * v[:, t, :, None, :]
        state = state * g[:, t].exp()[..., None] + written
        read = q[:, t, :, :, None] * q.shape[3] ** -0.5 * state
        outputs[:, t] = read.sum(-2)
    return outputs


def _slopes(heads: int) -> Tensor:
    return -((torch.arange(heads) + 1.0) / 16)


def _retained(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    decay = _slopes(q.shape[2]).to(q.dtype).expand(*q.shape[:2], -1)
    return recurrent_linear_attention(q, k, v, decay=decay)[0]


@exported_as(_retained)
def retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Retention in its parallel form, with the decay of every pair of tokens."""
    places = torch.arange(q.shape[1])
    distance = (places[:, None] - places).to(q.dtype)
    decay = (distance * _slopes(q.shape[2]).to(q.dtype).view(-1, 1, 1)).exp() * (distance >= 0)
    scores = torch.einsum("bqhd,bkhd->bhqk", q * q.shape[3] ** -0.5, k) * decay
    return torch.einsum("bhqk,bkhd->bqhd", scores, v)


def _lightning(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    decay = _slopes(q.shape[2]).to(q.dtype).expand(*q.shape[:2], -1)
    return recurrent_linear_attention(q, k, v, decay=decay, scale=1.0)[0]


@exported_as(_lightning)
def lightning(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Lightning attention in blocks; the last block may be shorter."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    slopes = _slopes(q.shape[1]).to(q.dtype).view(-1, 1, 1)
    state, outputs = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    for start in range(0, q.shape[2], CHUNK):
        end = min(start + CHUNK, q.shape[2])
        places = torch.arange(end - start).to(q.dtype)[:, None]
        qi, ki, vi = (x[:, :, start:end] for x in (q, k, v))
        mask = ((places - places.T) * slopes).exp() * (places >= places.T)
        inside = (qi @ ki.mT * mask) @ vi
        before = (qi * ((places + 1) * slopes).exp()) @ state
        outputs.append(inside + before)
        kept = ki * ((end - start - 1 - places) * slopes).exp()
        state = state * ((end - start) * slopes).exp() + kept.mT @ vi
    return torch.cat(outputs, 2).transpose(1, 2)


def _delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return recurrent_linear_attention(q, k, v, beta=beta)[0]


@exported_as(_delta)
def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The delta rule in chunks, by its WY form; the tokens are padded to whole chunks."""
    return _chunked_delta(q, k, v, beta, torch.zeros_like(beta))


def _gated_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    return recurrent_linear_attention(q, k, v, beta=beta, decay=g)[0]


@exported_as(_gated_delta)
def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """The gated delta rule in chunks."""
    return _chunked_delta(q, k, v, beta, g)


def _chunked_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    tokens = q.shape[1]
    if tokens % CHUNK:
        added = CHUNK - tokens % CHUNK
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, added)) for x in (q, k, v))
        beta, g = (F.pad(x, (0, 0, 0, added)) for x in (beta, g))
    q, k, v = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    beta, g = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (beta, g))
    q, g = q * q.shape[-1] ** -0.5, g.cumsum(-1)
    decay = (g[..., :, None] - g[..., None, :]).tril().exp().tril()
    inverse = -(k * beta[..., None] @ k.mT * decay).tril(-1)
    for i in range(1, CHUNK):
        row = inverse[..., i, :i].clone()
        inverse[..., i, :i] = row + (row[..., None] * inverse[..., :i, :i].clone()).sum(-2)
    inverse = inverse + torch.eye(CHUNK, dtype=q.dtype)
    new = inverse @ (v * beta[..., None])
    old = inverse @ (k * beta[..., None] * g.exp()[..., None])
    state, outputs = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for i in range(q.shape[2]):
        value = new[:, :, i] - old[:, :, i] @ state
        inside = (q[:, :, i] @ k[:, :, i].mT * decay[:, :, i]).tril() @ value
        outputs.append(q[:, :, i] * g[:, :, i].exp()[..., None] @ state + inside)
        kept = k[:, :, i] * (g[:, :, i, -1:] - g[:, :, i]).exp()[..., None]
        state = state * g[:, :, i, -1].exp()[..., None, None] + kept.mT @ value
    return torch.cat(outputs, 2).transpose(1, 2)[:, :tokens]


def _convolved(x: Tensor, weight: Tensor) -> Tensor:
    return causal_depthwise_conv(x, weight, activation="silu")[0]


@exported_as(_convolved)
def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """The short convolution of each channel, with silu."""
    channels, width = weight.shape
    convolved = F.conv1d(x.mT, weight.unsqueeze(1), padding=width - 1, groups=channels)
    return F.silu(convolved[..., : x.shape[1]]).mT


ATTENTIONS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "gla": (gla, ("g of channels",)),
    "retention": (retention, ()),
    "lightning": (lightning, ()),
    "delta_rule": (delta_rule, ("beta",)),
    "gated_delta_rule": (gated_delta_rule, ("beta", "g")),
}
"""Name to the function and its gates."""
_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "g of channels": lambda x: F.logsigmoid(x).unflatten(2, (_HEADS, _DIM)) / 4,
    "g": lambda x: F.logsigmoid(x),
    "beta": lambda x: x.sigmoid(),
}


class NaiveClassifier(nn.Module):
    """A classifier of one layer of a naive linear attention, after a short convolution."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._attention, self._gates = ATTENTIONS[name]
        self.embedding = nn.Embedding(VOCABULARY, _WIDTH)
        self.convolution = nn.Parameter(torch.randn(3 * _WIDTH, _KERNEL) / 2)
        self.project = nn.Linear(_WIDTH, 3 * _WIDTH)
        widths = [_WIDTH if gate == "g of channels" else _HEADS for gate in self._gates]
        self.gates = nn.ModuleList(nn.Linear(_WIDTH, width) for width in widths)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, 3)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        packed = short_convolution(self.project(x), self.convolution)
        q, k, v = (part.unflatten(2, (_HEADS, _DIM)) for part in packed.chunk(3, -1))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        gates = (
            _GATES[gate](layer(x)) for gate, layer in zip(self._gates, self.gates, strict=True)
        )
        x = x + self.out(self._attention(q, k, v, *gates).flatten(2))
        valid = (torch.arange(x.shape[1]) < lengths.unsqueeze(1)).unsqueeze(2)
        pooled = torch.where(valid, x, 0).sum(1) / lengths.unsqueeze(1)
        return self.head(pooled)


def build(name: str) -> NaiveClassifier:
    """Return a classifier with fixed random weights."""
    torch.manual_seed(0)
    return NaiveClassifier(name).eval()


def gla_classifier() -> nn.Module:
    """Return the model for ``--factory``."""
    return build("gla")


def retnet_classifier() -> nn.Module:
    """Return the model for ``--factory``."""
    return build("retention")


TOKENS = (1, 63, 64, 65, 130)
"""Lengths at both sides of the libraries' chunks of 64 tokens."""


def check_bundle(
    bundle: Bundle, logits_of: Callable[[Tensor, Tensor], Tensor], *, masked: bool
) -> None:
    """Compare a bundle with its model, which runs its own loops over chunks.

    A ``masked`` model takes the mask of a batch instead of the lengths.
    """
    assert bundle.manifest.operators.keys() >= RECURRENT_OPERATORS.keys()
    vocabulary = bundle.manifest.vocab_size
    assert vocabulary is not None
    engine = OnnxRuntimeEngine(bundle.model_path, threads=1)
    generator = torch.Generator().manual_seed(0)
    for tokens in TOKENS:
        lengths = torch.tensor([tokens, (tokens + 1) // 2, max(1, tokens - 1)])
        mask = (torch.arange(tokens) < lengths.unsqueeze(1)).long()
        ids = torch.randint(1, vocabulary, (3, tokens), generator=generator) * mask
        with torch.inference_mode():
            expected = logits_of(ids, mask if masked else lengths).numpy()
        given = engine.run({"input_ids": ids.numpy(), "lengths": lengths.numpy()})["logits"]
        np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-4)
