"""The pre-norm encoder and its token-mixing layers."""

from torch import Tensor, nn

from aftexport.nn.aft_conv import AftConv
from aftexport.nn.aft_full import AftFull
from aftexport.nn.aft_local import AftLocal
from aftexport.nn.aft_simple import AftSimple
from aftexport.nn.config import RECURRENT_LAYERS, EncoderConfig
from aftexport.nn.dot_product_attention import DotProductAttention
from aftexport.nn.efficient_attention import EfficientAttention
from aftexport.nn.fastformer import Fastformer
from aftexport.nn.linear_attention import LinearAttention
from aftexport.nn.recurrent_linear_attention import (
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    LightningAttention,
    Mamba2,
    Retention,
)


def build_attention(config: EncoderConfig, number: int = 0) -> nn.Module:
    """Build the token-mixing layer that ``config.mechanism`` names.

    Args:
        config: the configuration of the encoder.
        number: the number of the encoder layer, from 0.
    """
    if config.mechanism in RECURRENT_LAYERS:
        return _build_recurrent(config, number)
    dim, heads, causal = config.dim, config.num_heads, config.causal
    match config.mechanism:
        case "aft_full":
            assert config.max_length is not None  # ClassifierConfig checks this
            return AftFull(
                dim, config.max_length, bias_rank=config.bias_rank, gate=config.gate, causal=causal
            )
        case "aft_local":
            return AftLocal(
                dim,
                config.window,
                config.max_length,
                bias_rank=config.bias_rank,
                gate=config.gate,
                causal=causal,
            )
        case "aft_simple":
            return AftSimple(dim, gate=config.gate, causal=causal)
        case "aft_conv":
            return AftConv(dim, heads, config.window, gate=config.gate, causal=causal)
        case "efficient_attention":
            return EfficientAttention(dim, heads, normalization=config.normalization, causal=causal)
        case "fastformer":
            return Fastformer(dim, heads, causal=causal)
        case "linear_attention":
            return LinearAttention(dim, heads, feature_map=config.feature_map, causal=causal)
        case _:
            return DotProductAttention(dim, heads, causal=causal)


def _build_recurrent(config: EncoderConfig, number: int) -> nn.Module:
    dim, heads, causal, taps = config.dim, config.num_heads, config.causal, config.conv_taps
    match config.mechanism:
        case "gated_linear_attention":
            return GatedLinearAttention(dim, heads, causal=causal)
        case "retention":
            return Retention(dim, heads, causal=causal)
        case "lightning_attention":
            scale = 1 - number / max(config.depth - 1, 1) + 1e-5
            return LightningAttention(dim, heads, slope_scale=scale, causal=causal)
        case "delta_net":
            return DeltaNet(dim, heads, conv_taps=taps, causal=causal)
        case "gated_delta_net":
            return GatedDeltaNet(dim, heads, conv_taps=taps, causal=causal)
        case _:
            return Mamba2(dim, heads, state_size=config.state_size, conv_taps=taps, causal=causal)


class EncoderLayer(nn.Module):
    """An encoder layer: ``x + attention(norm(x))``, then ``x + ffn(norm(x))``.

    Args:
        config: the configuration of the encoder.
        number: the number of the layer, from 0.
    """

    def __init__(self, config: EncoderConfig, number: int = 0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = build_attention(config, number)
        self.ffn_norm = nn.LayerNorm(config.dim)
        self.ffn = nn.Sequential(
            nn.Linear(config.dim, config.ffn_dim),
            nn.GELU(),
            nn.Linear(config.ffn_dim, config.dim),
        )

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Transform ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        x = x + self.attention(self.attention_norm(x), lengths)
        return x + self.ffn(self.ffn_norm(x))


class Encoder(nn.Module):
    """A stack of ``depth`` encoder layers and a final norm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config, number) for number in range(config.depth))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Transform ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        for layer in self.layers:
            x = layer(x, lengths)
        return self.norm(x)
