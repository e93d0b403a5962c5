"""Exemplars: the request that a value of a histogram comes from."""

from contextvars import ContextVar

_MAX_CHARACTERS = 128
"""Maximum characters of an exemplar's labels with their names, by OpenMetrics 1.0."""

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The name of the request that the current task answers."""


def exemplar_labels(trace_id: str | None) -> dict[str, str] | None:
    """Return the labels that find the current request in traces and logs; None without any.

    A label that does not fit is left out.

    Args:
        trace_id: number of the request's trace in hexadecimal digits; None without a trace.
    """
    labels, left = dict[str, str](), _MAX_CHARACTERS
    for name, value in (("trace_id", trace_id), ("request_id", request_id.get())):
        if value is not None and len(name) + len(value) <= left:
            labels[name] = value
            left -= len(name) + len(value)
    return labels or None
