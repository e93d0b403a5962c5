"""Layers for each mechanism, the document classifier built from them, and its losses."""

import aftexport.operators.torch_ops  # noqa: F401  registers the operators that layers call
from aftexport.nn.aft_conv import AftConv
from aftexport.nn.aft_full import AftFull
from aftexport.nn.aft_local import AftLocal
from aftexport.nn.aft_simple import AftSimple
from aftexport.nn.classifier import DocumentClassifier, MultiHeadClassifier
from aftexport.nn.config import LAYERS, ClassifierConfig, EncoderConfig, HeadConfig, MultiHeadConfig
from aftexport.nn.dot_product_attention import DotProductAttention
from aftexport.nn.efficient_attention import EfficientAttention
from aftexport.nn.encoder import Encoder, EncoderLayer, build_attention
from aftexport.nn.fastformer import Fastformer
from aftexport.nn.linear_attention import LinearAttention
from aftexport.nn.loss import task_loss
from aftexport.nn.recurrent_linear_attention import (
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    LightningAttention,
    Mamba2,
    Retention,
)

__all__ = [
    "LAYERS",
    "AftConv",
    "AftFull",
    "AftLocal",
    "AftSimple",
    "ClassifierConfig",
    "DeltaNet",
    "DocumentClassifier",
    "DotProductAttention",
    "EfficientAttention",
    "Encoder",
    "EncoderConfig",
    "EncoderLayer",
    "Fastformer",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "HeadConfig",
    "LightningAttention",
    "LinearAttention",
    "Mamba2",
    "MultiHeadClassifier",
    "MultiHeadConfig",
    "Retention",
    "build_attention",
    "task_loss",
]
