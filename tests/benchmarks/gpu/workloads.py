"""One mechanism at one size: its tensors, its least work, and who computes it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import baselines
from benchmarks.gpu.library import (
    CALLS,
    ELEMENTS,
    ExpPrecision,
    FeatureMap,
    Gate,
    Kernels,
    Normalization,
)

HEADS = 8
EPSILON = 1e-5
TAPS = 31
WINDOW = 128
LAYER = "layer_norm_fastformer"
"""Not a mechanism: what surrounds one is in it, and it has no causal form."""
Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Workload:
    """A mechanism on packed documents that fill their rows, the gate a sigmoid.

    The input of ``LAYER`` is the query. The number of tokens is a multiple of ``WINDOW``.
    """

    mechanism: str
    batch: int
    tokens: int
    dim: int
    dtype: torch.dtype
    causal: bool

    def __str__(self) -> str:
        return f"{self.mechanism}{', causal' if self.causal else ''}, {self.tokens:,} tokens"

    def too_large(self, free: int) -> str | None:
        """Why it does not fit into so many bytes, with the copies that contenders make."""
        needed = 3.0 * self.bytes_moved
        return f"takes {needed / 2**30:.0f} GiB" if needed > free else None

    @property
    def constants(self) -> int:
        """Elements that are read beside query, key and value."""
        return {
            "aft_full": self.tokens**2,
            "aft_local": self.tokens * (WINDOW if self.causal else 2 * WINDOW - 1),
            "aft_conv": HEADS * TAPS,
            "fastformer": 2 * self.dim * HEADS,
            LAYER: 3 * self.dim**2 + 2 * self.dim * HEADS,
        }.get(self.mechanism, 0)

    @property
    def bytes_moved(self) -> float:
        """The least: everything read once, ``LAYER``'s input thrice, the output written once."""
        rows = self.batch * self.tokens
        keys = HEADS if self.mechanism == "aft_conv" else self.dim
        return self.dtype.itemsize * (rows * (3 * self.dim + keys) + self.constants)

    @property
    def flops(self) -> float:
        """Multiply-adds of the products, two operations each."""
        elements = self.batch * self.tokens * self.dim
        seen = self.tokens / 2 if self.causal else self.tokens
        window = WINDOW if self.causal else 2 * WINDOW - 1
        return (
            elements
            * {
                "aft_simple": 0.0,
                "aft_full": 4.0 * seen,
                "aft_local": 4.0 * window,
                "aft_conv": 2.0 * TAPS,
                "efficient_attention": 4.0 * self.dim / HEADS,
                "linear_attention": 4.0 * self.dim / HEADS,
                "fastformer": 4.0 * HEADS,
                LAYER: 2.0 * self.dim + 8.0 * HEADS + 2.0 * self.dim**2 / self.tokens,
            }[self.mechanism]
        )

    def tensors(self, device: str, seed: int = 0) -> dict[str, Tensor]:
        """Query, key and value, lengths, and the mechanism's constants by their member's name."""
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=self.dtype)

        rows = (self.batch, self.tokens)
        keys = HEADS if self.mechanism == "aft_conv" else self.dim
        # Means of many random numbers are 0 whichever are left out: values grow from first to last.
        growth = torch.linspace(0, 2, self.tokens, device=device)[:, None].to(self.dtype)
        tensors = {
            "query": draw(*rows, self.dim),
            "key": draw(*rows, keys),
            "value": draw(*rows, self.dim) + growth,
            "lengths": torch.full((self.batch,), self.tokens, device=device),
        }
        if self.mechanism == "aft_full":
            tensors["position_bias"] = draw(self.tokens, self.tokens)
        if self.mechanism == "aft_local":
            tensors["band"] = draw(self.tokens, WINDOW if self.causal else 2 * WINDOW - 1)
        if self.mechanism == "aft_conv":
            tensors["filter"] = draw(HEADS, TAPS)
        if self.mechanism == LAYER:
            tensors |= {"norm_weight": draw(self.dim), "norm_bias": draw(self.dim)}
            for name in ("query_", "key_", ""):
                tensors[f"{name}weight"] = draw(self.dim, self.dim) / self.dim**0.5
                tensors[f"{name}bias"] = draw(self.dim)
        if self.mechanism in ("fastformer", LAYER):
            tensors["alpha_weight"] = draw(self.dim, HEADS) / self.dim**0.5
            tensors["beta_weight"] = draw(self.dim, HEADS) / self.dim**0.5
        return tensors

    def kernel(self, kernels: Kernels, tensors: dict[str, Tensor], **changed: float) -> Run:
        """The fused kernel; ``changed`` are members of its struct other than the usual."""
        fields: dict[str, float] = {
            "aft_simple": {"gate": Gate.SIGMOID},
            "aft_full": {
                "gate": Gate.SIGMOID,
                "position_bias_width": self.tokens,
                # The range of a row of a standard normal bias is far below bfloat16's.
                "precision": ExpPrecision.FLOAT32
                if self.dtype == torch.float32
                else ExpPrecision.BFLOAT16,
            },
            "aft_local": {"gate": Gate.SIGMOID, "band_rows": self.tokens, "window": WINDOW},
            "aft_conv": {"gate": Gate.SIGMOID, "heads": HEADS, "taps": TAPS},
            "efficient_attention": {
                "normalization": Normalization.SOFTMAX,
                "heads": HEADS,
                "scale": 1.0,
            },
            "linear_attention": {"feature_map": FeatureMap.ELU, "heads": HEADS, "eps": 1e-6},
            "fastformer": {"heads": HEADS},
            LAYER: {"heads": HEADS, "epsilon": EPSILON},
        }[self.mechanism]
        return kernels.prepare(
            self.mechanism, **tensors, **{**fields, **changed}, causal=self.causal
        )

    def product(self, kernels: Kernels, tensors: dict[str, Tensor]) -> Run:
        """AFT-full around PyTorch's matrix product, the exponentials in the tensors' precision."""
        bias = tensors["position_bias"].float()
        return kernels.prepare_product(
            (bias - bias.amax(1, keepdim=True)).exp().to(self.dtype),
            **tensors,
            gate=Gate.SIGMOID,
            position_bias_width=self.tokens,
            precision=ExpPrecision(ELEMENTS[self.dtype]),
        )

    def baseline(self) -> Callable[..., Tensor]:
        """The same in PyTorch, not causal, a function of ``baseline_inputs``."""
        function = getattr(baselines, self.mechanism)
        if self.mechanism in ("efficient_attention", "linear_attention"):
            return partial(function, heads=HEADS)
        return function  # type: ignore[no-any-return]

    def baseline_inputs(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Query, key, value, and the constants as the baseline keeps them."""
        if self.mechanism == LAYER:
            names = [name for name, _ in CALLS[LAYER]._fields_ if name in tensors]
            return [tensors[name] for name in ("query", *names)]
        inputs = [tensors[name] for name in ("query", "key", "value")]
        if self.mechanism == "aft_full":
            bias = tensors["position_bias"].float()
            inputs.append((bias - bias.amax(1, keepdim=True)).exp().to(self.dtype))
        if self.mechanism == "aft_local":
            inputs.append(baselines.band_blocks(tensors["band"]))
        if self.mechanism == "aft_conv":
            inputs.append(tensors["filter"].float().expm1().to(self.dtype))
        if self.mechanism == "fastformer":
            inputs += [tensors["alpha_weight"], tensors["beta_weight"]]
        return inputs
