"""The addresses below ``/v2``."""

import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response, params

from aftexport import __version__
from aftexport.errors import InputError
from aftserve.api import request_body
from aftserve.api.deadline import DeadlineSeconds, deadline_of, while_wanted
from aftserve.api.error_responses import GUARDED, responses
from aftserve.api.open_inference import messages
from aftserve.api.open_inference.schemas import (
    InferenceRequest,
    InferenceResponse,
    Live,
    ModelMetadata,
    ModelReady,
    ProtocolProblem,
    Ready,
    ServerMetadata,
)
from aftserve.api.openapi_body import takes
from aftserve.errors import NotFoundError
from aftserve.http.access_log import note
from aftserve.service import Service

VERSION = "1"
"""Of the model: a server has one."""

_TENSORS = {
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
}
_PLATFORMS = {"onnxruntime": "onnxruntime_onnx", "tensorrt": "tensorrt_plan"}
# Whole, not joined of nested routers' prefixes: those are missing in the path of a route, by which
# responses are counted.
_ROOT = "/v2"
_MODEL = "/v2/models/{name}"
_VERSIONED = "/v2/models/{name}/versions/{version}"

JsonBytes = Annotated[
    int | None,
    Header(
        alias=messages.HEADER_LENGTH, ge=0, description="Bytes of the JSON, where tensors follow."
    ),
]


def create_router(service: Service, guards: Sequence[params.Depends]) -> APIRouter:
    """Builds what answers the protocol.

    Args:
        service: that classifies.
        guards: who may ask of the model.
    """
    model_name = service.settings.served_name
    problems = responses(ProtocolProblem)
    problems[404] = {"model": ProtocolProblem, "description": "There is no such model."}
    router = APIRouter(tags=["Open Inference Protocol"])

    def known(name: str) -> None:
        known_version(name, VERSION)

    def known_version(name: str, version: str) -> None:
        if (name, version) != (model_name, VERSION):
            raise NotFoundError(
                f"There is no model {name[:100]!r} of version {version[:100]!r}.",
                f"This server has {model_name!r}, version {VERSION}.",
            )

    @router.get(_ROOT)
    async def server() -> ServerMetadata:
        """The server."""
        return ServerMetadata(
            name="aftserve", version=__version__, extensions=["binary_tensor_data"]
        )

    @router.get(f"{_ROOT}/health/live")
    async def live() -> Live:
        """The process is alive."""
        return Live(live=True)

    @router.get(f"{_ROOT}/health/ready", responses={503: {"model": Ready}})
    async def ready(response: Response) -> Ready:
        """Requests are wanted."""
        response.status_code = 200 if service.health.ready else 503
        return Ready(ready=service.health.ready)

    for path, check in ((_MODEL, known), (_VERSIONED, known_version)):
        model = APIRouter(
            prefix=path,
            dependencies=[*guards, Depends(check)],
            responses={status: problems[status] for status in (*GUARDED, 404, 422)},
        )

        @model.get("/ready", responses={503: {"model": ModelReady}})
        async def model_ready(name: str, response: Response) -> ModelReady:
            """The model answers."""
            response.status_code = 200 if service.health.ready else 503
            return ModelReady(name=name, ready=service.health.ready)

        @model.get("")
        async def metadata(name: str) -> ModelMetadata:
            """The model's inputs and outputs; send ``text``, or ``input_ids``."""
            classifier = service.model.classifier
            engine = classifier.engine.name
            return ModelMetadata(
                name=name,
                versions=[VERSION],
                platform=_PLATFORMS.get(engine, engine),
                inputs=list(messages.INPUTS[0 if classifier.has_tokenizer else 1 :]),
                outputs=list(messages.outputs_of(len(classifier.manifest.labels))),
            )

        @model.post(
            "/infer",
            response_model=InferenceResponse,
            responses={**problems, 200: _TENSORS},
            openapi_extra=takes(InferenceRequest),
        )
        async def infer(
            request: Request,
            json_bytes: JsonBytes = None,
            deadline_seconds: DeadlineSeconds = None,
        ) -> Response:
            """Classifies documents: texts, or token ids."""
            service.check_open()
            settings = service.settings
            body = await request_body.receive(request)
            service.traces.record("receive", request.state.started, time.monotonic())
            head = len(body) if json_bytes is None else json_bytes
            if head > len(body):
                raise InputError(
                    f"{messages.HEADER_LENGTH} is {head}, the body has {len(body)} bytes.",
                    "Send the length of the JSON alone.",
                )
            content, binary = request_body.objects(body[:head]), memoryview(body)[head:]
            message = messages.parse(content, binary, most=settings.max_documents)
            deadline = deadline_of(request, deadline_seconds, settings.deadline_seconds)
            work = service.classify(message.documents, deadline)
            results = await while_wanted(work, request.receive, deadline)
            note(request, documents=len(results), tokens=sum(r.tokens_total for r in results))
            return messages.respond(message, results, name=model_name, version=VERSION)

        router.include_router(model)
    return router
