"""Redaction of query strings in traces: clients put secrets, such as API keys, there by mistake.

It is apart from ``tracing`` because it needs the SDK of OpenTelemetry, which may be missing.
"""

import re
from urllib.parse import parse_qsl, urlencode

from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span, SpanProcessor

_KNOWN = {
    "evidence": re.compile(r"\d{1,3}", re.ASCII),
    "evidence_check": re.compile(r"\d", re.ASCII),
    "evidence_tokens": re.compile(r"\d{1,7}", re.ASCII),
}
"""The parameters that the server reads, and their values."""
_QUERIES = ("url.query",)
_ADDRESSES = ("url.full", "url.original", "http.url", "http.target")
"""Attributes of the semantic conventions, old and new, that hold a query or end with one."""
_PATHS = ("url.path",)
_QUERY_IN_PATH = re.compile(r"[?;]|%3f|%3b", re.IGNORECASE)
"""A mark that starts a query for the client. If it is encoded, the server reads it as a path."""
_REDACTED = "REDACTED"


def redacted(query: str) -> str:
    """Return a query string without names and values that the server does not know."""
    pairs = parse_qsl(query, keep_blank_values=True)
    known = [(n, v) for n, v in pairs if n in _KNOWN and _KNOWN[n].fullmatch(v)]
    kept = [urlencode(known)] if known else []
    return "&".join([*kept, *([_REDACTED] if len(known) < len(pairs) else [])])


class QueryRedaction(SpanProcessor):  # type: ignore[misc]  # mypy skips the package
    """A processor that redacts the query strings of every span at its start."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Replace the attributes that have a query string."""
        for name, value in (span.attributes or {}).items():
            if name in _QUERIES:
                span.set_attribute(name, redacted(str(value)))
            elif name in _ADDRESSES:
                address, mark, query = str(value).partition("?")
                span.set_attribute(name, f"{_path(address)}{mark}{redacted(query)}")
            elif name in _PATHS:
                span.set_attribute(name, _path(str(value)))


def _path(path: str) -> str:
    if (mark := _QUERY_IN_PATH.search(path)) is None:
        return path
    return path[: mark.end()] + _REDACTED
