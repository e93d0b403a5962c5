"""An operator of the ``ai.aftexport`` domain in ONNX: its schema and its portable body."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx
import onnx.parser
from onnx.defs import OpSchema

from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION

AttributeValue = int | float | str

_TENSOR_TYPES = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"]


@dataclass(frozen=True)
class Attribute:
    """An operator attribute.

    ``choices`` marks a setting. Its value selects the body, because an ONNX
    function cannot branch on an attribute.
    """

    name: str
    default: AttributeValue
    doc: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OnnxOperator:
    """One operator of the ``ai.aftexport`` domain.

    Attributes:
        op_type: ONNX name, for example ``CausalAftLocal``.
        inputs: names in order; ``lengths`` is int64, every other one floating-point.
        shapes: the shape of each input, as axis names separated by spaces.
        outputs: names in order; all floating-point.
        exponents: the inputs to which an exponential is applied; their range decides the
            numerical difficulty.
        attributes: the attributes of the definition, in order.
        kernel_attributes: settings of the kernel only; the definition, the body and the torch
            op ignore them.
        body: the function from settings to the portable body in ONNX textual syntax.
        doc: formula and source.
    """

    op_type: str
    inputs: tuple[str, ...]
    shapes: tuple[str, ...]
    exponents: tuple[str, ...]
    attributes: tuple[Attribute, ...]
    body: Callable[..., str]
    doc: str
    outputs: tuple[str, ...] = ("output",)
    kernel_attributes: tuple[Attribute, ...] = ()

    @property
    def settings(self) -> tuple[Attribute, ...]:
        """The attributes whose value selects the body."""
        return tuple(a for a in self.attributes if a.choices)

    def attributes_of(self, node: onnx.NodeProto) -> dict[str, AttributeValue]:
        """Return the attributes of ``node`` without those of kernels; absent ones get defaults."""
        present = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        values = {a.name: present.get(a.name, a.default) for a in self.attributes}
        return {n: v.decode() if isinstance(v, bytes) else v for n, v in values.items()}

    def function(self, settings: Mapping[str, str], opset: int) -> onnx.FunctionProto:
        """Build the portable body as a model-local function in standard ops of ``opset``."""
        own = (*self.attributes, *self.kernel_attributes)
        declared = {a.name: a.default for a in own} | dict(settings) | PLUGIN_ATTRIBUTES
        attributes = ", ".join(_declaration(name, value) for name, value in declared.items())
        chosen = {a.name: settings[a.name] for a in self.settings}
        text = (
            f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]>\n'
            f"{self.op_type} <{attributes}> "
            f"({', '.join(self.inputs)}) => ({', '.join(self.outputs)})\n"
            f"{{{self.body(**chosen)}}}"
        )
        return onnx.parser.parse_function(text)

    def schema(self) -> OpSchema:
        """Build the ONNX schema: names, types and documentation in one place."""
        parameter = OpSchema.FormalParameter
        attributes = [
            OpSchema.Attribute(a.name, onnx.helper.make_attribute(a.name, a.default), a.doc)
            for a in (*self.attributes, *self.kernel_attributes)
        ] + [
            OpSchema.Attribute(
                name, onnx.helper.make_attribute(name, value), "Identifies the TensorRT plugin."
            )
            for name, value in PLUGIN_ATTRIBUTES.items()
        ]
        return OpSchema(
            self.op_type,
            DOMAIN,
            VERSION,
            doc=self.doc,
            inputs=[
                parameter(name, "tensor(int64)" if name == "lengths" else "T", f"[{shape}]")
                for name, shape in zip(self.inputs, self.shapes, strict=True)
            ],
            outputs=[parameter(name, "T") for name in self.outputs],
            type_constraints=[("T", _TENSOR_TYPES, "Floating-point tensors of one type.")],
            attributes=attributes,
        )


def _declaration(name: str, value: AttributeValue) -> str:
    if isinstance(value, str):
        return f'{name}: string = "{value}"'
    return f"{name}: {'int' if isinstance(value, int) else 'float'} = {value}"


def as_float(*names: str) -> str:
    """Return the lines of a body that cast its inputs to float32, as ``<name>_f``."""
    return "".join(f"{name}_f = Cast <to = 1> ({name})\n" for name in names)
