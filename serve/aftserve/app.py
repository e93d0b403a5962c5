"""The application: middleware and routers around the models."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext

from fastapi import Depends, FastAPI, params
from fastapi.middleware.cors import CORSMiddleware

from aftexport import __version__
from aftserve.api import infer, openapi, operations, page
from aftserve.api.adapters.adapter import create_adapters, include_adapters
from aftserve.api.api_keys import KeyFile, Keys
from aftserve.api.error_responses import handle_problems
from aftserve.api.model_choice import ModelPathMiddleware
from aftserve.api.open_inference import repository_routes
from aftserve.api.open_inference import routes as open_inference
from aftserve.api.open_inference.messages import HEADER_LENGTH
from aftserve.api.request_checks import check_query, in_turn, named_host, same_origin
from aftserve.http.access_log import AccessLogMiddleware, HeadMiddleware, PanicMiddleware
from aftserve.http.body_limits import BodyLimitMiddleware
from aftserve.serving.repository import ModelRepository
from aftserve.settings import Settings


def create_app(
    models: ModelRepository, key_file: KeyFile | None = None, *, replica: bool = False
) -> FastAPI:
    """Build the application around the models; its lifespan runs the scheduler."""
    # Of a replica of Ray Serve, Ray's proxy names the responses, and a new deployment replaces the
    # bundle. Otherwise POST /reload does, for API keys that are marked admin.
    app = _application(models, key_file)
    app.state.models = models
    keys = key_file.keys if key_file is not None else None
    guards = _guards(models.settings, keys)
    adapters = create_adapters(models, guards)
    parts = adapters.values()
    _add_middleware(app, models, [path for one in parts for path in one.probes], replica=replica)
    handle_problems(app, {path: body for one in parts for path, body in one.error_bodies.items()})
    describers = [one.describe for one in parts if one.describe is not None]
    app.include_router(openapi.create_router(app, describers))
    app.include_router(operations.create_router(models, guards))
    if keys is not None and not replica:
        admin = [*guards[:-1], Depends(keys.dependency(admin=True))]
        app.include_router(operations.create_reload_router(admin))
        app.include_router(repository_routes.create_admin_router(models, admin))
    app.include_router(infer.create_router(guards))
    app.include_router(operations.create_parity_router(guards))
    app.include_router(open_inference.create_router(models, guards))
    app.include_router(repository_routes.create_router(guards))
    app.include_router(page.create_router())
    include_adapters(app, adapters)
    return app


def _application(models: ModelRepository, key_file: KeyFile | None) -> FastAPI:
    provider = models.shared.traces.provider

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with models.running(), key_file.watch.running() if key_file else nullcontext():
            yield

    return FastAPI(
        title="aftserve",
        version=__version__,
        summary="Long-document classification. No document is ever truncated silently.",
        lifespan=lifespan,
        openapi_url=None,  # the document has the limits of a model
        # These pages run scripts of another host, which could read API keys. Without access to
        # that host they are empty.
        docs_url=None,
        redoc_url=None,
        # Behind a proxy that ends TLS, a client would repeat a redirected request in plain text,
        # with its API key, and to any host that the client named.
        redirect_slashes=False,
        # aftserve.observability.tracing configures traces, and GET /metrics has the metrics.
        telemetry={
            "tracer_provider": provider,
            "tracing": provider is not None,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
        },
    )


def _add_middleware(
    app: FastAPI, models: ModelRepository, probes: Sequence[str], *, replica: bool
) -> None:
    """Add the middleware; the last one added sees a request first."""
    settings = models.settings
    app.add_middleware(PanicMiddleware)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(
        BodyLimitMiddleware,
        max_bytes=settings.max_body_bytes,
        max_buffered_bytes=settings.max_buffered_bytes,
        seconds=settings.receive_seconds,
    )
    app.add_middleware(
        AccessLogMiddleware,
        responses=models.shared.metrics.responses,
        names=not replica,
        probes={*operations.PROBES, *open_inference.PROBES, *probes},
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=[
                "Authorization",
                "Content-Encoding",
                "Content-Type",
                "Deadline-Seconds",
                HEADER_LENGTH,
                "X-API-Key",
                "X-Request-ID",
                # Headers of traces, which OpenTelemetry in a page sends.
                "baggage",
                "traceparent",
                "tracestate",
            ],
            expose_headers=[
                "Accept-Encoding",
                "Allow",
                HEADER_LENGTH,
                "Retry-After",
                "Server-Timing",
                "WWW-Authenticate",
                "X-Request-ID",
            ],
        )
    app.add_middleware(ModelPathMiddleware)


def _guards(settings: Settings, keys: Keys | None) -> Sequence[params.Depends]:
    """Return the checks of a request before its body is read; the API key is the last."""
    by_name = named_host(settings.port_hosts, settings.allowed_hosts)
    if keys is None:
        origin = same_origin(settings.cors_origins)
        return [Depends(in_turn(by_name, origin, check_query))]
    # A web page with an API key may send requests, under any host name unless some are listed.
    checks = [by_name] if settings.allowed_hosts else []
    return [Depends(in_turn(*checks, check_query)), Depends(keys.dependency())]
