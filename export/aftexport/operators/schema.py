"""The operators of the ``ai.aftexport`` domain in ONNX: schemas and portable bodies."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import onnx
import onnx.parser
from onnx.defs import OpSchema

from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION

AttributeValue = int | float | str

INTEGER_INPUTS = ("lengths", "key_lengths", "query_start")
"""The names of inputs of type int64; every other input is floating-point."""
STATE_OUTPUT = "present_state"
"""The name of the output that is a state after the last token; it has no row for each token."""
LOG_SUM_OUTPUT = "log_sum"
"""The name of the output with logarithms of divisors, which is float32 for every input type."""

_TENSOR_TYPES = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"]


@dataclass(frozen=True)
class Attribute:
    """An operator attribute; ``choices`` marks a setting, whose value selects the body."""

    # An ONNX function cannot branch on an attribute. The GPU kernels lack every value but the
    # default of an is_cpu_only attribute, and the cpu_only_choices. Calls of the torch op may leave
    # an is_cpu_only attribute out.

    name: str
    default: AttributeValue
    doc: str
    choices: tuple[str, ...] = ()
    is_cpu_only: bool = False
    cpu_only_choices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OnnxOperator:
    """One operator of the ``ai.aftexport`` domain."""

    op_type: str  # the ONNX name, such as CausalAftLocal
    inputs: tuple[str, ...]
    shapes: tuple[str, ...]  # of each input, as axis names separated by spaces
    # the inputs to which an exponential is applied: their range is the difficulty
    exponents: tuple[str, ...]
    attributes: tuple[Attribute, ...]
    # the function from settings, and the names of ``present`` optional inputs, to ONNX text
    body: Callable[..., str]
    doc: str
    outputs: tuple[str, ...] = ("output",)
    kernel_attributes: tuple[Attribute, ...] = ()  # settings of the kernel only
    # inputs and outputs that a node may leave out; their presence selects the body
    optional: tuple[str, ...] = ()
    # The ranges of inputs in cases of the parity check, -1 to 1 for the others; and from
    # attributes, the sizes of axes, and the inputs with nonnegative columns with the first such
    # column of each.
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    sizes: Callable[[Mapping[str, Any]], dict[str, int]] = lambda _: {}
    nonnegative: Callable[[Mapping[str, Any]], Mapping[str, int]] = lambda _: {}
    # the kernel libraries that have the operator, see ``aftplugins.RUNTIMES``
    libraries: tuple[str, ...] = ("onnxruntime", "onnxruntime_cuda", "tensorrt")

    @property
    def required_inputs(self) -> tuple[str, ...]:
        """The inputs that every node has, in order."""
        return tuple(name for name in self.inputs if name not in self.optional)

    @property
    def settings(self) -> tuple[Attribute, ...]:
        """The attributes whose value selects the body."""
        return tuple(a for a in self.attributes if a.choices)

    def attributes_of(self, node: onnx.NodeProto) -> dict[str, AttributeValue]:
        """Return the attributes of ``node`` without those of kernels; absent ones get defaults."""
        present = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        values = {a.name: present.get(a.name, a.default) for a in self.attributes}
        return {n: v.decode() if isinstance(v, bytes) else v for n, v in values.items()}

    def present_in(self, node: onnx.NodeProto) -> tuple[str, ...]:
        """Return the optional inputs and outputs that ``node`` has, in order."""
        names = (*self.inputs, *self.outputs)
        given = {name for name, value in zip(self.inputs, node.input, strict=False) if value}
        given |= {name for name, value in zip(self.outputs, node.output, strict=False) if value}
        return tuple(name for name in names if name in self.optional and name in given)

    def cpu_only_parts(self, node: onnx.NodeProto) -> tuple[str, ...]:
        """Return the attributes and inputs of ``node`` that the GPU kernels lack."""
        values = self.attributes_of(node)
        attributes = [
            a.name
            for a in self.attributes
            if values[a.name] in a.cpu_only_choices
            or (a.is_cpu_only and values[a.name] != a.default)
        ]
        return (*attributes, *self.present_in(node))

    def function(
        self,
        settings: Mapping[str, str],
        opset: int,
        present: Collection[str] = (),
        **form: Any,
    ) -> onnx.FunctionProto:
        """Build the portable body as a model-local function in the standard ops of an opset.

        ``settings`` has the value of each setting, ``present`` the optional inputs and outputs of
        the calling nodes, and ``form`` arguments of the body that settings do not decide, such as
        ``arithmetic``.
        """
        own = (*self.attributes, *self.kernel_attributes)
        declared = {a.name: a.default for a in own} | dict(settings) | PLUGIN_ATTRIBUTES
        attributes = ", ".join(_declaration(name, value) for name, value in declared.items())
        chosen: dict[str, Any] = {a.name: settings[a.name] for a in self.settings} | form
        if self.optional:
            chosen["present"] = frozenset(present).intersection(self.optional)
        inputs = list(self.inputs)
        # TensorRT's parser expects as many inputs of a function as its nodes have.
        while inputs[-1] in self.optional and inputs[-1] not in present:
            inputs.pop()
        outputs = [o for o in self.outputs if o not in self.optional or o in present]
        text = (
            f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]>\n'
            f"{self.op_type} <{attributes}> "
            f"({', '.join(inputs)}) => ({', '.join(outputs)})\n"
            f"{{{self.body(**chosen)}}}"
        )
        return onnx.parser.parse_function(text)

    def schema(self) -> OpSchema:
        """Build the ONNX schema: names, types and documentation in one place."""
        parameter = OpSchema.FormalParameter
        options = (OpSchema.FormalParameterOption.Single, OpSchema.FormalParameterOption.Optional)
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
                parameter(
                    name,
                    "tensor(int64)" if name in INTEGER_INPUTS else "T",
                    f"[{shape}]",
                    param_option=options[name in self.optional],
                )
                for name, shape in zip(self.inputs, self.shapes, strict=True)
            ],
            outputs=[
                parameter(
                    name,
                    "tensor(float)" if name == LOG_SUM_OUTPUT else "T",
                    param_option=options[name in self.optional],
                )
                for name in self.outputs
            ],
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


GATE = Attribute(
    "gate",
    "sigmoid",
    "Function of the query that multiplies the result; none leaves the query out.",
    ("sigmoid", "tanh", "none", "relu"),
    cpu_only_choices=("relu",),
)
NUM_HEADS = Attribute("num_heads", 1, "Number of heads; divides the channels of query and value.")
DENOMINATOR_EPS = Attribute(
    "eps",
    0.0,
    "Added to each sum of weights exp(key + bias), as they are, without any shift by a maximum.",
    is_cpu_only=True,
)
KV_NUM_HEADS = Attribute(
    "kv_num_heads",
    0,
    "Number of heads of key and value; divides num_heads. Query head i reads head "
    "i // (num_heads / kv_num_heads). 0: num_heads, and values as wide as keys.",
    is_cpu_only=True,
)


@dataclass(frozen=True, kw_only=True)
class MechanismOperator(OnnxOperator):
    """An operator of a mechanism, whose files have the name ``stem``."""

    stem: str


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A mechanism and its causal twin, each an operator in ONNX; see ``OnnxOperator``."""

    op_type: str  # the name of the ONNX operator that is not causal
    stem: str  # the mechanism's file name, such as aft_local
    inputs: tuple[str, ...]  # lengths last
    shapes: tuple[str, ...]
    exponents: tuple[str, ...]
    attributes: tuple[Attribute, ...]
    body: Callable[..., str]  # a function of the attributes and ``causal``
    doc: str
    kernel_attributes: tuple[Attribute, ...] = ()
    optional: tuple[str, ...] = ()  # inputs that only the operator that is not causal has
    sizes: Callable[[Mapping[str, Any]], dict[str, int]] = lambda _: {}
    nonnegative: Callable[[Mapping[str, Any]], Mapping[str, int]] = lambda _: {}

    def register(self) -> tuple[MechanismOperator, MechanismOperator]:
        """Register both operators in onnx, and return them."""
        return self._register(causal=False), self._register(causal=True)

    def _register(self, *, causal: bool) -> MechanismOperator:
        twin = " Causal: only keys up to the query's own position count." if causal else ""
        kept = [i for i, name in enumerate(self.inputs) if not (causal and name in self.optional)]
        operator = MechanismOperator(
            op_type=f"Causal{self.op_type}" if causal else self.op_type,
            inputs=tuple(self.inputs[i] for i in kept),
            shapes=tuple(self.shapes[i] for i in kept),
            optional=() if causal else self.optional,
            sizes=self.sizes,
            nonnegative=self.nonnegative,
            exponents=self.exponents,
            attributes=self.attributes,
            kernel_attributes=self.kernel_attributes,
            body=partial(self.body, causal=causal),
            doc=self.doc + twin,
            stem=self.stem,
        )
        onnx.defs.register_schema(operator.schema())
        return operator
