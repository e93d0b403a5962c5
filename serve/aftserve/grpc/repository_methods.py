"""The methods of the extension for model repositories.

https://github.com/triton-inference-server/server (docs/protocol/extension_model_repository.md)
"""

from collections.abc import Mapping
from typing import Any

from aftexport.errors import InputError
from aftserve.api.open_inference.repository_requests import check_load, check_unload, index_of
from aftserve.grpc.call import Call, Method
from aftserve.grpc.wire_types import parse, write_message
from aftserve.serving.repository import ModelRepository


def repository_methods(models: ModelRepository, *, has_admins: bool) -> Mapping[str, Method]:
    """Return the methods by name.

    Args:
        models: the models of the server.
        has_admins: whether the server has the methods that load and unload models.
    """

    async def index(content: bytes, call: Call) -> bytes:
        request = _parse("RepositoryIndexRequest", content)
        found = index_of(await models.index(), ready=request.ready)
        return write_message("RepositoryIndexResponse", models=[one.model_dump() for one in found])

    async def load(content: bytes, call: Call) -> bytes:
        request = _parse("RepositoryModelLoadRequest", content)
        check_load(_parameters(request))
        await models.load(request.model_name)
        return write_message("RepositoryModelLoadResponse")

    async def unload(content: bytes, call: Call) -> bytes:
        request = _parse("RepositoryModelUnloadRequest", content)
        check_unload(_parameters(request))
        await models.unload(request.model_name)
        return write_message("RepositoryModelUnloadResponse")

    admin = {"RepositoryModelLoad": load, "RepositoryModelUnload": unload} if has_admins else {}
    return {"RepositoryIndex": index, **admin}


def _parse(name: str, content: bytes) -> Any:
    """Return the message of a request; raise InputError if it names a repository."""
    request = parse(name, content)
    if request.repository_name:
        raise InputError(
            f"Expected no repository_name, got {request.repository_name[:100]!r}.",
            "Leave it empty: models have names of their own in the whole server.",
        )
    return request


def _parameters(request: Any) -> dict[str, object]:
    kinds = {name: one.WhichOneof("parameter_choice") for name, one in request.parameters.items()}
    return {name: kind and getattr(request.parameters[name], kind) for name, kind in kinds.items()}
