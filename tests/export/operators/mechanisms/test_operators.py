"""The table of operators, and the ONNX schema of each."""

import re

import onnx
import pytest

from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION
from aftexport.operators.mechanisms import MECHANISMS
from aftexport.operators.torch_ops import OPERATORS

from .cases import VARIANTS, Variant

CONTRACT = {
    "AftFull": "query key value position_bias lengths; gate eps",
    "AftLocal": "query key value band lengths; gate eps",
    "AftSimple": "query key value lengths; gate num_heads eps",
    "AftConv": "query key value filter lengths; num_heads gate eps",
    "EfficientAttention": "query key value lengths; num_heads normalization scale kv_num_heads; "
    "key_lengths",
    "Fastformer": "query key value alpha_weight beta_weight lengths; num_heads",
    "NormalizedLinearAttention": "query key value lengths; "
    "num_heads feature_map eps normalizer kv_num_heads; key_lengths",
}
"""The inputs, the attributes, and the optional inputs, which causal operators lack."""
DEFAULTS = {
    "gate": "sigmoid",
    "num_heads": 1,
    "normalization": "softmax",
    "scale": 1.0,
    "feature_map": "elu",
    "eps": 0.0,
    "normalizer": "add",
    "kv_num_heads": 0,
}
CPU_ONLY = {"eps", "normalizer", "kv_num_heads"}
"""The attributes that the GPU kernels lack.

eps of linear attention and num_heads of AFT-simple differ.
"""


def test_seven_mechanisms_have_causal_twins() -> None:
    assert len(MECHANISMS) == 7
    assert set(OPERATORS) == {prefix + op for op in CONTRACT for prefix in ("", "Causal")}
    for op_type, operator in OPERATORS.items():
        assert operator.op_type == op_type
        assert operator.stem == OPERATORS[op_type.removeprefix("Causal")].stem


@pytest.mark.parametrize("op_type", OPERATORS)
def test_inputs_and_attributes_match_contract(op_type: str) -> None:
    operator = OPERATORS[op_type]
    inputs, attributes, *rest = CONTRACT[op_type.removeprefix("Causal")].split("; ")
    optional = [] if op_type.startswith("Causal") else " ".join(rest).split()
    assert operator.required_inputs == tuple(inputs.split())
    assert operator.inputs == (*inputs.split(), *optional)
    assert [a.name for a in operator.attributes] == attributes.split()
    own = {
        "linear_attention": {"eps": (1e-6, False)},
        "aft_simple": {"num_heads": (0, True)},
    }.get(operator.stem, {})
    for attribute in operator.attributes:
        name = attribute.name
        expected = own.get(name, (DEFAULTS[name], name in CPU_ONLY))
        assert (attribute.default, attribute.is_cpu_only) == expected
    # The torch op takes them in the same order, and then the optional inputs.
    assert [a.name for a in operator.torch_op._schema.arguments] == (
        inputs.split() + attributes.split() + optional
    )


@pytest.mark.parametrize("op_type", OPERATORS)
def test_onnx_schema_is_registered_and_documented(op_type: str) -> None:
    schema = onnx.defs.get_schema(op_type, VERSION, DOMAIN)
    operator = OPERATORS[op_type]
    assert [i.name for i in schema.inputs] == list(operator.inputs)
    declared = {a.name for a in (*operator.attributes, *operator.kernel_attributes)}
    assert set(schema.attributes) == declared | set(PLUGIN_ATTRIBUTES)
    for value in schema.inputs:
        assert (value.type_str == "tensor(int64)") == value.name.endswith("lengths")
    assert all(f"{name}" in schema.doc for name in operator.inputs[3:] if name != "lengths")
    assert re.search(r"arXiv \d{4}\.\d{5}", schema.doc)
    assert ("Causal" in schema.doc) == op_type.startswith("Causal")


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_function_declares_attributes_with_defaults(variant: Variant) -> None:
    function = variant.operator.function(dict(variant.settings), 20)
    declared = {a.name: onnx.helper.get_attribute_value(a) for a in function.attribute_proto}
    operator = variant.operator
    expected = {a.name: a.default for a in (*operator.attributes, *operator.kernel_attributes)}
    expected |= dict(variant.settings) | PLUGIN_ATTRIBUTES
    assert set(declared) == set(expected)
    for name, value in expected.items():
        found = declared[name]
        assert (found.decode() if isinstance(found, bytes) else found) == pytest.approx(value)
