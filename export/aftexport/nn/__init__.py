"""Layers for each mechanism, the document classifier built from them, and its losses."""

import aftexport.operators.torch_ops  # noqa: F401  registers the operators that layers call
from aftexport.nn.aft_conv import AftConv
from aftexport.nn.aft_full import AftFull
from aftexport.nn.aft_local import AftLocal
from aftexport.nn.aft_simple import AftSimple
from aftexport.nn.classifier import DocumentClassifier, MultiHeadClassifier
from aftexport.nn.config import ClassifierConfig, MultiHeadConfig
from aftexport.nn.dot_product_attention import DotProductAttention
from aftexport.nn.efficient_attention import EfficientAttention
from aftexport.nn.encoder import Encoder, EncoderLayer, build_attention
from aftexport.nn.encoder_config import LAYERS, EncoderConfig
from aftexport.nn.fastformer import Fastformer
from aftexport.nn.head_config import HeadConfig
from aftexport.nn.linear_attention import LinearAttention
from aftexport.nn.loss import task_loss

__all__ = [
    "LAYERS",
    "AftConv",
    "AftFull",
    "AftLocal",
    "AftSimple",
    "ClassifierConfig",
    "DocumentClassifier",
    "DotProductAttention",
    "EfficientAttention",
    "Encoder",
    "EncoderConfig",
    "EncoderLayer",
    "Fastformer",
    "HeadConfig",
    "LinearAttention",
    "MultiHeadClassifier",
    "MultiHeadConfig",
    "build_attention",
    "task_loss",
]
