"""A terminal table of a TensorRT engine."""

from rich.table import Table

from aftexport.engines.tensorrt.engine_file import EngineRecord
from aftexport.engines.tensorrt.runtimes import TITLES
from aftexport.system.console import escape, plain_table

_WAYS = {"plugin": "plugin", "portable": "portable body"}


def engine_table(record: EngineRecord) -> Table:
    """Return a table with the record of a TensorRT engine."""
    settings = record.settings
    capabilities = ", ".join(f"{c // 10}.{c % 10}" for c in settings.compute_capabilities)
    lengths = ", ".join(map(str, settings.opt_lengths))
    table = plain_table("", "")
    rows = {
        "built by": f"{TITLES[record.runtime]} {record.version}",
        "for": record.gpu or f"compute capability {capabilities}",
        "documents": f"{settings.min_length} to {settings.max_length} tokens, best at {lengths}; "
        f"up to {settings.max_batch} at once",
        "types": ", ".join(f"{name} {kind}" for name, kind in record.types.items()),
        "operators": ", ".join(f"{op} by its {_WAYS[way]}" for op, way in record.operators.items()),
        "parity": record.parity,
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table
