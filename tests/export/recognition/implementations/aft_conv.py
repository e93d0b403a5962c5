"""AFT-conv as other people write it: keys ``[B, T, H]``, filters ``[H, s]``, centered if not said.

Every style is the same function as the operator; those of even or causal filters say so.
"""

import torch
from torch import Tensor, nn

from ..layer import DIM, HEADS, Layer, heads, matrix, merged


def per_channel(x: Tensor) -> Tensor:
    """Repeat the value of each head for each of its channels."""
    return x[..., None].expand(*x.shape, DIM // HEADS).flatten(-2)


def conv_channels_first(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e = per_channel(k).transpose(1, 2).exp()
    ev = e * v.transpose(1, 2)
    taps = per_channel((w.exp() - 1).t()).t().unsqueeze(1)
    pad = (w.shape[1] - 1) // 2
    num = nn.functional.conv1d(ev, taps, padding=pad, groups=DIM) + ev.sum(2, keepdim=True)
    den = nn.functional.conv1d(e, taps, padding=pad, groups=DIM) + e.sum(2, keepdim=True)
    return q.sigmoid() * (num / den).transpose(1, 2)


def conv_shifted_heads(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """The denominator once for each head; a maximum is subtracted."""
    e = torch.exp(k - k.amax(1, keepdim=True)).transpose(1, 2)
    ev = e[:, :, None] * v.transpose(1, 2).unflatten(1, (HEADS, -1))
    taps = (w.exp() - 1)[:, None]
    den = nn.functional.conv1d(e, taps, padding="same", groups=HEADS) + e.sum(-1, keepdim=True)
    rows = ev.transpose(1, 2).flatten(0, 1)
    inside = nn.functional.conv1d(rows, taps, padding="same", groups=HEADS)
    num = inside.unflatten(0, (-1, DIM // HEADS)).transpose(1, 2) + ev.sum(-1, keepdim=True)
    return q.sigmoid() * (num / den[:, :, None]).flatten(1, 2).transpose(1, 2)


def conv_of_images_one_high(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e, v = k.exp().transpose(1, 2).unsqueeze(-1), heads(v)
    taps = (w.exp() - 1)[:, None, :, None]
    pad = (w.shape[1] // 2, 0)

    def weighed(x: Tensor) -> Tensor:
        inside = nn.functional.conv2d(x, taps, padding=pad, groups=HEADS)
        return inside + x.sum(2, keepdim=True)

    return q.tanh() * merged(weighed(e * v) / weighed(e))


def conv_slices(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    tokens, taps = q.shape[1], w.shape[1]
    e, v = k.exp()[..., None], v.unflatten(2, (HEADS, -1))

    def weighed(x: Tensor) -> Tensor:
        padded = nn.functional.pad(x, (0, 0, 0, 0, taps // 2, taps // 2))
        total = x.sum(1, keepdim=True)
        for j in range(taps):
            total = total + padded[:, j : j + tokens] * (w[:, j].exp() - 1)[:, None]
        return total

    return (weighed(e * v) / weighed(e)).flatten(2) * torch.sigmoid(q)


def conv_windows(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    tokens, taps = q.shape[1], w.shape[1]
    at = torch.arange(tokens)[:, None] + torch.arange(taps)
    e, v = k.exp(), v.unflatten(2, (HEADS, -1))
    pad = taps // 2

    def inside(x: Tensor) -> Tensor:
        windows = nn.functional.pad(x.flatten(2), (0, 0, pad, pad))[:, at]
        return torch.einsum("btjhd,hj->bthd", windows.unflatten(3, (HEADS, -1)), w.exp() - 1)

    ev, e = e[..., None] * v, e[..., None]
    mean = (inside(ev) + ev.sum(1)[:, None]) / (inside(e) + e.sum(1)[:, None])
    return q.sigmoid() * mean.flatten(2)


def conv_unfolded(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    batch, tokens = q.shape[:2]
    shift = k.max(dim=1, keepdim=True).values
    e = per_channel(torch.exp(k - shift)).transpose(1, 2)
    taps = per_channel((w.exp() - 1).t()).t()

    def weighed(x: Tensor) -> Tensor:
        size = (w.shape[1], 1)
        columns = nn.functional.unfold(x[..., None], size, padding=(w.shape[1] // 2, 0))
        columns = columns.view(batch, DIM, w.shape[1], tokens)
        return (columns * taps[..., None]).sum(2) + x.sum(-1, keepdim=True)

    num, den = weighed(e * v.transpose(1, 2)), weighed(e)
    return (num * den.reciprocal()).transpose(1, 2) * q.sigmoid()


def conv_of_windows_less_sums(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Weights exp(w) inside, and all keys less those inside."""
    e = per_channel(k).transpose(1, 2).exp()
    taps = per_channel(w.exp().t()).t().unsqueeze(1)
    ones = torch.ones_like(taps)

    def weighed(x: Tensor) -> Tensor:
        inside = nn.functional.conv1d(x, taps, padding="same", groups=DIM)
        counted = nn.functional.conv1d(x, ones, padding="same", groups=DIM)
        return inside + (x.sum(-1, keepdim=True) - counted)

    mean = weighed(e * v.transpose(1, 2)) / weighed(e)
    return q.sigmoid() * mean.transpose(1, 2)


def conv_even_taps(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return conv_shifted_heads(q, k, v, w[:, :4])


def conv_keys_of_channels(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """A key for each channel, a filter for all."""
    e = k.transpose(1, 2).exp()
    taps = (w[:1].exp() - 1).expand(DIM, -1)[:, None]

    def weighed(x: Tensor) -> Tensor:
        inside = nn.functional.conv1d(x, taps, padding=w.shape[1] // 2, groups=DIM)
        return inside + x.sum(-1, keepdim=True)

    return q.sigmoid() * (weighed(e * v.transpose(1, 2)) / weighed(e)).transpose(1, 2)


def conv_weights_not_lessened(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Without the 1 that the paper takes off: the bias is log(1 + exp(w)), not w."""
    return conv_of_images_one_high(q, k, v, torch.log1p(w.exp()))


def conv_causal(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e = per_channel(k).transpose(1, 2).exp()
    taps = per_channel((w.exp() - 1).t()).t().unsqueeze(1)

    def weighed(x: Tensor) -> Tensor:
        padded = nn.functional.pad(x, (w.shape[1] - 1, 0))
        return nn.functional.conv1d(padded, taps, groups=DIM) + x.cumsum(-1)

    return q.sigmoid() * (weighed(e * v.transpose(1, 2)) / weighed(e)).transpose(1, 2)


def conv_causal_cut(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Padded on both sides, and the end cut off."""
    e = per_channel(k).transpose(1, 2).exp()
    taps = per_channel((w.exp() - 1).t()).t().unsqueeze(1)

    def weighed(x: Tensor) -> Tensor:
        inside = nn.functional.conv1d(x, taps, padding=w.shape[1] - 1, groups=DIM)
        return inside[..., : 1 - w.shape[1]] + x.cumsum(-1)

    return (weighed(e * v.transpose(1, 2)) / weighed(e)).transpose(1, 2)


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer by name."""
    filters = 0.5 * matrix(4, 5)[:HEADS]
    conv = [
        conv_channels_first, conv_shifted_heads, conv_of_images_one_high, conv_slices,
        conv_windows, conv_unfolded, conv_of_windows_less_sums, conv_even_taps,
        conv_weights_not_lessened,
    ]  # fmt: skip
    found: dict[str, tuple[str, nn.Module]] = {
        f.__name__: ("AftConv", Layer(f, filters, keys=HEADS)) for f in conv
    }
    found["conv_keys_of_channels"] = "AftConv", Layer(conv_keys_of_channels, filters)
    for f in (conv_causal, conv_causal_cut):
        found[f.__name__] = "CausalAftConv", Layer(f, filters, keys=HEADS)
    return found
