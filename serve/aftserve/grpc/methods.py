"""The methods of the protocol."""

import asyncio
from functools import partial

import grpc

from aftexport.bundle.manifest import Manifest
from aftserve.api.model_reading import read_and_answer
from aftserve.api.open_inference import messages
from aftserve.api.open_inference.columns import OutputNames
from aftserve.api.open_inference.descriptions import (
    VERSION,
    check_version,
    describe_model,
    describe_server,
)
from aftserve.api.open_inference.repository_requests import EXTENSION
from aftserve.errors import NotFoundError
from aftserve.grpc.call import Call, Caller, Rules
from aftserve.grpc.conversion import read_request, write_metadata, write_response
from aftserve.grpc.repository_methods import repository_methods
from aftserve.grpc.wire_types import SERVICE, parse, write_message
from aftserve.model.results import DocumentAnswer
from aftserve.serving.repository import ModelRepository
from aftserve.serving.service import Service

_RULES = {
    "ServerLive": Rules("open", is_read=False, is_probe=True),
    "ServerReady": Rules("open", is_read=False, is_probe=True),
    "ServerMetadata": Rules("open", is_read=False),
    "ModelReady": Rules(is_probe=True),
    "ModelInfer": Rules(is_large=True),
    "RepositoryModelLoad": Rules("admin"),
    "RepositoryModelUnload": Rules("admin"),
}
"""The rules for calls, whose rights are those of HTTP; the other methods have the usual ones."""


class Methods:
    """The methods.

    Args:
        models: the models that answer.
    """

    def __init__(self, models: ModelRepository) -> None:
        self._models = models
        self._names = OutputNames()

    def handler(self, caller: Caller) -> grpc.GenericRpcHandler:
        """Return the handler of the service, whose calls ``caller`` runs."""
        methods = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
            **repository_methods(self._models, has_admins=caller.has_keys),
        }
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                name: caller.handler(f"/{SERVICE}/{name}", method, _RULES.get(name, Rules()))
                for name, method in methods.items()
            },
        )

    async def _server_live(self, content: bytes, call: Call) -> bytes:
        return write_message("ServerLiveResponse", live=True)

    async def _server_ready(self, content: bytes, call: Call) -> bytes:
        return write_message("ServerReadyResponse", ready=self._models.ready)

    async def _server_metadata(self, content: bytes, call: Call) -> bytes:
        described = describe_server(extensions=[EXTENSION])
        return write_message("ServerMetadataResponse", **described.model_dump())

    async def _model_ready(self, content: bytes, call: Call) -> bytes:
        request = parse("ModelReadyRequest", content)
        try:
            ready = self._named(call, request.name, request.version).health.ready
        except NotFoundError:
            ready = False  # as Triton answers for a model that is unloaded or that it does not know
        return write_message("ModelReadyResponse", ready=ready)

    async def _model_metadata(self, content: bytes, call: Call) -> bytes:
        request = parse("ModelMetadataRequest", content)
        return write_metadata(describe_model(self._named(call, request.name, request.version)))

    async def _model_infer(self, content: bytes, call: Call) -> bytes:
        self._models.check_open()
        request = parse("ModelInferRequest", content)
        call.keep(len(content))
        service = self._named(call, request.model_name, request.model_version)
        service.check_open()

        def read(manifest: Manifest) -> messages.Message:
            return read_request(
                request,
                max_documents=service.settings.max_documents,
                manifest=manifest,
                outputs=self._names.of(manifest),
            )

        async def answer(message: messages.Message) -> list[DocumentAnswer]:
            return await service.classify(
                message.documents,
                call.deadline,
                message.given,
                options=message.options,
                inline=message.inline,  # a response is one message, as JSON
            )

        message, answers = await read_and_answer(service, read, answer)
        total = sum(answer.result.tokens_total for answer in answers)
        call.fields.update(documents=len(answers), tokens=total)
        name = service.name
        responding = partial(write_response, message, answers, name=name, version=VERSION)
        if not answers[0].tokens.results:
            return responding()
        # In a thread: the outputs of many tokens take long.
        return await asyncio.to_thread(responding)

    def _named(self, call: Call, name: str, version: str) -> Service:
        service = self._models.named(name)
        call.model = service.name
        call.releases.append(service.holders.add())
        check_version(name, version or VERSION)
        return service
