"""The server's own account of its requests: log and metrics against the outcomes of clients."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from clients import http
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from load.interfaces import INTERFACES
from load.storm_clients import OK, Outcome

_RESPONSES = "aftserve_responses_total"
_QUIET = ("debug", "info")
_UNLOADED = "The model was unloaded meanwhile."
"""The outcome of a reload by SIGHUP during which an administrator unloads the model."""


class Metrics:
    """The metrics of a server at one time."""

    def __init__(self, address: str, key: str) -> None:
        text = http.get(f"{address}/metrics", headers={"X-API-Key": key}).raise_for_status().text
        self._samples: list[Sample] = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of all series of a name with these labels."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def responses(self, **labels: str) -> Counter[tuple[str, str]]:
        """Return the number of responses with these labels, by path and status."""
        counts = Counter[tuple[str, str]]()
        for one in self._samples:
            if one.name == _RESPONSES and labels.items() <= one.labels.items():
                counts[one.labels["path"], one.labels["status"]] += int(one.value)
        return counts


def read_log(log: Path) -> list[dict[str, Any]]:
    """Return the events of a log in JSON; a line in another form has the field ``line``."""
    lines = log.read_text("utf-8").splitlines()
    return [json.loads(one) if one.startswith("{") else {"line": one} for one in lines]


def log_faults(events: Sequence[dict[str, Any]], refused_reloads: int) -> Iterable[str]:
    """Yield each event that a healthy server does not log."""
    # events: from the first of its requests on
    refused = 0
    for event in events:
        if event.get("logger") == "aftserve.reloading" and event["level"] == "error":
            refused += _UNLOADED not in event["message"]
        elif event.get("level") not in _QUIET or "exception" in event:
            yield f"log: {event}"
    if refused != refused_reloads:
        yield f"log: {refused} refused reloads, expected {refused_reloads}"


def request_faults(events: Iterable[dict[str, Any]], outcomes: Sequence[Outcome]) -> Iterable[str]:
    """Yield each difference between the log and the outcomes.

    The log has one line for each request whose client stayed, with the status that this client got,
    and at most one for others.
    """
    logged = _statuses(events)
    for one in outcomes:
        statuses = logged[one.name]
        if one.status is not None and statuses != [one.status]:
            yield f"{one.interface.name}: the log has {statuses}, the client got {one.status}"
        elif len(statuses) > 1:
            yield f"{one.interface.name}: the log has {statuses} for one request"


def metric_faults(
    events: Iterable[dict[str, Any]],
    metrics: Metrics,
    outcomes: Sequence[Outcome],
    model: str | None = None,  # None to compare all responses
) -> Iterable[str]:
    """Yield each difference between the metrics and the log."""
    logged, labels = _statuses(events), {} if model is None else {"model": model}
    asked = [one for one in outcomes if model in (None, one.model)]
    counts = Counter(
        (one.interface.counted_path, status)
        for one in asked
        for status in logged[one.name]
        if model is None or status in OK
    )
    counted = metrics.responses(**labels)
    paths = {one.counted_path for one in INTERFACES}
    for path, status in counts.keys() | counted.keys():
        expected, found = counts[path, status], counted[path, status]
        if path in paths and expected != found and (model is None or status in OK):
            yield f"metrics: {found} responses {status} at {path}, the log has {expected}"
    answered = metrics.sum("aftserve_document_tokens_count", **labels)
    # A line of newline-delimited JSON may be refused by itself.
    least = sum(
        one.documents for one in asked if one.is_answered and not one.interface.is_by_document
    )
    most = sum(one.documents for one in asked if one.is_answered or one.status is None)
    if not least <= answered <= most:
        yield f"metrics: {answered:g} answered documents, expected {least} to {most}"
    if lost := metrics.sum("aftserve_log_lines_dropped_total"):
        yield f"metrics: {lost:g} lines of the log were dropped"


def _statuses(events: Iterable[dict[str, Any]]) -> defaultdict[str, list[str]]:
    """Return the statuses of each request in the log, by its name."""
    logged = defaultdict[str, list[str]](list)
    for event in events:
        if event.get("logger") == "aftserve.request":
            logged[event["request_id"]].append(event["message"].split()[-1])
    return logged
