"""The formats of other servers that ``--api`` names, and the callable of each adapter.

A line here and its file in ``aftserve/api/adapters`` are all that an adapter needs.
"""

from typing import Any

from pydantic_core import PydanticCustomError

ADAPTERS = {
    "vllm": "aftserve.api.adapters.vllm:create",
    "tei": "aftserve.api.adapters.tei:create",
    "models": "aftserve.api.adapters.models:create",
    "decisions": "aftserve.api.adapters.decisions:create",
    "systemone": "aftserve.api.adapters.systemone:create",
}
"""The callable of each adapter, by its name."""
NO_ADAPTER = "none"
"""The word for no adapter."""


def parse_adapters(names: Any) -> Any:
    """Check the names of adapters; a callable of a user is named as ``package.module:callable``."""
    if names == [NO_ADAPTER]:
        return []
    for name in names if isinstance(names, list) else ():
        if not isinstance(name, str) or (name not in ADAPTERS and ":" not in name):
            raise PydanticCustomError(
                "unknown_adapter",
                "Expected {known}, {none} by itself, or package.module:callable, got {name}",
                {"known": ", ".join(ADAPTERS), "none": NO_ADAPTER, "name": repr(name)},
            )
    return list(dict.fromkeys(names)) if isinstance(names, list) else names
