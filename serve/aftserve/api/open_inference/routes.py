"""The endpoints of the protocol, below ``/v2``, and the statistics of a model."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Depends, Header, Request, Response, params
from pydantic import BaseModel, Field

from aftexport.bundle.manifest import Manifest
from aftexport.errors import InputError
from aftserve.api.document_answers import (
    DeadlineSeconds,
    answer_documents,
    deadline_of,
    run_until_disconnect,
)
from aftserve.api.error_responses import GUARDED, responses
from aftserve.api.model_choice import OPEN, NamedModel, read_and_answer, readiness, visible
from aftserve.api.open_inference import messages
from aftserve.api.open_inference.columns import OutputNames
from aftserve.api.open_inference.descriptions import (
    VERSION,
    ModelConfig,
    check_version,
    describe_model,
    describe_server,
    model_config,
)
from aftserve.api.open_inference.repository_routes import EXTENSION
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
from aftserve.api.request_body import body_schema, parse_json, receive
from aftserve.api.request_checks import check_query
from aftserve.model.documents import DocumentAnswer
from aftserve.observability.metrics import InferenceStats, TotalTime
from aftserve.serving.repository import ModelRepository
from aftserve.serving.service import Service

_TENSORS = {
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
}
_PROBLEMS = responses(ProtocolProblem)
# These paths are complete, because responses are counted by the path of their route. It lacks the
# prefixes of nested routers.
_ROOT = "/v2"
_MODEL = "/v2/models/{name}"
_VERSIONED = "/v2/models/{name}/versions/{version}"
_EXTENSIONS = ["binary_tensor_data", "model_configuration", EXTENSION, "statistics"]
PROBES = (f"{_ROOT}/health/live", f"{_ROOT}/health/ready", f"{_MODEL}/ready", f"{_VERSIONED}/ready")
"""The paths that load balancers ask every few seconds."""
JsonBytes = Annotated[
    int | None,
    Header(alias=messages.HEADER_LENGTH, ge=0, description="Bytes of the JSON, if tensors follow."),
]


def create_router(models: ModelRepository, guards: Sequence[params.Depends]) -> APIRouter:
    """Build the endpoints of the protocol."""
    router = _server_router()

    @router.get(
        f"{_ROOT}/models/stats",
        tags=["Open Inference Protocol"],
        dependencies=guards,
        responses={status: _PROBLEMS[status] for status in GUARDED},
    )
    async def stats(request: Request) -> Statistics:
        """The statistics of all models; below /models/NAME only of that one."""
        return Statistics(model_stats=[*map(_statistics, visible(request))])

    for path, checks in ((_MODEL, guards), (_VERSIONED, [*guards, Depends(_check_version)])):
        router.include_router(_model_router(path, checks))
        router.include_router(_infer_router(models, path, checks))
    return router


def _server_router() -> APIRouter:
    router = APIRouter(
        tags=["Open Inference Protocol"], dependencies=OPEN, responses={404: _PROBLEMS[404]}
    )

    @router.get(_ROOT, dependencies=[Depends(check_query)])
    async def server() -> ServerMetadata:
        """The server."""
        return describe_server(_EXTENSIONS)

    @router.get(f"{_ROOT}/health/live")
    async def live() -> Live:
        """The process is alive."""
        return Live(live=True)

    @router.get(f"{_ROOT}/health/ready", responses={503: {"model": Ready}})
    async def ready(request: Request, response: Response) -> Ready:
        """The server takes requests."""
        is_ready, _ = readiness(request)
        response.status_code = 200 if is_ready else 503
        return Ready(ready=is_ready)

    return router


def _model_router(path: str, guards: Sequence[params.Depends]) -> APIRouter:
    """Build the endpoints that describe a model below a path."""
    router = _router(path, guards)

    @router.get("/ready", responses={503: {"model": ModelReady}})
    async def model_ready(service: NamedModel, response: Response) -> ModelReady:
        """The model answers."""
        response.status_code = 200 if service.health.ready else 503
        return ModelReady(name=service.name, ready=service.health.ready)

    @router.get("", response_model_exclude_none=True)
    async def metadata(service: NamedModel) -> ModelMetadata:
        """The model's inputs and outputs; send ``text``, ``input_ids`` or ``input_features``."""
        return describe_model(service)

    @router.get("/config")
    async def config(service: NamedModel) -> ModelConfig:
        """The model's configuration, by Triton's extension of the protocol."""
        classifier = service.model.classifier
        settings = service.settings
        engine = classifier.engine.name
        return model_config(
            describe_model(service),
            engine,
            {
                "bundle": service.active.bundle.digest,
                "long_documents": classifier.policy,
                "max_documents": str(settings.max_documents),
                "max_tokens": str(classifier.max_tokens),
            },
            is_on_gpu=engine == "tensorrt" or settings.provider == "cuda",
        )

    @router.get("/stats")
    async def stats(service: NamedModel) -> Statistics:
        """Counts and times since the server started, by Triton's extension of the protocol."""
        return Statistics(model_stats=[_statistics(service)])

    return router


