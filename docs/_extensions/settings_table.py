"""The directive ``server-settings``: every setting of the server, read from its pydantic class."""

from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from aftserve.setting_sources import ONLY_IN_FILE
from aftserve.settings import Settings

Schema = dict[str, Any]
_SHOWN = {"bundles": "BUNDLE ...", "models": "[models.NAME]"}
"""The settings without a flag: words of the command line, and sections of the file."""
_LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
}


def describe_type(schema: Schema) -> str:
    """Return the type of a setting in words, from the JSON Schema of the property."""
    if "anyOf" in schema:
        return ", or ".join(describe_type(s) for s in schema["anyOf"] if s.get("type") != "null")
    if "enum" in schema:
        return "one of " + ", ".join(schema["enum"])
    if schema.get("type") == "array":
        return "list, with commas between"
    name = {"path": "path"}.get(schema.get("format", ""), schema.get("type", "any"))
    limits = [f"{words} {schema[key]:,}" for key, words in _LIMITS.items() if key in schema]
    return ", ".join([name, *limits])


class ServerSettings(Directive):
    """Lists flag, variable, type, default and meaning of every setting."""

    def run(self) -> list[nodes.Node]:
        """Build the nodes."""
        definitions = nodes.definition_list()
        properties = Settings.model_json_schema()["properties"]
        for name, schema in properties.items():
            term = nodes.term()
            flag = _SHOWN.get(name, "--" + name.replace("_", "-"))
            term += nodes.literal(text=flag)
            default = schema.get("default")
            if isinstance(default, list):
                default = ", ".join(default)
            default = "none" if default in (None, "", ".", {}) else str(default)
            facts = nodes.paragraph()
            if name in ONLY_IN_FILE:
                facts += nodes.Text("only in the file of --config")
            else:
                facts += nodes.literal(text=f"AFTSERVE_{name.upper()}")
            facts += nodes.Text(f" · {describe_type(schema)} · default: {default}")
            meaning = nodes.paragraph(text=schema.get("description", ""))
            item = nodes.definition_list_item()
            item += [term, nodes.definition("", facts, meaning)]
            definitions += item
        return [definitions]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("server-settings", ServerSettings)
    return {"parallel_read_safe": True}
