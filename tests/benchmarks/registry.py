"""The contenders for models that this checkout knows, as a file: tables need no peer installed.

PYTHONPATH=tests:tests/support .venv/bin/python -m benchmarks.registry
"""

import json
import sys
from typing import Any

from benchmarks.record import FOLDER, write_record
from benchmarks.setup import prepare

REGISTRY = FOLDER / "contenders.json"


def read_registry() -> dict[str, dict[str, Any]]:
    """Return the properties of all contenders for models, by name."""
    facts: dict[str, dict[str, Any]] = json.loads(REGISTRY.read_text("utf-8"))
    return facts


def main() -> None:
    """Write the contenders of all modules."""
    prepare(threads=1)
    # Imported once the peers are on the path.
    from benchmarks.contenders import MISSING, MODELS

    if MISSING:
        sys.exit(f"Expected every contender, got none of {', '.join(MISSING.values())}")
    facts = {name: contender.facts for name, contender in MODELS.items()}
    write_record(facts, REGISTRY)


if __name__ == "__main__":
    main()