def _infer_router(
    models: ModelRepository, path: str, guards: Sequence[params.Depends]
) -> APIRouter:
    """Build the endpoint that classifies below a path."""
    settings, names = models.settings, OutputNames()
    router = _router(path, guards)

    @router.post(
        "/infer",
        response_model=InferenceResponse,
        responses={**_PROBLEMS, 200: _TENSORS},
        openapi_extra=body_schema(InferenceRequest),
    )
    async def infer(
        request: Request,
        service: NamedModel,
        json_bytes: JsonBytes = None,
        deadline_seconds: DeadlineSeconds = None,
    ) -> Response:
        """Classify documents: texts, or token ids."""
        service.check_open()
        content, binary = await _read(request, json_bytes)
        deadline = deadline_of(request, deadline_seconds, settings.deadline_seconds)

        def read(manifest: Manifest) -> messages.Message:
            return messages.parse(
                content,
                binary,
                max_documents=settings.max_documents,
                manifest=manifest,
                outputs=names.of(manifest),
            )

        async def answer(message: messages.Message) -> list[DocumentAnswer]:
            return await answer_documents(
                request,
                service,
                message.documents,
                deadline,
                given=message.given,
                options=message.options,
                inline=message.inline,
            )

        message, answers = await read_and_answer(service, read, answer)
        responding = partial(
            messages.respond,
            message,
            answers,
            name=service.name,
            version=VERSION,
            deadline=deadline,
        )
        if not answers[0].tokens.results:
            await service.shared.turns.take()
            return responding()
        # In a thread: the outputs of many tokens take long.
        building = anyio.to_thread.run_sync(responding, abandon_on_cancel=True)
        return await run_until_disconnect(building, request.receive, deadline)

    return router


async def _check_version(name: str, version: str) -> None:
    check_version(name, version)


class StatisticDuration(BaseModel):
    """A number of events, and the sum of their times."""

    count: int
    ns: int = Field(description="Nanoseconds.")


class InferStatistics(BaseModel):
    """Requests and their stages; the caches of Triton do not exist, so their counts are 0."""

    success: StatisticDuration
    fail: StatisticDuration
    queue: StatisticDuration
    compute_input: StatisticDuration = Field(description="Tokenization.")
    compute_infer: StatisticDuration = Field(description="Runs of the engine.")
    compute_output: StatisticDuration = Field(description="Scores, spans and evidence.")
    cache_hit: StatisticDuration
    cache_miss: StatisticDuration


class BatchStatistics(BaseModel):
    """Runs of one number of documents; input and output are not part of a run, so they are 0."""

    batch_size: int
    compute_input: StatisticDuration
    compute_infer: StatisticDuration
    compute_output: StatisticDuration


class ModelStatistics(BaseModel):
    """The statistics of a model since the server started."""

    name: str
    version: str
    last_inference: int = Field(description="Unix time of the last request in milliseconds, or 0.")
    inference_count: int = Field(description="Number of answered documents.")
    execution_count: int = Field(description="Number of runs of the engine.")
    inference_stats: InferStatistics
    batch_stats: list[BatchStatistics]


class Statistics(BaseModel):
    """The statistics of models of the server."""

    model_stats: list[ModelStatistics]


_NONE = StatisticDuration(count=0, ns=0)


def _statistics_of(stats: InferenceStats, name: str, version: str) -> ModelStatistics:
    """Return the statistics of a model in the form of the protocol."""
    inference = InferStatistics(
        success=_duration(stats.answered),
        fail=_duration(stats.failed),
        queue=_duration(stats.queue),
        compute_input=_duration(stats.tokenize),
        compute_infer=_duration(stats.run),
        compute_output=_duration(stats.finish),
        cache_hit=_NONE,
        cache_miss=_NONE,
    )
    batches = [
        BatchStatistics(
            batch_size=size,
            compute_input=_NONE,
            compute_infer=_duration(total),
            compute_output=_NONE,
        )
        for size, total in sorted(stats.runs.items())
    ]
    return ModelStatistics(
        name=name,
        version=version,
        last_inference=int(stats.last_request * 1000),
        inference_count=stats.documents,
        execution_count=sum(total.count for total in stats.runs.values()),
        inference_stats=inference,
        batch_stats=batches,
    )


def _duration(total: TotalTime) -> StatisticDuration:
    return StatisticDuration(count=total.count, ns=round(total.seconds * 1e9))


def _statistics(service: Service) -> ModelStatistics:
    return _statistics_of(service.metrics.inference, service.name, VERSION)


def _router(path: str, guards: Sequence[params.Depends]) -> APIRouter:
    return APIRouter(
        prefix=path,
        dependencies=guards,
        responses={status: _PROBLEMS[status] for status in (*GUARDED, 404, 422)},
    )


async def _read(request: Request, json_bytes: int | None) -> tuple[Any, memoryview]:
    """Receive a body; return the value of its JSON, and the tensors after it."""
    body = await receive(request)
    head = len(body) if json_bytes is None else json_bytes
    if head > len(body):
        raise InputError(
            f"{messages.HEADER_LENGTH} must be at most {len(body)}, the bytes of the body, "
            f"got {head}.",
            "Send the length of the JSON only.",
        )
    return await parse_json(request, body[:head]), memoryview(body[head:])
