"""The builder of TensorRT-RTX, which needs no GPU, on models with our operators."""

import importlib.util
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from aft_full_product import aft_full_model
from onnx import TensorProto, helper
from sampling import any_case
from torch import Tensor, nn

from aftexport.capture.capture import capture
from aftexport.engines import aft_full_product
from aftexport.engines.aft_full_product import use_products
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.nn import ClassifierConfig, EncoderLayer
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION
from aftexport.operators.mechanisms import MECHANISMS
from aftexport.operators.torch_ops import OPERATORS
from aftexport.system.contract import DEFAULT_OPSET

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx is not installed"
)

SCRIPT = Path(__file__).with_name("build_engine.py")
CHANNELS, HEADS = 16, 2
PARAMETERS = {
    "position_bias": [32, 32],
    "band": [32, 7],
    "filter": [HEADS, 3],
    "alpha_weight": [CHANNELS, HEADS],
    "beta_weight": [CHANNELS, HEADS],
}

Shapes = Mapping[str, Sequence[int | str]]


def one_of_each(
    *op_types: str,
    element: int = TensorProto.FLOAT,
    elements: Mapping[str, int] | None = None,
    shapes: Shapes | None = None,
    without_last: bool = False,
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a model with one node for each operator, named as that, on inputs of its own.

    ``elements`` and ``shapes`` are those of some inputs by name, ``attributes`` replace defaults.
    """
    nodes, inputs, outputs, functions = [], [], [], []
    for op_type in op_types:
        operator = OPERATORS[op_type]
        required = operator.required_inputs
        names = required[:-1] if without_last else required
        for name in names:
            heads_as_key = operator.stem == "aft_conv" and name == "key"
            sequence = ["batch", "tokens", HEADS if heads_as_key else CHANNELS]
            shape = ["batch"] if name == "lengths" else PARAMETERS.get(name, sequence)
            kind = TensorProto.INT64 if name == "lengths" else element
            kind = (elements or {}).get(name, kind)
            shape = (shapes or {}).get(name, shape)
            inputs.append(helper.make_tensor_value_info(f"{op_type}_{name}", kind, shape))
        first = [a for a in operator.attributes if not a.is_cpu_only]
        own = (*first, *operator.kernel_attributes)
        values = {a.name: HEADS if a.name == "num_heads" else a.default for a in own}
        nodes.append(
            helper.make_node(
                op_type,
                [f"{op_type}_{name}" for name in names],
                [f"{op_type}_output"],
                name=op_type,
                domain=DOMAIN,
                **(values | attributes | PLUGIN_ATTRIBUTES),
            )
        )
        output = ["batch", "tokens", CHANNELS]
        outputs.append(helper.make_tensor_value_info(f"{op_type}_output", element, output))
        defaults = {a.name: str(a.default) for a in operator.settings}
        functions.append(operator.function(defaults, DEFAULT_OPSET))
    opsets = [helper.make_opsetid("", DEFAULT_OPSET), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(
        helper.make_graph(nodes, "operators", inputs, outputs),
        functions=functions,
        opset_imports=opsets,
        ir_version=10,
    )


class Both(nn.Module):
    """An encoder layer of a mechanism and one of its causal form."""

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(
            EncoderLayer(replace(config, causal=causal)) for causal in (False, True)
        )
        self.head = nn.Linear(config.dim, config.num_labels)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, lengths)
        return self.head(x[:, 0])


def exported_model(mechanism: str) -> onnx.ModelProto:
    """Export a small PyTorch model of a mechanism."""
    torch.manual_seed(0)
    most = 32 if mechanism == "aft_full" else None
    config = ClassifierConfig(
        mechanism=mechanism,
        vocab_size=50,
        num_labels=3,
        dim=CHANNELS,
        num_heads=8,  # too narrow for a Fastformer layer to be made one operator
        ffn_dim=16,
        window=4,
        max_length=most,
    )
    return finish(lower(capture(Both(config).eval(), max_tokens=most)))


def build(model: onnx.ModelProto, folder: Path, *plugins: Path) -> dict[str, Any]:
    """Return the builder's result for a model (see build_engine.py); the process must end."""
    path = folder / "model.onnx"
    onnx.save(model, path)
    done = subprocess.run(
        [sys.executable, SCRIPT, path, *plugins], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.table(keep=0.2, by=any_case)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_exported_model_builds_either_way(mechanism: str, library: Path, tmp_path: Path) -> None:
    """It builds with and without the plugins."""
    model = exported_model(mechanism)
    nodes = {n.name: n.op_type for n in model.graph.node if n.op_type in OPERATORS}
    assert Counter(OPERATORS[op_type].stem for op_type in nodes.values()) == {mechanism: 2}

    fused, portable = build(model, tmp_path, library), build(model, tmp_path)
    for result in (fused, portable):
        assert result["errors"] == []
        assert result["engine"]
        assert result["inputs"] == {"input_ids": ["INT64", [-1, -1]], "lengths": ["INT64", [-1]]}
        assert result["outputs"] == {"logits": ["FLOAT", [-1, 3]]}
    assert sorted(fused["plugins"]) == sorted(nodes)
    assert portable["plugins"] == []


@pytest.mark.parametrize("element", ["FLOAT", "FLOAT16", "BFLOAT16"])
def test_every_operator_builds_in_every_type(element: str, library: Path, tmp_path: Path) -> None:
    model = one_of_each(*OPERATORS, element=TensorProto.DataType.Value(element))
    result = build(model, tmp_path, library)
    assert result["errors"] == []
    assert sorted(result["plugins"]) == sorted(OPERATORS)
    names = {"FLOAT": "FLOAT", "FLOAT16": "HALF", "BFLOAT16": "BF16"}
    outputs = {f"{op_type}_output": [names[element], [-1, -1, CHANNELS]] for op_type in OPERATORS}
    assert result["outputs"] == outputs
    assert result["engine"]


@pytest.fixture
def product_from_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aft_full_product, "MIN_TOKENS", 1)


@pytest.mark.usefixtures("product_from_one_token")
@pytest.mark.parametrize(("precision", "element"), [("fp16", "HALF"), ("bf16", "BF16")])
def test_product_of_aft_full_builds_either_way(
    precision: str, element: str, library: Path, tmp_path: Path
) -> None:
    model = aft_full_model(precision, np.eye(32), gate="tanh")
    assert use_products(model, "tensorrt")
    fused, portable = build(model, tmp_path, library), build(model, tmp_path)
    for result in (fused, portable):
        assert result["errors"] == []
        assert result["outputs"] == {"output": [element, [-1, -1, 16]]}
        assert result["engine"]
    assert sorted(fused["plugins"]) == ["attention", "output/entries"]
    assert portable["plugins"] == []


@pytest.mark.parametrize(
    ("op_type", "changes", "message"),
    [
        ("AftFull", {"gate": "relu"}, 'gate is "relu", expected sigmoid, tanh or none'),
        ("CausalAftFull", {"precision": "int4"}, 'precision is "int4", expected fp32, fp16, bf16'),
        ("AftConv", {"num_heads": "2"}, "num_heads has a wrong type, expected an integer"),
        ("AftConv", {"num_heads": [1, 2]}, "num_heads has 2 values, expected one"),
        ("NormalizedLinearAttention", {"eps": 0.0}, "eps is 0, expected more than 0"),
        ("NormalizedLinearAttention", {"eps": math.inf}, "eps is inf, expected a finite number"),
        ("AftSimple", {"without_last": True}, "has 3 inputs, expected 4"),
        (
            "AftSimple",
            {"elements": {"key": TensorProto.FLOAT16}},
            "key is float16, expected float32",
        ),
        (
            "CausalFastformer",
            {"element": TensorProto.INT8},
            "query is int8, expected float32, float16 or bfloat16",
        ),
        (
            "AftLocal",
            {"elements": {"lengths": TensorProto.INT32}},
            "lengths is int32, expected int64",
        ),
        (
            "AftSimple",
            {"shapes": {"value": ["batch", CHANNELS]}},
            "value has shape [-1, -1], expected 3 dimensions",
        ),
    ],
)
def test_parser_refusal_is_explained(
    op_type: str, changes: dict[str, Any], message: str, library: Path, tmp_path: Path
) -> None:
    result = build(one_of_each(op_type, **changes), tmp_path, library)
    assert not result["parsed"]
    assert result["errors"][0].startswith(f"{op_type}: {message}")
    assert any(f"Node name: {op_type}" in error for error in result["errors"])


@pytest.mark.parametrize(
    ("op_type", "changes", "message"),
    [
        (
            "AftSimple",
            {"shapes": {"key": ["batch", "tokens", 17]}},
            "key has shape [-1, -1, 17], expected [-1, -1, 16]",
        ),
        (
            "EfficientAttention",
            {"num_heads": 3},
            "query has shape [-1, -1, 16], whose width is not divisible by num_heads 3",
        ),
        (
            "AftFull",
            {"shapes": {"position_bias": [32, 33]}},
            "position_bias has shape [32, 33], expected [32, 32]",
        ),
        (
            "AftLocal",
            {"shapes": {"band": [1, 4]}},
            "band has shape [1, 4], expected an odd number of columns",
        ),
        (
            "AftConv",
            {"shapes": {"filter": [2, 0]}},
            "filter has shape [2, 0], expected at least one tap",
        ),
        (
            "CausalFastformer",
            {"shapes": {"beta_weight": [CHANNELS, 3]}},
            "beta_weight has shape [16, 3], expected [16, 2]",
        ),
    ],
)
def test_builder_refusal_is_explained(
    op_type: str, changes: dict[str, Any], message: str, library: Path, tmp_path: Path
) -> None:
    result = build(one_of_each(op_type, **changes), tmp_path, library)
    assert result["parsed"]
    assert not result["engine"]
    assert result["errors"][0].startswith(f"{op_type}: {message}")
    assert any(f"Plugin node {op_type}" in error for error in result["errors"])
