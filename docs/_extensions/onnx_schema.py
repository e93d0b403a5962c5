"""The directive ``onnx-operator``: inputs and attributes of an operator, from its ONNX schema."""

import onnx
from docutils import nodes
from docutils.parsers.rst import Directive
from onnx.defs import OpSchema
from sphinx.application import Sphinx

import aftexport.nn  # noqa: F401  (registers the operators of the domain)

DOMAIN = "ai.aftexport"


class OnnxOperator(Directive):
    """Shows a table of the inputs, attributes and outputs of one operator."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Build the nodes."""
        schema = onnx.defs.get_schema(self.arguments[0], domain=DOMAIN)
        attributes = {
            name: attribute
            for name, attribute in sorted(schema.attributes.items())
            if not name.startswith("plugin_")  # the same on every node
        }
        rows = [(v.name, "input", f"{_type_of(v)} {v.description}") for v in schema.inputs]
        rows += [
            (name, "attribute", f"{attribute.description} Default: {_default(attribute)}.")
            for name, attribute in attributes.items()
        ]
        rows += [(v.name, "output", _type_of(v)) for v in schema.outputs]
        return [_table(("name", "kind", "type, or meaning"), rows)]


def _type_of(value: OpSchema.FormalParameter) -> str:
    return "int64" if value.type_str == "tensor(int64)" else "float"


def _default(attribute: OpSchema.Attribute) -> str:
    value = onnx.helper.get_attribute_value(attribute.default_value)
    return value.decode() if isinstance(value, bytes) else f"{value:g}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> nodes.table:
    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in head), cols=len(head))
    group += nodes.thead("", _row(head, is_code=False))
    group += nodes.tbody("", *(_row(row, is_code=True) for row in rows))
    return nodes.table("", group)


def _row(cells: tuple[str, ...], *, is_code: bool) -> nodes.row:
    row = nodes.row()
    for column, text in enumerate(cells):
        content = nodes.literal(text=text) if is_code and column == 0 else nodes.Text(text)
        row += nodes.entry("", nodes.paragraph("", "", content))
    return row


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("onnx-operator", OnnxOperator)
    return {"parallel_read_safe": True}
