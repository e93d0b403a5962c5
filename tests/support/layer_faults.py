"""A model of four mechanisms, faults to plant in it, and where and why each should be found."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from stock_attention import use_stock_attention
from torch import Tensor, nn

from aftexport.nn import ClassifierConfig, EncoderLayer
from aftexport.nn.classifier import MeanPooling


@dataclass(frozen=True)
class Fault:
    """A change of a model, and the place and cause that a comparison must name."""

    name: str
    plant: Callable[[onnx.ModelProto], None]
    module: str  # a path that must be among those blamed
    cause: str  # kernel, precision or export
    finding: str = ""  # a part of the findings
    fused: bool = True


def node_giving(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(n for n in model.graph.node if name in n.output)


def nodes_of(model: onnx.ModelProto, op_type: str) -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if n.op_type == op_type]


def rewrite(
    model: onnx.ModelProto, name: str, change: Callable[[NDArray[np.generic]], object]
) -> None:
    """Change a weight of the graph."""
    tensor = next(t for t in model.graph.initializer if t.name == name)
    array = numpy_helper.to_array(tensor)
    changed = np.asarray(change(array.copy())).astype(array.dtype)
    assert not np.array_equal(changed, array)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(changed), name))


def weight(op_type: str, layer: int, position: int, change: Callable) -> Callable:
    """Change input ``position`` of the ``layer``-th node of a type."""

    def plant(model: onnx.ModelProto) -> None:
        rewrite(model, nodes_of(model, op_type)[layer].input[position], change)

    return plant


def attribute(op_type: str, layer: int, name: str, value: float | int | str) -> Callable:
    def plant(model: onnx.ModelProto) -> None:
        node = nodes_of(model, op_type)[layer]
        found = next(a for a in node.attribute if a.name == name)
        assert helper.get_attribute_value(found) != value
        found.CopyFrom(helper.make_attribute(name, value))

    return plant


def one_number(array: NDArray[np.generic]) -> NDArray[np.generic]:
    array.reshape(-1)[7] += 0.5
    return array


def swapped_residual(model: onnx.ModelProto) -> None:
    nodes_of(model, "LinearResidual")[1].input[3] = "embedding"


def wrong_lengths(model: onnx.ModelProto) -> None:
    """Every document is taken to be as long as the batch is wide."""
    axes = numpy_helper.from_array(np.array([0]), "axes")
    model.graph.initializer.append(axes)
    index = next(i for i, n in enumerate(model.graph.node) if n.op_type == "AftLocal")
    model.graph.node[index].input[4] = "every_length"
    for node in (
        helper.make_node("Expand", ["longest", "count"], ["every_length"]),
        helper.make_node("Shape", ["lengths"], ["count"]),
        helper.make_node("ReduceMax", ["lengths", "axes"], ["longest"], keepdims=1),
    ):
        model.graph.node.insert(index, node)


def wrong_pooling(model: onnx.ModelProto) -> None:
    """The sums of blocks and of the blocks become maxima."""
    node = node_giving(model, "sum_1")
    while node.op_type != "Reshape":  # of the tokens into blocks
        if node.op_type == "ReduceSum":
            node.op_type = "ReduceMax"
        node = node_giving(model, node.input[0])


def pooled_with_padding(model: onnx.ModelProto) -> None:
    node = node_giving(model, "sum_1")
    while node.op_type != "Concat":  # of the tokens with what fills the last block
        node = node_giving(model, node.input[0])
    node.input[0] = "layer_norm_8"


def swapped_heads(model: onnx.ModelProto) -> None:
    """The heads of the dot-product attention are put side by side channel by channel."""
    node_giving(model, "transpose_3").attribute[0].ints[:] = [0, 2, 3, 1]


def softmax_over_queries(model: onnx.ModelProto) -> None:
    (softmax,) = nodes_of(model, "Softmax")
    softmax.attribute[0].i = 2


def missing_scale(model: onnx.ModelProto) -> None:
    """Query and key are not divided by the root of the head's width."""
    weights = {tensor.name for tensor in model.graph.initializer}
    produced = {name for node in nodes_of(model, "Mul") for name in node.output}
    scores = next(n for n in nodes_of(model, "MatMul") if produced.issuperset(n.input))
    scaled = node_giving(model, scores.input[0])
    rewrite(model, next(name for name in scaled.input if name in weights), np.ones_like)


def wrong_function(op_type: str, before: str, after: str) -> Callable:
    """Another operator in a portable body."""

    def plant(model: onnx.ModelProto) -> None:
        function = next(f for f in model.functions if f.name == op_type)
        node = [n for n in function.node if n.op_type == before][-1]
        node.op_type = after

    return plant


