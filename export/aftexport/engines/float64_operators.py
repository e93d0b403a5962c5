"""Operators that ONNX Runtime has only in float32, as functions of others in float64."""

from collections.abc import Iterable

import onnx
import onnx.parser

from aftexport.operators.domain import opset_of

_DOMAIN = "ai.aftexport.float64"
_NAMES = {"Erf": "Erf64", "Gelu": "Gelu64"}
_COEFFICIENTS = (
    -1.3026537197817094, 6.4196979235649026e-1, 1.9476473204185836e-2, -9.561514786808631e-3,
    -9.46595344482036e-4, 3.66839497852761e-4, 4.2523324806907e-5, -2.0278578112534e-5,
    -1.624290004647e-6, 1.303655835580e-6, 1.5626441722e-8, -8.5238095915e-8,
    6.529054439e-9, 5.059343495e-9, -9.91364156e-10, -2.27365122e-10,
    9.6467911e-11, 2.394038e-12, -6.886027e-12, 8.94487e-13,
    3.13092e-13, -1.12708e-13, 3.81e-16, 7.106e-15,
    -1.523e-15, -9.4e-17, 1.21e-16, -2.8e-17,
)  # fmt: skip
"""Chebyshev coefficients of ``log(erfc(z) exp(z^2) / t)`` for ``t = 2 / (2 + z)``, ``z >= 0``.

The error of erf is below 1e-15. From Numerical Recipes, third edition, section 6.2.2.
"""


def add_float64_operators(model: onnx.ModelProto) -> None:
    """Replace Erf and Gelu in a float64 graph by functions, in place."""
    if not _rename(model.graph.node):
        return
    opset = opset_of(model)
    functions = [onnx.parser.parse_function(_erf(opset)), onnx.parser.parse_function(_gelu(opset))]
    model.functions.extend(functions)
    model.opset_import.append(onnx.helper.make_opsetid(_DOMAIN, 1))


def _rename(nodes: Iterable[onnx.NodeProto]) -> int:
    """Give nodes the names of the functions; return their number."""
    count = 0
    for node in nodes:
        for attribute in node.attribute:
            for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                count += _rename(graph.node)
        if node.domain == "" and node.op_type in _NAMES and not _is_tanh(node):
            node.op_type, node.domain = _NAMES[node.op_type], _DOMAIN
            del node.attribute[:]
            count += 1
    return count


def _is_tanh(node: onnx.NodeProto) -> bool:
    """Return whether a Gelu is that of the hyperbolic tangent, which needs no Erf."""
    return any(a.name == "approximate" and a.s == b"tanh" for a in node.attribute)


def _erf(opset: int) -> str:
    """Return the function of erf, by Clenshaw's recurrence."""
    lines, number = [], 0

    def let(expression: str) -> str:
        nonlocal number
        number += 1
        lines.append(f"v{number} = {expression}")
        return f"v{number}"

    def scalar(value: float) -> str:
        return let(f"Constant <value = double {{{value!r}}}> ()")

    one, two = scalar(1.0), scalar(2.0)
    z = let("Abs (x)")
    t = let(f"Div ({two}, {let(f'Add ({two}, {z})')})")
    ty = let(f"Sub ({let(f'Mul ({t}, {scalar(4.0)})')}, {two})")
    d, dd = scalar(0.0), scalar(0.0)
    for coefficient in reversed(_COEFFICIENTS[1:]):
        kept = d
        scaled = let(f"Sub ({let(f'Mul ({ty}, {d})')}, {dd})")
        d, dd = let(f"Add ({scaled}, {scalar(coefficient)})"), kept
    series = let(f"Add ({let(f'Mul ({ty}, {d})')}, {scalar(_COEFFICIENTS[0])})")
    half = let(f"Sub ({let(f'Mul ({series}, {scalar(0.5)})')}, {dd})")
    exponent = let(f"Sub ({half}, {let(f'Mul ({z}, {z})')})")
    rest = let(f"Mul ({t}, {let(f'Exp ({exponent})')})")
    lines.append(f"y = Mul ({let('Sign (x)')}, {let(f'Sub ({one}, {rest})')})")
    return _function("Erf64", opset, lines)


def _gelu(opset: int) -> str:
    lines = [
        "root = Constant <value = double {1.4142135623730951}> ()",
        "half = Constant <value = double {0.5}> ()",
        "one = Constant <value = double {1.0}> ()",
        "scaled = Div (x, root)",
        f"e = {_DOMAIN}.Erf64 (scaled)",
        "sum = Add (one, e)",
        "product = Mul (x, sum)",
        "y = Mul (half, product)",
    ]
    return _function("Gelu64", opset, lines)


def _function(name: str, opset: int, lines: list[str]) -> str:
    body = "\n".join(lines)
    imports = f'"" : {opset}, "{_DOMAIN}" : 1'
    return f'<domain: "{_DOMAIN}", opset_import: [{imports}]> {name} (x) => (y) {{\n{body}\n}}'
