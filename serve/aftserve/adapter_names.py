"""The formats of other servers that ``--api`` names, and the callable of each adapter.

A line here and its file in ``aftserve/api/adapters`` are all that an adapter needs.
"""

from pydantic_core import PydanticCustomError

ADAPTERS = {
    "vllm": "aftserve.api.adapters.vllm:create",
    "tei": "aftserve.api.adapters.tei:create",
    "cohere": "aftserve.api.adapters.cohere:create",
    "models": "aftserve.api.adapters.models:create",
    "decisions": "aftserve.api.adapters.decisions:create",
    "kserve": "aftserve.api.adapters.platforms:create_kserve",
    "sagemaker": "aftserve.api.adapters.platforms:create_sagemaker",
}
"""The callable of each adapter, by its name."""
NO_ADAPTER = "none"
"""The word for no adapter."""


def check_adapters(names: list[str]) -> list[str]:
    """Check the names of adapters; a callable of a user is named as ``package.module:callable``."""
    if names == [NO_ADAPTER]:
        return []
    for name in names:
        if name not in ADAPTERS and ":" not in name:
            raise PydanticCustomError(
                "unknown_adapter",
                "Expected {known}, {none} by itself, or package.module:callable, got {name}",
                {"known": ", ".join(ADAPTERS), "none": NO_ADAPTER, "name": repr(name)},
            )
    return list(dict.fromkeys(names))
