"""The methods of the protocol."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
from aftserve.grpc.call import Call, Caller, Method, Rules
from aftserve.grpc.conversion import input_bytes, read_request, write_metadata, write_response
from aftserve.grpc.infer_request import InferRequest, split_request
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
_INLINE_BYTES = 1 << 12
"""Maximum size of a message that is read in the event loop, in about a millisecond."""


class Methods:
    """The methods.

    Args:
        models: the models that answer.
    """

    def __init__(self, models: ModelRepository) -> None:
        self._models = models
        self._names = OutputNames()
        # One at a time: several would take all turns of the loop. A call that is cancelled leaves
        # its work to the thread, which a lock would give back.
        self._splitting = ThreadPoolExecutor(1, "grpc-messages")

    def handler(self, caller: Caller) -> grpc.GenericRpcHandler:
        """Return the handler of the service, whose calls ``caller`` runs."""
        methods: dict[str, Method] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": partial(self._model_infer, caller.max_message_bytes),
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

    async def _model_infer(self, max_bytes: int, content: bytes, call: Call) -> bytes:
        self._models.check_open()
        request, parts = await self._split(max_bytes, content, call)
        named = request.message
        service = self._named(call, named.model_name, named.model_version)
        service.check_open()

        def read(manifest: Manifest) -> messages.Message:
            return read_request(
                request,
                parts,
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

    async def _split(
        self, max_bytes: int, content: bytes, call: Call
    ) -> tuple[InferRequest, Sequence[bytes | memoryview]]:
        """Return a request and the bytes of its inputs; hold no more of the buffer than these."""

        def work() -> tuple[InferRequest, Sequence[bytes | memoryview]]:
            request = split_request(content)
            return request, input_bytes(request, max_bytes)

        if len(content) <= _INLINE_BYTES:
            request, parts = work()
        else:
            loop = asyncio.get_running_loop()
            request, parts = await loop.run_in_executor(self._splitting, work)
        call.keep(min(max_bytes, max(len(content), sum(map(len, parts)))))
        return request, parts

    def _named(self, call: Call, name: str, version: str) -> Service:
        service = self._models.named(name)
        call.model = service.name
        call.releases.append(service.holders.add())
        check_version(name, version or VERSION)
        return service
