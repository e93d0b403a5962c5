"""Functions that resemble AFT-conv, with another window, filter, weight or sum."""

import torch
from torch import Tensor, nn

from .implementations.aft_conv import per_channel
from .layer import DIM, HEADS, Layer


class Windowed:
    """AFT-conv with something else in its window; as it stands, it is AFT-conv."""

    padding: tuple[int, int] = (2, 2)
    mode = "constant"
    groups = DIM
    stride = dilation = 1

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        e = self.weights(per_channel(k)).transpose(1, 2)
        taps = self.taps(w)
        num, den = self.sums(e, v.transpose(1, 2), taps)
        return q.sigmoid() * (num / den).transpose(1, 2)

    def weights(self, k: Tensor) -> Tensor:
        return k.exp()

    def taps(self, w: Tensor) -> Tensor:
        """``[D, 1, s]``."""
        return per_channel((w.exp() - 1).t()).t()[:, None]

    def sums(self, e: Tensor, v: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
        return self.inside(e * v, taps) + self.all(e * v), self.inside(e, taps) + self.all(e)

    def all(self, x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True)

    def inside(self, x: Tensor, taps: Tensor) -> Tensor:
        padded = nn.functional.pad(x, self.padding, mode=self.mode)
        return nn.functional.conv1d(
            padded, taps, stride=self.stride, dilation=self.dilation, groups=self.groups
        )


class ConvShifted(Windowed):
    padding = (3, 1)


class ConvEvenTapsShifted(Windowed):
    padding = (2, 1)

    def taps(self, w: Tensor) -> Tensor:
        return super().taps(w[:, :4])


class ConvDilated(Windowed):
    padding, dilation = (4, 4), 2


class ConvStrided(Windowed):
    stride = 2

    def inside(self, x: Tensor, taps: Tensor) -> Tensor:
        return super().inside(x, taps)[..., torch.arange(x.shape[-1]) // 2]


class ConvCircular(Windowed):
    mode = "circular"


class ConvReflected(Windowed):
    mode = "reflect"


class ConvPaddedByOnes(Windowed):
    def inside(self, x: Tensor, taps: Tensor) -> Tensor:
        return nn.functional.conv1d(nn.functional.pad(x, (2, 2), value=1.0), taps, groups=DIM)


class ConvOfAllChannels(Windowed):
    groups = 1

    def taps(self, w: Tensor) -> Tensor:
        return super().taps(w).expand(-1, DIM, -1)


class ConvBackwards(Windowed):
    """Causal windows, but every key counts."""

    padding = (4, 0)


class ConvCenteredOverPast(Windowed):
    def all(self, x: Tensor) -> Tensor:
        return x.cumsum(-1)


class ConvAlone(Windowed):
    """A plain normalized convolution: other keys do not count."""

    def sums(self, e: Tensor, v: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
        taps = taps + 1
        return self.inside(e * v, taps), self.inside(e, taps)


class ConvWindowBelowOnly(Windowed):
    def sums(self, e: Tensor, v: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
        return self.inside(e * v, taps) + self.all(e * v), self.all(e) + self.all(e * e)


class ConvFiltersDiffer(Windowed):
    def sums(self, e: Tensor, v: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
        num, den = super().sums(e, v, taps)
        return num, den + self.inside(e, 0.1 * taps)


class ConvOfOtherValues(Windowed):
    """The window weighs the values by the square of what all are weighed by."""

    def sums(self, e: Tensor, v: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
        return self.inside(e * e * v, taps) + self.all(e * v), self.inside(e, taps) + self.all(e)


class ConvFilterOfChannels(Windowed):
    def taps(self, w: Tensor) -> Tensor:
        return super().taps(w) * torch.linspace(0.5, 1.0, DIM)[:, None, None]


class ConvWeightsOfEitherSign(Windowed):
    def taps(self, w: Tensor) -> Tensor:
        return per_channel(4.0 * w.t()).t()[:, None]


class ConvWithEps(Windowed):
    def sums(self, e: Tensor, v: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
        num, den = super().sums(e, v, taps)
        return num, den + 1e-6


class ConvClamped(Windowed):
    def weights(self, k: Tensor) -> Tensor:
        return k.clamp(max=40.0).exp()


class ConvMaximumOverTheBatch(Windowed):
    def weights(self, k: Tensor) -> Tensor:
        return (k - k.amax(0, keepdim=True)).exp()


class ConvMeanOfAll(Windowed):
    def all(self, x: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True)


def layers(filters: Tensor) -> dict[str, nn.Module]:
    """Return the layers by name."""
    windowed = [
        ConvShifted, ConvEvenTapsShifted, ConvDilated, ConvStrided, ConvCircular, ConvReflected,
        ConvPaddedByOnes, ConvOfAllChannels, ConvBackwards, ConvCenteredOverPast, ConvAlone,
        ConvWindowBelowOnly, ConvFiltersDiffer, ConvOfOtherValues, ConvFilterOfChannels,
        ConvWeightsOfEitherSign, ConvWithEps, ConvClamped, ConvMaximumOverTheBatch, ConvMeanOfAll,
    ]  # fmt: skip
    return {cls.__name__: Layer(cls(), filters, keys=HEADS) for cls in windowed}