EXPORT = [
    Fault("wrong weight", weight("LayerNormFeedForward", 1, 5, one_number),
          "layers.1.ffn.2", "export", "layers.1.ffn.2.weight"),
    Fault("transposed weight", weight("LayerNormQueryKeyValue", 0, 7, np.transpose),
          "layers.0.attention.value", "export", "transposed"),
    Fault("wrong bias", weight("LayerNormFeedForward", 2, 4, np.zeros_like),
          "layers.2.ffn.0", "export", "layers.2.ffn.0.bias"),
    Fault("wrong gain of a norm", weight("LayerNormQueryKeyValue", 1, 1, one_number),
          "layers.1.attention_norm", "export", "layers.1.attention_norm.weight"),
    Fault("wrong epsilon", attribute("LayerNormFeedForward", 3, "epsilon", 0.1),
          "layers.3.ffn_norm", "export", "attribute"),
    Fault("wrong row of the embedding", weight("Gather", 0, 0, lambda a: np.roll(a, 1, 0)),
          "embedding", "export", "embedding.weight"),
    Fault("labels swapped", weight("Gemm", 0, 1, lambda a: a[::-1]),
          "head", "export", "head.weight"),
    Fault("band reversed", weight("AftLocal", 0, 3, lambda a: a[:, ::-1]),
          "layers.0.attention", "export", "layers.0.attention.relative_bias"),
    Fault("missing scale in folded logits",
          weight("LayerNormFastformer", 0, 8, lambda a: a * np.sqrt(8)),
          "layers.2.attention", "export", "layers.2.attention.beta_weight"),
    Fault("missing scale in a product", missing_scale, "layers.3.attention", "export", "attribute"),
    Fault("swapped axis of heads", swapped_heads, "layers.3.attention", "export", "axis"),
    Fault("softmax over the wrong axis", softmax_over_queries,
          "layers.3.attention", "export", "axis"),
    Fault("wrong number of heads", attribute("EfficientAttention", 0, "num_heads", 4),
          "layers.1.attention", "export", "attribute"),
    Fault("wrong gate", attribute("AftLocal", 0, "gate", "tanh"),
          "layers.0.attention", "export", "attribute"),
    Fault("swapped residual", swapped_residual, "layers.1", "export", "input"),
    Fault("padding taken for tokens", wrong_lengths, "layers.0.attention", "export", "input"),
    Fault("wrong pooling", wrong_pooling, "pooling", "export", "axis"),
    Fault("padding pooled", pooled_with_padding, "pooling", "export", "input"),
    Fault("wrong body", wrong_function("EfficientAttention", "Mul", "Add"),
          "layers.1.attention", "export", "body", fused=False),
]  # fmt: skip
"""Possible faults of an exporter."""

PRECISION = [
    Fault("int8 in one layer", attribute("LayerNormFeedForward", 1, "precision", "int8"),
          "layers.1.ffn.0", "precision"),
    Fault("bf16 in one layer", attribute("LayerNormQueryKeyValue", 1, "precision", "bf16"),
          "layers.1.attention.query", "precision"),
]  # fmt: skip

KERNEL = [
    Fault("AftLocal", wrong_function("AftLocal", "Mul", "Add"), "layers.0.attention", "kernel"),
    Fault("EfficientAttention", wrong_function("EfficientAttention", "Mul", "Add"),
          "layers.1.attention", "kernel"),
    Fault("LayerNormFastformer", wrong_function("LayerNormFastformer", "Add", "Sub"),
          "layers.2.attention.output", "kernel"),
    Fault("LinearResidual", wrong_function("LinearResidual", "Add", "Sub"),
          "layers.0.attention.output", "kernel"),
]  # fmt: skip
"""Faults of kernels, written as bodies."""


VOCABULARY, DIM, LABELS = 60, 16, 3
MECHANISMS = ("aft_local", "efficient_attention", "fastformer", "dot_product_attention")


class Mixed(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(EncoderLayer(config(name)) for name in MECHANISMS)
        use_stock_attention(self)
        self.norm = nn.LayerNorm(DIM)
        self.pooling = MeanPooling()
        self.head = nn.Linear(DIM, LABELS)
        for parameter in self.parameters():  # no two norms are alike
            parameter.data += 0.1 * torch.randn_like(parameter)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, lengths)
        return self.head(self.pooling(self.norm(x), lengths))


def config(mechanism: str) -> ClassifierConfig:
    return ClassifierConfig(
        mechanism=mechanism, vocab_size=VOCABULARY, num_labels=LABELS, dim=DIM, num_heads=2,
        ffn_dim=24, window=4,
    )  # fmt: skip
