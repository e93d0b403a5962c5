"""Log formats for people and for machines."""

import json
import logging
import time
from typing import Any

from aftexport.system.console import one_line

ADDRESS_LOGGER = "aftserve.address"
"""Logger of the line with the server's addresses, which programs read to find the port."""
_OWN_LOGGERS = ("aftserve", "aftexport", "uvicorn")


def configure_logging(form: str, level: str = "info") -> None:
    """Send every log record of this level or above to standard error, one line each.

    The addresses of the server are written at every level.

    Args:
        form: ``text``, or ``json`` for one JSON object on each line.
        level: name of the level, in lower case. Records of ``debug`` are those of the server and
            of uvicorn, because other libraries would fill the log.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.INFO), handlers=[handler], force=True)
    for name in _OWN_LOGGERS:
        logging.getLogger(name).setLevel(number)
    logging.getLogger(ADDRESS_LOGGER).setLevel(logging.INFO)
    # The access log has a line for each request, with its name and times.
    logging.getLogger("uvicorn.access").disabled = True


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        return one_line(super().formatMessage(record) + fields)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields
