"""The models of a server in this process, and their states."""

from aftserve.serving.repository import ModelRepository


async def states(models: ModelRepository) -> dict[str, str]:
    return {one.name: one.state for one in await models.index()}


async def reason(models: ModelRepository, name: str) -> str:
    """Return the reason why a model is not ready."""
    (state,) = [one for one in await models.index() if one.name == name]
    assert state.state == "UNAVAILABLE"
    return state.reason


def names(models: ModelRepository) -> list[str]:
    return [service.name for service in models.loaded()]
